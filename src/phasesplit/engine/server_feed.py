"""What a worker tells whoever listens on GET /events: facts at a steady beat, and what happens to keys."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import orjson

BEAT_S = 0.25
"""Longest time between two snapshots of the facts."""
_MOST_WAITING = 10_000
"""Lines that wait for a listener who does not read; then the listener is dropped: it has lost track anyway."""


class Feed:
    """Lines of JSON for any number of listeners. Everything happens in one event loop.

    Args:
        facts: Makes a snapshot of the worker's facts.
    """

    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts
        self._listeners: set[_Listener] = set()

    @property
    def has_listener(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def tell(self, line: dict[str, Any]) -> None:
        """Send a line to all who listen now."""
        if not self._listeners:
            return
        text = orjson.dumps(line) + b"\n"
        for listener in tuple(self._listeners):
            listener.push(text)

    def close(self) -> None:
        """Let every listener come to its end."""
        for listener in self._listeners:
            listener.is_lost = True
            listener.push(b"")

    def nudge(self) -> None:
        """Send everybody the facts now: they have changed in a way that should not wait for the next beat."""
        self.tell({"facts": self._facts()})

    async def listen(self) -> AsyncIterator[bytes]:
        """Return the lines from now on, endlessly, the facts first; ends for a listener that falls behind."""
        listener = _Listener()
        self._listeners.add(listener)
        try:
            listener.push(orjson.dumps({"facts": self._facts()}) + b"\n")
            due_s = time.monotonic() + BEAT_S
            while not listener.is_lost:
                if listener.lines:
                    yield listener.pop()
                    continue
                await listener.wait(due_s - time.monotonic())
                if time.monotonic() >= due_s:
                    listener.push(orjson.dumps({"facts": self._facts()}) + b"\n")
                    due_s = time.monotonic() + BEAT_S
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.is_lost = False
        self._has_lines = asyncio.Event()

    def push(self, line: bytes) -> None:
        self.is_lost = self.is_lost or len(self.lines) >= _MOST_WAITING
        self.lines.append(line)
        self._has_lines.set()

    def pop(self) -> bytes:
        """Return all lines that wait, as one text."""
        text = b"".join(self.lines)
        self.lines.clear()
        self._has_lines.clear()
        return text

    async def wait(self, within_s: float) -> None:
        """Wait for a line, at most so many seconds."""
        if within_s > 0:
            try:
                await asyncio.wait_for(self._has_lines.wait(), within_s)
            except TimeoutError:
                return
