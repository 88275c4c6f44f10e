"""A plan in words: what was asked, the verdict, why a design is not in the ranking, what each panel shows."""

from math import isinf, isnan

from phasesplit.figures import readable
from phasesplit.planning.designs import counts_text
from phasesplit.planning.misses import distance
from phasesplit.planning.objective import UNITS, Measure
from phasesplit.planning.plan import Entry, Gain, Plan
from phasesplit.planning.probe import Answer
from phasesplit.planning.problem import Offer, Problem
from phasesplit.planning.search import RESOLUTION
from phasesplit.planning.verdict import EVEN

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
    return f"{word}: {compared(plan, verdict.advantage)} than {than}"


def compared(plan: Plan, advantage: float) -> str:
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
    far = [entry for entry in plan.entries if entry.found.miss is not None or entry.found.wall is not None]
    if not far:
        return (
            "Nothing was simulated." if not plan.entries else readable.sentence(why_not(plan.problem, plan.entries[0]))
        )
    best = min(far, key=distance)
    return f"Nearest: {best.design.name}; {why_not(plan.problem, best)}."


def why_not(problem: Problem, entry: Entry) -> str:
    """Return why a design is not in the ranking: the wall that it hits, its nearest miss, or what was not looked at."""
    found = entry.found
    if found.wall is not None:
        return f"refused before any simulation: {wall_line(found.wall.resource, found.wall.where, found.wall.share)}"
    if found.miss is not None:
        counts, answer = found.miss
        return f"nearest miss {counts_text(problem, found.design, counts)}: {limit_line(answer)}"
    if not found.complete:
        return "the search ended before it was tried"
    if any(problem.offers[number].variant_of for _, number in found.design.slots):
        return "cannot be better than the design that it varies"
    if found.floor:
        least = counts_text(problem, found.design, found.floor)
        return f"needs at least {least}, which is beyond the budgets or the largest cluster looked at"
    return "no counts within the budgets hold any rate"


def wall_line(resource: str, where: str, share: float) -> str:
    """Return a wall in words."""
    if isinf(share):
        return f"{resource} of {where}: no number of machines suffices"
    if resource.endswith(","):
        return f"{resource} {where}: {readable.percent(share)} of its limit"
    return f"{resource} of {where}: {readable.percent(share)} of what there is"


def limit_line(answer: Answer) -> str:
    """Return how near a simulation came to its nearest limit."""
    if isinf(answer.worst):
        return answer.wall
    return f"{answer.wall} at {readable.percent(answer.worst)} of its limit"


def bought(gain: Gain) -> str:
    """Return the rate that a gain adds; below what searches resolve, it is none."""
    if not gain.is_resolved:
        return f"nothing (below {100 * RESOLUTION:g} %)"
    return f"{'−' if gain.more_per_s < 0 else '+'}{readable.number(abs(gain.more_per_s))} requests/s"


def source_error(offer: Offer) -> str:
    """Return the mean error of an offer's phase times."""
    error = offer.times.mean_error
    return "not known" if isnan(error) else readable.percent(error)
