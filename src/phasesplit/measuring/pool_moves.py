"""Moves of machines between pools, counted from what a gateway wrote of its decisions."""

from collections.abc import Iterable, Mapping
from typing import Any

from phasesplit.scheduling.ledger import MIXED, PROMPT

KINDS = ("prompt_to_mixed", "token_to_mixed", "returns", "repurposed")
"""As a simulation counts them."""


def pool_moves(decisions: Iterable[Mapping[str, Any]], first: int = 0) -> dict[str, int]:
    """Return how often machines moved, by kind.

    Args:
        decisions: The lines of a decision log from its first on, as JSON has them.
        first: The first line whose moves count.
    """
    counts = dict.fromkeys(KINDS, 0)
    places: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(decisions):
        if line.get("call") == "enlist":
            _, machine, home, _ = line["args"]
            places[machine] = home, home
        for machine, pool, home in line.get("moved", ()):
            before, home_before = places.get(machine, (home, home))
            places[machine] = pool, home
            if number < first or line["call"] in ("enlist", "retire", "switch_off"):
                continue
            if home != home_before:
                counts["repurposed"] += 1
            elif pool == MIXED:
                counts["prompt_to_mixed" if before == PROMPT else "token_to_mixed"] += 1
            else:
                counts["returns"] += 1
    return counts
