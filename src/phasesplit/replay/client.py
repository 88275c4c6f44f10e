"""Open-loop load: each request of a trace is sent at its instant, whatever became of those before it.

1. `find_endpoint` reads what an endpoint says about itself.
2. `Prompts` draws prompts of exact token lengths.
3. `replay` sends the requests. A `Client` does so in a process apart from the cluster: neither waits for the other's
   interpreter.

Latencies count from the instant at which a request was due, not from when it was sent. A sender or server that falls
behind cannot hide it (coordinated omission). `ReplayResult` counts requests that were sent late.
"""

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import numpy as np
import orjson
from numpy.typing import NDArray

from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError, WorkerError, WorkerLostError
from phasesplit.launcher.announcing import http_address, unreached
from phasesplit.protocol.sse import event_text, is_done

USUAL_IDS = range(1_000, 20_000)
"""Ids that are ordinary tokens in every vocabulary in use: special tokens stand at its ends."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of random tokens, the same for the same seed and row, and different for different rows.

    Attributes:
        ids: Token ids to draw from.
        seed: Of the draws, >= 0.
        decode: Token ids to text, where the endpoint takes no token ids; None sends ids. Text is only as exact as the
            endpoint's tokenizer is that of `decode`.
    """

    ids: range = USUAL_IDS
    seed: int = 0
    decode: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        if not self.ids or self.ids[0] < 0:
            raise SpecError.bad(
                "token ids to draw prompts from", f"{self.ids.start}:{self.ids.stop}", "a range FROM:TO"
            )

    def of(self, tokens: int, row: int) -> list[int] | str:
        """Return the prompt of a request.

        Args:
            tokens: Its length, >= 1.
            row: Its number, >= 0.
        """
        drawn = np.random.default_rng((self.seed, row)).integers(0, len(self.ids), tokens)
        ids = [self.ids[place] for place in drawn.tolist()]
        return ids if self.decode is None else self.decode(ids)


