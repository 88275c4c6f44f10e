"""Which designs no other beats at once in everything that counts."""

from collections.abc import Sequence


def front(points: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the points that no other point dominates, in order.

    A point dominates another if it is nowhere larger and somewhere smaller; what is wanted large is given negated.

    Args:
        points: Equally long tuples, one for each candidate.
    """
    return [index for index, point in enumerate(points) if not any(_dominates(other, point) for other in points)]


def _dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
