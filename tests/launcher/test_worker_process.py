"""The life of a worker's process: how it ends when nobody told it to."""

import asyncio
import types
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from phasesplit.errors import SpecError
from phasesplit.launcher.announcing import GatewayAddress
from phasesplit.launcher.listening import Listening
from phasesplit.launcher.worker_process import WorkerPlace, live


class Silent:
    """A worker that nobody calls."""

    name = "w"
    error = None

    def __init__(self) -> None:
        self.is_closed = False
        self.feed: Any = types.SimpleNamespace(has_listener=False)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"nobody asks for {name}")

    def facts(self) -> dict[str, Any]:
        return {"name": self.name}

    def drain(self) -> None:
        raise AssertionError("a worker that is refused has nothing to end in peace")

    async def drained(self, within_s: float) -> bool:
        return within_s > 0

    def close(self) -> None:
        self.is_closed = True


def test_a_worker_that_its_gateway_refuses_ends() -> None:
    """A worker with a wrong key would stay up, served by nobody, until a person looks for it."""

    async def refuse(_: Request) -> Response:
        return JSONResponse({"error": {"message": "missing or wrong API key"}}, 401)

    async def test() -> None:
        gateway, own, worker = Listening("127.0.0.1", 0), Listening("127.0.0.1", 0), Silent()
        await gateway.start(Starlette(routes=[Route("/workers", refuse, methods=["POST"])]))
        await own.start(Starlette())
        place = WorkerPlace(
            host="127.0.0.1", port=own.port, gateway=GatewayAddress("http", "127.0.0.1", gateway.port),
            join_key="another-key", key=None, drain_s=1.0,
        )  # fmt: skip
        with pytest.raises(SpecError, match="refuses this worker: 401, missing or wrong API key"):
            await asyncio.wait_for(live(worker, place, own, ready=lambda _: None, say=lambda _: None), 60)
        assert worker.is_closed
        await gateway.stop()

    asyncio.run(test())
