"""A clock that is moved by hand."""

import heapq
from collections.abc import Callable
from itertools import count


class _Call:
    """A call that is still to come."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class ManualClock:
    """Time that passes only when a test says so; satisfies `gateway.clock.Clock`."""

    def __init__(self, start_s: float = 0.0, unix_s: float = 1_700_000_000.0) -> None:
        """Make a clock.

        Args:
            start_s: Its first instant.
            unix_s: Seconds since 1970 at that instant.
        """
        self._now_s = start_s
        self._offset_s = unix_s - start_s
        self._order = count()
        self._calls: list[tuple[float, int, _Call]] = []

    def now_s(self) -> float:
        """Return the instant."""
        return self._now_s

    def unix_s(self) -> float:
        """Return seconds since 1970."""
        return self._now_s + self._offset_s

    def call_at(self, when_s: float, call: Callable[[], None]) -> _Call:
        """Have something called when time passes an instant."""
        pending = _Call(call)
        heapq.heappush(self._calls, (when_s, next(self._order), pending))
        return pending

    def advance(self, seconds: float) -> None:
        """Let time pass, and make the calls that fall due, each at its own instant.

        Args:
            seconds: How long, >= 0.
        """
        end_s = self._now_s + seconds
        while self._calls and self._calls[0][0] <= end_s:
            when_s, _, pending = heapq.heappop(self._calls)
            self._now_s = max(self._now_s, when_s)
            if pending.call is not None:
                pending.call()
        self._now_s = end_s

    def stand_still(self, seconds: float) -> None:
        """Let time pass for all but the process, as where its host pauses: what falls due meanwhile is called late.

        Args:
            seconds: How long, >= 0.
        """
        self._now_s += seconds
        self.advance(0.0)
