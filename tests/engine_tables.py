"""A stand-in for the optional package aiconfigurator-core: its calls and layout, with times that are known formulae."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from phasesplit.io import operator_engine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131_072,
}
"""Llama 3.1 70B."""

SDK = '''
class EngineHandle:
    """Records what it is asked; milliseconds, as the real one."""
    asked = []
    dip_ms = 0.0
    failure = None

    @classmethod
    def compile(cls, model_path, system, backend, **keywords):
        with open(f"{model_path}/config.json", encoding="utf-8") as file:
            cls.asked.append({"config": file.read(), "system": system, "backend": backend, **keywords})
        return cls()

    def predict_prefill_latency(self, bs, isl, prefix=0):
        if self.failure:
            raise self.failure
        return 5 + 0.04 * bs * isl + 5e-7 * bs * isl**2 / 2

    def predict_decode_latency(self, bs, isl, osl=2):
        return (osl - 1) * (9 + 0.02 * bs + 1.3e-5 * bs * isl + (self.dip_ms if bs == 1 else 0.0))

    def run_static_per_op(self, *, batch_size, isl, osl):
        return [("norm", 1.0, 0.0, "empirical"), ("gemm", 6.0, 0.0, "silicon")], [("gemm", 3.0, 0.0, "silicon")]
'''
TABLES = """
def get_version_slots(system, backend):
    return {"current": "0.24.0", "next": "0.27.0"}
"""


@dataclass
class FakeTables:
    """Handles on the stand-in.

    Attributes:
        engine: Its EngineHandle.
        asked: What engines were compiled with, oldest first.
    """

    engine: Any
    asked: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture
def fake_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTables]:
    """Put the stand-in where Python finds it, in place of the package where that is installed."""
    package = tmp_path / "aiconfigurator_core"
    (package / "sdk").mkdir(parents=True)
    (package / "model_configs").mkdir()
    (package / "__init__.py").touch()
    (package / "sdk" / "__init__.py").write_text(SDK)
    (package / "sdk" / "perf_database.py").write_text(TABLES)
    (package / "model_configs" / "meta-llama--Meta-Llama-3.1-70B_config.json").write_text(json.dumps(CONFIG))
    described = tmp_path / "aiconfigurator_core-0.12.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: aiconfigurator-core\nVersion: 0.12.0\n")
    real = {name: module for name, module in sys.modules.items() if name.startswith("aiconfigurator_core")}
    _forget()
    monkeypatch.syspath_prepend(tmp_path)
    from aiconfigurator_core.sdk import EngineHandle

    yield FakeTables(engine=EngineHandle, asked=EngineHandle.asked)
    _forget()
    sys.modules.update(real)


@pytest.fixture
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the package where it is installed."""
    for name in ("aiconfigurator_core", "aiconfigurator_core.sdk", "aiconfigurator_core.sdk.perf_database"):
        monkeypatch.setitem(sys.modules, name, None)


def _forget() -> None:
    for name in [name for name in sys.modules if name.startswith("aiconfigurator_core")]:
        del sys.modules[name]
    operator_engine._packaged_models.cache_clear()
    operator_engine._compiled.cache_clear()