_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that answered.

    Attributes:
        url: Its base, without /v1.
        model: The model asked for, or the only one it has.
        context_tokens: Longest prompt plus output, None where it does not say (vLLM and phasesplit do).
    """

    url: str
    model: str
    context_tokens: int | None


async def find_endpoint(
    url: str, *, model: str | None = None, api_key: str | None = None, where: str = "URL"
) -> Endpoint:
    """Ask an endpoint for its models.

    Args:
        url: Its base, with or without /v1.
        model: The model wanted; None: the only one.
        api_key: Sent as a bearer token.
        where: The option or argument that the address was given with.

    Raises:
        SpecError: It is no address, cannot be reached, does not list models, or not the one wanted.
    """
    base = url.rstrip("/").removesuffix("/v1")
    http_address(base, where)
    if api_key is not None and not api_key.isprintable():
        raise SpecError("PHASESPLIT_API_KEY: holds a line break or another character that no key can have")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=headers) as session,
            session.get(f"{base}/v1/models") as answer,
        ):
            if answer.status in (401, 403):
                why = "does not take this key" if api_key else "wants a key"
                raise SpecError(f"{base}: {why}; PHASESPLIT_API_KEY holds the one that is sent")
            if answer.status != 200:
                raise SpecError(f"{base}/v1/models: answers with status {answer.status}")
            listed = await answer.json()
    except (aiohttp.ContentTypeError, ValueError):
        raise SpecError(f"{base}/v1/models: answers with something else than JSON; no OpenAI-compatible API") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SpecError(f"{base}: {unreached(getattr(error, 'os_error', error))}") from None
    return _chosen(base, listed, model)


def _chosen(base: str, listed: Any, model: str | None) -> Endpoint:
    rows = listed.get("data") if isinstance(listed, dict) else None
    names = {row["id"]: row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)}
    if not names:
        raise SpecError(f"{base}/v1/models: lists no model")
    if model is None and len(names) > 1:
        raise SpecError(f"{base}: has several models, name one with --model: {', '.join(names)}")
    name = next(iter(names)) if model is None else model
    if name not in names:
        raise SpecError.unknown("--model", name, list(names))
    context = names[name].get("max_model_len")
    return Endpoint(url=base, model=name, context_tokens=context if isinstance(context, int) else None)


LATE_S = 0.010
"""A request sent this much after it was due counts as late. Source: assumed, a tenth of a usual ITL limit."""
_LEAD_S = 0.2
"""Time before the first request is due, in which tasks start."""


@dataclass(slots=True)
class SeenRequest:
    """One request as its client saw it; instants in seconds since the replay's start.

    Attributes:
        row: Its row in the trace.
        due_s: When it was to be sent.
        sent_s: When it was sent.
        decode_s: When each chunk with tokens came, and how many tokens it had.
        output_tokens: Tokens of the answer, as the server counts them where it does.
        end_s: When the stream ended.
        error: Why it failed; empty where it did not.
    """

    row: int
    due_s: float
    sent_s: float = float("nan")
    decode_s: list[tuple[float, int]] = field(default_factory=list)
    output_tokens: int = 0
    end_s: float = float("nan")
    error: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayResult:
    """What a replay measured.

    Attributes:
        seen: Every request, in order of arrival.
        gaps_s: float64 (g,) all gaps between consecutive tokens of completed requests: tokens of one chunk have gaps 0.
        wall_s: From the first due instant to the last end.
    """

    seen: Sequence[SeenRequest]
    gaps_s: NDArray[np.float64]
    wall_s: float

    @property
    def completed(self) -> list[SeenRequest]:
        """Requests that got an answer."""
        return [one for one in self.seen if not one.error]

    @property
    def late(self) -> NDArray[np.float64]:
        """How late each request was sent, in seconds, (n,)."""
        return np.array([one.sent_s - one.due_s for one in self.seen if not np.isnan(one.sent_s)])

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return a row for each request: `request_id`, `arrival_s`, `sent_s`, tokens, latencies in seconds, `error`."""
        seen = self.seen
        first = np.array([one.decode_s[0][0] if one.decode_s else np.nan for one in seen])
        last = np.array([one.decode_s[-1][0] if one.decode_s else np.nan for one in seen])
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
    on_end: Callable[[SeenRequest], None] = lambda _: None,
) -> ReplayResult:
    """Send a trace to an OpenAI-compatible endpoint and measure what comes back.

    Args:
        trace: The requests; their instants are honoured.
        url: Base of the endpoint, without /v1.
        model: The model's name there.
        prompts: Makes the body's prompt for a number of tokens.
        api_key: Sent as a bearer token.
        timeout_s: A request that has not ended so long after it was due has failed.
        on_end: Called with every request that ends.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    bodies = [_body(trace, row, model, prompts) for row in range(trace.arrival_s.size)]
    first_s = float(trace.arrival_s[0]) if trace.arrival_s.size else 0.0
    seen = [SeenRequest(row, float(at) - first_s) for row, at in enumerate(trace.arrival_s)]
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
    return ReplayResult(seen, np.array(gaps, np.float64), max(ends, default=0.0))


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
    one: SeenRequest,
    start_s: float,
    timeout_s: float,
    on_end: Callable[[SeenRequest], None],
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


async def _read(answer: aiohttp.ClientResponse, one: SeenRequest, start_s: float) -> None:
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
            one.decode_s.append((now_s, tokens))
        if chunk.get("usage"):
            one.output_tokens = int(chunk["usage"]["completion_tokens"])
    if not done:
        raise WorkerError("the stream ended without [DONE]")
    one.output_tokens = one.output_tokens or sum(count for _, count in one.decode_s)


def _tokens(choice: dict[str, Any]) -> int:
    """Return how many tokens a chunk brings: by their ids where the server sends them, else one for any text."""
    ids = choice.get("token_ids")
    return len(ids) if ids is not None else int(bool(choice.get("text")))


def _gaps(one: SeenRequest) -> list[float]:
    """Return the gaps between consecutive tokens; tokens of one chunk came together."""
    gaps: list[float] = []
    for index, (at_s, count) in enumerate(one.decode_s):
        if index:
            gaps.append(at_s - one.decode_s[index - 1][0])
        gaps.extend([0.0] * (count - 1))
    return gaps


_END_S = 5.0


class Client:
    """A process that replays what it is given; to be closed at the end. Only who started it can interrupt it."""

    def __init__(self) -> None:
        # A fork of a process with threads and an event loop would inherit half of both.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None  # noqa: S101 - it has been started
        return self._process.pid

    async def replay(self, trace: Trace, url: str, model: str, prompts: Prompts) -> tuple[ReplayResult, float]:
        """Return what came of a trace, and the seconds that the process computed for it.

        Args:
            trace: The requests.
            url: Base of the endpoint.
            model: The model's name there.
            prompts: Makes the prompts.

        Raises:
            WorkerLostError: The process has ended.
        """
        return await asyncio.to_thread(self._exchange, (trace, url, model, prompts))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join(_END_S)
        self._connection.close()

    def _exchange(self, asked: tuple[Trace, str, str, Prompts]) -> tuple[ReplayResult, float]:
        try:
            self._connection.send(asked)
            found: tuple[ReplayResult, float] = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerLostError("the process that sends the requests has ended early") from None
        return found


def _serve(connection: Connection) -> None:
    """Replay what comes, until nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            trace, url, model, prompts = connection.recv()
        except EOFError:
            return
        since_s = time.process_time()
        seen = asyncio.run(replay(trace, url, model=model, prompts=prompts))
        connection.send((seen, time.process_time() - since_s))
