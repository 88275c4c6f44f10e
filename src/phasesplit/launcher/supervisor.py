"""The supervisor keeps the workers of this host alive.

1. It starts one process for each worker, each time with a new epoch (`Child`).
2. It passes on what a worker prints, and probes whether the worker still answers.
3. It starts a worker again that exits or stalls, later each time, and gives up on one that cannot run.
4. It stops all workers: by a signal that lets requests end, then by SIGKILL.

A worker does not outlive the process that supervises it, however that process ends (`end_with_parent`).
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LINES_KEPT = 20
_LONGEST_LINE_BYTES = 1 << 16


Log = Callable[[str, str], None]
"""Takes a worker's name and a line that it wrote, or that is about it."""


class Child:
    """A process in a group of its own, so that Ctrl-C in a terminal reaches the supervisor alone.

    The first line that it writes to standard output is its announcement, one JSON object. Everything on standard error
    is its log.

    Attributes:
        name: The worker's name.
        epoch: The epoch it was started with.
        announcement: What it announced, None before.
        lines: The last lines of its log.
    """

    def __init__(self, name: str, epoch: int, log: Log) -> None:
        self.name, self.epoch = name, epoch
        self.announcement: dict[str, Any] | None = None
        self.lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._readers: list[asyncio.Task[None]] = []

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process.

        Args:
            command: Program and arguments.
            environment: What it finds in its environment.

        Raises:
            OSError: It cannot be started.
        """
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(environment),
            process_group=0,
            limit=_LONGEST_LINE_BYTES,
        )
        self._readers = [
            asyncio.create_task(self._read(self._process.stdout, self._announced)),
            asyncio.create_task(self._read(self._process.stderr, self._logged)),
        ]

    @property
    def pid(self) -> int | None:
        """Its process id, None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def wait(self) -> int:
        """Wait for its end, and for all of its output; return its exit code, negative for a signal."""
        if self._process is None:
            return 0
        code = await self._process.wait()
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens where it has ended."""
        if self.is_alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _read(self, stream: asyncio.StreamReader | None, take: Callable[[str], None]) -> None:
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:  # longer than the limit: what was read of it is gone
                continue
            if not line:
                return
            take(line.decode("utf-8", "replace").rstrip())

    def _announced(self, line: str) -> None:
        if self.announcement is None:
            with contextlib.suppress(ValueError):
                announcement = json.loads(line)
                if isinstance(announcement, dict):
                    self.announcement = announcement
                    return
        self._logged(line)

    def _logged(self, line: str) -> None:
        self.lines.append(line)
        self._log(self.name, line)


def ending(code: int) -> str:
    """Return how a process ended, from its exit code (negative: a signal)."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


_PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; a stopped process is killed too.

    Args:
        parent: The parent's process id. Where it has gone already, this process exits.

    Raises:
        SystemExit: The parent has gone.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


_AFTER_KILL_S = 5.0
_WRONG_INPUT = 2
"""Exit code of a worker whose settings or model are wrong: starting it again would change nothing."""

Command = Callable[[int], Sequence[str]]
"""From an epoch to program and arguments of a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorTimeouts:
    """When the supervisor acts.

    Attributes:
        first_wait_s: Seconds before the first restart; each further quick death doubles them.
        most_wait_s: Their bound.
        quick_s: A process that ends sooner counts as a quick end.
        quick_deaths: So many in a row, and the worker is given up.
        start_s: A process that has not announced itself after so long is killed, and started again; vLLM gets to
            know by itself, and earlier, that it does not come up.
        probe_s: Seconds between two looks at whether a process still answers.
        stalled_s: A process that has not answered for so long, at two looks or more, is killed, and started again.
    """

    first_wait_s: float = 0.2
    most_wait_s: float = 5.0
    quick_s: float = 5.0
    quick_deaths: int = 5
    start_s: float = 900.0
    probe_s: float = 1.0
    stalled_s: float = 10.0


@dataclass(slots=True)
class _Place:
    """One worker's place: the process that fills it now, and how often it had to be filled."""

    name: str
    command: Command
    epoch: int
    child: Child | None = None
    restarts: int = 0
    given_up: str = ""
    task: asyncio.Task[None] | None = None


