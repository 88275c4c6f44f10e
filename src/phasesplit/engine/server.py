"""A worker's HTTP server: the worker protocol as an ASGI application.

| call                 | what it does                                                                             |
|----------------------|------------------------------------------------------------------------------------------|
| POST /v1/completions | a whole request, a prefill leg or a decode leg                                           |
| GET /v1/models       | what is served                                                                           |
| GET /facts           | one snapshot of the worker's facts                                                       |
| GET /events          | lines of JSON without end: facts at a beat, what happens to keys                         |
| POST /abort          | {"key"}: ends a request, and frees KV that waits to leave                                |
| POST /role           | {"epoch", "role"}: what the gateway uses the worker for; 409 where the epoch is stale    |
| POST /drain          | no more requests                                                                         |
| GET /health          | 200 while the engine runs and takes requests, else 503; needs no key                     |

One POST /v1/completions:

1. `Completions` reads the body under its bound, and `wire.parsed_request` checks it.
2. `_Choice.serve` submits the request to the worker's engine; its events come into an `_Inbox`.
3. Nothing is sent before the first event that says something: a refusal or a failure before the first token is an HTTP
   error, never an error inside a 200.
4. The answer leaves in one piece, or a token a chunk. A client that closes the connection ends the request in any
   state.
"""

import asyncio
import hmac
import secrets
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, cast

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from phasesplit.domain.cluster import Role
from phasesplit.engine.engine_events import Event, Failed, Finished, PromptScored, Refused, Token
from phasesplit.engine.server_worker import Feed, Worker
from phasesplit.engine.tokens import Detokenizer
from phasesplit.engine.wire import WorkerRequest, parsed_request
from phasesplit.errors import RequestError
from phasesplit.protocol.answers import model_list, usage
from phasesplit.protocol.asgi import (
    ClientGoneError,
    JsonAnswer,
    Receive,
    Scope,
    Send,
    client_gone,
    read_body,
    refused,
    send_part,
    start,
)
from phasesplit.protocol.openai_errors import error_answer, error_body
from phasesplit.protocol.roles import ROLES
from phasesplit.protocol.sse import CONTENT_TYPE, DONE, event
from phasesplit.protocol.worker import PrefillTimes, Scored, TakeKv
from phasesplit.protocol.worker_answers import TOKEN_NAME, ChunkPart, WorkerAnswer

_TYPES = {400: "invalid_request_error", 409: "conflict", 503: "overloaded_error"}


class _Gone:
    """The client has closed the connection."""


_Happened = Event | _Gone


class _Inbox:
    """The events of a request, in order."""

    def __init__(self) -> None:
        self._waiting: deque[_Happened] = deque()
        self._arrived = asyncio.Event()

    def put(self, happened: _Happened) -> None:
        self._waiting.append(happened)
        self._arrived.set()

    async def take(self) -> _Happened:
        """Wait for the next, and take it."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def take_end(self) -> Finished | None:
        """Take the next if it is the end, and is here already."""
        if self._waiting and isinstance(self._waiting[0], Finished):
            return cast("Finished", self._waiting.popleft())
        return None


class Completions:
    """The endpoint, an ASGI application."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await read_body(receive)
            request = parsed_request(body, self._worker.served, seed=secrets.randbits(63))
            request.require_epoch(self._worker.epoch)
        except ClientGoneError:
            return
        except RequestError as problem:
            await JsonAnswer(problem.status, error_answer(problem).body).send_to(send)
            return
        await _Choice(self._worker, request).serve(receive, send)


