"""The days of a plan: how far they are, on standard error, and what they say, as text in the terminal."""

import math
import time
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from phasesplit.domain.money import JOULES_PER_KWH
from phasesplit.files.plans import policy_name, policy_setting
from phasesplit.planning.days import day_verdict
from phasesplit.planning.designs import Design, counts_text
from phasesplit.planning.drift import Day
from phasesplit.planning.plan import Plan

if TYPE_CHECKING:
    from phasesplit.planning.days import Ahead

_WORK_S = 2e-6
"""Processor time of one request of a day, on a machine of 2024."""
_COLUMNS = {
    "machine hours": 7, "USD": 6, "kWh": 5, "kg": 5, "changes": 7, "missed": 7, "worst hour": 7, "SLO": 6,
}  # fmt: skip
"""Columns of the table and their least width, so that the tables of both designs line up."""


class DayProgress:
    """Says on standard error how long the days will take, and each one that is done.

    Args:
        width: How many run at once; None: that is not known.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._began_s = time.perf_counter()
        self._days = self._done = 0

    def begin(self, ahead: "Ahead") -> None:
        """Say what is ahead."""
        self._days = len(ahead.questions)
        if not self._days:
            return
        expected = ""
        if self._width is not None:
            expected = f": expect about {max(round(ahead.requests * _WORK_S / self._width), 1)} s"
        typer.echo(f"{self._days} days, {ahead.requests:,} requests in all{expected}", err=True)
        self._began_s = time.perf_counter()

    def __call__(self, day: Day) -> None:
        """Say that a day is done."""
        self._done += 1
        elapsed_s = time.perf_counter() - self._began_s
        typer.echo(
            f"day {self._done} of {self._days}, {elapsed_s:.0f} s: {day.design.name}, {policy_name(day)}", err=True
        )


def print_days(console: Any, plan: Plan) -> None:
    """Print how each day went, and what all of them say; nothing where there is none and nothing to tell.

    Args:
        console: Where to.
        plan: The plan.
    """
    from rich.text import Text

    for design, days in groupby(plan.days, key=lambda day: day.design):
        _print_design(console, plan, design, list(days))
    for sentence in day_verdict(plan):
        console.print(Text(sentence))
    for note in plan.day_notes:
        console.print(Text(note, "dim"))
    if not plan.days_complete:
        console.print(Text("interrupted, so days are missing", "dim"))
    if plan.days or plan.day_notes or not plan.days_complete:
        console.print()


def _print_design(console: Any, plan: Plan, design: Design, days: list[Day]) -> None:
    """Print a table of one design's days, and how its policies are fitted."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    machines = counts_text(plan.problem, design, days[0].counts)
    console.print(Text(f"A day of {days[0].requests:,} requests with {machines} ({design.kind}):"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("policy", min_width=9, overflow="fold")
    for column, width in _COLUMNS.items():
        table.add_column(column, justify="right", min_width=width)
    own = [day.written for day in days if day.written]
    for day in days:
        table.add_row(
            f"{day.policy.name} ({own.index(day.written) + 1})" if day.written else day.policy.name,
            f"{day.machine_hours:,.1f}",
            f"{day.usd:,.0f}",
            f"{day.energy_j / JOULES_PER_KWH:,.0f}",
            f"{day.kg_co2e:,.0f}",
            f"{day.changes:,}",
            _share(day.missed_share),
            _share(day.worst_hour_share),
            "kept" if day.holds else "broken",
        )
    console.print(table)
    fitted = [policy_setting(day) for day in days if not day.written and policy_setting(day) != day.policy.name]
    if fitted:
        console.print(Text("fitted, as --autoscale of simulate takes them:", "dim"))
    for setting in fitted:
        console.print(Text(f"  {setting}", "dim"), soft_wrap=True)
    for number, written in enumerate(own, 1):
        console.print(Text(f"({number}) {written}", "dim"), soft_wrap=True)
    console.print()


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"