class Supervisor:
    """The workers of one host.

    Args:
        commands: Worker's name to its command.
        environment: What the workers find in their environment.
        log: Where their output and what happens to them goes.
        answers: From a worker's URL to whether it answers; a stalled one is killed. None: nobody looks.
        timeouts: When to act.
        now_s: Returns seconds on a clock that never goes back, by which lives are quick or not.
        first_epoch: Epoch of the first start. A later life of this program must not start lower: workers of other
            hosts refuse an epoch that is older than what they know.
    """

    def __init__(
        self,
        commands: Mapping[str, Command],
        *,
        environment: Mapping[str, str],
        log: Log,
        answers: Callable[[str], Awaitable[bool]] | None = None,
        timeouts: SupervisorTimeouts | None = None,
        now_s: Callable[[], float] = time.monotonic,
        first_epoch: int | None = None,
    ) -> None:
        epoch = int(time.time() * 1000) if first_epoch is None else first_epoch
        self._places = {name: _Place(name, command, epoch) for name, command in commands.items()}
        self._environment, self._log, self._answers = environment, log, answers
        self._timeouts, self._now_s = timeouts or SupervisorTimeouts(), now_s
        self._is_ending = False

    def start(self) -> None:
        """Start all workers, at the same time."""
        for place in self._places.values():
            place.task = asyncio.create_task(self._keep(place))

    async def announced(self) -> list[str]:
        """Wait until every worker has announced itself or was given up; return why some were, a line each."""
        while any(not place.given_up and not _has_announced(place) for place in self._places.values()):
            await asyncio.sleep(0.01)
        return [place.given_up for place in self._places.values() if place.given_up]

    def listed(self) -> list[dict[str, object]]:
        """Return each worker's name, process id, epoch, restarts, announcement, and why it was given up, if so."""
        return [
            {
                "name": place.name,
                "pid": place.child.pid if place.child is not None and place.child.is_alive else None,
                "epoch": place.epoch,
                "restarts": place.restarts,
                "given_up": place.given_up,
                "announcement": None if place.child is None else place.child.announcement,
            }
            for place in self._places.values()
        ]

    async def stop(self, *, within_s: float) -> None:
        """End all workers: ask them to drain, and kill those that are still there after `within_s` seconds."""
        self._is_ending = True
        for place in self._places.values():
            if place.child is not None:
                place.child.send(signal.SIGTERM)
            if place.task is not None and (place.child is None or not place.child.is_alive):
                place.task.cancel()  # it waits for its next start
        tasks = [place.task for place in self._places.values() if place.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=within_s)
            self.kill()
            await asyncio.wait(tasks, timeout=_AFTER_KILL_S)

    def kill(self) -> None:
        """End all workers at once."""
        self._is_ending = True
        for place in self._places.values():
            if place.child is not None:
                place.child.send(signal.SIGKILL)

    async def _keep(self, place: _Place) -> None:
        deaths: deque[str] = deque(maxlen=self._timeouts.quick_deaths)
        while not self._is_ending:
            since_s = self._now_s()
            child = place.child = Child(place.name, place.epoch, self._log)
            try:
                await child.start(place.command(place.epoch), self._environment)
            except OSError as problem:
                place.given_up = f"worker {place.name} cannot be started: {problem.strerror or problem}"
                self._log(place.name, place.given_up)
                return
            if self._is_ending:  # it was asked for while the process was being made
                child.send(signal.SIGTERM)
            watch = asyncio.create_task(self._watch(place, child))
            code = await child.wait()
            how = ending(code)
            watch.cancel()
            if self._is_ending:
                return
            if code == _WRONG_INPUT:
                place.given_up = f"worker {place.name} cannot run: {_last_words(child)}"
                self._log(place.name, place.given_up)
                return
            if self._now_s() - since_s >= self._timeouts.quick_s:
                deaths.clear()
            deaths.append(how)
            if len(deaths) == self._timeouts.quick_deaths:
                place.given_up = _gives_up(child, deaths)
                self._log(place.name, place.given_up)
                return
            wait_s = min(self._timeouts.first_wait_s * 2 ** (len(deaths) - 1), self._timeouts.most_wait_s)
            self._log(place.name, f"ended ({how}); starting it again in {wait_s:.1f} s")
            await asyncio.sleep(wait_s)
            place.epoch += 1
            place.restarts += 1

    async def _watch(self, place: _Place, child: Child) -> None:
        """Kill a process that does not come up, or has come up and no longer answers."""
        if self._answers is None:
            return
        began_s = answered_s = time.monotonic()
        unanswered, why = 0, ""
        while not why:
            await asyncio.sleep(self._timeouts.probe_s)
            announcement, now_s = child.announcement, time.monotonic()
            if announcement is None:
                answered_s = now_s
                if now_s - began_s > self._timeouts.start_s:
                    why = f"has not come up within {self._timeouts.start_s:.0f} s: killed"
            elif await self._answers(str(announcement.get("url", ""))):
                answered_s, unanswered = time.monotonic(), 0
            # Not at the first: that one may have been on its way while the whole host stood still.
            elif (unanswered := unanswered + 1) > 1 and time.monotonic() - answered_s > self._timeouts.stalled_s:
                why = f"has not answered for {self._timeouts.stalled_s:.0f} s: killed"
        self._log(place.name, why)
        child.send(signal.SIGKILL)


def _has_announced(place: _Place) -> bool:
    return place.child is not None and place.child.announcement is not None


def _gives_up(child: Child, deaths: Sequence[str]) -> str:
    return (
        f"worker {child.name} is given up: it ended {len(deaths)} times in a row ({deaths[-1]}); "
        f"it said last: {_last_words(child)}"
    )


def _last_words(child: Child) -> str:
    return " | ".join(line.removeprefix("phasesplit: ") for line in list(child.lines)[-3:] if line.strip()) or "nothing"
