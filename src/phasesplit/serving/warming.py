"""What a worker compiles, made ready before it says that it is: the engine's kernels, and the rules of its batches."""

from collections.abc import Callable

from phasesplit import _jit
from phasesplit.engine import bookings, kernels
from phasesplit.engine.cached_file import alone
from phasesplit.engine.kernels import compiling
from phasesplit.scheduling.rules import Rules

_LAST_BOOKING = "withdrawal.withdraw-*.nbi"
"""What `bookings.warm` compiles last: what an interrupted start leaves behind is not taken for all of it."""


def warm_up(rules: Rules, say: Callable[[str], None]) -> None:
    """Load all compiled code, the first time after compiling it.

    Of the workers that start at the same time on a cold host one compiles, and the others wait for it.

    Args:
        rules: The scheduler's settings.
        say: Told that it will take a while, where it will.
    """
    kept, kept_rules = compiling.CACHE_DIRECTORY, _jit.CACHE_DIRECTORY
    if kept is None or kept_rules is None or (compiling.CACHE_IS_WARM and any(kept_rules.rglob(_LAST_BOOKING))):
        _load(rules)
        return
    say("compiling once for this version and processor, about 20 s ...")
    with alone(kept / "live", say=lambda _: None):
        _load(rules)


def _load(rules: Rules) -> None:
    bookings.warm(rules)
    kernels.warm_up()
