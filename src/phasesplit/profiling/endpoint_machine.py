"""An OpenAI-compatible endpoint as a machine that is timed, as far as its clients can see it.

`endpoint_facts` reads what an endpoint says about itself: a worker of phasesplit in /facts, vLLM in /metrics.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.errors import TransferError, WorkerError
from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.profiling.adaptive import Bounds
from phasesplit.profiling.fitting import Shape
from phasesplit.replay.client import USUAL_IDS, Endpoint, Prompts, ReplayResult, replay
from phasesplit.vllm.worker.state import read_figures

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import KvFacts, LinkFacts


_FACTS_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """What it reports; None of what it does not.

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
    limits = aiohttp.ClientTimeout(total=_FACTS_PATIENCE_S)
    try:
        async with aiohttp.ClientSession(timeout=limits, headers=headers) as session:
            async with session.get(f"{endpoint.url}/facts") as answer:
                found = await answer.json() if answer.status == 200 else None
            if isinstance(found, dict) and {"capacity_blocks", "block_tokens"} <= found.keys():
                return _found(found)
            async with session.get(f"{endpoint.url}/metrics") as answer:
                text = await answer.text() if answer.status == 200 else ""
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return EndpointFacts()
    return EndpointFacts(kv=_kv_of_vllm(text))


def _found(facts: Mapping[str, Any]) -> EndpointFacts:
    from phasesplit.io.profile_schema import KvFacts, LinkFacts

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
    """Return the KV bytes of a token by the layout that a worker reports; None where it reports none."""
    try:
        known = KvLayout(**layout)
    except (TypeError, TransferError):
        return None
    return known.layers * known.block_bytes / known.block_tokens


def _kv_of_vllm(metrics: str) -> "KvFacts | None":
    from phasesplit.io.profile_schema import KvFacts

    figures = read_figures(metrics)
    if not (figures.blocks and figures.block_tokens):
        return None
    return KvFacts(
        blocks=figures.blocks,
        block_tokens=figures.block_tokens,
        bytes_per_token=None,
        source="the endpoint's /metrics (vllm:cache_config_info)",
    )


FROM_OUTSIDE = (
    "times are those of a client: the network, the server's queue and its sampling are in them",
    "batches are the server's own: so many prompts sent at once, or requests that stream at once, count as one batch",
    "chunks of prompts and mixed iterations cannot be asked for from outside",
)
"""What readers of such a profile must know."""

_USUAL_CONTEXT_TOKENS = 2048
_LEAST_PROMPT_TOKENS = 8
_GAPS = 16


class EndpointMachine:
    """Times TTFT of prompts sent at once, and the gaps between tokens of requests that stream at once.

    Every prompt is new, so that no prefix cache knows it.

    Args:
        endpoint: The endpoint.
        most_requests: Most requests at a time, >= 2.
        kv_tokens: Tokens of KV that it has, None where it does not say.
        api_key: Sent as a bearer token.
        ids: Token ids that prompts are drawn from.

    Attributes:
        bounds: What can be asked for.
        interrupted_share: Always None: what else runs there cannot be seen.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        most_requests: int,
        kv_tokens: int | None = None,
        api_key: str | None = None,
        ids: range = USUAL_IDS,
    ) -> None:
        longest = endpoint.context_tokens or _USUAL_CONTEXT_TOKENS
        self._endpoint, self._api_key, self._ids = endpoint, api_key, ids
        # One more token than the prompt has to fit in; and a server keeps some of its memory free.
        self._longest_tokens = longest - 1
        self.bounds = Bounds(
            longest_tokens=self._longest_tokens - most_requests - _GAPS,
            kv_tokens=int(0.9 * kv_tokens) if kv_tokens else most_requests * longest,
            most_prompt_tokens=self._longest_tokens,
            most_requests=most_requests,
            least_prompt_tokens=_LEAST_PROMPT_TOKENS,
            has_chunks=False,
            has_mixed=False,
            has_free_context=False,
        )
        self.interrupted_share: float | None = None
        self._asked = 0

    def run(self, shape: Shape) -> Sequence[float]:
        """Send requests once, and return the seconds of the iterations that they make visible.

        Raises:
            WorkerError: A request failed, or its answer was too short.
        """
        if shape.phase == "prefill":
            sent = self._sent(shape.prompts, shape.prompt_tokens, 1)
            return (max(one.decode_s[0][0] - one.sent_s for one in sent.seen),)
        # The first may be far ahead when the last one begins; the context in the middle is the one asked for.
        output_tokens = shape.requests + _GAPS
        prompt_tokens = max(1, shape.context_tokens - output_tokens // 2)
        while not (gaps_s := _gaps_s(self._sent(shape.requests, prompt_tokens, output_tokens))):
            output_tokens *= 2
            if prompt_tokens + output_tokens > self._longest_tokens:
                raise WorkerError(
                    "the requests of a batch never streamed at the same time: ask for fewer (--concurrency)"
                )
        return gaps_s

    def _sent(self, count: int, prompt_tokens: int, output_tokens: int) -> ReplayResult:
        self._asked += 1
        trace = Trace.from_columns(
            "profile",
            np.zeros(count),
            np.full(count, prompt_tokens, np.int32),
            np.full(count, output_tokens, np.int32),
        )
        prompts = Prompts(ids=self._ids, seed=self._asked)
        sent = asyncio.run(
            replay(trace, self._endpoint.url, model=self._endpoint.model, prompts=prompts, api_key=self._api_key)
        )
        for one in sent.seen:
            if one.error or not one.decode_s:
                raise WorkerError(f"{self._endpoint.url}: a request failed: {one.error or 'it got no token'}")
        return sent


def _gaps_s(sent: ReplayResult) -> list[float]:
    """Return the time of each token of the first request while all requests stream: theirs are the same iterations.

    None where they never did.
    """
    begin_s = max(one.decode_s[0][0] for one in sent.seen)
    end_s = min(one.decode_s[-1][0] for one in sent.seen)
    inside = [(at_s, count) for at_s, count in sent.seen[0].decode_s if begin_s <= at_s <= end_s]
    return [(at_s - before_s) / count for (before_s, _), (at_s, count) in pairwise(inside)]
