"""One worker process as its supervisor sees it: its command, its output, its end."""

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
