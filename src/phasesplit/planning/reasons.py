"""Why a figure differs from the published one: which corrections moved it, each measured on its own rung."""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

from phasesplit.planning.ladder import DEFAULT, Rung
from phasesplit.planning.paper import Figure

LEAST = 0.03
"""A smaller change is not named: seeds alone move a capacity by as much."""


class Change(NamedTuple):
    """What one correction did.

    Attributes:
        rung: The correction.
        share: Change of the figure against the rung before it.
    """

    rung: Rung
    share: float


def changes(ladder: Mapping[Rung, float]) -> list[Change]:
    """Return what each rung changed, in order; rungs that are missing count as part of the next one."""
    found = []
    rungs = sorted(ladder)
    for before, rung in pairwise(rungs):
        base = ladder[before]
        share = ladder[rung] / base - 1 if base else (float("inf") if ladder[rung] else 0.0)
        found.append(Change(rung, share))
    return found


def why(ladder: Mapping[Rung, float]) -> str:
    """Return the corrections that moved a figure by LEAST or more from the published rung up to the default's."""
    system = [one for one in changes(ladder) if one.rung <= DEFAULT]
    return _listed(system) if system else ""


def why_bursty(ladder: Mapping[Rung, float]) -> str:
    """Return what real burstiness moved the default's figure by, "" where that is little or was not looked at."""
    return _listed([one for one in changes(ladder) if one.rung > DEFAULT and abs(one.share) >= LEAST], nothing="")


def beside_paper(published: Figure, ours: float, per_seed: tuple[float, ...] = (), step: float = 0.0) -> str:
    """Return how far the published setting is from the published figure, and what chance alone explains.

    Args:
        published: The published figure.
        ours: The same in setting `published`, in its unit.
        per_seed: The same on each seed alone.
        step: Width of the grid that the published figure was read from; 0 for none.
    """
    if published.number != published.number:
        return ""
    off = ours / published.number - 1
    told = f"published setting {abs(off):.0%} {'above' if off > 0 else 'below'} the published figure".replace("%", " %")
    if step:
        within = abs(ours // step * step - published.number) <= step
        told += f", {'within' if within else 'beyond'} one step of its grid of {step:g}/s"
    if len(per_seed) > 1:
        told += f"; seeds alone give {min(per_seed):.1f} to {max(per_seed):.1f}"
    return told


def signed(share: float) -> str:
    """Return a change in per cent."""
    return "from nothing" if share == float("inf") else f"{100 * share:+.0f} %"


def _listed(
    found: list[Change], nothing: str = f"no correction moves it by {LEAST:.0%} or more".replace("%", " %")
) -> str:
    named = [f"{one.rung.label} {signed(one.share)}" for one in found if abs(one.share) >= LEAST]
    return "; ".join(named) or nothing
