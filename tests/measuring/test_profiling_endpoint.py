"""What a profile sees of an endpoint, held against a server whose delays are known."""

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from endpoints import GAP_S, Server, running_server
from phasesplit.errors import SpecError, WorkerError
from phasesplit.measuring.endpoint import Endpoint, find_endpoint
from phasesplit.measuring.endpoint_machine import EndpointMachine, endpoint_kv
from phasesplit.measuring.iterations import Shape

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


def test_an_endpoint_that_wants_a_key_says_where_it_belongs() -> None:
    """A person who has no key set, or a wrong one, would read a bare status."""

    async def refused(key: str | None) -> None:
        async def locked(_: web.Request) -> web.Response:
            return web.Response(status=401)

        app = web.Application()
        app.router.add_get("/v1/models", locked)
        async with TestServer(app) as server:
            await find_endpoint(str(server.make_url("/")), api_key=key)

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
