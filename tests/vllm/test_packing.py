"""What must be equal on two machines for one to read the other's blocks. Needs vLLM, so `make test-vllm` runs this."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_machines import MODEL_VARIABLE

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM and torch warn of is theirs to mend
]


@pytest.fixture
def block_layout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what makes a layout's text of a device, an attention backend, a dtype and tokens of a block."""
    import torch

    from phasesplit.vllm import connector
    from phasesplit.vllm.settings import Settings

    def text(device: str, backend: str, dtype: Any = torch.bfloat16, block_tokens: int = 32) -> str:
        named = SimpleNamespace(get_name=lambda: backend)
        monkeypatch.setattr(connector, "get_current_attn_backends", lambda *_: [named])
        shape = (8, 1, block_tokens, 128)
        tensor = SimpleNamespace(
            shape=shape, device=torch.device(device), dim=lambda: 4, stride=torch.zeros(shape, device="meta").stride
        )
        vllm: Any = SimpleNamespace(
            model_config=SimpleNamespace(dtype=dtype), cache_config=SimpleNamespace(cache_dtype="auto")
        )
        spec: Any = SimpleNamespace(num_kv_heads=1, head_size=64, dtype=dtype, block_size=block_tokens)
        settings = Settings(machine="a", epoch=1, model="m")
        return connector._layout(vllm, settings, spec, tensor, ["layer"]).block_layout  # type: ignore[arg-type]

    return text


def test_a_host_with_amx_packs_in_its_own_way(block_layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if two hosts whose processors make vLLM pack blocks differently take each other's KV: answers are noise."""
    import torch

    texts = set()
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        texts.add(block_layout("cpu", "CPU_ATTN"))
    assert len(texts) == 2
    assert block_layout("cpu", "CPU_ATTN", torch.float32) != block_layout("cpu", "CPU_ATTN", torch.float32, 16)


def test_gpus_of_two_generations_understand_each_other(block_layout: Any) -> None:
    """Wrong if a pool of one kind of GPU cannot send to a pool of another, or backends are taken for one another."""
    text = block_layout("cuda", "FLASH_ATTN")  # on a host without a GPU: nothing is asked of it
    assert "FLASH_ATTN" in text
    assert text != block_layout("cuda", "FLASHINFER")


def test_what_is_made_of_the_weights_counts_and_where_they_are_does_not() -> None:
    """Wrong if weights quantized on loading pass for whole ones, or two processes differ on the same arguments."""
    from phasesplit.vllm.connector import _loaded_as

    def model(**told: Any) -> Any:
        return SimpleNamespace(**({"quantization": None, "quantization_config": None, "hf_overrides": {}} | told))

    told = [{}, {"quantization": "fp8"}, {"hf_overrides": {"rope_theta": 1.0}}, {"hf_overrides": block_layout_of}]
    texts = [_loaded_as(model(**each)) for each in told]
    assert len(set(texts)) == len(told)
    assert texts[3].endswith('"block_layout_of"]')


def block_layout_of(config: Any) -> Any:
    """Change a model's configuration, as a person may have vLLM do."""
    return config


def test_a_machine_says_which_backend_it_has() -> None:
    """Wrong if vLLM, of another version than ours, no longer says how it packs blocks."""
    look = """
import json, os, torch
from vllm import LLM
machine = LLM(os.environ["PHASESPLIT_VLLM_MODEL"], max_model_len=64, enforce_eager=True, dtype="float32",
    kv_transfer_config={"kv_connector": "PhaseSplitConnector", "kv_role": "kv_both", "engine_id": "e",
        "kv_connector_module_path": "phasesplit.vllm.connector", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"machine": "a", "epoch": 1}})
from vllm.distributed.kv_transfer import get_kv_transfer_group
print(json.dumps(get_kv_transfer_group()._worker._layout.block_layout))
"""
    given = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", look], env=given, capture_output=True, text=True, check=True)
    assert "CPU_ATTN" in json.loads(done.stdout.splitlines()[-1])
