"""All panels of a plan on one sheet, as a PNG, PDF or SVG file."""

from pathlib import Path
from typing import Any

from phasesplit.planner.designs import counts_text
from phasesplit.planner.plan import Plan
from phasesplit.planner.problem import Measure
from phasesplit.planner.report.plan_panels import (
    choice_panels,
    crossover_panels,
    latency_panels,
    miss_panel,
    next_panels,
)
from phasesplit.planner.report.plan_tables import amount, asked, heading, verdict_lines
from phasesplit.report import readable
from phasesplit.report.page import colour
from phasesplit.report.sheet import write_sheet
from phasesplit.simulator.result import Result

_LATENCIES = 3
_LONGEST_LINE = 180


def write_plan_figure(plan: Plan, result: Result | None, path: str | Path) -> None:
    """Write all panels of a plan as one picture; the same plan gives the same bytes.

    Args:
        plan: What was found, perhaps not complete.
        result: The winner, simulated with every metric on the first seed; None where there is none.
        path: Where to; its ending says how: .png, .pdf or .svg.

    Raises:
        SpecError: The ending is another one, or the file cannot be written.
    """
    panels = [miss_panel(plan)]
    if plan.best is not None:
        latencies = latency_panels(plan, result)
        panels = [*choice_panels(plan), *next_panels(plan), *latencies[:_LATENCIES], latencies[-1]]
        if plan.points:
            panels += crossover_panels(plan)
    write_sheet(path, [panel.draw for panel in panels], lambda figure: _head(figure, plan))


def _head(figure: Any, plan: Plan) -> None:
    """Write above the panels the verdict, the winner, and what was asked."""
    figure.text(0.009, 0.985, f"{plan.problem.model.name}: {heading(plan)}", fontsize=13, fontweight="bold", va="top")
    about = readable.shortened(asked(plan.problem), _LONGEST_LINE)
    figure.text(0.009, 0.953, about, fontsize=8.5, va="top", color=colour("faint"))
    best = plan.best
    lines = [] if plan.complete else ["Interrupted: not complete."]
    if best is not None:
        pools = counts_text(plan.problem, best.design, best.found.counts)
        cost = amount(Measure.COST, best.taken[Measure.COST])
        power = amount(Measure.POWER, best.taken[Measure.POWER])
        lines.append(f"Best: {pools} ({best.design.kind}), {cost} an hour, {power}")
    else:
        lines += verdict_lines(plan)
    if lines:
        figure.text(0.009, 0.933, readable.shortened(" ".join(lines), _LONGEST_LINE), fontsize=8.5, va="top")
