"""What a profile sees of an endpoint, held against a server whose delays are known."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from endpoints import GAP_S, Server, running_server
from phasesplit.errors import SpecError, WorkerError
from phasesplit.profiling.endpoint_machine import EndpointFacts, EndpointMachine, endpoint_facts
from phasesplit.profiling.fitting import Shape
from phasesplit.replay.client import Endpoint, find_endpoint

pytestmark = pytest.mark.alone

ROOM_S = 0.05
"""What a busy machine may add."""


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server with known delays."""
    with running_server() as server:
        yield server


Made = Callable[..., EndpointMachine]


@pytest.fixture
def made(server: Server) -> Made:
    def make(**given: object) -> EndpointMachine:
        endpoint = asyncio.run(find_endpoint(server.url))
        return EndpointMachine(endpoint, most_requests=4, **given)  # type: ignore[arg-type]

    return make


def shortest_s(machine: EndpointMachine, shape: Shape) -> float:
    """Return the shortest median of a few runs: a busy host makes any one of them longer."""
    return min(float(np.median(machine.run(shape))) for _ in range(3))


def test_prompt_times_are_those_of_the_last_first_token(server: Server, made: Made) -> None:
    """A batch would take as long as its first prompt."""
    machine = made()
    assert 0.1 <= shortest_s(machine, Shape(prompts=1, prompt_tokens=100)) < 0.1 + ROOM_S
    assert 0.15 <= shortest_s(machine, Shape(prompts=3, prompt_tokens=50)) < 0.15 + ROOM_S
    assert [len(prompt) for prompt in server.prompts] == [100] * 3 + [50] * 9
    assert len({tuple(prompt[:20]) for prompt in server.prompts}) == 12


def test_token_times_are_gaps_while_all_stream(server: Server, made: Made) -> None:
    """Waiting for the prompts of others would count as token time."""
    machine, shape = made(), Shape(requests=3, context_tokens=60)
    assert len(machine.run(shape)) >= 10
    assert GAP_S * 0.9 <= shortest_s(machine, shape) < GAP_S + ROOM_S / 2
    assert {len(prompt) for prompt in server.prompts} == {60 - (3 + 16) // 2}


def test_a_batch_whose_first_request_ends_before_its_last_begins_streams_longer(server: Server, made: Made) -> None:
    """A machine that computes prompts one after the other could not be measured at all."""
    machine, shape = made(), Shape(requests=4, context_tokens=250)
    machine.run(shape)
    assert len(server.prompts) == 8, "once in vain, and once with outputs twice as long"
    assert GAP_S * 0.9 <= shortest_s(machine, shape) < GAP_S + ROOM_S / 2


def test_an_endpoint_that_wants_a_key_says_where_it_belongs() -> None:
    """A person who has no key set, or a wrong one, would read a bare status."""

    async def refused(key: str | None) -> None:
        async def locked(_: web.Request) -> web.Response:
            return web.Response(status=401)

        app = web.Application()
        app.router.add_get("/v1/models", locked)
        async with TestServer(app) as server:
            await find_endpoint(str(server.make_url("/")), api_key=key)

    with pytest.raises(SpecError, match=r"^PHASESPLIT_API_KEY: holds a line break"):
        asyncio.run(refused("a key\n"))
    for key, why in ((None, "wants a key"), ("wrong", "does not take this key")):
        with pytest.raises(SpecError, match=f"{why}; PHASESPLIT_API_KEY"):
            asyncio.run(refused(key))


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
    assert asyncio.run(endpoint_facts(endpoint)) == EndpointFacts()
    server.metrics = 'x 1\nvllm:cache_config_info{block_size="128",engine="0",num_gpu_blocks="347"} 1.0\n'
    told = asyncio.run(endpoint_facts(endpoint)).kv
    assert told is not None
    assert (told.blocks, told.block_tokens) == (347, 128)
    server.facts = {"capacity_blocks": 12, "block_tokens": 32}
    told = asyncio.run(endpoint_facts(endpoint)).kv
    assert told is not None
    assert (told.blocks, told.block_tokens, told.bytes_per_token) == (12, 32, None)


def test_a_worker_tells_of_its_link_its_start_and_the_size_of_its_kv(server: Server) -> None:
    """A vLLM machine's profile would lack what a prediction of split machines rests on."""
    link = {"bytes_per_s": 2e9, "latency_s": 1e-4, "per_layer_s": 2e-5, "streaming_slowdown": 0.25}
    layout = {
        "model": "m", "layers": 30, "kv_heads": 3, "head_dim": 64, "dtype": "float32", "block_tokens": 32,
        "block_layout": "any", "protocol": 1,
    }  # fmt: skip
    server.facts = {
        "capacity_blocks": 12, "block_tokens": 32, "layout": layout, "measured_link": link, "start_up_s": 31.5,
    }  # fmt: skip
    told = asyncio.run(endpoint_facts(Endpoint(url=server.url, model="m", context_tokens=None)))
    assert told.kv is not None
    assert told.kv.bytes_per_token == 30 * 2 * 3 * 64 * 4
    assert told.link is not None
    assert {name: getattr(told.link, name) for name in link} == link
    assert told.start_up_s == 31.5


def test_a_failed_request_ends_the_profile_with_its_reason(server: Server, made: Made) -> None:
    """Refused requests would count as very fast ones."""
    server.status = 503
    with pytest.raises(WorkerError, match="status 503: full"):
        made().run(Shape(prompts=1, prompt_tokens=8))
