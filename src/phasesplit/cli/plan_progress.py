"""How far a plan is, on standard error."""

import time
from types import TracebackType
from typing import Any, Self

import typer

from phasesplit.planning.objective import UNITS
from phasesplit.planning.plan import Step
from phasesplit.planning.problem import Problem

_EVERY_S = 30.0
"""Between two lines where they cannot replace one another."""


class PlanProgress:
    """Shows stage, simulations done and the best so far; to be called with every `Step`, and closed at the end.

    Args:
        problem: The problem.
        shown: Whether to show every step in place, as on a terminal; else there is a line every half minute.
    """

    def __init__(self, problem: Problem, *, shown: bool) -> None:
        self._problem = problem
        self._shown = shown
        self._status: Any = None
        self._told_s: float | None = None

    def __call__(self, step: Step) -> None:
        """Show how far the plan is."""
        if not self._shown:
            self._tell_rarely(step)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")
            self._status.start()
        self._status.update(self._line(step))

    def _tell_rarely(self, step: Step) -> None:
        now_s = time.monotonic()
        if self._told_s is None:
            self._told_s = now_s  # of the first step: a plan that is soon done says nothing
        if now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            typer.echo(self._line(step), err=True)

    def _line(self, step: Step) -> str:
        best = f"; best so far {self._best(step)}" if step.best is not None else ""
        return f"{step.stage}, {step.questions:,} simulations{best}"

    def _best(self, step: Step) -> str:
        assert step.best is not None  # noqa: S101 - asked by the caller
        design, counts, value = step.best
        objective = self._problem.objective
        unit = "requests/s" if objective is None else UNITS[objective]
        machines = " + ".join(str(count) for count in counts)
        return f"{abs(value):,.5g} {unit} ({design.name}, {machines})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
