"""The client of a machine, against a machine that answers badly in every way."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from gateways import play
from phasesplit.gateway.http_worker import AnswerTimeouts, HttpWorker
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.worker_client import LegError
from phasesplit.protocol.worker import Chunk, PrefillTimes, Scored

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
Machine = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(text), text)


@asynccontextmanager
async def client_of(machine: Machine, timeouts: AnswerTimeouts | None = None) -> Any:
    """Serve with a function, and yield a client of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            at = head.lower().find(b"content-length:")
            body = await reader.readexactly(int(head[at + 15 : head.index(b"\r\n", at)])) if at >= 0 else b""
            await machine(head + body, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    worker = HttpWorker(f"http://127.0.0.1:{port}/", key="k", timeouts=timeouts)
    try:
        yield worker
    finally:
        await worker.close()
        server.close()
        await server.wait_closed()


async def whole(worker: HttpWorker) -> list[Chunk]:
    """Return all of a decode leg."""
    async with aclosing(worker.decode_leg({})) as chunks:
        return [one async for one in chunks]


def answering(*parts: bytes) -> Machine:
    """Return a machine that sends these bytes, and closes."""

    async def machine(_: bytes, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)

    return machine


def test_prompt_leg() -> None:
    """A prefill leg's token, its times, or the key that opens the machine, would not get through."""
    seen = []

    async def machine(request: bytes, writer: asyncio.StreamWriter) -> None:
        seen.append(request)
        body = b'{"choices": [{"token_ids": [5], "finish_reason": "length"}], "phasesplit": %s}'
        body %= b'{"queued_s": 0.5, "prefill_s": 2}'
        writer.write(OK % (len(body), body))

    async def scenario() -> None:
        async with client_of(machine) as worker:
            found = await worker.prefill_leg({"max_tokens": 1})
            assert found == Chunk((5,), (), "length", (), PrefillTimes(queued_s=0.5, prefill_s=2.0))
        assert b"Authorization: Bearer k" in seen[0]
        assert seen[0].endswith(b'{"max_tokens":1}')

    play(scenario())


def test_token_leg_reads_both_shapes_of_logprobs() -> None:
    """Log-probabilities of one of the two kinds of machines would be lost."""
    ours = b'{"token_logprobs": [-1.0], "top_token_ids": [[5, 6]], "top_token_logprobs": [[-1.0, -2.0]]}'
    theirs = b'{"token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0, "token_id:6": -2.0}]}'
    lines = [
        b'data: {"choices": [{"token_ids": [5], "logprobs": %b}]}\n\n' % ours,
        b'data: {"choices": [{"token_ids": [5], "logprobs": %b,'
        b'"prompt_logprobs": [null, {"9": {"logprob": -3.0}}]}]}\n\n' % theirs,
        b'data: {"choices": [{"token_ids": [], "finish_reason": "stop"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n',
    ]

    async def scenario() -> None:
        parts = [STREAM, *map(chunk, lines), b"0\r\n\r\n"]
        async with client_of(answering(*parts)) as worker:
            found = await whole(worker)
        scored = (Scored(5, -1.0, ((5, -1.0), (6, -2.0))),)
        prompt = (Scored(-1, None), Scored(9, -3.0, ((9, -3.0),)))
        assert found == [Chunk((5,), scored), Chunk((5,), scored, None, prompt), Chunk((), (), "stop"), Chunk(())]

    play(scenario())


def test_an_output_that_repeats_itself_has_ended() -> None:
    """A client that asks vLLM to stop repetitions would have its request tried again, and its machines left alone."""
    line = b'data: {"choices": [{"token_ids": [5], "finish_reason": "repetition"}]}\n\n'

    async def scenario() -> None:
        async with client_of(answering(STREAM, chunk(line), b"0\r\n\r\n")) as worker:
            assert await whole(worker) == [Chunk((5,), (), "stop")]

    play(scenario())


def test_connections_are_used_again() -> None:
    """Thousands of requests would use up the ports of a host."""
    opened = []
    answer = b'{"choices": [{"token_ids": [5], "finish_reason": "length"}]}'
    stream = chunk(b"data: " + answer + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                at = head.lower().find(b"content-length:")
                body = await reader.readexactly(int(head[at + 15 : head.index(b"\r\n", at)]))
                writer.write(STREAM + stream if b"true" in body else OK % (len(answer), answer))
        except asyncio.IncompleteReadError:
            writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        worker = HttpWorker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        for _ in range(200):
            assert (await worker.prefill_leg({"stream": False})).tokens == (5,)
            async with aclosing(worker.decode_leg({"stream": True})) as chunks:
                assert [one.tokens async for one in chunks] == [(5,)]
        await worker.close()
        server.close()
        await server.wait_closed()
        assert len(opened) == 1

    play(scenario())


def failing(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


FAILURES = [
    (failing(400, b'{"error": {"message": "no", "param": "top_k"}}'), Event.INPUT_REFUSED),
    (failing(503, b""), Event.WORKER_REFUSED),
    (failing(409, b'{"error": {"message": "stale"}}'), Event.WORKER_REFUSED),
    (failing(500, b"oops"), Event.DECODE_LOST),
    (failing(500, b'{"error": {"message": "torn", "code": "transfer_failed"}}'), Event.TRANSFER_FAILED),
    (b"", Event.DECODE_LOST),
    (b"not http\r\n\r\n", Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"choices": [{"token_ids": [5]}]}\n\n') + b"5\r\nda", Event.DECODE_LOST),
    (STREAM + chunk(b"data: {broken\n\n") + b"0\r\n\r\n", Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"choices": 3}\n\n') + b"0\r\n\r\n", Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"choices": [{"token_ids": ["a"]}]}\n\n'), Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"choices": [{"token_ids": [-1]}]}\n\n'), Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"choices": [{"token_ids": [1], "finish_reason": "abort"}]}\n\n'), Event.DECODE_LOST),
    (STREAM + chunk(b'data: {"error": {"message": "x", "code": "transfer_failed"}}\n\n'), Event.TRANSFER_FAILED),
    (STREAM + chunk(b'data: {"error": {"message": "x", "type": "invalid_request_error"}}\n\n'), Event.INPUT_REFUSED),
    (STREAM + chunk(b'data: {"error": "x"}\n\n'), Event.DECODE_LOST),
]


