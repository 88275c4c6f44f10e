"""`phasesplit verify` over real vLLM machines: profiled, run, predicted, compared. `make test-vllm` runs this."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phasesplit.io.profiles import read_profile_file
from vllm_machines import MODEL_VARIABLE

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two vLLM machines need a core each"),
    pytest.mark.timeout(1200),
]

CLUSTER = """\
name: here
model: {model}
engine: vllm
pools: [{{role: prefill, count: 1}}, {{role: decode, count: 1}}]
serve:
  kv_memory: 500MB
  stalled: 60 s
  vllm: {{python: {python}, arguments: [--dtype, float32, --enforce-eager, --max-model-len, "1024"]}}
"""
BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4
"""Keys and values of 30 layers of 3 heads of 64 numbers in float32."""


def test_two_vllm_machines_are_profiled_run_and_compared(tmp_path: Path) -> None:
    """Wrong if a person who runs vLLM cannot see how far a plan for it is from what it does."""
    path, profile_path = tmp_path / "cluster.yaml", tmp_path / "profile.json"
    path.write_text(CLUSTER.format(model=os.environ[MODEL_VARIABLE], python=sys.executable))
    command = [
        sys.executable, "-m", "phasesplit", "verify", str(path), "azure-conversation", "--rate", "2", "--count", "8",
        "--clip", "96:8", "--profile-time", "20s", "--keep-profile", str(profile_path), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    profile = read_profile_file(profile_path)
    assert profile.kv is not None
    assert profile.kv.bytes_per_token == BYTES_PER_TOKEN
    assert profile.link is not None
    assert found["kv_blocks"] == {"prefill-0": profile.kv.blocks, "decode-0": profile.kv.blocks}
    assert (found["compared"], found["errors"]) == (8, {})
    stages = {one["name"]: one["measured"] for one in found["stages"]}
    assert stages["queue"] > 0, "the connector tells when a prefill phase begins"
    assert stages["decode"] > 0
    busy = {one["name"]: one["measured"] for one in found["totals"] if one["name"].endswith("busy")}
    assert set(busy) == {"prefill-0 busy", "decode-0 busy"}
    assert all(0 < share < 1.1 for share in busy.values()), busy
