"""The plan: every design sized and ranked, the verdict, what limits the winner next, and where the verdict flips."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from phasesplit.domain.cluster import Cluster
from phasesplit.planner.capacity import Capacity
from phasesplit.planner.designs import Counts, Design
from phasesplit.planner.drift import Day
from phasesplit.planner.lower_bounds import Bottleneck
from phasesplit.planner.probe import Answer
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.search import RESOLUTION, Found
from phasesplit.planner.sensitivity import Point
from phasesplit.planner.verdict import Verdict


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point dominates, in order.

    A point dominates another if it is nowhere larger and somewhere smaller; what is wanted large is given negated.

    Args:
        points: Equally long tuples, one for each candidate.
    """
    return [index for index, point in enumerate(points) if not any(_dominates(other, point) for other in points)]


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


RATE = "rate"
"""What is compared where the objective is the rate within budgets."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankedDesign:
    """A design in the ranking.

    Attributes:
        found: What the search found.
        cluster: The cluster; None where the design keeps the SLO with no number of machines.
        taken: What it takes of each measure.
        rate_per_s: The rate it was sized for, or the highest that it holds.
        capacity: Its capacity: of the best split and the best unsplit design over all seeds, of others on the first.
        per_seed: Of the best split and the best unsplit design, the capacity on each seed alone.
    """

    found: Found
    cluster: Cluster | None
    taken: dict[Measure, float]
    rate_per_s: float
    capacity: Capacity | None = None
    per_seed: tuple[Capacity, ...] = ()

    @property
    def design(self) -> Design:
        """The design."""
        return self.found.design

    @property
    def first_seed_per_s(self) -> float:
        """The capacity on the first seed, by which all designs can be compared, else the rate it was sized for."""
        if self.per_seed:
            return self.per_seed[0].rate_per_s
        return self.capacity.rate_per_s if self.capacity is not None else self.rate_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a little more of something buys the winner.

    Attributes:
        what: What is added.
        rate_per_s: The capacity with it.
        base_per_s: The capacity without, found in the same way.
    """

    what: str
    rate_per_s: float
    base_per_s: float

    @property
    def more_per_s(self) -> float:
        """Requests per second that the addition buys."""
        return self.rate_per_s - self.base_per_s

    @property
    def is_resolved(self) -> bool:
        """Whether that is more than searches leave open."""
        return abs(self.more_per_s) >= RESOLUTION * self.base_per_s


@dataclass(slots=True, eq=False, kw_only=True)
class Plan:
    """What a plan says.

    Attributes:
        problem: What was asked.
        entries: Every design: those that keep the SLO first, the best first.
        verdict: Split or do not; None where not both kinds were compared.
        bottlenecks: What the winner needs of each resource at the rate, at the least.
        gains: What one more of each buys.
        grid: How counts around the winner's do on the first seed.
        points: How the best split and the best unsplit design compare under other conditions.
        questions: Simulations asked for.
        complete: Whether it came to its end.
        lost: Why its workers were lost, "" where they were not.
        days: How the best split and the best unsplit design do over a day under each policy; empty if not asked for.
        day_notes: What was left out of the days and why, a sentence each.
        days_complete: Whether all days that were asked for are there.
    """

    problem: Problem
    entries: list[RankedDesign] = field(default_factory=list)
    verdict: Verdict | None = None
    bottlenecks: list[Bottleneck] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    grid: dict[Counts, Answer] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    questions: int = 0
    complete: bool = True
    lost: str = ""
    days: list[Day] = field(default_factory=list)
    day_notes: list[str] = field(default_factory=list)
    days_complete: bool = True

    @property
    def best(self) -> RankedDesign | None:
        """The winner, None where no design keeps the SLO."""
        return self.entries[0] if self.entries and self.entries[0].found.holds else None

    @property
    def best_split(self) -> RankedDesign | None:
        """The best split design, None where none keeps the SLO."""
        return next((one for one in self.entries if one.found.holds and one.design.kind.is_split), None)

    @property
    def best_unsplit(self) -> RankedDesign | None:
        """The best unsplit design, None where none keeps the SLO."""
        return next((one for one in self.entries if one.found.holds and not one.design.kind.is_split), None)

    @property
    def unbeaten(self) -> list[RankedDesign]:
        """The designs that no other beats in cost, power and capacity at once, in order of rank."""
        holding = [entry for entry in self.entries if entry.found.holds]
        points = [(one.taken[Measure.COST], one.taken[Measure.POWER], -one.first_seed_per_s) for one in holding]
        return [holding[index] for index in front(points)]

    @property
    def unsplit_side(self) -> list[RankedDesign]:
        """What a split has to beat: the best unsplit design, or several side by side; empty where none keeps the SLO.

        Of machines that exist, each type may serve by itself, the load divided as they hold it: placement within one
        cluster does not know that one machine is slower than another.
        """
        best = self.best_unsplit
        if best is None or self.problem.objective is not None:
            return [] if best is None else [best]
        apart: dict[int, RankedDesign] = {}
        for entry in self.entries:
            numbers = {number for _, number in entry.design.slots}
            if entry.found.holds and not entry.design.kind.is_split and len(numbers) == 1:
                apart.setdefault(numbers.pop(), entry)
        given = all(self.problem.offers[number].existing is not None for number in apart)
        together = sum(entry.rate_per_s for entry in apart.values())
        return list(apart.values()) if given and together > best.rate_per_s else [best]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStep:
    """How far a plan is.

    Attributes:
        stage: What it is doing.
        questions: Simulations asked so far.
        best: The best design so far and its objective; None before there is one.
    """

    stage: str
    questions: int
    best: tuple[Design, Counts, float] | None
