"""Machines in processes of their own that are killed or stopped: nothing hangs, and no block stays held."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import pairs
from kv_transfer.pairs import WAYS, Machine
from kv_transfer.wires import BLOCKS, LAYOUT, needles, open_sockets
from phasesplit.kv_transfer.block_pool import Use
from phasesplit.kv_transfer.messages import TransferTimeouts
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import eventually

SHORT = TransferTimeouts(lease_s=0.3, heartbeat_s=0.1, answer_s=0.5, transfer_s=0.6)


@contextlib.contextmanager
def another(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a machine in its own process; `received` waits for what it prints. It is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", pairs.__name__, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(pairs.__file__).parent.parent,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    received: list[str] = []
    try:
        yield process, received
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def has_said(process: subprocess.Popen[str], received: list[str], lines: int) -> bool:
    """Return whether a process has said so many lines."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        received.append(line.strip())
    return len(received) >= lines


class StandingClock:
    """Stands at 0 until it is started: on a busy host the other process may be late, which is not what is tested."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def __call__(self) -> float:
        """Return the seconds since the start."""
        return 0.0 if self._since_s is None else time.monotonic() - self._since_s

    def start(self) -> None:
        """Let time pass from now on."""
        self._since_s = time.monotonic()


@pytest.fixture
def clock() -> StandingClock:
    """Return the clock of `machine`."""
    return StandingClock()


@pytest.fixture(params=WAYS)
def machine(request: pytest.FixtureRequest, clock: StandingClock) -> Iterator[Machine]:
    """Return a machine that waits for short times only, named by the test; afterwards no socket may be open."""
    before = open_sockets()
    way = request.param
    name = "decode-0" if "sender" in request.node.name else "prefill-0"
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        here = Machine(name, way, folder, clock, timeouts=SHORT)
        here.way = way
        yield here
        here.close()
    assert open_sockets() == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("layers", [0, 2])
def test_sender_that_dies_or_stops(machine: Machine, clock: StandingClock, how: signal.Signals, layers: int) -> None:
    """The decode machine would wait for ever for a prefill machine that is gone, or read half a prompt."""
    with another("prefill", machine.way, json.dumps(machine.endpoint.address), str(layers)) as (process, received):
        eventually(lambda: has_said(process, received, 1), machine.endpoint.poll)
        machine.incoming.expect("r", 16, "prefill-0")
        arrived = functools.partial(machine.incoming._receiver.layers_arrived, 1)
        eventually(lambda: arrived() == layers, machine.endpoint.poll)
        process.send_signal(how)
        if how is signal.SIGSTOP:
            clock.start()
        over = (InboundState.DRAINING, InboundState.RELEASED)
        eventually(lambda: machine.incoming.state("r") in over, machine.endpoint.poll)
        assert machine.incoming.why("r") == ("no heartbeat" if how is signal.SIGSTOP else "the sender is gone")
        if how is signal.SIGSTOP and machine.way == "shared-memory":
            time.sleep(2 * SHORT.lease_s)
            machine.endpoint.poll()
            assert machine.free.used == 4  # it can still write to them when it goes on, so they wait for its end
            process.kill()
        eventually(lambda: machine.free.used == 0, machine.endpoint.poll)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_receiver_that_dies_or_stops(machine: Machine, clock: StandingClock, how: signal.Signals) -> None:
    """The prefill machine would keep its KV for a decode machine that is gone, or send on for ever."""
    machine.pool[:] = needles(LAYOUT, BLOCKS)
    with another("decode", machine.way) as (process, received):
        eventually(lambda: has_said(process, received, 1))
        machine.outgoing.await_offer("r", "decode-0", json.loads(received[0]), 1)
        eventually(lambda: machine.outgoing.state("r") is OutboundState.OFFERED, machine.endpoint.poll)
        machine.outgoing.open("r", machine.free.hold("r", Use.SEND, 4).blocks)
        machine.outgoing.send_layer("r", 0)
        eventually(lambda: has_said(process, received, 2), machine.endpoint.poll)
        process.send_signal(how)
        if how is signal.SIGSTOP:
            clock.start()
        machine.outgoing.send_layer("r", 1)
        eventually(lambda: machine.outgoing.state("r") is OutboundState.FAILED, machine.endpoint.poll)
        assert ("deadline" if how is signal.SIGSTOP else "channel") in machine.outgoing.why("r")
        eventually(lambda: machine.outgoing.may_free("r"), machine.endpoint.poll)
        machine.outgoing.forget("r")


def test_receiver_that_stops_with_a_full_channel(caplog: pytest.LogCaptureFixture) -> None:
    """Blocks would be kept for ever for bytes that nobody takes from the channel any more."""
    layout = replace(LAYOUT, block_tokens=2**16)
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        now_s = [0.0]
        prompt = Machine("prefill-0", "tcp", folder, lambda: now_s[0], layout=layout, blocks=4)
        token = Machine("decode-0", "tcp", folder, lambda: now_s[0], layout=layout, blocks=4)
        token.incoming.expect("r", 4 * 2**16, "prefill-0", wants_note=False)
        prompt.outgoing.await_offer("r", "decode-0", token.endpoint.address, 1)
        both = lambda: (prompt.endpoint.poll(), token.endpoint.poll())  # noqa: E731
        eventually(lambda: prompt.outgoing.state("r") is OutboundState.OFFERED, both)
        prompt.outgoing.open("r", (0, 1, 2, 3))
        prompt.outgoing.send_all("r")
        prompt.endpoint.poll()
        prompt.outgoing.abort("r", "the client is gone")
        assert not prompt.outgoing.may_free("r")
        for now_s[0] in (9.0, 11.0):
            prompt.endpoint.poll()
        assert prompt.outgoing.may_free("r")
        assert "decode-0 took nothing for 10 s" in caplog.text
        eventually(lambda: token.free.used == 0, token.endpoint.poll)
        assert not np.array_equal(token.pool, prompt.pool) or not prompt.pool.any()
        prompt.close()
        token.close()
