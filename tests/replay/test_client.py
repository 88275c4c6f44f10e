"""What a replay measures, held against a server whose delays are known."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import orjson
import pytest
from aiohttp import web

from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.replay.client import LATE_S, Prompts, ReplayResult, replay

pytestmark = pytest.mark.alone

FIRST_S, GAP_S = 0.08, 0.03
ROOM_S = 0.025
"""What a busy machine may add to an instant."""


def _chunk(tokens: int) -> bytes:
    return b"data: " + orjson.dumps({"choices": [{"text": "x", "token_ids": [1] * tokens}]}) + b"\n\n"


async def _steady(request: web.Request) -> web.StreamResponse:
    """Answer with the first token after FIRST_S, each further one GAP_S after it."""
    body = orjson.loads(await request.read())
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for index in range(body["max_tokens"]):
        await asyncio.sleep(GAP_S if index else FIRST_S)
        await answer.write(_chunk(1))
    used = {"completion_tokens": body["max_tokens"]}
    await answer.write(b"data: " + orjson.dumps({"choices": [], "usage": used}) + b"\n\ndata: [DONE]\n\n")
    return answer


@asynccontextmanager
async def _served(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def _trace(arrival_s: list[float], output_tokens: list[int]) -> Trace:
    prompts = np.full(len(arrival_s), 5, np.int32)
    return Trace.from_columns("test", np.array(arrival_s), prompts, np.array(output_tokens, np.int32))


def _replayed(
    trace: Trace, answer: Callable[[web.Request], Awaitable[web.StreamResponse]], timeout_s: float = 30.0
) -> ReplayResult:
    async def run() -> ReplayResult:
        async with _served(answer) as url:
            return await replay(trace, url, model="m", prompts=Prompts(), timeout_s=timeout_s)

    return asyncio.run(run())


def test_latencies_are_those_of_the_server() -> None:
    """Otherwise what verify calls measured is an artefact of the client."""
    measured = _replayed(_trace([0.0, 0.1, 0.15, 0.3, 0.45, 0.5, 0.6], [4, 1, 3, 2, 5, 1, 2]), _steady)
    columns = measured.columns()
    assert list(columns["error"]) == [""] * 7
    assert list(columns["output_tokens"]) == [4, 1, 3, 2, 5, 1, 2]
    assert (columns["ttft_s"] >= FIRST_S).all()
    # A busy host delays any one of them; what the client adds, it adds to all.
    assert np.median(columns["ttft_s"]) < FIRST_S + ROOM_S
    expected_s = FIRST_S + GAP_S * (columns["output_tokens"] - 1)
    assert np.median(np.abs(columns["e2e_s"] - expected_s)) < 2 * ROOM_S
    assert abs(np.median(measured.gaps_s) - GAP_S) < ROOM_S
    assert len(measured.gaps_s) == 11
    assert np.isnan(columns["itl_mean_s"][1])


def test_time_counts_from_the_due_instant_and_late_sending_is_counted() -> None:
    """Otherwise a client that falls behind reports short latencies: coordinated omission."""

    async def blocking(request: web.Request) -> web.StreamResponse:
        time.sleep(0.15)  # holds up the event loop that server and client share
        return await _steady(request)

    measured = _replayed(_trace([0.0, 0.02], [1, 1]), blocking)
    assert measured.late[1] > LATE_S
    assert measured.columns()["ttft_s"][1] > 0.13 + FIRST_S


def test_tokens_of_one_chunk_came_together() -> None:
    """Otherwise a server that sends two tokens at a time looks twice as fast a token."""

    async def pairs(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(_chunk(2))
        await asyncio.sleep(GAP_S)
        await answer.write(_chunk(2) + b"data: [DONE]\n\n")
        return answer

    measured = _replayed(_trace([0.0], [4]), pairs)
    assert (np.sort(measured.gaps_s)[:2] == 0).all()
    assert measured.gaps_s.max() >= GAP_S
    assert measured.columns()["output_tokens"][0] == 4


@pytest.mark.parametrize(
    ("ending", "expected"),
    [(b"", "without [DONE]"), (b'data: {"error": {"message": "worker lost"}}\n\ndata: [DONE]\n\n', "worker lost")],
)
def test_a_stream_that_breaks_off_is_no_answer(ending: bytes, expected: str) -> None:
    """Otherwise failures improve the latencies."""

    async def broken(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(_chunk(1) + ending)
        return answer

    measured = _replayed(_trace([0.0], [4]), broken)
    assert expected in measured.seen[0].error
    assert not measured.completed
    assert not measured.gaps_s.size


def test_refusals_and_silence_are_errors() -> None:
    """Otherwise a replay hangs, or counts a 503 as an answer."""

    async def refusing(request: web.Request) -> web.Response:
        return web.Response(status=503, text="no capacity")

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response()

    assert "503" in _replayed(_trace([0.0], [4]), refusing).seen[0].error
    assert "0.1 s" in _replayed(_trace([0.0], [4]), silent, timeout_s=0.1).seen[0].error


def test_prompts_are_exact_and_repeat() -> None:
    """Otherwise a prompt has another length than the trace says, or two runs ask for different work."""
    prompts = Prompts(ids=range(50, 60), seed=3)
    drawn = prompts.of(70, 4)
    assert len(drawn) == 70
    assert set(drawn) <= set(range(50, 60))
    assert drawn == Prompts(ids=range(50, 60), seed=3).of(70, 4)
    assert drawn != prompts.of(70, 5)
    with pytest.raises(SpecError, match="token ids"):
        Prompts(ids=range(0))
