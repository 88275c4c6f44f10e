"""The gateway as an ASGI application, see `make_app`.

1. `Generation` serves the OpenAI endpoints that make text; `models` lists what is served.
2. `AdminPages` is for whoever runs the cluster: machines that join, pools, leases, requests, health.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from phasesplit.errors import GatewayError, NoCapacityError, RequestError
from phasesplit.gateway import metrics
from phasesplit.gateway.choice_spec import ChoiceSpec, choice_specs
from phasesplit.gateway.gateway import Gateway
from phasesplit.gateway.limits import Limits, bearer_key, key_accepted
from phasesplit.gateway.parsing import parsed_chat, parsed_completion
from phasesplit.gateway.response_stream import ResponseStream, bounded_body
from phasesplit.protocol.answers import ClientAnswer, model_list
from phasesplit.protocol.asgi import ClientGoneError, JsonAnswer, refused
from phasesplit.protocol.bodies import json_object, typed_field
from phasesplit.protocol.completions import ClientRequest
from phasesplit.protocol.openai_errors import error_answer, wrong_key
from phasesplit.protocol.roles import is_loopback

Parse = Callable[[bytes, Limits], ClientRequest]

_LONG_BODY_BYTES = 1 << 15
"""Larger bodies are read in a thread, because the event loop would stand still for milliseconds."""


class Generation:
    """POST /v1/completions or /v1/chat/completions, an ASGI application."""

    def __init__(self, gateway: Gateway, path: str, parse: Parse) -> None:
        """Make one.

        Args:
            gateway: The gateway.
            path: The endpoint's path, for counts.
            parse: Reads its bodies.
        """
        self._gateway, self._path, self._parse = gateway, path, parse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        status = 0

        async def counted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._served(scope, receive, counted)
        except ClientGoneError:
            status = 499
        except asyncio.CancelledError:
            # The server ends, and waits no longer.
            if status == 0:
                answer = error_answer(NoCapacityError("the gateway is shutting down", retry_after_s=1.0))
                await JsonAnswer(answer.status, answer.body, answer.headers).send_to(counted)
            raise
        except Exception as error:
            if status == 0:
                answer = error_answer(error)
                headers = answer.headers | ({"connection": "close"} if answer.status in (408, 413) else {})
                await JsonAnswer(answer.status, answer.body, headers).send_to(counted)
            if not isinstance(error, GatewayError):
                raise
        finally:
            self._gateway.meters.responses[self._path, status] += 1

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        gateway.require_client(header(scope, b"authorization"))
        gateway.enter()
        try:
            body = await bounded_body(scope, receive, gateway.limits)
            held, context, number = gateway.dispatcher.most_tokens, gateway.context_tokens, gateway.number()
            read = partial(self._read, body, number, held, context)
            request, specs = await asyncio.to_thread(read) if len(body) > _LONG_BODY_BYTES else read()
            answer = ClientAnswer(number, int(gateway.clock.unix_s()), request.model)
            await ResponseStream(gateway.in_flight, request, specs, answer).serve(receive, send)
        finally:
            gateway.leave()

    def _read(self, body: bytes, number: str, held: int, context: int) -> tuple[ClientRequest, list[ChoiceSpec]]:
        """Return the request in a body, and its choices."""
        gateway = self._gateway
        request = self._parse(body, gateway.limits)
        gateway.require_model(request.model)
        specs = choice_specs(
            request, gateway.codec, number=number, seed=gateway.seed(), context_tokens=context, most_held_tokens=held
        )
        return request, specs


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request's header, None where it has none."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value.decode("latin-1"))
    return None


def models(gateway: Gateway) -> Callable[[Request], Awaitable[JsonAnswer]]:
    """Return the page of GET /v1/models and of one model below it."""

    async def page(request: Request) -> JsonAnswer:
        gateway.require_client(request.headers.get("authorization"))
        context = gateway.context_tokens
        listed = model_list(gateway.models, gateway.created_s, min(context, gateway.dispatcher.most_tokens or context))
        name = request.path_params.get("model")
        if name is not None:
            gateway.require_model(name)
            listed = next(model for model in listed["data"] if model["id"] == name)
        return JsonAnswer(200, listed)

    return page


Page = Callable[[Request], Awaitable[ASGIApp]]


class AdminPages:
    """The pages of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        """Make them.

        Args:
            gateway: The gateway.
        """
        self._gateway = gateway

    async def health(self, _: Request) -> JsonAnswer:
        """Say that the process lives."""
        return JsonAnswer(200, {"status": "ok"})

    async def ready(self, _: Request) -> JsonAnswer:
        """Say whether a request would find machines for both phases."""
        lacks, degraded = self._gateway.lacks, list(self._gateway.dispatcher.degraded)
        return JsonAnswer(503 if lacks else 200, {"ready": not lacks, "why": lacks or None, "degraded": degraded})

    async def metrics(self, _: Request) -> Response:
        """Show what Prometheus reads."""
        return Response(metrics.exposition(self._gateway.in_flight), headers={"content-type": metrics.CONTENT_TYPE})

    async def kv(self, request: Request) -> JsonAnswer:
        """List all KV leases."""
        self._gateway.require_client(request.headers.get("authorization"))
        leases, now_s = self._gateway.dispatcher.leases, self._gateway.clock.now_s()
        ended = {str(reason): count for reason, count in leases.ended.items()}
        return JsonAnswer(200, {"leases": leases.listed(now_s), "blocks": leases.machines(), "ended": ended})

    async def requests(self, request: Request) -> JsonAnswer:
        """List all choices that are served now."""
        self._gateway.require_client(request.headers.get("authorization"))
        return JsonAnswer(200, {
            "requests": [
                {
                    "request": choice.name,
                    "state": choice.progress.state,
                    "attempts": choice.progress.attempts,
                    "has_content": choice.progress.sent,
                    "age_s": round(choice.age_s, 3),
                    "prompt_tokens": len(choice.spec.prompt_ids),
                    "output_tokens": len(choice.output.ids),
                    "prefill_machine": choice.pair.prefill if choice.pair else None,
                    "decode_machine": choice.pair.decode if choice.pair else None,
                }
                for choice in self._gateway.in_flight.live
            ]
        })  # fmt: skip

    async def story(self, request: Request) -> JsonAnswer:
        """Tell what has happened to one request, served now or not long ago, in order."""
        self._gateway.require_client(request.headers.get("authorization"))
        name = request.path_params["request"]
        stories = self._gateway.in_flight.story(name)
        if not stories:
            raise RequestError(f"request {name[:80]}: it is not served now, and not among the last ones", status=404)
        return JsonAnswer(200, {"choices": [story.shown() for story in stories]})

    async def pools(self, request: Request) -> JsonAnswer:
        """Show all machines and the moves between pools."""
        self._require_admin(request)
        dispatcher, now_s = self._gateway.dispatcher, self._gateway.clock.now_s()
        called = {machine.name: machine for machine in dispatcher.registry.connected()}
        return JsonAnswer(200, {
            "machines": [
                view._asdict()
                | {
                    "silent_s": round(now_s - view.heartbeat_s, 3),
                    "url": called[view.name].url if view.name in called else None,
                    "facts": dict(called[view.name].facts) if view.name in called else None,
                }
                for view in dispatcher.pools(now_s)
            ],
            "moves": dispatcher.moves(),
            "degraded": list(dispatcher.degraded),
            "counts": dict(dispatcher.counts),
        })  # fmt: skip

    async def change_pool(self, request: Request) -> JsonAnswer:
        """Give a machine another home, or let it drain or serve again."""
        self._require_admin(request)
        change = await self._object(request)
        dispatcher, now_s = self._gateway.dispatcher, self._gateway.clock.now_s()
        name = typed_field(change, "machine", str)
        if "drain" in change:
            (dispatcher.drain if typed_field(change, "drain", bool) else dispatcher.undrain)(name, now_s)
        else:
            dispatcher.set_home(name, typed_field(change, "home", str), typed_field(change, "epoch", int), now_s)
        return await self.pools(request)

    async def join(self, request: Request) -> JsonAnswer:
        """Let a machine join."""
        join = self._gateway.keys.join
        if join:
            if not key_accepted(bearer_key(request.headers.get("authorization")), join):
                raise wrong_key()
        elif request.client is None or not is_loopback(request.client.host):
            raise RequestError("machines of other hosts need a join key, and this gateway has none", status=403)
        _refuse_browsers(request, needs_own_host=not join)
        announced = await self._object(request)
        machine = await self._gateway.workers.join(typed_field(announced, "url", str), announced.get("facts"))
        return JsonAnswer(200, {"name": machine.name, "epoch": machine.facts["epoch"]})

    def _require_admin(self, request: Request) -> None:
        admin = self._gateway.keys.admin
        if not admin:
            raise RequestError("this gateway has no admin key, so nobody may see or change pools", status=403)
        if not key_accepted(bearer_key(request.headers.get("authorization")), admin):
            raise wrong_key()

    async def _object(self, request: Request) -> dict[str, Any]:
        return json_object(await bounded_body(request.scope, request.receive, self._gateway.limits))


