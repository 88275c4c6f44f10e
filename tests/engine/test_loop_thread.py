"""The engine's thread: commands from other threads, events in batches, and sleep while there is nothing to do."""

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine_machines import Machine, Pair, Received, asked, served
from phasesplit.engine import thread as engine_thread
from phasesplit.engine.engine_events import Event, Failed, Finished, Refused, Started, Token
from phasesplit.engine.sequences import OnEvent
from phasesplit.engine.thread import EngineThread
from waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.alone


class Running:
    """A machine whose engine has its thread."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.batches: list[list[Event]] = []
        self.thread = EngineThread(machine.engine, machine.endpoint, self._deliver)

    def _deliver(self, events: list[tuple[OnEvent, Event]]) -> None:
        self.batches.append([event for _, event in events])
        for on_event, event in events:
            on_event(event)


@pytest.fixture
def running() -> Iterator[Running]:
    """Return a machine that runs."""
    one = Running(Machine())
    one.thread.start()
    yield one
    assert one.thread.stop()


def test_requests_from_many_threads_are_served(running: Running) -> None:
    """Requests handed in at the same time would be lost or mixed up."""
    received = [Received() for _ in range(12)]
    requests = [asked(np.random.default_rng(n).integers(3, 300, 10 + 9 * n), 6) for n in range(12)]
    threads = [
        threading.Thread(target=running.thread.submit, args=(f"r{n}", requests[n], received[n])) for n in range(12)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: all(one.finished for one in received))
    assert [one.ids for one in received] == [served(Machine(), request).ids for request in requests]


def test_events_come_in_batches(running: Running) -> None:
    """Who streams to many clients would be woken once a token instead of once an iteration."""
    received = [Received() for _ in range(8)]
    barrier = threading.Event()
    running.thread.call(lambda _: barrier.wait(PATIENCE_S) and None)
    for number, one in enumerate(received):
        running.thread.submit(f"r{number}", asked(range(3, 20), 10), one)
    barrier.set()
    eventually(lambda: all(one.finished for one in received))
    tokens = [sum(isinstance(event, Token) for event in batch) for batch in running.batches]
    assert max(tokens) == 8
    assert sum(tokens) == 80


def test_a_prompt_is_said_to_begin_before_it_is_computed(running: Running) -> None:
    """A prompt that takes seconds would count as waiting until it has ended."""
    received = Received()
    run, seen = running.machine.forward.run, []

    def watched(*arguments: object) -> object:
        seen.append(received.has(Started))
        return run(*arguments)

    running.machine.forward.run = watched
    running.thread.submit("r", asked(range(3, 20), 2), received)
    eventually(lambda: received.finished is not None)
    assert seen == [True, True]


def test_abort_and_drain_reach_the_engine(running: Running) -> None:
    """A client that hangs up would be computed for until its end."""
    received, late = Received(), Received()
    running.thread.submit("r", asked(range(3, 20), 2_000), received)
    eventually(lambda: len(received.ids) > 3)
    running.thread.abort("r")
    running.thread.drain()
    running.thread.submit("late", asked(range(3, 20), 2), late)
    eventually(lambda: bool(late.bad))
    assert isinstance(late.bad[0], Refused)
    eventually(lambda: running.thread.facts.held == {} and running.thread.facts.is_draining)
    assert received.finished is None


def test_idle_it_sleeps(running: Running) -> None:
    """A worker without requests would keep a core busy."""
    time.sleep(0.3)
    before_s = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before_s < 0.1


@pytest.fixture
def _sleeps_until_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sleepers look up by themselves only when tests have given up."""
    monkeypatch.setattr(engine_thread, "_LONGEST_SLEEP_S", 3600.0)


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_it_wakes_at_once() -> None:
    """A request would wait until the sleeper looks up by itself."""
    one = Running(Machine())
    one.thread.start()
    for number in range(5):
        time.sleep(0.02)
        received = Received()
        one.thread.submit(f"r{number}", asked(range(3, 9), 1), received)
        eventually(lambda received=received: received.finished is not None)
    assert one.thread.stop()


def test_its_death_fails_every_request() -> None:
    """Clients would wait for ever for an engine that has ended by a defect."""
    running = Running(Machine())
    here, late = Received(), Received()
    running.thread.call(lambda engine: engine.submit("here", asked(range(3, 9), 2_000), here))

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    running.machine.forward.run = broken
    raised: list[BaseException | None] = []
    hook, threading.excepthook = threading.excepthook, lambda failure: raised.append(failure.exc_value)
    try:
        running.thread.start()
        eventually(lambda: bool(here.bad))
        assert running.thread.stop()
    finally:
        threading.excepthook = hook
    running.thread.submit("late", asked(range(3, 9), 1), late)
    assert [type(one) for one in (here.bad[0], late.bad[0])] == [Failed, Failed]
    assert "a defect" in late.bad[0].why
    assert isinstance(running.thread.error, RuntimeError)
    assert len(raised) == 1


@pytest.mark.usefixtures("_sleeps_until_woken")
def test_a_pair_of_threads_hands_kv_over() -> None:
    """A sleeping machine would not notice the KV, or the offer, that another thread or process sends it."""
    with Pair(threshold_tokens=40) as pair:
        machines = [Running(machine) for machine in pair.machines]
        for machine in machines:
            machine.thread.start()
        for number in range(18):
            size = number % 6
            request = asked(np.random.default_rng(size).integers(3, 300, 20 + 20 * size), 6)
            legs = Received(), Received()
            for one, leg, submit in zip(machines, legs, (pair.submit_prefill, pair.submit_decode), strict=True):
                one.thread.call(
                    lambda _, leg=leg, submit=submit, request=request, key=f"r{number}": submit(request, key, leg)
                )
            eventually(lambda legs=legs: isinstance(legs[1].events[-1] if legs[1].events else None, Finished))
            assert legs[1].ids == served(Machine(), request).ids
        eventually(lambda: all(not machine.thread.facts.held for machine in machines))
        for machine in machines:
            assert machine.thread.stop()
