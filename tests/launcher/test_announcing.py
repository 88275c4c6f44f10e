"""A worker and the gateway that it joins: when it announces itself, and what it says when it is not taken."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phasesplit.errors import SpecError
from phasesplit.launcher.announcing import GatewayAddress, keep_announced
from phasesplit.launcher.listening import Listening
from waiting import eventually_there


class Desk:
    """A gateway's page for workers."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.heard: list[tuple[str | None, dict[str, Any]]] = []

    async def __call__(self, request: Request) -> Response:
        self.heard.append((request.headers.get("authorization"), json.loads(await request.body())))
        error = {"error": {"message": "another layout"}}
        return JSONResponse({} if self.status == 200 else error, self.status)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/workers", self.__call__, methods=["POST"])])


def announcing(port: int, said: list[str], has_listener: Callable[[], bool]) -> "asyncio.Task[None]":
    return asyncio.create_task(
        keep_announced(
            GatewayAddress("http", "127.0.0.1", port), "http://w", lambda: {"name": "w"},
            key="secret", has_listener=has_listener, say=said.append,
        )
    )  # fmt: skip


def test_it_says_so_until_somebody_listens_and_again_when_nobody_does() -> None:
    """A gateway that was restarted would never learn of workers that are there."""

    async def test() -> None:
        desk, said, listens = Desk(), list[str](), False
        listening = Listening("127.0.0.1", 0)
        await listening.start(desk.app())
        task = announcing(listening.port, said, lambda: listens)
        await eventually_there(lambda: len(desk.heard) >= 2)
        listens = True
        await asyncio.sleep(0.6)
        before = len(desk.heard)
        await asyncio.sleep(0.6)
        assert len(desk.heard) == before
        listens = False
        await eventually_there(lambda: len(desk.heard) > before)
        assert desk.heard[0] == ("Bearer secret", {"url": "http://w", "facts": {"name": "w"}})
        assert said == []
        task.cancel()
        await listening.stop()

    asyncio.run(test())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409])
def test_a_refusal_is_final(status: int) -> None:
    """A worker with a wrong key or another model would knock for ever, and nothing would say that it is no use."""

    async def test() -> None:
        desk, said = Desk(status), list[str]()
        listening = Listening("127.0.0.1", 0)
        await listening.start(desk.app())
        line = f"http://127.0.0.1:{listening.port} refuses this worker: {status}, another layout"
        with pytest.raises(SpecError, match=f"^{line}$"):
            await asyncio.wait_for(announcing(listening.port, said, lambda: False), 30)
        assert (len(desk.heard), said) == (1, [])
        await listening.stop()

    asyncio.run(test())


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_trouble_of_a_gateway_is_said_once_and_waited_for(status: int) -> None:
    """A gateway that has just too much to do would lose its workers, or a log would fill with the same line."""

    async def test() -> None:
        desk, said = Desk(status), list[str]()
        listening = Listening("127.0.0.1", 0)
        await listening.start(desk.app())
        task = announcing(listening.port, said, lambda: False)
        await eventually_there(lambda: len(desk.heard) >= 3)
        assert said == [f"http://127.0.0.1:{listening.port} does not take this worker: {status}, another layout"]
        desk.status, before = 200, len(desk.heard)
        await eventually_there(lambda: len(desk.heard) > before)
        assert not task.done()
        task.cancel()
        await listening.stop()

    asyncio.run(test())


def test_a_web_server_is_not_quoted_at_length() -> None:
    """A worker that was told a wrong address would fill its log with somebody's page, and not say what is wrong."""

    async def page(_: Request) -> Response:
        return Response("<!DOCTYPE html>\n<p>Unsupported method</p>", 501)

    async def test() -> None:
        said, listening = list[str](), Listening("127.0.0.1", 0)
        await listening.start(Starlette(routes=[Route("/workers", page, methods=["POST"])]))
        task = announcing(listening.port, said, lambda: False)
        await eventually_there(lambda: bool(said))
        assert said[0].endswith("501, without a reason; what answers there may be no phasesplit gateway")
        task.cancel()
        await listening.stop()

    asyncio.run(test())


def test_a_gateway_that_is_not_there_yet_is_waited_for() -> None:
    """Workers would have to be started after the gateway."""

    async def test() -> None:
        listening = Listening("127.0.0.1", 0)
        port, said, desk = listening.port, list[str](), Desk()
        await listening.stop()
        task = announcing(port, said, lambda: False)
        await eventually_there(lambda: len(said) == 1)
        assert "nothing listens there" in said[0]
        listening = Listening("127.0.0.1", port)
        await listening.start(desk.app())
        await eventually_there(lambda: len(desk.heard) == 1)
        task.cancel()
        await listening.stop()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("text", "gateway"),
    [
        ("http://h:1", ("http", "h", 1)),
        ("h:81", ("http", "h", 81)),
        ("https://h/", ("https", "h", 443)),
        ("http://[::1]:9", ("http", "::1", 9)),
    ],
)
def test_gateways_are_named_by_url_or_by_host(text: str, gateway: tuple[str, str, int]) -> None:
    """A worker would join another gateway than was meant."""
    assert GatewayAddress.from_text(text) == gateway


@pytest.mark.parametrize("text", ["", "ftp://h", "http://", "http://h/path", "http://[::1"])
def test_what_is_no_gateway_is_refused(text: str) -> None:
    """A worker would wait for ever for something that cannot be."""
    with pytest.raises(SpecError, match=r"^--join: got .* allowed is http://HOST:PORT of a gateway"):
        GatewayAddress.from_text(text)


@pytest.mark.parametrize("text", ["h:99999", "http://h:x"])
def test_a_wrong_port_is_named(text: str) -> None:
    """A person would look for what is wrong in the whole of an address."""
    with pytest.raises(SpecError, match=r"^--join http://h:\w+, port: got '\w+', allowed is a whole number from 1"):
        GatewayAddress.from_text(text)
