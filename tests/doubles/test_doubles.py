"""The doubles: they stand in for the real thing, and do what tests say and nothing else."""

import asyncio
from contextlib import aclosing

import pytest

from doubles import ByteCodec, FakeWire, FakeWorker, ManualClock
from phasesplit.gateway.clock import Clock
from phasesplit.gateway.codec import Codec
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.worker_client import LegError, WorkerClient
from phasesplit.protocol.worker import Chunk

BODY = {"prompt": [1, 2, 3], "max_tokens": 3}
SENDING = BODY | {"kv_transfer_params": {"key": "a.1", "do_remote_decode": True}}
TAKING = BODY | {"kv_transfer_params": {"key": "a.1", "do_remote_prefill": True}}


def test_doubles_have_the_shape_of_the_real_thing() -> None:
    """A double would let a test pass that the real thing fails; the type checker reads these lines."""
    clock: Clock = ManualClock()
    codec: Codec = ByteCodec()
    worker: WorkerClient = FakeWorker("x")
    assert (clock.now_s(), codec.token_name(256), isinstance(worker, FakeWorker)) == (0.0, "<end>", True)


def test_clock_makes_calls_in_order_at_their_own_instants() -> None:
    """Two calls that fall due in one step would be made in the wrong order, or see a time that is not theirs."""
    clock = ManualClock(10.0)
    seen: list[tuple[str, float]] = []
    clock.call_at(12.0, lambda: seen.append(("b", clock.now_s())))
    clock.call_at(11.0, lambda: seen.append(("a", clock.now_s())))
    clock.call_at(12.0, lambda: seen.append(("c", clock.now_s())))
    clock.call_at(11.5, lambda: seen.append(("never", clock.now_s()))).cancel()
    clock.call_at(13.0, lambda: seen.append(("d", clock.now_s())))
    clock.advance(2.0)
    assert seen == [("a", 11.0), ("b", 12.0), ("c", 12.0)]
    clock.advance(1.0)
    assert (seen[-1], clock.now_s(), clock.unix_s()) == (("d", 13.0), 13.0, 1_700_000_003.0)


def test_split_and_whole_give_the_same_tokens() -> None:
    """A fake pair would answer otherwise than one fake machine, and every comparison be of no use."""

    async def scenario() -> None:
        wire = FakeWire()
        prompt, token, whole = (FakeWorker(name, wire) for name in ("p", "t", "u"))

        async def told(worker: FakeWorker, body: dict[str, object]) -> list[Chunk]:
            async with aclosing(worker.decode_leg(body)) as chunks:
                return [chunk async for chunk in chunks]

        first, split = await asyncio.gather(prompt.prefill_leg(SENDING), told(token, TAKING))
        assert split == await told(whole, BODY)
        assert (first.tokens, split[-1].finish_reason) == (split[0].tokens, "length")
        assert (prompt.held, token.held) == ({}, {})

    asyncio.run(scenario())


def test_dead_machine_breaks_what_waits_on_it() -> None:
    """A test of a killed machine would hang, or the machine go on."""

    async def scenario() -> None:
        worker = FakeWorker("p")
        worker.hold("prefill")
        leg = asyncio.create_task(worker.prefill_leg(SENDING))
        while not worker.waiting("prefill"):
            await asyncio.sleep(0)
        worker.die()
        with pytest.raises(LegError) as found:
            await leg
        assert found.value.event is Event.PREFILL_LOST
        with pytest.raises(LegError):
            await worker.prefill_leg(SENDING)

    asyncio.run(scenario())
