"""Events in order of time, simultaneous ones in the order they were made."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Agenda:
    """What is still to happen, and what time it is."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._made = 0
        self._heap: list[tuple[float, int, Action]] = []
        self._cancelled: set[int] = set()

    def at(self, time_s: float, action: Action) -> int:
        """Call `action` at `time_s`; return the number of the event, by which it can be cancelled."""
        number = self._made
        self._made += 1
        heapq.heappush(self._heap, (time_s, number, action))
        return number

    def cancel(self, number: int) -> None:
        """Let an event that has not happened yet never happen."""
        self._cancelled.add(number)

    def run(self, end_s: float) -> None:
        """Let everything up to and including `end_s` happen."""
        while self._heap and self._heap[0][0] <= end_s:
            time_s, number, action = heapq.heappop(self._heap)
            if number in self._cancelled:
                self._cancelled.remove(number)
                continue
            self.now_s = time_s
            action()
