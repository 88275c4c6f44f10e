"""The class that vLLM loads: `--kv-transfer-config '{"kv_connector": "PhaseSplitConnector", ...}'`, see docs/vllm.md.

Every call goes to one of two halves, which do not depend on vLLM: the scheduler's (`scheduler_half`) and the model's
(`worker_half`). A step's orders go from the one to the other as `Orders`.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.vllm.connector_machine import join_key, weights_text, worker_half
from phasesplit.vllm.device_blocks import device_of, rows_of
from phasesplit.vllm.scheduler_half import SchedulerHalf, StepOrders
from phasesplit.vllm.settings import Settings
from phasesplit.vllm.worker_half import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

VLLM_VERSION = "0.32."
"""How the versions of vLLM begin that this class is written and tested against."""


class Orders(KVConnectorMetadata):
    """A step's orders on their way from the scheduler.

    Attributes:
        step: The orders.
    """

    def __init__(self, step: StepOrders) -> None:
        self.step = step


class PhaseSplitConnector(KVConnectorBase_V1):
    """KV moves between machines by `phasesplit.kv_transfer`, layer by layer while the prompt is computed.

    Raises:
        TransferError: vLLM has another version, or is set up in a way that the connector does not know.
    """

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _require_known(vllm_config, kv_cache_config)
        self._settings = Settings.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._spec: AttentionSpec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        self._scheduler: SchedulerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(self._spec.block_size)
        self._worker: WorkerHalf | None = None
        self._layers: dict[str, int] = {}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return True: a whole-model graph would hide when a layer is final."""
        del extra_config
        return True

    # In the scheduler.

    def on_new_request(self, request: "Request") -> None:
        """See `SchedulerHalf.arrived`."""
        self._in_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens come from another machine, and whether any do: they come between steps."""
        tokens = self._in_scheduler.awaited_tokens(request, num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """See `SchedulerHalf.allocated`."""
        if num_external_tokens:
            self._in_scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> Orders:
        """See `SchedulerHalf.step`."""
        new, known = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = [(each.req_id, each.num_computed_tokens) for each in new]
        computed += zip(known.req_ids, known.num_computed_tokens, strict=True)
        state = scheduler_output.kv_connector_block_state
        return Orders(
            self._in_scheduler.step(
                scheduler_output.num_scheduled_tokens, computed, lambda name: state.resolve_block_ids(name)[0]
            )
        )

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `SchedulerHalf.finished`."""
        return self._in_scheduler.finished(request, block_ids), None

    # Where the model runs.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take vLLM's blocks, and begin to listen."""
        names, blocks = list(self._kv_cache_config.kv_cache_groups[0].layer_names), self._kv_cache_config.num_blocks
        rows = [rows_of(kv_caches[name], blocks, name) for name in names]
        layout = _layout(self._vllm_config, self._settings, self._spec, kv_caches[names[0]], names)
        if {each.shape[1] for each in rows} != {layout.block_bytes}:
            raise TransferError(
                f"KV blocks of {rows[0].shape[1]} bytes a layer are not keys and values of {layout.kv_heads} heads"
                f" of {layout.head_dim} {layout.dtype}: this kind of attention is not supported"
            )
        self._layers = {name: layer for layer, name in enumerate(names)}
        longest_tokens = self._vllm_config.model_config.max_model_len
        self._worker = worker_half(
            self._settings,
            layout,
            longest_tokens,
            lambda pool: device_of(rows, pool),
            key=join_key(os.environ),
            is_pinned=rows[0].device.type != "cpu",
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the orders of a step, before it is computed."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, Orders):
            self._worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Do nothing: KV comes in between steps."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a step reads came in before it."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """See `WorkerHalf.layer_computed`."""
        del kv_layer, attn_metadata, kwargs
        layer = self._layers.get(layer_name)
        if self._worker is not None and layer is not None:
            self._worker.layer_computed(layer)

    def wait_for_save(self) -> None:
        """See `WorkerHalf.end`."""
        if self._worker is not None:
            self._worker.end()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `WorkerHalf.take_ended`."""
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        ended = self._worker.take_ended()
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def shutdown(self) -> None:
        """End all transfers and close the sockets."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _in_scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise TransferError("the scheduler's half was called where the model runs")
        return self._scheduler


def _require_known(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
    """Refuse what the connector would get wrong."""
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    groups = kv_cache_config.kv_cache_groups
    if not vllm.__version__.startswith(VLLM_VERSION):
        raise TransferError(f"vLLM {vllm.__version__}: this connector is for {VLLM_VERSION}*")
    if parallel.world_size != 1:
        raise TransferError(
            "tensor_parallel_size, pipeline_parallel_size and prefill_context_parallel_size: allowed is 1 with this"
            " connector, which sends the KV of one process"
        )
    # A rank's settings may say that it is alone; its engine's name still says which one it is.
    # Source: vllm/v1/engine/core.py, EngineCoreProc.run_engine_core.
    is_rank = str(transfer.engine_id).endswith(f"_dp{parallel.data_parallel_index}")
    if parallel.data_parallel_size != 1 or is_rank:
        raise TransferError(
            "data_parallel_size: allowed is 1 with this connector: the ranks would all be one machine of the cluster;"
            " start a machine for each"
        )
    if parallel.use_ubatching:
        raise TransferError(
            "enable_dbo and ubatch_size: not supported by this connector: a layer would leave with the first microbatch"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise TransferError(
            f"kv_load_failure_policy: got {transfer.kv_load_failure_policy!r}, allowed is 'recompute': a request whose"
            " KV does not come would fail, and its client with it"
        )
    if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, AttentionSpec):
        raise TransferError("models with several kinds of KV cache are not supported by this connector")


def _layout(
    vllm_config: "VllmConfig", settings: Settings, spec: AttentionSpec, tensor: torch.Tensor, names: Sequence[str]
) -> KvLayout:
    model, shape = vllm_config.model_config, tuple(tensor.shape[1:])
    order = sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))
    packing = _packing(vllm_config, spec, tensor.device, names)
    return KvLayout(
        model=settings.model or weights_text(model.model, model.revision, loaded_as=_loaded_as(model)),
        layers=len(names),
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        dtype=str(spec.dtype).removeprefix("torch.").removesuffix("fn"),
        block_tokens=spec.block_size,
        block_layout=f"vllm {vllm.__version__} {packing} shape {shape} order {order} tp 1",
    )


