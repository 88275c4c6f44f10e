"""Where the verdict flips: the best split and the best unsplit design, sized again under other conditions."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import exp, isnan, log

from phasesplit.planner.problem import AS_ASKED, Variation
from phasesplit.planner.verdict import advantage_of


class Axis(StrEnum):
    """What is varied, each as a factor on what was asked."""

    RATE = "rate"
    RATIO = "prompt:output ratio"
    LINK = "link speed"
    TIGHTNESS = "SLO limits"


FACTORS: dict[Axis, tuple[float, ...]] = {
    Axis.RATE: (0.25, 0.5, 1.0, 2.0),
    Axis.RATIO: (0.25, 0.5, 1.0, 2.0, 4.0),
    Axis.LINK: (1 / 32, 1 / 8, 1 / 2, 1.0),
    Axis.TIGHTNESS: (0.8, 1.0, 1.25, 2.0),
}
"""Factors of each axis."""


def varied(axis: Axis, factor: float) -> tuple[float, Variation]:
    """Return the factor on the rate, and the variation, of a point on an axis."""
    if axis == Axis.RATE:
        return factor, AS_ASKED
    if axis == Axis.RATIO:
        return 1.0, Variation(ratio=factor)
    if axis == Axis.LINK:
        return 1.0, Variation(link=factor)
    return 1.0, Variation(tightness=factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The two designs at one place.

    Attributes:
        axis: What is varied.
        factor: By which factor.
        split: The objective of the split design, infinite where it keeps the SLO with no number of machines.
        unsplit: Of the unsplit one.
    """

    axis: Axis
    factor: float
    split: float
    unsplit: float

    @property
    def advantage(self) -> float:
        """By which share the split takes less, NaN where one of the two is infinite."""
        return advantage_of(self.split, self.unsplit)

    @property
    def lead(self) -> int:
        """1 where the split is better, -1 where the unsplit one is, 0 where they are even or both impossible."""
        return (self.split < self.unsplit) - (self.split > self.unsplit)


def changes(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return the neighbours between which the lead passes to the split, or from it.

    Args:
        points: Of one axis, by rising factor.
    """
    return [
        (left, right) for left, right in pairwise(points) if left.lead != right.lead and max(left.lead, right.lead) > 0
    ]


def flips(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return between which factors each of the `changes` lies; as one number twice where it can be interpolated.

    Args:
        points: Of one axis, by rising factor, the one as asked among them.
    """
    found = []
    for left, right in changes(points):
        a, b = left.advantage, right.advantage
        if isnan(a) or isnan(b) or a == b:
            found.append((left.factor, right.factor))
            continue
        at = exp(log(left.factor) + (log(right.factor) - log(left.factor)) * (0 - a) / (b - a))
        found.append((at, at))
    return found
