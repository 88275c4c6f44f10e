"""What vLLM's own settings make the connector refuse. Needs vLLM, so `make test-vllm` runs this."""

import os
from typing import Any

import pytest

from phasesplit.errors import TransferError
from vllm_machines import MODEL_VARIABLE

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM and torch warn of is theirs to mend
]


def connector(
    groups: int = 1,
    failure: str = "recompute",
    engine: str | None = None,
    later: dict[str, int] | None = None,
    **parallel: int,
) -> Any:
    """Return the connector as vLLM's scheduler makes it, before any process is started that computes.

    Args:
        groups: Kinds of KV cache.
        failure: vLLM's `kv_load_failure_policy`.
        engine: Its name, by default one that vLLM makes up.
        later: Settings of it that vLLM itself refuses on a CPU.
        parallel: Settings of vLLM's `ParallelConfig`.
    """
    import torch
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    transfer = KVTransferConfig(
        kv_connector="PhaseSplitConnector",
        kv_connector_module_path="phasesplit.vllm.connector",
        kv_role="kv_both",
        engine_id=engine,
        kv_load_failure_policy=failure,
        kv_connector_extra_config={"machine": "decode-0", "epoch": 1},
    )
    processes = ParallelConfig(distributed_executor_backend="mp", **parallel)
    spec = FullAttentionSpec(block_size=32, num_kv_heads=3, head_size=64, dtype=torch.float32)
    kinds = [KVCacheGroupSpec([f"layer {number}"], spec) for number in range(groups)]
    whole = VllmConfig(parallel_config=processes, kv_transfer_config=transfer)
    for name, value in (later or {}).items():
        setattr(whole.parallel_config, name, value)
    return KVConnectorFactory.create_connector(
        whole,
        KVConnectorRole.SCHEDULER,
        KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=kinds),
    )


def test_what_the_connector_knows_is_taken() -> None:
    """Wrong if a machine as the documentation describes it is refused."""
    assert type(connector()).__name__ == "PhaseSplitConnector"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"later": {"world_size": 2}}, "prefill_context_parallel_size"),
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"engine": "6f1c_dp0"}, "data_parallel_size"),  # a rank of a dense model, whose settings say that it is alone
        ({"later": {"enable_dbo": True}}, "enable_dbo"),
        ({"later": {"ubatch_size": 2}}, "ubatch_size"),
        ({"failure": "fail"}, "kv_load_failure_policy: got 'fail', allowed is 'recompute'"),
        ({"groups": 2}, "several kinds of KV cache"),
    ],
)
def test_what_the_connector_would_get_wrong_is_refused(settings: dict[str, Any], why: str) -> None:
    """Wrong if a machine serves and sends a part of its KV for the whole, or loses the requests whose KV is late."""
    with pytest.raises(TransferError, match=why):
        connector(**settings)
