"""The words and tables of a plan's report: every number of it that a reader may want to look up."""

from collections.abc import Sequence
from math import isinf, isnan

from phasesplit.planner.designs import counts_text
from phasesplit.planner.misses import distance
from phasesplit.planner.plan import Gain, Plan, RankedDesign
from phasesplit.planner.probe import Answer
from phasesplit.planner.problem import UNITS, Measure, Offer, Problem
from phasesplit.planner.search import RESOLUTION
from phasesplit.planner.sources import MachineSources
from phasesplit.planner.verdict import EVEN
from phasesplit.report import readable
from phasesplit.report.page import Cell, Markup, Value, table
from phasesplit.report.simulation_page import origins

MEASURE_NAMES = {
    Measure.MACHINES: "servers",
    Measure.COST: "cost an hour",
    Measure.POWER: "provisioned power",
    Measure.ENERGY: "power drawn",
    Measure.CARBON: "CO₂e an hour",
}
"""What people call the measures, in the order of the tables."""


def amount(measure: Measure | None, value: float) -> str:
    """Return how much of a measure, with its unit; None is a rate, which may be given negated, as searches do."""
    if isnan(value) or isinf(value):
        return readable.NONE
    if measure is None:
        return f"{readable.number(abs(value))}/s"
    if measure == Measure.COST:
        return readable.usd(value)
    if UNITS[measure] == "W":
        return readable.with_prefix(value, "W")
    if measure == Measure.CARBON:
        return f"{readable.number(value)} kg"
    return readable.number(value)


def asked(problem: Problem) -> str:
    """Return what was asked, in a line."""
    goal = "the highest rate" if problem.objective is None else f"the least {problem.objective}"
    for measure, most in problem.budgets.items():
        goal += f", {MEASURE_NAMES[measure]} at most {amount(measure, most)}"
    owned = [f"{offer.existing} {offer.machine.name}" for offer in problem.offers if offer.existing is not None]
    if owned:
        goal += f", on {' and '.join(owned)} that exist"
    rate = "" if problem.objective is None else f" at {readable.number(problem.traffic.rate_per_s)} requests/s"
    return f"{problem.traffic.name}{rate}; SLO “{problem.slo.name}”; wanted: {goal}"


def heading(plan: Plan) -> str:
    """Return the verdict in a line."""
    verdict = plan.verdict
    if plan.best is None:
        return "No design that was looked at keeps the SLO"
    if verdict is None:
        if not plan.complete:
            return "No verdict yet: split and unsplit designs were still being sized"
        return "No verdict: split and unsplit designs were not both compared"
    word = f"{'Split' if verdict.split else 'Do not split'}{'' if verdict.sure else ', but not surely'}"
    if isnan(verdict.advantage):
        other = "unsplit" if verdict.split else "split"
        return f"{word}: no {other} cluster that was looked at keeps the SLO"
    than = "unsplit machines, each type by itself" if len(plan.unsplit_side) > 1 else "the best unsplit design"
    if abs(verdict.advantage) <= EVEN:
        measure = plan.problem.objective
        even = "holds the same rate" if measure is None else f"takes as much {measure}"
        return f"{word}: a split {even} as {than}"
    return f"{word}: {compared_in_words(plan, verdict.advantage)} than {than}"


def compared_in_words(plan: Plan, advantage: float) -> str:
    """Return by how much the split is better or worse."""
    measure = plan.problem.objective
    size = readable.percent(abs(advantage))
    if measure is None:
        return f"a split holds a rate {size} {'higher' if advantage >= 0 else 'lower'}"
    return f"a split takes {size} {'less' if advantage >= 0 else 'more'} {measure}"


def verdict_lines(plan: Plan) -> list[str]:
    """Return what stands behind the verdict: the seeds, their spread, and whether they agree."""
    verdict = plan.verdict
    if verdict is None or not verdict.per_seed:
        return [] if plan.best is not None else [nearest(plan)]
    low, high = verdict.spread
    what = "rate" if plan.problem.objective is None else f"{plan.problem.objective} per request/s of capacity"
    seeds = ", ".join(str(seed) for seed in plan.problem.seeds)
    agreed = "They agree: it is sure." if verdict.sure else "They do not bear it out: take it as even."
    spread = f"Advantage of the split in {what}, over seeds {seeds}: {signed(low)} to {signed(high)}. {agreed}"
    if plan.problem.objective is None:
        return [spread]
    return [spread, "Whole machines hide part of an advantage; per request/s of capacity it is what remains."]


def signed(share: float) -> str:
    """Return a share with its sign, as a percentage."""
    if isnan(share):
        return readable.NONE
    return f"{'−' if share < 0 else '+'}{readable.percent(abs(share))}"


def nearest(plan: Plan) -> str:
    """Return what came nearest to keeping the SLO."""
    far = [entry for entry in plan.entries if entry.found.miss is not None or entry.found.bottleneck is not None]
    if not far:
        return (
            "Nothing was simulated." if not plan.entries else readable.sentence(why_not(plan.problem, plan.entries[0]))
        )
    best = min(far, key=distance)
    return f"Nearest: {best.design.name}; {why_not(plan.problem, best)}."


def why_not(problem: Problem, entry: RankedDesign) -> str:
    """Return why a design is not in the ranking: its bottleneck, its nearest miss, or what was not looked at."""
    found = entry.found
    if found.bottleneck is not None:
        bottleneck = found.bottleneck
        line = bottleneck_line(bottleneck.resource, bottleneck.where, bottleneck.share)
        return f"refused before any simulation: {line}"
    if found.miss is not None:
        counts, answer = found.miss
        return f"nearest miss {counts_text(problem, found.design, counts)}: {limit_line(answer)}"
    if not found.complete:
        return "the search ended before it was tried"
    if any(problem.offers[number].variant_of for _, number in found.design.slots):
        return "cannot be better than the design that it varies"
    if found.least:
        least = counts_text(problem, found.design, found.least)
        return f"needs at least {least}, which is beyond the budgets or the largest cluster looked at"
    return "no counts within the budgets hold any rate"


def bottleneck_line(resource: str, where: str, share: float) -> str:
    """Return a bottleneck in words."""
    if isinf(share):
        return f"{resource} of {where}: no number of machines suffices"
    if resource.endswith(","):
        return f"{resource} {where}: {readable.percent(share)} of its limit"
    return f"{resource} of {where}: {readable.percent(share)} of what there is"


def limit_line(answer: Answer) -> str:
    """Return how near a simulation came to its nearest limit."""
    if isinf(answer.worst):
        return answer.bottleneck
    return f"{answer.bottleneck} at {readable.percent(answer.worst)} of its limit"


def bought(gain: Gain) -> str:
    """Return the rate that a gain adds; below what searches resolve, it is none."""
    if not gain.is_resolved:
        return f"nothing (below {100 * RESOLUTION:g} %)"
    return f"{'−' if gain.more_per_s < 0 else '+'}{readable.number(abs(gain.more_per_s))} requests/s"


def source_error(offer: Offer) -> str:
    """Return the mean error of an offer's phase times."""
    error = offer.times.mean_error
    return "not known" if isnan(error) else readable.percent(error)


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


def bottlenecks(plan: Plan) -> Markup:
    """Return what the winner needs of each resource at the least."""
    rows = [
        (f"{bottleneck.resource} of {bottleneck.where}", _share(bottleneck.share)) for bottleneck in plan.bottlenecks
    ]
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
            what = f"prefill of {row.size:,}" if row.phase == "prefill" else f"decode, batch {row.size}"
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
