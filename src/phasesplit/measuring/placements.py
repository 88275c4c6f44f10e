"""Where requests went, predicted against measured."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Pairs = Sequence[tuple[str, str] | None]
"""Names of prefill and decode machine of each request; None where it went nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A request that the cluster placed elsewhere than predicted.

    Attributes:
        row: Its row in the trace.
        predicted: Prompt and decode machine.
        measured: The same.
    """

    row: int
    predicted: tuple[str, str]
    measured: tuple[str, str]


def fitting_names(machines: Sequence[str], predicted: Pairs, measured: Pairs) -> dict[str, str]:
    """Return machines by the names under which most predicted placements agree with those measured.

    Machines of one home are alike, and which of two idle ones comes first depends on what was served before; so names
    are exchanged, but only within a home, which is what stands before the number: `prompt-0`.

    Args:
        machines: All names.
        predicted: What the simulation says.
        measured: What the cluster did, requests in the same order.
    """
    met: Counter[tuple[str, str]] = Counter()
    for one, other in zip(predicted, measured, strict=True):
        if one is not None and other is not None:
            met.update([(one[0], other[0]), (one[1], other[1])])
    # First those that met, most often first; then the others, under their own names where those are free.
    wanted = [pair for pair, _ in met.most_common()] + [(name, name) for name in machines]
    wanted += [(old, name) for old in machines for name in machines]
    new: dict[str, str] = {}
    for old, name in wanted:
        if old not in new and name not in new.values() and _home(old) == _home(name):
            new[old] = name
    return new


def renamed(pairs: Pairs, names: Mapping[str, str]) -> Pairs:
    """Return pairs with other names of machines."""
    return [None if pair is None else (names[pair[0]], names[pair[1]]) for pair in pairs]


def misplaced(predicted: Pairs, measured: Pairs) -> tuple[Misplaced, ...]:
    """Return the requests that went elsewhere than predicted, in order.

    Args:
        predicted: What the simulation says.
        measured: What the cluster did, requests in the same order.
    """
    return tuple(
        Misplaced(row=row, predicted=one, measured=other)
        for row, (one, other) in enumerate(zip(predicted, measured, strict=True))
        if one is not None and other is not None and one != other
    )


def _home(name: str) -> str:
    return name.rpartition("-")[0]
