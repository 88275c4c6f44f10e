"""Where the lead changes, and what a variation changes."""

from math import inf, isnan

import pytest

from phasesplit.planner.problem import Variation
from phasesplit.planner.sensitivity import FACTORS, Axis, Point, flips, varied


def points(*values: tuple[float, float, float]) -> list[Point]:
    return [Point(axis=Axis.RATIO, factor=factor, split=split, unsplit=unsplit) for factor, split, unsplit in values]


def test_a_flip_between_two_points_is_put_where_the_advantage_is_zero() -> None:
    """If wrong, a report names a ratio at which the verdict does not change."""
    found = flips(points((0.5, 120.0, 100.0), (1.0, 90.0, 100.0), (2.0, 80.0, 100.0)))
    assert found == [(pytest.approx(0.5 * 2 ** (0.2 / 0.3)),) * 2]


def test_each_change_of_the_lead_to_or_from_a_split_is_one_flip() -> None:
    """If wrong, a second flip is lost, or a tie counts as one."""
    found = flips(points((1, 90, 100), (2, 110, 100), (4, 110, 100), (8, 90, 100), (16, 100, 100)))
    assert [round(low, 6) for low, _ in found] == [round(2**0.5, 6), round(4 * 2**0.5, 6), 16]
    assert flips(points((1, 110, 100), (2, 100, 100), (4, 110, 100))) == []
    assert flips(points((1, 90, 100), (2, 80, 100))) == []
    assert flips([]) == []


@pytest.mark.parametrize(("split", "unsplit", "lead"), [(inf, 100.0, -1), (100.0, inf, 1), (inf, inf, 0)])
def test_what_is_impossible_flips_somewhere_between(split: float, unsplit: float, lead: int) -> None:
    """If wrong, an infinite objective is interpolated to nonsense."""
    ahead, behind = (1.0, 90.0, 100.0), (1.0, 110.0, 100.0)
    one = points((2.0, split, unsplit))[0]
    assert one.lead == lead
    assert isnan(one.advantage)
    assert flips(points(ahead, (2.0, split, unsplit))) == ([] if lead == 1 else [(1.0, 2.0)])
    assert flips(points(behind, (2.0, split, unsplit))) == ([(1.0, 2.0)] if lead == 1 else [])


def test_each_axis_bends_one_thing_and_has_the_point_as_asked() -> None:
    """If wrong, a line of the sensitivity table mixes two causes, or has no point to compare with."""
    asked = (1.0, Variation())
    for axis in Axis:
        assert list(FACTORS[axis]) == sorted(FACTORS[axis])
        assert varied(axis, 1.0) == asked
        for factor in FACTORS[axis]:
            rate, variation = varied(axis, factor)
            changed = [rate, *variation]
            assert changed.count(1.0) == (4 if factor == 1.0 else 3)
    assert varied(Axis.RATE, 2.0)[0] == 2.0
    assert varied(Axis.RATIO, 2.0)[1].ratio == 2.0
    assert varied(Axis.LINK, 0.5)[1].link == 0.5
    assert varied(Axis.TIGHTNESS, 0.8)[1].tightness == 0.8
