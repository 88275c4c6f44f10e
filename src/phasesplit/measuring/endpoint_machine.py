"""An OpenAI-compatible endpoint as a machine that is timed, as far as its clients can see it."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.errors import WorkerError
from phasesplit.measuring.adaptive import Bounds
from phasesplit.measuring.endpoint import Endpoint
from phasesplit.measuring.iterations import Shape
from phasesplit.measuring.prompts import USUAL_IDS, Prompts
from phasesplit.measuring.replay import Replay, replay

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
        if shape.phase == "prompt":
            sent = self._sent(shape.prompts, shape.prompt_tokens, 1)
            return (max(one.token_s[0][0] - one.sent_s for one in sent.seen),)
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

    def _sent(self, count: int, prompt_tokens: int, output_tokens: int) -> Replay:
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
            if one.error or not one.token_s:
                raise WorkerError(f"{self._endpoint.url}: a request failed: {one.error or 'it got no token'}")
        return sent


def _gaps_s(sent: Replay) -> list[float]:
    """Return the time of each token of the first request while all requests stream: theirs are the same iterations.

    None where they never did.
    """
    begin_s = max(one.token_s[0][0] for one in sent.seen)
    end_s = min(one.token_s[-1][0] for one in sent.seen)
    inside = [(at_s, count) for at_s, count in sent.seen[0].token_s if begin_s <= at_s <= end_s]
    return [(at_s - before_s) / count for (before_s, _), (at_s, count) in pairwise(inside)]
