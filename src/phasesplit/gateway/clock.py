"""The gateway's time: an argument, so that tests move it by hand."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A call that is still to come."""

    def cancel(self) -> None:
        """Call it off; once it has run, or twice, changes nothing."""


class Clock(Protocol):
    """What the gateway asks of time."""

    def now_s(self) -> float:
        """Return seconds on a clock that never goes back."""

    def unix_s(self) -> float:
        """Return seconds since 1970."""

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        """Have something called once `now_s` has reached an instant."""


class LoopClock:
    """The clock of the running event loop."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    def call_at(self, when_s: float, call: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(max(0.0, when_s - self.now_s()), call)
