"""Open-loop load: each request of a trace is sent at its instant, whatever became of those before it.

What a client sees is measured from the instant at which a request was due, not from when it was sent, so a sender or a
server that falls behind cannot hide it (coordinated omission). Where the sender itself was late, that is counted apart.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from phasesplit.domain.request import Trace
from phasesplit.errors import WorkerError
from phasesplit.measuring.prompts import Prompts
from phasesplit.protocol.sse import event_text, is_done

LATE_S = 0.010
"""A request sent this much after it was due counts as late. Source: assumed, a tenth of a usual ITL limit."""
_LEAD_S = 0.2
"""Time before the first request is due, in which tasks start."""


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; instants in seconds since the replay's start.

    Attributes:
        row: Its row in the trace.
        due_s: When it was to be sent.
        sent_s: When it was sent.
        token_s: When each chunk with tokens came, and how many tokens it had.
        output_tokens: Tokens of the answer, as the server counts them where it does.
        end_s: When the stream ended.
        error: Why it failed; empty where it did not.
    """

    row: int
    due_s: float
    sent_s: float = float("nan")
    token_s: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    end_s: float = float("nan")
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Replay:
    """What a replay measured.

    Attributes:
        seen: Every request, in order of arrival.
        gaps_s: float64 (g,) all gaps between consecutive tokens of completed requests: tokens of one chunk have gaps 0.
        wall_s: From the first due instant to the last end.
    """

    seen: Sequence[Seen]
    gaps_s: NDArray[np.float64]
    wall_s: float

    @property
    def completed(self) -> list[Seen]:
        """Requests that got an answer."""
        return [one for one in self.seen if not one.error]

    @property
    def late(self) -> NDArray[np.float64]:
        """How late each request was sent, in seconds, (n,)."""
        return np.array([one.sent_s - one.due_s for one in self.seen if not np.isnan(one.sent_s)])

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return a row for each request: `request_id`, `arrival_s`, `sent_s`, tokens, latencies in seconds, `error`."""
        seen = self.seen
        first = np.array([one.token_s[0][0] if one.token_s else np.nan for one in seen])
        last = np.array([one.token_s[-1][0] if one.token_s else np.nan for one in seen])
        due = np.array([one.due_s for one in seen])
        tokens = np.array([one.output_tokens for one in seen], np.int64)
        return {
            "request_id": np.array([one.row for one in seen], np.int64),
            "arrival_s": due,
            "sent_s": np.array([one.sent_s for one in seen]),
            "output_tokens": tokens,
            "ttft_s": first - due,
            "itl_mean_s": np.where(tokens > 1, (last - first) / np.maximum(tokens - 1, 1), np.nan),
            "itl_max_s": np.array([max(_gaps(one), default=np.nan) for one in seen]),
            "e2e_s": last - due,
            "error": np.array([" ".join(one.error.replace(",", ";").replace('"', "'").split()) for one in seen]),
        }


async def replay(
    trace: Trace,
    url: str,
    *,
    model: str,
    prompts: Prompts,
    api_key: str | None = None,
    timeout_s: float = 600.0,
    on_end: Callable[[Seen], None] = lambda _: None,
) -> Replay:
    """Send a trace to an OpenAI-compatible endpoint and measure what comes back.

    Args:
        trace: The requests; their instants are honoured.
        url: Base of the endpoint, without /v1.
        model: The model's name there.
        prompts: Makes the body's prompt for a number of tokens.
        api_key: Sent as a bearer token.
        timeout_s: A request that has not ended so long after it was due has failed.
        on_end: Told of every request that ends.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    bodies = [_body(trace, row, model, prompts) for row in range(trace.arrival_s.size)]
    first_s = float(trace.arrival_s[0]) if trace.arrival_s.size else 0.0
    seen = [Seen(row, float(at) - first_s) for row, at in enumerate(trace.arrival_s)]
    # No limit on connections: one that waits for another to end would no longer be open-loop.
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=None)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    async with aiohttp.ClientSession(connector=connector, timeout=limits, headers=headers) as session:
        start_s = time.perf_counter() + _LEAD_S
        tasks = []
        for one, body in zip(seen, bodies, strict=True):
            await _until(start_s + one.due_s)
            tasks.append(
                asyncio.create_task(_ask(session, f"{url}/v1/completions", body, one, start_s, timeout_s, on_end))
            )
        await asyncio.gather(*tasks)
    ends = [one.end_s for one in seen if not np.isnan(one.end_s)]
    gaps = [gap for one in seen if not one.error for gap in _gaps(one)]
    return Replay(seen, np.array(gaps, np.float64), max(ends, default=0.0))


def _body(trace: Trace, row: int, model: str, prompts: Prompts) -> bytes:
    output_tokens = int(trace.output_tokens[row])
    return orjson.dumps(
        {
            "model": model,
            "prompt": prompts.of(int(trace.prompt_tokens[row]), row),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    )


async def _until(instant_s: float) -> None:
    """Sleep until an instant of the performance counter; the last stretch in short steps, for sleeps overshoot."""
    while (left_s := instant_s - time.perf_counter()) > 0:
        await asyncio.sleep(left_s - 0.001 if left_s > 0.002 else 0)


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    one: Seen,
    start_s: float,
    timeout_s: float,
    on_end: Callable[[Seen], None],
) -> None:
    one.sent_s = time.perf_counter() - start_s
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer,
        ):
            if answer.status != 200:
                one.error = f"status {answer.status}: {(await answer.text())[:200]}"
            else:
                await _read(answer, one, start_s)
    except TimeoutError:
        one.error = f"no end within {timeout_s:g} s"
    except (aiohttp.ClientError, OSError, WorkerError, ValueError) as error:
        one.error = f"{type(error).__name__}: {error}"
    one.end_s = time.perf_counter() - start_s
    on_end(one)


async def _read(answer: aiohttp.ClientResponse, one: Seen, start_s: float) -> None:
    """Read a stream of server-sent events to its end.

    Raises:
        WorkerError: It holds an error, or ends without having said so.
    """
    done = False
    async for line in answer.content:
        now_s = time.perf_counter() - start_s
        text = event_text(line)
        if text is None:
            continue
        if is_done(text):
            done = True
            continue
        chunk = orjson.loads(text)
        if "error" in chunk:
            raise WorkerError(f"error in the stream: {chunk['error']}")
        tokens = sum(_tokens(choice) for choice in chunk.get("choices", ()))
        if tokens:
            one.token_s.append((now_s, tokens))
        if chunk.get("usage"):
            one.output_tokens = int(chunk["usage"]["completion_tokens"])
    if not done:
        raise WorkerError("the stream ended without [DONE]")
    one.output_tokens = one.output_tokens or sum(count for _, count in one.token_s)


def _tokens(choice: dict[str, Any]) -> int:
    """Return how many tokens a chunk brings: by their ids where the server tells them, else one for any text."""
    ids = choice.get("token_ids")
    return len(ids) if ids is not None else int(bool(choice.get("text")))


def _gaps(one: Seen) -> list[float]:
    """Return the gaps between consecutive tokens; tokens of one chunk came together."""
    gaps: list[float] = []
    for index, (at_s, count) in enumerate(one.token_s):
        if index:
            gaps.append(at_s - one.token_s[index - 1][0])
        gaps.extend([0.0] * (count - 1))
    return gaps
