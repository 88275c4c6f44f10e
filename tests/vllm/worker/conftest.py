"""What tests of the vLLM worker share."""

from typing import Any

import pytest

from phasesplit.vllm.worker.vllm_server import VllmSettings


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[VllmSettings]:
    """Return what `vllm-worker` makes of its command lines, in place of running workers."""
    given: list[VllmSettings] = []

    async def run_vllm_worker(settings: VllmSettings, *_: Any, **__: Any) -> int:
        given.append(settings)
        return 0

    monkeypatch.setattr("phasesplit.vllm.worker.vllm_worker_command.run_vllm_worker", run_vllm_worker)
    monkeypatch.setattr("phasesplit.vllm.worker.vllm_server.require_vllm", lambda _: None)
    return given
