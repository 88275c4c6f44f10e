"""A machine reached over HTTP.

Each machine has connections of its own, as many as it needs: one that answers nothing holds up nobody else's requests.
How long its answers may take is not decided here: a request's deadlines, the longest pause between tokens and the
machine's heartbeats end what takes too long, whichever comes first. A timer per read would cost as much as the read.

`read_chunk` and `read_error` say what a machine's answers and errors mean for a request; `protocol.worker_answers`
knows their shape.
"""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from phasesplit.gateway.request_states import Event
from phasesplit.gateway.worker_client import LegError
from phasesplit.protocol.sse import answer_lines, chunk_text
from phasesplit.protocol.worker import Chunk
from phasesplit.protocol.worker_answers import read_answer

_REFUSED = frozenset({400, 404, 413, 422})
_FULL = frozenset({409, 429, 503})


def read_chunk(answer: Mapping[str, Any], lost: Event) -> Chunk:
    """Return what an answer, or one event of a stream, says.

    Args:
        answer: The JSON object.
        lost: The event that a machine's failure means on this leg.

    Raises:
        LegError: It is an error, or not an answer.
    """
    if "error" in answer:
        raise read_error(answer, None, lost)
    try:
        chunk = read_answer(answer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise LegError("a machine sent something that is not an answer", lost) from None
    if chunk.finish_reason not in (None, "stop", "length"):
        raise LegError(f"a machine ended a request with {chunk.finish_reason!r}", lost)
    return chunk


def read_error(answer: Any, status: int | None, lost: Event) -> LegError:
    """Return what a machine's error means.

    Args:
        answer: Its body, where it has one.
        status: Its HTTP status, None for an error within a stream.
        lost: See `read_chunk`.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"a machine answered with status {status}")
    if error.get("code") == "transfer_failed":
        return LegError(message, Event.TRANSFER_FAILED)
    if status in _FULL or error.get("code") == "no_capacity":
        return LegError(message, Event.WORKER_REFUSED, machine_status=status or 503)
    if status in _REFUSED or (status is None and error.get("type") == "invalid_request_error"):
        param, code = error.get("param"), error.get("code")
        return LegError(
            message,
            Event.INPUT_REFUSED,
            machine_status=status or 400,
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    return LegError(message, lost, machine_status=status or 502)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTimeouts:
    """How long to wait for what a machine answers at once.

    Attributes:
        connect_s: For a connection.
        order_s: For the answer to an order (role, drain, abort, facts).
    """

    connect_s: float = 2.0
    order_s: float = 5.0


class HttpWorker:
    """One machine behind a URL; satisfies `worker.WorkerClient`.

    Attributes:
        url: Where it listens, without a slash at the end.
    """

    def __init__(self, url: str, *, key: str | None = None, timeouts: AnswerTimeouts | None = None) -> None:
        """Make a client; nothing is connected before the first call, which needs a running event loop.

        Args:
            url: Where the machine listens, such as "http://127.0.0.1:8101".
            key: Its key, None where it wants none.
            timeouts: Time-outs.
        """
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        timeouts = timeouts or AnswerTimeouts()
        self._answer = aiohttp.ClientTimeout(total=None, sock_connect=timeouts.connect_s)
        self._order = aiohttp.ClientTimeout(total=timeouts.order_s, sock_connect=timeouts.connect_s)
        self._opened: aiohttp.ClientSession | None = None

    async def prefill_leg(self, body: Mapping[str, Any]) -> Chunk:
        lost = Event.PREFILL_LOST
        return read_chunk(await self._call("POST", "/v1/completions", body, self._answer, lost), lost)

    async def decode_leg(self, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        lost = Event.DECODE_LOST
        with _losses(lost):
            async with self._session.post(
                f"{self.url}/v1/completions", data=orjson.dumps(body), timeout=self._answer
            ) as response:
                if response.status != 200:
                    raise read_error(_json(await response.read()), response.status, lost)
                async for line in answer_lines(response.content):
                    text = chunk_text(line)
                    if text is not None:
                        yield read_chunk(orjson.loads(text), lost)

    async def facts(self) -> dict[str, Any]:
        return dict(await self._call("GET", "/facts", None, self._order, Event.WORKER_REFUSED))

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        with _losses(Event.DECODE_LOST):
            async with self._session.get(f"{self.url}/events", timeout=self._answer) as response:
                if response.status != 200:
                    raise read_error(_json(await response.read()), response.status, Event.DECODE_LOST)
                async for line in answer_lines(response.content):
                    if line:
                        yield orjson.loads(line)

    async def abort(self, key: str, why: str) -> None:
        await self._tell("/abort", {"key": key, "why": why})

    async def role(self, epoch: int, role: str) -> None:
        await self._tell("/role", {"epoch": epoch, "role": role})

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()

    @property
    def _session(self) -> aiohttp.ClientSession:
        if self._opened is None:
            self._opened = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
                headers=self._headers,
                read_bufsize=1 << 16,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._opened

    async def _tell(self, path: str, body: Mapping[str, Any]) -> None:
        await self._call("POST", path, body, self._order, Event.WORKER_REFUSED)

    async def _call(
        self, method: str, path: str, body: Mapping[str, Any] | None, times: aiohttp.ClientTimeout, lost: Event
    ) -> Any:
        with _losses(lost):
            sent = None if body is None else orjson.dumps(body)
            async with self._session.request(method, f"{self.url}{path}", data=sent, timeout=times) as response:
                answer = _json(await response.read())
                if response.status >= 400:
                    raise read_error(answer, response.status, lost)
                return answer


def _json(body: bytes) -> Any:
    """Return what a body holds, None where that is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


@contextmanager
def _losses(lost: Event) -> Iterator[None]:
    """Tell every way in which a connection can fail as the loss of the machine."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise LegError(f"the connection to a machine failed ({type(error).__name__})", lost) from error
