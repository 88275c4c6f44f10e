"""A tiny model on disk, and a way to take GGUF files apart and put them together wrongly."""

from pathlib import Path

import pytest

from phasesplit.engine.cached_file import cache_directory, is_whole
from phasesplit.engine.fetch import DEFAULT, write_tiny_model
from warm import compile_engine


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile the rules of batches, which workers interpret: on a cold machine it takes longer than tests wait."""
    compile_engine()


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model with matrices of kind F32."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """Return the default model's file where it has been fetched before; otherwise the test is skipped."""
    path = cache_directory() / DEFAULT.file
    if not is_whole(path, DEFAULT.sha256):
        pytest.skip(f"needs {path}, which the first `phasesplit serve` fetches")
    return path