class _Choice:
    """One request, from its parsing to the last byte of its answer."""

    def __init__(self, worker: Worker, request: WorkerRequest) -> None:
        self._worker, self._request = worker, request
        self._key = request.transfer.key if request.transfer is not None else worker.own_key()
        self._inbox = _Inbox()
        self._tokens = 0
        self._text_length = 0
        self._detokenizer = Detokenizer(worker.tokenizer)
        self._prompt: tuple[Scored, ...] = ()
        self._times: PrefillTimes | None = None
        self._answer = WorkerAnswer(
            request=f"cmpl-{self._key}",
            created_s=int(time.time()),
            model=request.model,
            spelled=self._spelled,
            has_token_ids=request.return_token_ids,
            has_logprobs=request.sampling.logprobs is not None,
            has_echo=request.echo,
            has_prompt_logprobs=request.prompt_logprobs is not None,
        )

    async def serve(self, receive: Receive, send: Send) -> None:
        """Compute and answer; a client that goes away, and every error here, ends the request."""
        self._worker.submit(self._request, self._key, self._inbox.put)
        leaving = asyncio.create_task(self._watch(receive))
        is_over = False
        try:
            first = await self._first()
            if isinstance(first, _Gone):
                return
            if isinstance(first, Refused | Failed):
                is_over = True
                await self._refuse(first).send_to(send)
            elif self._request.stream:
                is_over = await self._stream(first, send)
            else:
                is_over = await self._whole(first, send)
        finally:
            leaving.cancel()
            if not is_over:
                self._worker.abort(self._key, "aborted")

    async def _watch(self, receive: Receive) -> None:
        await client_gone(receive)
        self._inbox.put(_Gone())

    async def _first(self) -> Token | Finished | Refused | Failed | _Gone:
        """Return the first event that says something to the client."""
        while True:
            happened = await self._inbox.take()
            if isinstance(happened, PromptScored):
                self._prompt = happened.scores
            elif isinstance(happened, Token):
                self._times = happened.times
                return happened
            elif isinstance(happened, Finished | Refused | Failed | _Gone):
                return happened

    async def _whole(self, first: Token | Finished, send: Send) -> bool:
        """Answer in one piece; return whether the request is over here (or its KV is on its way by itself)."""
        output: list[Scored] = []
        happened: _Happened = first
        while not isinstance(happened, Finished):
            if isinstance(happened, Token):
                output.append(happened.scored)
            elif isinstance(happened, Failed):
                await self._refuse(happened).send_to(send)
                return True
            elif isinstance(happened, _Gone):
                return False
            happened = await self._inbox.take()
        part = self._part(output, happened)
        used = usage([len(self._request.prompt_ids)], [self._tokens])
        await JsonAnswer(200, self._answer.completion(part, used)).send_to(send)
        return True

    async def _stream(self, first: Token | Finished, send: Send) -> bool:
        """Answer a token a chunk; return whether the request is over here."""
        await start(send, 200, {"content-type": CONTENT_TYPE, "cache-control": "no-cache"})
        happened: _Happened = first
        while True:
            if isinstance(happened, _Gone):
                return False
            if isinstance(happened, Failed):
                # No mark of a normal end: an error is never one.
                await send_part(send, event(_failure(happened, self._request, has_token=True)), has_more=False)
                return True
            if isinstance(happened, Token | Finished):
                output = [happened.scored] if isinstance(happened, Token) else []
                end = happened if isinstance(happened, Finished) else self._inbox.take_end()
                chunk = event(self._answer.chunk(self._part(output, end), with_usage=self._request.include_usage))
                if end is not None:
                    await send_part(send, chunk + self._usage_chunk() + DONE, has_more=False)
                    return True
                await send_part(send, chunk, has_more=True)
            happened = await self._inbox.take()

    def _part(self, output: list[Scored], end: Finished | None) -> ChunkPart:
        self._tokens += len(output)
        text = "".join([self._detokenizer.push(one.token) for one in output])
        if end is not None:
            text += self._detokenizer.finish()
            if isinstance(end.stop, str) and not self._request.include_stop and not self._request.stream:
                text = text[: text.find(end.stop)] if end.stop in text else text
        prompt, self._prompt = self._prompt, ()
        times, self._times = self._times, None
        if self._request.echo and self._text_length == 0 and self._tokens == len(output):
            text = self._worker.tokenizer.decode(self._request.prompt_ids) + text
        offset, self._text_length = self._text_length, self._text_length + len(text)
        return ChunkPart(
            text=text,
            output=output,
            prompt=prompt,
            text_offset=offset,
            finish_reason=None if end is None else end.reason,
            stop_reason=None if end is None else end.stop,
            times=times,
        )

    def _usage_chunk(self) -> bytes:
        if not self._request.include_usage:
            return b""
        return event(self._answer.usage_chunk(usage([len(self._request.prompt_ids)], [self._tokens])))

    def _refuse(self, why: Refused | Failed) -> JsonAnswer:
        if isinstance(why, Failed):
            return JsonAnswer(500, _failure(why, self._request, has_token=self._tokens > 0))
        return refused(why.status, why.message, "refused", kind=_TYPES.get(why.status, "server_error"))

    def _spelled(self, token: int) -> str:
        if self._request.names_by_id:
            return f"{TOKEN_NAME}{token}"
        return self._worker.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _failure(why: Failed, request: WorkerRequest, *, has_token: bool) -> dict[str, Any]:
    is_transfer = isinstance(request.transfer, TakeKv) and not has_token
    return error_body(why.why, kind="server_error", code="transfer_failed" if is_transfer else "engine_failed")


