"""A plan as text in the terminal: the ranking, the verdict, what binds, and where the verdict flips."""

import math
from collections.abc import Sequence
from typing import Any

from phasesplit.cli.plan_days import print_days
from phasesplit.cli.sources_view import print_sources
from phasesplit.files.plan_sources import MachineSources
from phasesplit.planning.capacity import TOLERANCE
from phasesplit.planning.designs import counts_text
from phasesplit.planning.misses import refusal
from phasesplit.planning.objective import UNITS, Measure
from phasesplit.planning.plan import Entry, Gain, Plan
from phasesplit.planning.problem import Offer, Problem
from phasesplit.planning.sensitivity import Axis, Point, changes, flips

_WIDEST = 120


def opening_line(problem: Problem, rate_known: bool, source: str, width: str) -> str:
    """Return what is being planned in one line.

    Args:
        problem: The problem.
        rate_known: Whether its rate is asked for, not still to be found.
        source: Name of the traffic.
        width: Where simulations run.
    """
    asked = [offer for offer in problem.offers if not offer.variant_of]
    machines = [
        offer.machine.name if offer.existing is None else f"{offer.existing} {offer.machine.name}" for offer in asked
    ]
    variants = len(problem.offers) - len(asked)
    others = f" (and {variants} settings of them)" if variants else ""
    rate = f" at {problem.traffic.rate_per_s:,.4g} requests/s" if rate_known else ""
    goal = "the highest rate" if problem.objective is None else f"least {problem.objective}"
    budgets = "".join(f", within {most:,.6g} {UNITS[measure]}" for measure, most in problem.budgets.items())
    return (
        f"planning {problem.model.name} on {', '.join(machines)}{others}: {source}{rate}, SLO {problem.slo.name},"
        f" {goal}{budgets}; {_plural(len(problem.seeds), 'seed')} of {problem.traffic.duration_s:,.0f} s, {width}"
    )


