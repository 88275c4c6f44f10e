"""The front keeps what nothing beats."""

from hypothesis import given
from hypothesis import strategies as st

from phasesplit.planner.plan import front


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12))
def test_the_front_is_what_no_other_point_beats(points: list[tuple[int, int, int]]) -> None:
    """If wrong, a report hides a design worth having, or shows one that another beats in everything."""
    kept = front(points)
    assert kept == sorted(kept)
    for index, point in enumerate(points):
        beaten = any(
            all(a <= b for a, b in zip(other, point, strict=True))
            and any(a < b for a, b in zip(other, point, strict=True))
            for other in points
        )
        assert (index in kept) != beaten
