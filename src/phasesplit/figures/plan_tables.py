"""A plan's tables: every number of it that a reader may want to look up."""

from collections.abc import Sequence
from math import isinf, isnan

from phasesplit.figures import readable
from phasesplit.figures.page import Cell, Markup, Value, table
from phasesplit.figures.plan_words import MEASURE_NAMES, amount, signed, source_error, why_not
from phasesplit.figures.tables import origins
from phasesplit.files.plan_sources import MachineSources
from phasesplit.planning.designs import counts_text
from phasesplit.planning.plan import Plan


def ranking(plan: Plan) -> Markup:
    """Return every design that keeps the SLO, the best first, with all that it takes."""
    rows: list[Sequence[Cell]] = []
    for rank, entry in enumerate((one for one in plan.entries if one.found.holds), 1):
        taken = [Value(entry.taken[measure], amount(measure, entry.taken[measure])) for measure in MEASURE_NAMES]
        held = entry.capacity.rate_per_s if entry.capacity is not None else float("nan")
        rows.append(
            (
                f"{rank}  {entry.design.kind}: {counts_text(plan.problem, entry.design, entry.found.counts)}",
                *taken,
                Value(entry.rate_per_s, amount(None, entry.rate_per_s)),
                Value(held, amount(None, held)),
            )
        )
    rate = "highest rate" if plan.problem.objective is None else "sized for"
    return table(("design", *MEASURE_NAMES.values(), rate, "capacity"), rows, "designs")


def refused(plan: Plan) -> Markup:
    """Return every design that is not in the ranking, and why."""
    rows = [(entry.design.name, why_not(plan.problem, entry)) for entry in plan.entries if not entry.found.holds]
    return table(("design", "why not"), rows, "words")


def seeds(plan: Plan) -> Markup:
    """Return the capacity of the best split and the best unsplit design on each seed."""
    rows: list[Sequence[Cell]] = []
    for entry in (plan.best_split, plan.best_unsplit):
        if entry is not None and entry.per_seed:
            cells = [Value(one.rate_per_s, amount(None, one.rate_per_s)) for one in entry.per_seed]
            rows.append((f"capacity, {entry.design.name}", *cells))
    # A design that holds no rate on a seed leaves that seed out of the comparison.
    if plan.verdict is not None and len(plan.verdict.per_seed) == len(plan.problem.seeds):
        rows.append(("advantage of the split", *(Value(share, signed(share)) for share in plan.verdict.per_seed)))
    return table(("", *(f"seed {seed}" for seed in plan.problem.seeds)), rows)


def sensitivity(plan: Plan) -> Markup:
    """Return the best split and the best unsplit design under other conditions."""
    measure = plan.problem.objective
    rows: list[Sequence[Cell]] = []
    for point in plan.points:
        values = [
            Value(float("nan"), "cannot") if isinf(value) else Value(abs(value), amount(measure, value))
            for value in (point.split, point.unsplit)
        ]
        better = {1: "split", 0: "even", -1: "unsplit"}[point.lead]
        rows.append(
            (
                f"{point.axis} × {factor(point.factor)}",
                *values,
                Value(point.advantage, signed(point.advantage)),
                better if point.split < float("inf") or point.unsplit < float("inf") else "neither can",
            )
        )
    return table(("", "split", "unsplit", "advantage of the split", "better"), rows)


def walls(plan: Plan) -> Markup:
    """Return what the winner needs of each resource at the least."""
    rows = [(f"{wall.resource} of {wall.where}", _share(wall.share)) for wall in plan.walls]
    return table(("at the least", "of what there is"), rows)


def gains(plan: Plan) -> Markup:
    """Return what one more of each thing buys the winner."""
    rows: list[Sequence[Cell]] = []
    for gain in plan.gains:
        more = gain.more_per_s
        text = f"{'−' if more < 0 else '+'}{amount(None, more)}" if gain.is_resolved else "below 1 %"
        rows.append((gain.what, Value(gain.rate_per_s, amount(None, gain.rate_per_s)), Value(more, text)))
    return table(("with", "capacity", "buys"), rows)


def sources(plan: Plan) -> Markup:
    """Return where the phase times of each machine come from, and their error; its link too, where one was measured."""
    rows: list[tuple[Cell, ...]] = [
        (offer.machine.name, offer.times.source, Value(offer.times.mean_error, source_error(offer)))
        for offer in plan.problem.offers
    ]
    machines = [offer.machine for offer in plan.problem.offers]
    return origins(("machine", "where its phase times come from", "mean error"), rows, machines)


def compared(machines: Sequence[MachineSources]) -> Markup:
    """Return iterations by every source that covers them, in milliseconds, and each source's ratio to the roofline."""
    names = list(dict.fromkeys(name for one in machines for row in one.rows for name in row.seconds))
    others = [name for name in names if name != "roofline"]
    rows: list[Sequence[Cell]] = []
    for one in machines:
        for row in one.rows:
            what = f"prompt of {row.size:,}" if row.phase == "prompt" else f"token, batch {row.size}"
            times_ms = [row.seconds.get(name, float("nan")) * 1e3 for name in names]
            ratios = [row.ratios.get(name, float("nan")) for name in others]
            cells = [*(_rounded(one_ms, ",.1f") for one_ms in times_ms), *(_rounded(ratio, ".2f") for ratio in ratios)]
            rows.append((f"{one.machine}, {what}", *cells))
    return table(("", *(f"{name}, ms" for name in names), *(f"{name} / roofline" for name in others)), rows)


def _rounded(number: float, layout: str) -> Value:
    return Value(number, "" if isnan(number) else format(number, layout))


def factor(value: float) -> str:
    """Return a factor as people say it: 2, 1, 1/2, 1/32."""
    inverse = 1 / value
    if value < 1 and abs(inverse - round(inverse)) < 1e-9:
        return f"1/{round(inverse)}"
    return f"{value:g}"


def _share(share: float) -> Value:
    return Value(float("nan") if isinf(share) else share, "∞" if isinf(share) else readable.percent(share), share > 1)
