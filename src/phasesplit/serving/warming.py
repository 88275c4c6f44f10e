"""Compiled code made ready before a worker says that it is: the scheduler's calls, and the engine's kernels."""

from collections.abc import Callable
from pathlib import Path

from phasesplit import _jit
from phasesplit.engine import kernels
from phasesplit.engine.cached_file import alone
from phasesplit.engine.kernels import compiling
from phasesplit.scheduling.accounts import open_slot, use_blocks
from phasesplit.scheduling.ledger import WAITING
from phasesplit.scheduling.lists import entry, length
from phasesplit.scheduling.live_cluster import with_place_for_one
from phasesplit.scheduling.live_machine import (
    HERE,
    await_kv,
    end_iteration,
    end_prompt_here,
    form_batch,
    kv_arrived,
    land,
    machine_ledger,
    take_prompt,
)
from phasesplit.scheduling.rules import Rules
from phasesplit.scheduling.withdrawal import withdraw

_Part = tuple[Path | None, bool, Callable[[], None]]
"""Where compiled code is kept, whether it is there, and what loads or makes it."""

_LAST_COMPILED = "withdrawal.withdraw-*.nbi"
_CAPACITY_BLOCKS = 64


def warm_up(rules: Rules, *, kernels_first: bool, say: Callable[[str], None]) -> None:
    """Load all compiled code, the first time after compiling it.

    Workers that start at the same time on a cold host compile each part once: whoever comes second to one waits for it,
    and with an order of its own has compiled the other one meanwhile.

    Args:
        rules: Settings of the scheduler.
        kernels_first: The order.
        say: Told that it will take a while, where it will.
    """
    parts: list[_Part] = [
        (compiling.CACHE_DIRECTORY, compiling.CACHE_IS_WARM, kernels.warm_up),
        (_jit.CACHE_DIRECTORY, _scheduling_is_warm(), lambda: _warm_scheduling(rules)),
    ]
    if not all(is_warm for _, is_warm, _ in parts):
        say("compiling once for this version and processor, about 10 s ...")
    for directory, is_warm, warm in parts if kernels_first else reversed(parts):
        if is_warm or directory is None:
            warm()
            continue
        with alone(directory / "live", say=lambda _: None):
            warm()


def _scheduling_is_warm() -> bool:
    directory = _jit.CACHE_DIRECTORY
    return not _jit.JIT_ENABLED or (directory is not None and any(directory.rglob(_LAST_COMPILED)))


def _warm_scheduling(rules: Rules) -> None:
    """Make every call that the engine makes, on a ledger that is thrown away."""
    ledger = with_place_for_one(machine_ledger(rules, _CAPACITY_BLOCKS))
    came = open_slot(ledger, 0.0, 1, 2, 2)
    await_kv(ledger, came)
    land(ledger, 0.0)
    kv_arrived(ledger, came, 0.0)
    stayed = open_slot(ledger, 0.0, 1, 2, 2)
    take_prompt(ledger, stayed, True)
    entry(ledger.lists[WAITING, HERE], length(ledger.lists[WAITING, HERE]) - 1)
    form_batch(ledger, 0.0)
    end_iteration(ledger, 0.0)
    end_prompt_here(ledger, stayed, 0.0)
    use_blocks(ledger.machines, HERE, 1, 0.0)
    for slot in (came, stayed):
        withdraw(ledger, slot, 0.0)
