"""Runs the simulations of the published study, and says on standard error how far they are."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from phasesplit.cli.options import COMPILING

if TYPE_CHECKING:
    from phasesplit.planning.reproduction import Findings, Progress

_QUICK, _FULL = ((0,), 60.0), ((0, 1, 2), 120.0)
"""Seeds, and length of each simulated trace in seconds: a minute as in the published runs, or more and longer ones."""
_QUICK_WORK_S, _FULL_WORK_S = 75.0, 310.0
"""Processor time of the study, on a machine of 2024."""
_TELL_EVERY_S = 10.0


def run_study(quick: bool, workers: int | None) -> "Findings":
    """Run the study's simulations, saying on standard error how far they are.

    Args:
        quick: Fewer and shorter ones.
        workers: Processes that simulate; None: one for each core.
    """
    from phasesplit.pool.cores import usable_cores

    many = workers or usable_cores()
    expected_s = (_QUICK_WORK_S if quick else _FULL_WORK_S) / many
    minutes = f"{expected_s / 60:.0f} minutes" if expected_s >= 90 else f"{expected_s:.0f} s"
    typer.echo(
        f"the study of the Splitwise paper, {many} worker{'' if many == 1 else 's'}: expect about {minutes}", err=True
    )
    sys.stderr.flush()
    from phasesplit import _jit
    from phasesplit.files.reproduction import load_stock
    from phasesplit.planning.reproduction import PAPER_OPTIMUM_CASE, reproduce
    from phasesplit.planning.study import Bench, one_question
    from phasesplit.pool import open_pool

    seeds, duration_s = _QUICK if quick else _FULL
    bench = Bench(load_stock(), duration_s, seeds)
    if not _jit.CACHE_IS_WARM:
        typer.echo(COMPILING, err=True)
        bench(one_question(bench, PAPER_OPTIMUM_CASE))  # compiled here once, not by every worker
    with open_pool(bench, count=workers) as crew:
        return reproduce(bench, crew, _progress(), thorough=not quick)


def _progress() -> "Callable[[Progress], None]":
    """Return what shows progress on standard error, a line every so many seconds."""
    last_s = [time.monotonic()]

    def show(progress: "Progress") -> None:
        now_s = time.monotonic()
        if now_s - last_s[0] >= _TELL_EVERY_S:
            last_s[0] = now_s
            typer.echo(f"{progress.done} of {progress.searches} searches, {progress.questions:,} simulations", err=True)

    return show
