"""Clients that are slow on purpose, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from gateways import play
from phasesplit.launcher.listening import bounded_protocol

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def app(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    await asyncio.sleep(0.35 if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def served(header_s: float) -> AsyncIterator[int]:
    """Serve with a deadline for heads; yield the port."""
    config = uvicorn.Config(app, port=0, http=bounded_protocol(header_s), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await serving


async def answer_to(port: int, *parts: bytes) -> bytes:
    """Send parts on one connection, waiting for what comes after each, and return the last answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    for part in parts:
        writer.write(part)
        answer = await reader.read(4096)
    writer.close()
    return answer


def test_heads_have_a_deadline() -> None:
    """A client that never ends its head, at once or on a later request, would hold a connection for ever."""

    async def scenario() -> None:
        async with served(0.25) as port:
            answers = await asyncio.gather(
                answer_to(port, b""),
                answer_to(port, b"GET / HTTP/1.1\r\nHost:"),
                answer_to(port, REQUEST, b"GET / HT"),
            )
            assert [answer[:12] for answer in answers] == [b"HTTP/1.1 408"] * 3

    play(scenario())


def test_slow_answers_are_no_slow_heads() -> None:
    """A request that takes long to answer would be hung up on."""

    async def scenario() -> None:
        async with served(0.25) as port:
            slow = REQUEST.replace(b"GET /", b"GET /slow")
            assert (await answer_to(port, slow, REQUEST))[:12] == b"HTTP/1.1 200"

    play(scenario())
