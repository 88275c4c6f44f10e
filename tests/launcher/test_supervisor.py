"""The supervisor over small real processes that stand in for workers."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from phasesplit.launcher.supervisor import Command, Supervisor, SupervisorTimeouts
from waiting import eventually, eventually_there

pytestmark = pytest.mark.alone

FAST = SupervisorTimeouts(first_wait_s=0.01, most_wait_s=0.05, quick_s=5.0, quick_deaths=3, probe_s=0.05, stalled_s=0.3)
ANNOUNCE = "import json, sys, time; print(json.dumps({'url': 'u', 'epoch': int(sys.argv[1])}), flush=True); "


def python(code: str) -> Command:
    """Return the command of a worker that runs some code, with its epoch as the argument."""
    return lambda epoch: [sys.executable, "-c", code, str(epoch)]


def supervisor(commands: dict[str, str], lines: list[str] | None = None, **changes: Any) -> Supervisor:
    return Supervisor(
        {name: python(code) for name, code in commands.items()},
        environment=dict(os.environ),
        log=lambda name, line: None if lines is None else lines.append(f"{name}: {line}"),
        **({"timeouts": FAST, "first_epoch": 5} | changes),
    )


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is more than an entry that its parent has not read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def only(workers: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(workers) == 1
    return workers[0]


def test_a_worker_that_dies_is_started_again_with_a_new_epoch() -> None:
    """A crash would cost a machine for good, or the new one would pass for the old."""

    async def test() -> None:
        watched = supervisor({"a": ANNOUNCE + "time.sleep(60)"})
        watched.start()
        assert await watched.announced() == []
        first = only(watched.listed())
        assert first["announcement"]["epoch"] == 5
        os.kill(first["pid"], signal.SIGKILL)
        await eventually_there(lambda: only(watched.listed())["epoch"] == 6)
        await watched.announced()
        second = only(watched.listed())
        assert second["announcement"]["epoch"] == 6
        assert second["restarts"] == 1
        await watched.stop(within_s=5)
        assert not is_running(second["pid"])

    run(test)


def test_a_worker_that_dies_at_once_again_and_again_is_given_up_with_its_last_words() -> None:
    """A worker that cannot start would be started for ever, and nobody would learn why it cannot."""

    async def test() -> None:
        watched = supervisor({"a": "import sys; print('no such instruction', file=sys.stderr); sys.exit(3)"})
        watched.start()
        (why,) = await watched.announced()
        assert "3 times in a row (exit code 3)" in why
        assert why.endswith("no such instruction")
        await watched.stop(within_s=1)

    run(test)


def test_only_deaths_in_a_row_count() -> None:
    """A worker that dies once a day would be given up in the end, or one that never stays up would be kept for ever."""

    async def test() -> None:
        lives_s = [0.0, 0.0, FAST.quick_s, 0.0, 0.0]
        instants = iter([instant_s for life_s in lives_s for instant_s in (0.0, life_s)])
        watched = supervisor({"a": "import sys; sys.exit(3)"}, now_s=lambda: next(instants))
        watched.start()
        assert len(await watched.announced()) == 1
        # The long life begins the count anew: its own end is the first of the three.
        assert only(watched.listed())["restarts"] == len(lives_s) - 1
        assert list(instants) == []
        await watched.stop(within_s=1)

    run(test)


def test_wrong_settings_are_not_tried_again() -> None:
    """A wrong file would be read five times before the person who wrote it is told."""

    async def test() -> None:
        watched = supervisor({"a": "import sys; print('field x', file=sys.stderr); sys.exit(2)"})
        watched.start()
        assert await watched.announced() == ["worker a cannot run: field x"]
        assert only(watched.listed())["restarts"] == 0
        await watched.stop(within_s=1)

    run(test)


def test_a_worker_that_stops_answering_is_killed_and_started_again() -> None:
    """A stopped or hanging process would keep its place for ever."""

    async def test() -> None:
        is_stalled = False

        async def answers(_: str) -> bool:
            return not is_stalled

        watched = supervisor({"a": ANNOUNCE + "time.sleep(60)"}, answers=answers)
        watched.start()
        await watched.announced()
        pid = only(watched.listed())["pid"]
        os.kill(pid, signal.SIGSTOP)
        is_stalled = True
        await eventually_there(lambda: only(watched.listed())["epoch"] == 6)
        is_stalled = False
        assert not is_running(pid)
        await watched.stop(within_s=5)

    run(test)


def test_a_worker_is_not_killed_for_a_pause_of_the_host() -> None:
    """A host that stands still for a while would come back without its workers, and their KV."""

    async def test() -> None:
        looks = 0

        async def answers(_: str) -> bool:
            nonlocal looks
            looks += 1
            if looks == 2:
                time.sleep(
                    2 * FAST.stalled_s
                )  # all of this process stands still, and the look that was on its way fails
            return looks != 2

        watched = supervisor({"a": ANNOUNCE + "time.sleep(60)"}, answers=answers)
        watched.start()
        await eventually_there(lambda: looks > 4)
        assert only(watched.listed())["restarts"] == 0
        await watched.stop(within_s=5)

    run(test)


def test_a_worker_that_hangs_before_it_is_up_is_killed_and_started_again() -> None:
    """Whoever stops or hangs while it starts would never be looked at, and keep its place for ever."""

    async def test() -> None:
        async def answers(_: str) -> bool:
            return True

        lines: list[str] = []
        timeouts = replace(FAST, start_s=0.3)
        watched = supervisor({"a": "import time; time.sleep(60)"}, lines, answers=answers, timeouts=timeouts)
        watched.start()
        await eventually_there(lambda: only(watched.listed())["pid"] is not None)
        pid = only(watched.listed())["pid"]
        await eventually_there(lambda: only(watched.listed())["epoch"] == 6)
        assert not is_running(pid)
        assert "a: has not come up within 0 s: killed" in lines
        await watched.stop(within_s=5)

    run(test)


def test_stopping_asks_first_and_kills_those_that_do_not_listen() -> None:
    """A worker would lose what it is about to finish, or hold up the end for ever."""
    polite = (
        ANNOUNCE
        + "import signal; signal.signal(15, lambda *_: (print('bye', file=sys.stderr), sys.exit(0))); time.sleep(60)"
    )
    deaf = ANNOUNCE + "import signal; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"

    async def test() -> None:
        lines: list[str] = []
        watched = supervisor(
            {"polite": polite.replace(ANNOUNCE, "import signal, sys; " + ANNOUNCE), "deaf": deaf}, lines
        )
        watched.start()
        await watched.announced()
        await asyncio.sleep(0.1)  # the handlers are set after the announcement
        pids = [worker["pid"] for worker in watched.listed()]
        await watched.stop(within_s=0.5)  # `run` would give up before the deaf one ends by itself
        assert lines == ["polite: bye"]
        assert not any(map(is_running, pids))
        assert [worker["restarts"] for worker in watched.listed()] == [0, 0]

    run(test)


def test_a_signal_to_the_terminals_group_does_not_reach_workers() -> None:
    """Ctrl-C would end the workers while the gateway still drains."""

    async def test() -> None:
        watched = supervisor({"a": ANNOUNCE + "time.sleep(60)"})
        watched.start()
        await watched.announced()
        pid = only(watched.listed())["pid"]
        assert os.getpgid(pid) != os.getpgid(0)
        await watched.stop(within_s=2)

    run(test)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_worker_outlives_a_supervisor_that_is_killed(is_stopped: bool) -> None:
    """Processes would be left behind that hold memory and ports, and that nobody knows of."""
    code = textwrap.dedent("""
        import os, signal, sys, time
        from phasesplit.launcher.supervisor import end_with_parent
        if (child := os.fork()) == 0:
            end_with_parent(os.getppid())
            print(os.getpid(), flush=True)
            time.sleep(3600)
        time.sleep(60)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        if is_stopped:
            os.kill(child, signal.SIGSTOP)
        parent.kill()
        parent.wait()
        eventually(lambda: not is_running(child))
