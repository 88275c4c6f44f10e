"""Waiting for what comes about by itself, with one time-out for all: long, since a busy host is no fault."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""How long tests wait for what a machine that does nothing else does at once."""


def eventually(
    holds: Callable[[], object],
    step: Callable[[], object] = lambda: time.sleep(0.005),
    within_s: float = PATIENCE_S,
    why: Callable[[], object] = lambda: "it did not come about",
) -> None:
    """Repeat a step until something holds.

    Args:
        holds: What is waited for.
        step: What is done meanwhile.
        within_s: The time after which the test fails, for what takes longer than others.
        why: What is said then.
    """
    end_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end_s, why()
        step()


async def eventually_there(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.01)
