"""A tiny model on disk, and a way to take GGUF files apart and put them together wrongly."""

from pathlib import Path

import pytest

from phasesplit.engine.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with matrices of kind F32."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path
