"""The highest rate at which a cluster keeps the SLO: bisection over one set of requests (common random numbers)."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from phasesplit.planner.designs import Counts, Design
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.probe import Answer, Question
from phasesplit.planner.problem import AS_ASKED, Variation

TOLERANCE = 0.01
"""Relative width at which bisection stops."""
_STEP = 0.8
"""Share of the bound to begin at, and of a rate that broke to try next; squared with every further one that breaks."""
_FEWEST_REQUESTS = 20
"""No rate is tried that brings fewer requests than this in the length of a trace: their percentiles say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The highest rate that a cluster holds.

    Attributes:
        rate_per_s: The highest rate found to hold on all seeds; 0 where none does.
        broken_per_s: The lowest rate found not to hold; the capacity lies between.
        answers: Of the seeds, at `rate_per_s`.
        bottleneck: What breaks first above it.
        probes: Questions asked.
    """

    rate_per_s: float
    broken_per_s: float
    answers: tuple[Answer, ...]
    bottleneck: str
    probes: int


def capacity(
    lower_bounds: LowerBounds,
    design: Design,
    counts: Counts,
    seeds: Sequence[int],
    *,
    variation: Variation = AS_ASKED,
    at_least: float = 0.0,
    guess: float | None = None,
    tolerance: float = TOLERANCE,
) -> Generator[Sequence[Question], Sequence[Answer], Capacity]:
    """Search for the capacity of a cluster; a generator like `search.CountSearch.run`.

    Args:
        lower_bounds: Bounds of the problem under the same variation.
        design: The design.
        counts: Instances of its slots.
        seeds: All must hold.
        variation: How the problem is varied.
        at_least: A rate that is of no interest if it is not held: then the search ends at once.
        guess: Where to begin; by default a little below what the bounds allow.
        tolerance: Relative width to stop at.
    """
    upper = lower_bounds.rate_per_s(design, counts)
    broken, held, bottleneck, probes = upper, 0.0, "", 0
    answers: tuple[Answer, ...] = ()
    rate = min(guess or upper * _STEP, upper)
    if at_least:
        rate = at_least
        if at_least >= upper:
            return Capacity(
                rate_per_s=0.0,
                broken_per_s=upper,
                answers=(),
                bottleneck=_bound_bottleneck(lower_bounds, design, counts, at_least),
                probes=0,
            )
    down = _STEP
    duration_s = lower_bounds.problem.traffic.duration_s
    lowest = min(rate, _FEWEST_REQUESTS / duration_s)
    while broken - held > tolerance * broken and rate >= lowest:
        replies: list[Answer] = []
        for asked in (seeds[:1], seeds[1:]):
            if asked and all(answer.holds for answer in replies):
                replies += yield [Question(design, counts, rate, seed, variation) for seed in asked]
        probes += len(replies)
        if all(answer.holds for answer in replies):
            held, answers = rate, tuple(replies)
        else:
            broken, bottleneck = rate, next(answer.bottleneck for answer in replies if not answer.holds)
            if rate == at_least:
                break
        if held:
            rate = (held * broken) ** 0.5
        else:
            rate *= down
            down *= down
    if not bottleneck:
        bottleneck = _bound_bottleneck(lower_bounds, design, counts, upper * (1 + tolerance))
    return Capacity(rate_per_s=held, broken_per_s=broken, answers=answers, bottleneck=bottleneck, probes=probes)


def _bound_bottleneck(lower_bounds: LowerBounds, design: Design, counts: Counts, rate_per_s: float) -> str:
    bottleneck = lower_bounds.bottleneck(design, counts, rate_per_s)
    return "" if bottleneck is None else f"{bottleneck.resource} of {bottleneck.where}"
