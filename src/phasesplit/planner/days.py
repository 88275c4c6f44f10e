"""The days of a plan: which designs serve one under which policies, and what they say of splitting."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phasesplit.domain.money import JOULES_PER_KWH
from phasesplit.errors import SpecError
from phasesplit.planner.drift import Day, DayQuestion, by_role, policies_for, requests_of
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.verdict import EVEN, advantage_of
from phasesplit.scheduler.autoscaling import Joint, Policy, Static
from phasesplit.scheduler.ledger import DECODE, PREFILL, UNSPLIT

MOST_REQUESTS_OF_A_DAY = 20_000_000
"""A day of more requests is not simulated: it would take minutes for each policy."""
_MANY = 0.01
"""A larger share of misses in an hour is named."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Ahead:
    """The days that are to be simulated.

    Attributes:
        questions: The days.
        requests: Requests of all of them together.
        notes: What is left out and why, a sentence each.
    """

    questions: tuple[DayQuestion, ...]
    requests: int
    notes: tuple[str, ...]


def days_ahead(plan: Plan, own: Mapping[str, Policy]) -> Ahead:
    """Return the days of the best split and the best unsplit design, under fitted policies and those of one's own.

    Each gets the rate that it was sized for, or the highest that it holds.

    Args:
        plan: A plan with a winner.
        own: Policies by how a person wrote them.
    """
    questions: list[DayQuestion] = []
    notes: list[str] = []
    requests = 0
    for entry in (plan.best_split, plan.best_unsplit):
        if entry is None:
            continue
        problem = replace(plan.problem, traffic=replace(plan.problem.traffic, rate_per_s=entry.rate_per_s))
        of_a_day = requests_of(problem.traffic)
        if of_a_day > MOST_REQUESTS_OF_A_DAY:
            notes.append(f"{entry.design.name}: {too_many(of_a_day)}")
            continue
        of_entry, left_out = _of_entry(problem, entry, own)
        questions += of_entry
        notes += left_out
        requests += of_a_day * len(of_entry)
    return Ahead(questions=tuple(questions), requests=requests, notes=tuple(notes))


def too_many(requests: int) -> str:
    """Return what to say of a day with too many requests."""
    return f"a day of {requests:,} requests, allowed are at most {MOST_REQUESTS_OF_A_DAY:,}"


def best_day(plan: Plan, *, split: bool) -> Day | None:
    """Return the day of one side that keeps the SLO with whole servers and takes least; None where there is none."""
    kept = [day for day in plan.days if day.design.kind.is_split == split and day.holds and _is_whole(plan, day)]
    return min(kept, key=lambda day: taken(plan.problem, day), default=None)


def taken(problem: Problem, day: Day) -> float:
    """Return what a day takes of what the plan minimises, where that follows from the day's use; money else."""
    if problem.objective == Measure.ENERGY:
        return day.energy_j / JOULES_PER_KWH
    return day.kg_co2e if problem.objective == Measure.CARBON else day.usd


def day_unit(problem: Problem) -> str:
    """Return the unit of `taken`."""
    return {Measure.ENERGY: "kWh", Measure.CARBON: "kg CO2e"}.get(problem.objective or Measure.COST, "USD")


def day_verdict(plan: Plan) -> list[str]:
    """Return what the days say of splitting and how far to trust it, a sentence each; nothing without days."""
    if not plan.days:
        return []
    problem = plan.problem
    best = {split: best_day(plan, split=split) for split in dict.fromkeys(d.design.kind.is_split for d in plan.days)}
    sides = [_side(plan, split, day) for split, day in best.items()]
    found = [f"The least over the day that keeps the SLO: {'; '.join(sides)}."]
    own, other = best.get(True), best.get(False)
    if own is not None and other is not None:
        # Where the highest rate was looked for, the two serve different ones.
        advantage = advantage_of(taken(problem, own) / own.requests, taken(problem, other) / other.requests)
        more = "as much as" if abs(advantage) <= EVEN else f"{abs(advantage):.0%} {_less(advantage)} than"
        found.append(f"Over the day the split takes {more} unsplit for each request.")
    found.append(
        f"Policies are fitted to the planned rate, not tuned, and judged on one day (seed {problem.seeds[0]});"
        " a schedule knows the day."
    )
    if not all(_is_whole(plan, day) for day in plan.days):
        found.append("Joint scaling and policies of one's own may switch off a part of a server: shown, not compared.")
    return found


def _is_whole(plan: Plan, day: Day) -> bool:
    """Return whether the policy switches whole servers only."""
    parts = any(plan.problem.offers[number].machine.instances_per_server > 1 for _, number in day.design.slots)
    return not parts or (not day.written and day.policy.name != Joint.name)


def _side(plan: Plan, split: bool, day: Day | None) -> str:
    """Return the best day of a side, its policy, and how much less it takes than all machines always on."""
    side = "split" if split else "unsplit"
    if day is None:
        return f"none {side}"
    parts = [day.policy.name]
    still = next((one for one in plan.days if one.design == day.design and one.policy.name == Static.name), day)
    if still != day:
        saved = advantage_of(taken(plan.problem, day), taken(plan.problem, still))
        parts.append(f"{abs(saved):.0%} {_less(saved)} than with all always on")
    if day.worst_hour_share > _MANY:
        parts.append(f"but {day.worst_hour_share:.0%} missed in its worst hour")
    return f"{side} {taken(plan.problem, day):,.0f} {day_unit(plan.problem)} ({', '.join(parts)})"


def _less(share: float) -> str:
    return "less" if share >= 0 else "more"


def _of_entry(problem: Problem, entry: RankedDesign, own: Mapping[str, Policy]) -> tuple[list[DayQuestion], list[str]]:
    """Return the days of one design, and a note on each policy that does not fit it."""
    design, counts, rate, seed = entry.design, entry.found.counts, entry.rate_per_s, problem.seeds[0]
    at_peak = Prober(problem).result(Question(design, counts, rate, seed))
    questions = [
        DayQuestion(design, counts, rate, policy, seed) for policy in policies_for(problem, design, counts, at_peak)
    ]
    notes = []
    roles = (PREFILL, DECODE) if design.kind.is_split else (UNSPLIT,)
    most = dict(zip(roles, by_role(design, counts), strict=True))
    if all(one.policy.name != "schedule" for one in questions):
        notes.append(f"no schedule for {design.name}: the hours of its day are not known beforehand")
    for written, policy in own.items():
        try:
            policy.opening(0.0, most)
        except SpecError as refusal:
            notes.append(f"{written} does not fit {design.name}: {refusal}")
        else:
            questions.append(DayQuestion(design, counts, rate, policy, seed, written))
    return questions, notes
