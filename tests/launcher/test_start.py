"""What a worker's process loads before it is ready: each import is a part of the time that everybody waits."""

import json
import os
import subprocess
import sys

import pytest

_READY = """
import json, sys
from phasesplit.launcher.worker_command import interpret_scheduling
interpret_scheduling()
import phasesplit.cli
from phasesplit.engine.fetch import model_path
from phasesplit.io.cluster_file import only_key, read_keys, served_rules
from phasesplit.launcher.embedded import EmbeddedWorker
from phasesplit.launcher.worker_process import run_worker
from phasesplit.engine.kernels import IS_COMPILED
from phasesplit.scheduler.live_machine import form_batch
print(json.dumps([IS_COMPILED, type(form_batch).__name__, sorted(sys.modules)]))
"""
NOT_NEEDED = ("pydantic", "tokenizers", "aiohttp", "pandas", "pyarrow", "matplotlib", "rich", "prometheus_client")


def started(**environment: str) -> tuple[bool, str, list[str]]:
    """Return whether kernels are compiled in a worker's process, what a scheduling function is, and the modules."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PHASESPLIT_")}
    done = subprocess.run(
        [sys.executable, "-c", _READY], env=usual | environment, capture_output=True, text=True, timeout=60, check=True
    )
    compiled, kind, modules = json.loads(done.stdout)
    return compiled, kind, modules


def test_workers_compile_kernels_and_interpret_scheduling() -> None:
    """The very first start would take 9 s longer, or every prompt a hundred times as long."""
    compiled, kind, modules = started()
    assert (compiled, kind) == (True, "function")
    assert [name for name in NOT_NEEDED if name in modules] == []


@pytest.mark.parametrize(
    ("environment", "compiled"),
    [({"PHASESPLIT_JIT": "0"}, False), ({"PHASESPLIT_JIT": "0", "PHASESPLIT_KERNELS": "1"}, True)],
)
def test_a_person_may_turn_compiling_off(environment: dict[str, str], compiled: bool) -> None:
    """A debugger would stand in compiled code though it was told not to be compiled."""
    assert started(**environment)[:2] == (compiled, "function")