def print_plan(plan: Plan, elapsed_s: float, sources: Sequence[MachineSources] = ()) -> None:
    """Print a plan to standard output, as wide as the terminal but at most 120 columns.

    Args:
        plan: The plan.
        elapsed_s: How long it took.
        sources: Phase times of the best designs' machines, by source.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    if plan.best is not None:
        _print_ranking(console, plan)
    _print_refused(console, plan)
    if plan.verdict is not None:
        console.print(Text(f"{plan.verdict.text}\n", "bold"))
    _print_binding(console, plan)
    if plan.points:
        console.print(_sensitivity(plan))
        console.print(Text("(on the first seed alone)\n", "dim"))
    print_sources(console, sources)
    print_days(console, plan)
    for source, users in _sources(plan).items():
        console.print(Text(f"phase times ({', '.join(users)}): {source}", "dim"))
    for source, users in _links(plan).items():
        console.print(Text(f"link ({', '.join(users)}): {source}", "dim"))
    seeds = ", ".join(str(seed) for seed in plan.problem.seeds)
    why = plan.lost or "interrupted"
    stopped = "" if plan.complete else f"; {why}: there may be better"
    console.print(Text(f"{plan.questions:,} simulations, seeds {seeds}, {elapsed_s:,.3g} s{stopped}", "dim"))


def _sources(plan: Plan) -> dict[str, list[str]]:
    """Return who uses each source of phase times."""
    problem = plan.problem
    users: dict[str, list[str]] = {}
    for offer in _offers(plan):
        users.setdefault(offer.times.source, []).append(offer.machine.name)
    if problem.reference is not None and problem.slo.needs_reference:
        users.setdefault(problem.reference.source, []).append("reference of slowdowns")
    return users


def _links(plan: Plan) -> dict[str, list[str]]:
    """Return who has each source of a link that was measured; the published rules ask for none."""
    users: dict[str, list[str]] = {}
    for offer in _offers(plan):
        if offer.machine.link_source is not None and not plan.problem.rules.published:
            users.setdefault(offer.machine.link_source, []).append(offer.machine.name)
    return users


def _offers(plan: Plan) -> list[Offer]:
    """Return the machines as asked for, and the settings of them that are compared."""
    compared = [entry.design for entry in (plan.best_split, plan.best_unsplit) if entry is not None]
    used = {number for design in compared for _, number in design.slots}
    return [offer for number, offer in enumerate(plan.problem.offers) if not offer.variant_of or number in used]


def _print_ranking(console: Any, plan: Plan) -> None:
    from rich.text import Text

    table = _ranking(plan)
    if table.__rich_measure__(console, console.options.update(max_width=_WIDEST)).minimum > console.width:
        table = _ranking(plan, limit_below=True)
    console.print(table)
    if any(_is_of_first_seed(plan.problem, entry) for entry in plan.entries if entry.found.holds):
        console.print(Text("~ on the first seed alone\n", "dim"))


def _ranking(plan: Plan, *, limit_below: bool = False) -> Any:
    """Return the table of the designs that keep the SLO.

    Args:
        plan: The plan.
        limit_below: Whether the nearest limit stands below the design, where there is no room for a column of it.
    """
    problem = plan.problem
    drawn = ("kW drawn",) if problem.objective == Measure.ENERGY or Measure.ENERGY in problem.budgets else ()
    heads = ("design, nearest limit",) if limit_below else ("design",)
    last = () if limit_below else ("nearest limit",)
    table = _table("", *heads, "USD/h", "kW", *drawn, "kg/h", "holds", *last)
    for column, width in ((1, 18),) if limit_below else ((1, 18), (-1, 13)):
        table.columns[column].no_wrap = False
        table.columns[column].justify = "left"
        table.columns[column].min_width = width
    for rank, entry in enumerate((entry for entry in plan.entries if entry.found.holds), start=1):
        nearest = max(entry.found.answers, key=lambda answer: answer.worst, default=None)
        limit = "" if nearest is None else f"{nearest.wall} {nearest.worst:.0%}"
        what = f"{entry.design.kind}\n{counts_text(problem, entry.design, entry.found.counts)}{_servers(entry)}"
        table.add_row(
            str(rank),
            f"{what}\n{limit}".rstrip() if limit_below else what,
            f"{entry.taken[Measure.COST]:,.2f}",
            f"{entry.taken[Measure.POWER] / 1e3:,.1f}",
            *(f"{entry.taken[Measure.ENERGY] / 1e3:,.1f}" for _ in drawn),
            f"{entry.taken[Measure.CARBON]:,.1f}",
            _holds(problem, entry),
            *(() if limit_below else (limit,)),
            style="bold" if rank == 1 else "",
        )
    return table


def _servers(entry: Entry) -> str:
    """Return how many whole servers the machines are, where they are slices."""
    servers = entry.taken[Measure.MACHINES]
    whole = entry.cluster is None or servers == entry.cluster.machines
    return "" if whole else f" ({_plural(round(servers), 'server')})"


def _holds(problem: Problem, entry: Entry) -> str:
    if problem.objective is None:
        return f"{entry.rate_per_s:,.3g}/s"
    if entry.capacity is None:
        return f"≥{entry.rate_per_s:,.3g}/s"
    return f"{'~' if _is_of_first_seed(problem, entry) else ''}{entry.capacity.rate_per_s:,.3g}/s"


def _is_of_first_seed(problem: Problem, entry: Entry) -> bool:
    """Whether the capacity was looked for on the first seed of several."""
    looked_for = problem.objective is not None and entry.capacity is not None
    return looked_for and len(problem.seeds) > 1 and not entry.per_seed


def _print_refused(console: Any, plan: Plan) -> None:
    from rich.text import Text

    problem = plan.problem
    refused = [entry for entry in plan.entries if not entry.found.holds and entry.found.complete]
    variants = [
        entry
        for entry in refused
        if plan.best is not None and any(problem.offers[number].variant_of for _, number in entry.design.slots)
    ]
    for entry in refused:
        if entry not in variants:
            console.print(Text(f"not {entry.design.name}: {refusal(problem, entry)}", "dim"))
    if variants:
        console.print(Text(f"no better: {_plural(len(variants), 'design')} with slices or power caps", "dim"))
    if refused:
        console.print()


def _print_binding(console: Any, plan: Plan) -> None:
    best = plan.best
    if best is None:
        return
    if best.capacity is not None and best.capacity.wall:
        console.print(f"What breaks first above {best.capacity.rate_per_s:,.3g} requests/s: {best.capacity.wall}.")
    if plan.walls:
        wall = max(plan.walls, key=lambda one: one.share)
        console.print(f"Scarcest at the least it can need: {wall.resource} of {wall.where}, {wall.share:.0%}.")
    for gain in plan.gains:
        console.print(f"With {gain.what}: {gain_text(gain)}.")
    if plan.gains:
        console.print()


def gain_text(gain: Gain) -> str:
    """Return what an addition buys; nothing where it is within what searches leave open."""
    if abs(gain.more_per_s) <= TOLERANCE * gain.base_per_s:
        return f"nothing (within {TOLERANCE:.0%})"
    more = f"{gain.more_per_s / gain.base_per_s:+.1%}" if gain.more_per_s > 0 < gain.base_per_s else "no more"
    return f"{gain.rate_per_s:,.3g} requests/s ({more})"


def _sensitivity(plan: Plan) -> Any:
    what = "rate" if plan.problem.objective is None else str(plan.problem.objective)
    table = _table("", f"split against unsplit: {what} (+ is for the split)", "flips")
    for column in table.columns:
        column.no_wrap, column.justify = False, "left"
    rate = plan.problem.traffic.rate_per_s
    for axis in Axis:
        points = [point for point in plan.points if point.axis == axis]
        if points:
            shown = "  ".join(f"{_place(axis, one.factor, rate)}: {_advantage(one)}" for one in points)
            table.add_row(str(axis), shown, "; ".join(flip_texts(axis, points, rate)) or "does not")
    return table


def flip_texts(axis: Axis, points: list[Point], rate_per_s: float) -> list[str]:
    """Return where the verdict flips along an axis, a phrase for each place.

    Args:
        axis: The axis.
        points: Its points by rising factor.
        rate_per_s: The rate that factors of the rate are of.
    """
    texts = []
    for (left, _), (low, high) in zip(changes(points), flips(points), strict=True):
        at = _place(axis, low, rate_per_s)
        if high != low:
            at = f"somewhere from {at} to {_place(axis, high, rate_per_s)}"
        side = "above" if left.lead > 0 else "below"
        texts.append(f"to unsplit {side} {at}")
    return texts


def _place(axis: Axis, factor: float, rate_per_s: float) -> str:
    return f"{factor * rate_per_s:,.3g}/s" if axis == Axis.RATE else f"x{factor:.3g}"


def _advantage(point: Point) -> str:
    if math.isinf(point.split) or math.isinf(point.unsplit):
        sides = {1: "only split", -1: "only unsplit", 0: "neither"}
        return sides[point.lead]
    return f"{point.advantage:+.0%}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < 2 else "right", no_wrap=True)
    return table