def _refuse_browsers(request: Request, *, needs_own_host: bool) -> None:
    """Refuse what a web page can make a browser send: as a machine, it would get the prompts of all clients.

    A page of another site may post text without asking first, but not JSON. Its requests carry an Origin. Where its
    name resolves to this host, the Host header still says its name. Machines send JSON, no Origin, and the address
    they were given.

    Args:
        request: The announcement.
        needs_own_host: Whether the Host header must name this host, as it does where no join key lets others in.

    Raises:
        RequestError: It looks like a browser's.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"content-type {kind[:80] or 'missing'}: machines send application/json", status=415)
    if "origin" in request.headers:
        raise RequestError("a web page announces no machine: there is an Origin header", status=403)
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
    except ValueError:
        host = ""
    if needs_own_host and not is_loopback(host):
        named = host[:80] or "missing"
        raise RequestError(f"Host {named}: without a join key, machines join at a loopback address", status=403)


def guarded(page: Page) -> Page:
    """Return a page whose errors are answered in OpenAI's shape."""

    async def answered(request: Request) -> ASGIApp:
        try:
            return await page(request)
        except ClientGoneError:
            return Response(status_code=499)
        except GatewayError as error:
            answer = error_answer(error)
            return JsonAnswer(answer.status, answer.body, answer.headers)

    return answered


COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def make_app(gateway: Gateway) -> Starlette:
    """Return the application; its lifespan starts the gateway and closes it.

    Args:
        gateway: The gateway.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gateway.start()
        yield
        await gateway.close()

    pages = AdminPages(gateway)
    listed = guarded(models(gateway))
    return Starlette(
        lifespan=lifespan,
        exception_handlers={HTTPException: _not_a_page},
        routes=[
            Route(COMPLETIONS, Generation(gateway, COMPLETIONS, parsed_completion), methods=["POST"]),
            Route(CHATS, Generation(gateway, CHATS, parsed_chat), methods=["POST"]),
            Route("/v1/models", listed, methods=["GET"]),
            Route("/v1/models/{model:path}", listed, methods=["GET"]),
            Route("/health", pages.health, methods=["GET"]),
            Route("/ready", pages.ready, methods=["GET"]),
            Route("/metrics", pages.metrics, methods=["GET"]),
            Route("/debug/kv", guarded(pages.kv), methods=["GET"]),
            Route("/debug/requests", guarded(pages.requests), methods=["GET"]),
            Route("/debug/requests/{request}", guarded(pages.story), methods=["GET"]),
            Route("/admin/pools", guarded(pages.pools), methods=["GET"]),
            Route("/admin/pools", guarded(pages.change_pool), methods=["POST"]),
            Route("/workers", guarded(pages.join), methods=["POST"]),
        ],
    )


async def _not_a_page(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    why = f"allowed is {headers['Allow']}" if headers and "Allow" in headers else "no such page"
    message = f"{request.method} {request.url.path[:160]}: {why}"
    answer = refused(status, message, kind="invalid_request_error", headers=headers)
    return Response(answer.body, answer.status, answer.headers)
