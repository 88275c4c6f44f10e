"""What vLLM says of itself at /metrics, read: the queue, what runs, how full the KV cache is."""

from collections.abc import Mapping
from dataclasses import dataclass

from phasesplit.protocol.metrics import read_samples

_PREFIX = "vllm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One look.

    Attributes:
        blocks: KV blocks that it has.
        block_tokens: Tokens of a block.
        used_share: Share of the blocks that is in use, 0 to 1.
        running: Requests in the batch.
        waiting: Requests that wait, for their turn or for KV.
        awaiting_kv: Those that wait for KV of another machine.
        tokens: Output tokens so far.
        prompt_tokens: Prompt tokens so far, however they came.
        fetched_tokens: Those whose KV came from another machine.
        steps: Iterations so far.
        preemptions: How often KV had to go for lack of memory.
    """

    blocks: int = 0
    block_tokens: int = 0
    used_share: float = 0.0
    running: int = 0
    waiting: int = 0
    awaiting_kv: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    fetched_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


def read_figures(text: str) -> Figures:
    """Return the figures in Prometheus text; what is not there counts as nothing.

    Args:
        text: The body of GET /metrics.
    """
    sums: dict[str, float] = {}
    info: Mapping[str, str] = {}
    for full_name, labels, value in read_samples(text):
        if not full_name.startswith(_PREFIX):
            continue
        name = full_name.removeprefix(_PREFIX)
        if name == "cache_config_info":
            info = labels
        for full in (name, f"{name}.{labels.get('stage', '')}", f"{name}.{labels.get('source', '')}"):
            sums[full] = sums.get(full, 0.0) + value

    def whole(name: str) -> int:
        return round(sums.get(name, 0.0))

    return Figures(
        blocks=_number(info.get("num_gpu_blocks")),
        block_tokens=_number(info.get("block_size")),
        used_share=sums.get("kv_cache_usage_perc", 0.0),
        running=whole("num_requests_running"),
        waiting=whole("num_requests_waiting"),
        awaiting_kv=whole("num_requests_kv_fetch_by_stage.in_progress"),
        tokens=whole("generation_tokens_total"),
        prompt_tokens=whole("prompt_tokens_total"),
        fetched_tokens=whole("prompt_tokens_by_source_total.external_kv_transfer"),
        steps=whole("iteration_tokens_total_count"),
        preemptions=whole("num_preemptions_total"),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
