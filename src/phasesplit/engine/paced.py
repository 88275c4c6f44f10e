"""Iterations on a share of a core: what a worker takes where several have to live on one."""

import time
from collections.abc import Callable

from phasesplit.engine.iteration import Batch, Computes, Logits

_SLEPT_S = 0.001
"""After this time without computing the thread has slept, and the next iteration begins anew."""
_MOST_LATE_S = 0.02
"""What an iteration that ended late may be ahead in the next one."""


class Paced:
    """Computes iterations as a machine of a share of this core's speed would.

    An iteration takes the time that its thread computed for it, divided by the share. That includes forming the batch
    and delivering the events of the one before, unless the thread slept in between. Layers whose KV leaves are spread
    alike. So a worker that has half of a core takes twice as long for everything, whether or not others want the core
    meanwhile, as long as all shares of it are at most 1. A worker that was kept from the core for longer catches up.

    Args:
        forward: What computes.
        core_share: The share, 0 to 1.
        clock: Returns the instant.
        computed: Returns how long this thread has computed.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        forward: Computes,
        core_share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._forward, self._share = forward, core_share
        self._clock, self._computed, self._sleep = clock, computed, sleep
        self._due_s = self._ended_s = self._computed_s = 0.0

    def run(self, batch: Batch, after_layer: Callable[[int], None] | None = None) -> Logits:
        """Compute one batch, see `iteration.Computes`, and return when its time has passed."""
        self._begin()
        if after_layer is None:
            logits = self._forward.run(batch)
        else:
            inner = after_layer

            def paced(layer: int) -> None:
                self._hold()
                inner(layer)

            logits = self._forward.run(batch, paced)
        self._hold()
        return logits

    def _begin(self) -> None:
        now_s, computed_s = self._clock(), self._computed()
        slept_s = now_s - self._ended_s - (computed_s - self._computed_s)
        if slept_s > _SLEPT_S:
            self._due_s, self._computed_s = now_s, computed_s

    def _hold(self) -> None:
        computed_s = self._computed()
        self._due_s += (computed_s - self._computed_s) / self._share
        self._computed_s = computed_s
        while (left_s := self._due_s - self._clock()) > 0:
            self._sleep(left_s)
        self._ended_s = self._clock()
        self._due_s = max(self._due_s, self._ended_s - _MOST_LATE_S)
