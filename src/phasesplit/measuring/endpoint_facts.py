"""What an endpoint tells of itself besides its models: a worker of phasesplit in /facts, vLLM in /metrics."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from phasesplit.errors import TransferError
from phasesplit.measuring.endpoint import Endpoint
from phasesplit.serving.vllm_metrics import read_figures
from phasesplit.transfer.layout import KvLayout

if TYPE_CHECKING:
    from phasesplit.files.profile_schema import KvFacts, LinkFacts

_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """What it tells; None of what it does not.

    Attributes:
        kv: How much KV it has room for.
        link: How fast KV moves from it to a machine like it, as it has measured by itself.
        start_up_s: From the start of its process until it serves.
    """

    kv: "KvFacts | None" = None
    link: "LinkFacts | None" = None
    start_up_s: float | None = None


async def endpoint_facts(endpoint: Endpoint, api_key: str | None = None) -> EndpointFacts:
    """Ask an endpoint.

    Args:
        endpoint: The endpoint.
        api_key: Sent as a bearer token.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with aiohttp.ClientSession(timeout=limits, headers=headers) as session:
            async with session.get(f"{endpoint.url}/facts") as answer:
                told = await answer.json() if answer.status == 200 else None
            if isinstance(told, dict) and {"capacity_blocks", "block_tokens"} <= told.keys():
                return _told(told)
            async with session.get(f"{endpoint.url}/metrics") as answer:
                text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return EndpointFacts()
    return EndpointFacts(kv=_kv_of_vllm(text))


def _told(facts: Mapping[str, Any]) -> EndpointFacts:
    from phasesplit.files.profile_schema import KvFacts, LinkFacts

    link = facts.get("measured_link")
    kv = KvFacts(
        blocks=int(facts["capacity_blocks"]),
        block_tokens=int(facts["block_tokens"]),
        bytes_per_token=_bytes_per_token(facts.get("layout")),
        source="the endpoint's /facts",
    )
    return EndpointFacts(
        kv=kv,
        link=None if link is None else LinkFacts(**link, source="measured by the worker at its start, on its own host"),
        start_up_s=facts.get("start_up_s"),
    )


def _bytes_per_token(layout: Any) -> float | None:
    """Return the KV bytes of a token by the layout that a worker tells; None where it tells none."""
    try:
        known = KvLayout(**layout)
    except (TypeError, TransferError):
        return None
    return known.layers * known.block_bytes / known.block_tokens


def _kv_of_vllm(metrics: str) -> "KvFacts | None":
    from phasesplit.files.profile_schema import KvFacts

    figures = read_figures(metrics)
    if not (figures.blocks and figures.block_tokens):
        return None
    return KvFacts(
        blocks=figures.blocks,
        block_tokens=figures.block_tokens,
        bytes_per_token=None,
        source="the endpoint's /metrics (vllm:cache_config_info)",
    )