@pytest.mark.parametrize(("answer", "event"), FAILURES)
def test_every_failure_is_reported_as_what_it_is(answer: bytes, event: Event) -> None:
    """A failure would end a request normally, crash the gateway, or be blamed on the client."""

    async def scenario() -> None:
        async with client_of(answering(answer)) as worker:
            with pytest.raises(LegError) as found:
                await whole(worker)
            assert found.value.event is event

    play(scenario())


def test_silent_machines_are_given_up() -> None:
    """A machine that accepts orders and says nothing would hold up whoever gives them."""

    async def machine(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        await writer.drain()
        await asyncio.sleep(1.0)

    async def scenario() -> None:
        async with client_of(machine, AnswerTimeouts(order_s=0.02)) as worker:
            for call in (worker.role(1, "decode"), worker.facts(), worker.abort("a.1", "x")):
                with pytest.raises(LegError):
                    await call

    play(scenario())


def test_unreachable_machine_is_lost_at_once() -> None:
    """A machine that is gone would cost a time-out."""

    async def scenario() -> None:
        async with client_of(answering(b"")) as worker:
            pass
        worker = HttpWorker(worker.url)
        try:
            with pytest.raises(LegError) as found:
                await worker.prefill_leg({})
            assert found.value.event is Event.PREFILL_LOST
        finally:
            await worker.close()

    play(scenario())


def test_closing_a_leg_closes_its_connection() -> None:
    """A machine would go on for a client that has gone."""
    closed = []

    async def machine(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(b'data: {"choices": [{"token_ids": [5]}]}\n\n'))
        await writer.drain()
        try:
            while True:
                writer.write(chunk(b": still here\n\n"))
                await writer.drain()
                await asyncio.sleep(0.001)
        except ConnectionError:
            closed.append(True)
            raise

    async def scenario() -> None:
        async with client_of(machine) as worker:
            async with aclosing(worker.decode_leg({})) as chunks:
                async for one in chunks:
                    assert one.tokens == (5,)
                    break
            for _ in range(1000):
                if closed:
                    break
                await asyncio.sleep(0.002)
        assert closed

    play(scenario())


def test_events_are_read_line_by_line() -> None:
    """Reports of a machine would be lost, or its end not be seen."""

    async def scenario() -> None:
        parts = [STREAM, chunk(b'{"facts": {"name": "x"}}\n{"kv_r'), chunk(b'eady": "a.1"}\n\n'), b"0\r\n\r\n"]
        async with client_of(answering(*parts)) as worker, aclosing(worker.events()) as reports:
            assert [report async for report in reports] == [{"facts": {"name": "x"}}, {"kv_ready": "a.1"}]

    play(scenario())
