"""The engine's kernels made ready before a worker says that it is."""

from collections.abc import Callable

from phasesplit.engine import kernels
from phasesplit.engine.cached_file import alone
from phasesplit.engine.kernels import compiling


def warm_up(say: Callable[[str], None]) -> None:
    """Load all compiled code, the first time after compiling it.

    Of the workers that start at the same time on a cold host one compiles, and the others wait for it.

    Args:
        say: Told that it will take a while, where it will.
    """
    if compiling.CACHE_IS_WARM or compiling.CACHE_DIRECTORY is None:
        kernels.warm_up()
        return
    say("compiling once for this version and processor, about 10 s ...")
    with alone(compiling.CACHE_DIRECTORY / "live", say=lambda _: None):
        kernels.warm_up()
