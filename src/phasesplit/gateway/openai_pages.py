"""The OpenAI endpoints."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from phasesplit.errors import GatewayError, NoCapacityError
from phasesplit.gateway.body import bounded_body
from phasesplit.gateway.gateway import Gateway
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.order import Order, ordered
from phasesplit.gateway.response_stream import ResponseStream
from phasesplit.protocol.answers import ClientAnswer, model_list
from phasesplit.protocol.asgi import ClientGoneError, JsonAnswer
from phasesplit.protocol.completions import ClientRequest
from phasesplit.protocol.errors import error_answer

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
        gateway.demand_client(header(scope, b"authorization"))
        gateway.enter()
        try:
            body = await bounded_body(scope, receive, gateway.limits)
            held, context, number = gateway.dispatcher.most_tokens, gateway.context_tokens, gateway.number()
            read = partial(self._read, body, number, held, context)
            request, orders = await asyncio.to_thread(read) if len(body) > _LONG_BODY_BYTES else read()
            answer = ClientAnswer(number, int(gateway.clock.unix_s()), request.model)
            await ResponseStream(gateway.in_flight, request, orders, answer).serve(receive, send)
        finally:
            gateway.leave()

    def _read(self, body: bytes, number: str, held: int, context: int) -> tuple[ClientRequest, list[Order]]:
        """Return the request in a body, and its choices."""
        gateway = self._gateway
        request = self._parse(body, gateway.limits)
        gateway.demand_model(request.model)
        orders = ordered(
            request, gateway.codec, number=number, seed=gateway.seed(), context_tokens=context, most_held_tokens=held
        )
        return request, orders


def header(scope: Scope, name: bytes) -> str | None:
    """Return a request's header, None where it has none."""
    for found, value in scope["headers"]:
        if found == name:
            return str(value.decode("latin-1"))
    return None


def models(gateway: Gateway) -> Callable[[Request], Awaitable[JsonAnswer]]:
    """Return the page of GET /v1/models and of one model below it."""

    async def page(request: Request) -> JsonAnswer:
        gateway.demand_client(request.headers.get("authorization"))
        context = gateway.context_tokens
        listed = model_list(gateway.models, gateway.created_s, min(context, gateway.dispatcher.most_tokens or context))
        name = request.path_params.get("model")
        if name is not None:
            gateway.demand_model(name)
            listed = next(model for model in listed["data"] if model["id"] == name)
        return JsonAnswer(200, listed)

    return page
