"""The gateway as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from phasesplit.gateway.admin import AdminPages, guarded
from phasesplit.gateway.gateway import Gateway
from phasesplit.gateway.openai_pages import Generation, models
from phasesplit.gateway.parsing import parsed_chat, parsed_completion
from phasesplit.protocol.asgi import refused

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