def _loaded_as(model: "ModelConfig") -> str:
    """Return how vLLM loads the weights, as a text that is equal in every process with the same settings.

    `ModelConfig.compute_hash` is no such text: it differs with the directory and with `max_model_len`.
    """
    overrides = model.hf_overrides
    loading = [model.quantization, model.quantization_config, getattr(overrides, "__qualname__", overrides)]
    return json.dumps(loading, sort_keys=True, default=str)


def _packing(vllm_config: "VllmConfig", spec: AttentionSpec, device: torch.device, names: Sequence[str]) -> str:
    """Return what decides how numbers lie in a block, in addition to its shape and the order of its axes.

    CUDA's backends write each number where the axes say, whatever the GPU: machines with GPUs of different generations
    can exchange KV if they run the same backend. CPUs and ROCm have backends with several packings.

    Source: vllm 0.32, v1/attention/backends: flash_attn.py, `do_kv_cache_update`; cpu_attn.py, `_get_attn_isa`, whose
    packings are compiled for the host's instructions; rocm_aiter_fa.py, `is_shuffle_kv_cache_enabled`. What
    vLLM's own connector compares: distributed/kv_transfer/kv_connector/v1/nixl, `compute_nixl_compatibility_hash`.
    """
    backends = get_current_attn_backends(vllm_config, list(names))
    text = " ".join(sorted(backend.get_name() for backend in backends))
    if device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # imports what only a CPU has

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        instructions: Any = torch.backends.cpu
        packing = _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
        return f"{text} {packing} cpu {instructions.get_cpu_capability()}"
    return f"{text} shuffled {envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT}" if torch.version.hip else text
