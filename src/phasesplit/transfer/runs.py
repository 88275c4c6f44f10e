"""Which blocks travel in one frame: neighbours on both ends, no longer than a frame may be."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks on both ends.

    Attributes:
        transfer: Number of the reservation.
        layer: The layer.
        source: First block in the sender's pool.
        target: First block in the receiver's pool.
        blocks: How many, >= 1.
    """

    transfer: int
    layer: int
    source: int
    target: int
    blocks: int


def runs(
    transfer: int, layer: int, sources: tuple[int, ...], targets: tuple[int, ...], places: range, longest: int
) -> Iterator[Run]:
    """Yield the runs of some blocks of a request, in order.

    Args:
        transfer: Number of the reservation.
        layer: The layer.
        sources: Blocks of the request at the sender.
        targets: Its blocks at the receiver, as many.
        places: Which of them, at least one.
        longest: Blocks of a frame at most, >= 1.
    """
    start = places.start
    for at in range(places.start + 1, places.stop + 1):
        joined = (
            at < places.stop
            and at - start < longest
            and sources[at] == sources[at - 1] + 1
            and targets[at] == targets[at - 1] + 1
        )
        if not joined:
            yield Run(transfer, layer, sources[start], targets[start], at - start)
            start = at
