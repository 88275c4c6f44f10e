"""A worker's HTTP server: the worker protocol as an ASGI application.

| call                 | what it does                                                                             |
|----------------------|------------------------------------------------------------------------------------------|
| POST /v1/completions | a whole request, a prompt leg or a token leg; `server_completions`                       |
| GET /v1/models       | what is served                                                                           |
| GET /facts           | one snapshot of the worker's facts                                                       |
| GET /events          | lines of JSON without end: facts at a beat, what happens to keys; `server_feed`          |
| POST /abort          | {"key"}: ends a request, and lets KV go that waits to leave                              |
| POST /role           | {"epoch", "role"}: what the gateway uses the worker for; 409 where the epoch is stale    |
| POST /drain          | no more requests                                                                         |
| GET /health          | 200 while the engine runs and takes requests, else 503; needs no key                     |
"""

import hmac
from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from phasesplit.domain.cluster import Role
from phasesplit.engine.server_completions import Completions
from phasesplit.engine.server_feed import Feed
from phasesplit.engine.server_worker import Worker
from phasesplit.protocol.answers import model_list
from phasesplit.protocol.asgi import JsonAnswer, Receive, Scope, Send, refused
from phasesplit.protocol.roles import ROLES

_LONGEST_ORDER_BYTES = 1 << 16


class Speaker(Protocol):
    """Who answers for a worker, whichever engine it has.

    Attributes:
        feed: Who listens to it.
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
    return speaker_app(worker, [Route("/v1/completions", Completions(worker), methods=["POST"])], key=key)


def speaker_app(worker: Speaker, computing: Sequence[BaseRoute], *, key: str | None = None) -> Any:
    """Return the ASGI application of a worker.

    Args:
        worker: Who answers for it.
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
    def __init__(self, worker: Speaker) -> None:
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
