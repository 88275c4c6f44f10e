"""What a profile sees of an endpoint, held against a server whose delays are known."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import orjson
import pytest
from aiohttp import web

from phasesplit.errors import WorkerError
from phasesplit.measuring.endpoint import Endpoint, find_endpoint
from phasesplit.measuring.endpoint_machine import EndpointMachine, endpoint_kv
from phasesplit.measuring.iterations import Shape

TOKEN_S, GAP_S = 0.001, 0.02
ROOM_S = 0.05
"""What a busy machine may add."""


@dataclass
class Server:
    """Answers a prompt after TOKEN_S a token, then a token each GAP_S; one prompt at a time, as engines do."""

    url: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    facts: dict[str, object] | None = None
    metrics: str = ""
    status: int = 200

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if self.status != 200:
            return web.Response(status=self.status, text="full")
        self.prompts.append(body["prompt"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        async with self.lock:
            await asyncio.sleep(TOKEN_S * len(body["prompt"]))
        for index in range(body["max_tokens"]):
            await asyncio.sleep(GAP_S if index else 0)
            chunk = {"choices": [{"text": "x", "token_ids": [1]}]}
            await answer.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def about(self, request: web.Request) -> web.Response:
        if request.path == "/facts" and self.facts is not None:
            return web.json_response(self.facts)
        if request.path == "/metrics" and self.metrics:
            return web.Response(text=self.metrics)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 600}]})
        raise web.HTTPNotFound

    async def start(self) -> web.AppRunner:
        self.lock = asyncio.Lock()
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/{path:.*}", self.about)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server on a thread of its own, for the machine runs event loops of its own."""
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    def serve() -> None:
        runner = loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(10)
    yield server
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


Made = Callable[..., EndpointMachine]


@pytest.fixture
def made(server: Server) -> Made:
    def make(**given: object) -> EndpointMachine:
        endpoint = asyncio.run(find_endpoint(server.url))
        return EndpointMachine(endpoint, most_requests=4, **given)  # type: ignore[arg-type]

    return make


def test_prompt_times_are_those_of_the_last_first_token(server: Server, made: Made) -> None:
    """A batch would take as long as its first prompt."""
    machine = made()
    (alone_s,) = machine.run(Shape(prompts=1, prompt_tokens=100))
    assert 0.1 <= alone_s < 0.1 + ROOM_S
    (batch_s,) = machine.run(Shape(prompts=3, prompt_tokens=50))
    assert 0.15 <= batch_s < 0.15 + ROOM_S
    assert [len(prompt) for prompt in server.prompts] == [100, 50, 50, 50]
    assert len({tuple(prompt[:20]) for prompt in server.prompts}) == 4


def test_token_times_are_gaps_while_all_stream(server: Server, made: Made) -> None:
    """Waiting for the prompts of others would count as token time."""
    gaps_s = made().run(Shape(requests=3, context_tokens=60))
    assert len(gaps_s) >= 10
    assert GAP_S * 0.9 <= np.median(gaps_s) < GAP_S + ROOM_S / 2
    assert {len(prompt) for prompt in server.prompts} == {60 - (3 + 16) // 2}


def test_bounds_are_those_of_the_endpoint(made: Made) -> None:
    """It would be asked for prompts that it refuses, or for what no client can ask for."""
    bounds = made(kv_tokens=1_000).bounds
    assert bounds.most_prompt_tokens == 599
    assert bounds.longest_tokens + 4 + 16 < 600
    assert bounds.kv_tokens == 900
    assert not bounds.has_chunks
    assert not bounds.has_mixed


def test_kv_capacity_is_taken_from_where_it_is_told(server: Server) -> None:
    """A machine's memory would be unknown although it says it."""
    endpoint = Endpoint(url=server.url, model="m", context_tokens=None)
    assert asyncio.run(endpoint_kv(endpoint)) is None
    server.metrics = 'x 1\nvllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="347"} 1.0\n'
    told = asyncio.run(endpoint_kv(endpoint))
    assert told is not None
    assert (told.blocks, told.block_tokens) == (347, 128)
    server.facts = {"capacity_blocks": 12, "block_tokens": 32}
    told = asyncio.run(endpoint_kv(endpoint))
    assert told is not None
    assert (told.blocks, told.block_tokens) == (12, 32)


def test_a_failed_request_ends_the_profile_with_its_reason(server: Server, made: Made) -> None:
    """Refused requests would count as very fast ones."""
    server.status = 503
    with pytest.raises(WorkerError, match="status 503: full"):
        made().run(Shape(prompts=1, prompt_tokens=8))