_LONGEST_ORDER_BYTES = 1 << 16


class WorkerState(Protocol):
    """The worker that a server answers for, whichever engine it has.

    Attributes:
        feed: What it reports on GET /events.
        role: The role it has now.
        epoch: Which start of it this is.
        started_s: When, in seconds since 1970.
        is_draining: Whether it takes no more requests.
    """

    feed: Feed
    role: str
    epoch: int
    started_s: float
    is_draining: bool

    @property
    def names(self) -> Sequence[str]:
        """Names under which its model may be asked for."""

    @property
    def error(self) -> BaseException | None:
        """Why it computes no more, None while it does."""

    def facts(self) -> dict[str, Any]:
        """Return a snapshot of its facts."""

    def abort(self, key: str, why: str) -> None:
        """End a request in whatever state it is."""

    def drain(self) -> None:
        """Take no more requests."""


def worker_app(worker: Worker, *, key: str | None = None) -> Any:
    """Return the ASGI application of an embedded worker.

    Args:
        worker: The worker.
        key: Every call but /health has to carry it (`Authorization: Bearer KEY`); None: nobody is asked.
    """
    return protocol_app(worker, [Route("/v1/completions", Completions(worker), methods=["POST"])], key=key)


def protocol_app(worker: WorkerState, computing: Sequence[BaseRoute], *, key: str | None = None) -> Any:
    """Return the ASGI application of a worker.

    Args:
        worker: The worker.
        computing: Its calls that compute.
        key: See `worker_app`.
    """
    orders = _Orders(worker)
    app = Starlette(
        routes=[
            *computing,
            Route("/v1/models", orders.models, methods=["GET"]),
            Route("/facts", orders.facts, methods=["GET"]),
            Route("/events", orders.events, methods=["GET"]),
            Route("/abort", orders.abort, methods=["POST"]),
            Route("/role", orders.role, methods=["POST"]),
            Route("/drain", orders.drain, methods=["POST"]),
            Route("/health", orders.health, methods=["GET"]),
        ],
    )
    return app if key is None else _Keyed(app, key)


class _Keyed:
    """Lets only those in who know the key."""

    def __init__(self, app: Any, key: str) -> None:
        self._app, self._expected = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            offered = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(offered, self._expected):
                await _refused(401, "the worker's key is missing or wrong").send_to(send)
                return
        await self._app(scope, receive, send)


class _Orders:
    def __init__(self, worker: WorkerState) -> None:
        self._worker = worker

    async def models(self, _: Request) -> JsonAnswer:
        return JsonAnswer(200, model_list(self._worker.names, int(self._worker.started_s)))

    async def facts(self, _: Request) -> JsonAnswer:
        return JsonAnswer(200, self._worker.facts())

    async def events(self, _: Request) -> Response:
        return StreamingResponse(self._worker.feed.listen(), media_type="application/x-ndjson")

    async def abort(self, request: Request) -> JsonAnswer:
        key = (await _order(request)).get("key")
        if not isinstance(key, str):
            return _refused(400, "key: allowed is a text")
        self._worker.abort(key, "aborted")
        return JsonAnswer(200, {})

    async def role(self, request: Request) -> JsonAnswer:
        order = await _order(request)
        if order.get("epoch") != self._worker.epoch:
            return _refused(
                409, f"epoch: got {order.get('epoch')!r}, this worker is in epoch {self._worker.epoch}", "stale_epoch"
            )
        try:
            self._worker.role = str(Role(str(order.get("role"))))
        except ValueError:
            return _refused(400, f"role: got {str(order.get('role'))[:40]!r}, allowed is one of {', '.join(ROLES)}")
        self._worker.feed.nudge()
        return JsonAnswer(200, {"role": self._worker.role})

    async def drain(self, _: Request) -> JsonAnswer:
        self._worker.drain()
        return JsonAnswer(200, {})

    async def health(self, _: Request) -> JsonAnswer:
        error = self._worker.error
        if error is not None:
            return _refused(503, f"the engine has stopped: {error}")
        if self._worker.is_draining:
            return _refused(503, "draining")
        return JsonAnswer(200, {"status": "ok"})


async def _order(request: Request) -> dict[str, Any]:
    """Return the JSON object of a short body, an empty one where it is none."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _LONGEST_ORDER_BYTES:
            return {}
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}


def _refused(status: int, message: str, code: str | None = None) -> JsonAnswer:
    return refused(status, message, code, kind=None if status < 500 else "overloaded_error")
