"""A plan without a winner: how far each design is from keeping the SLO, and what is in its way."""

from math import isinf
from typing import Any

from phasesplit.figures import readable
from phasesplit.figures.style import colour, note, title
from phasesplit.planning.misses import distance
from phasesplit.planning.plan import Entry, Plan

_MOST_BARS = 6
_FARTHEST = 3.0
_LONGEST_NAME = 48


def draw_misses(axes: Any, plan: Plan) -> None:
    """Draw how many times over its limit each design is, the nearest first."""
    known = [entry for entry in plan.entries if entry.found.wall is not None or entry.found.miss is not None]
    entries = sorted(known, key=distance)[:_MOST_BARS]
    title(axes, "What is in the way, nearest first")
    if not entries:
        note(axes, "Nothing came near the SLO.")
        return
    rows = list(range(len(entries), 0, -1))
    for row, entry in zip(rows, entries, strict=True):
        share = distance(entry)
        shown = min(share, _FARTHEST)
        tint = colour("transfer" if entry.design.kind.is_split else "unsplit")
        axes.barh(row - 0.2, shown, height=0.34, color=tint)
        axes.text(
            0,
            row + 0.05,
            readable.shortened(entry.design.name, _LONGEST_NAME),
            va="bottom",
            fontweight="bold",
            zorder=4,
            bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.5},
        )
        axes.text(0.04, row - 0.2, _in_bar(entry), va="center", fontsize=6.0, color=colour("on-strong"))
        axes.text(shown + 0.04, row - 0.2, "∞" if isinf(share) else readable.percent(share), va="center")
    axes.axvline(1.0, color=colour("ink"), linewidth=1.0)
    axes.set(
        xlim=(0, _FARTHEST + 0.6),
        ylim=(0.5, len(entries) + 0.7),
        xlabel="value as a share of its limit, or need as a share of what there is",
    )
    axes.set_xticks([0, 1, 2, 3], labels=["0", "limit", "200 %", "300 %"])
    axes.set_yticks([])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _in_bar(entry: Entry) -> str:
    found = entry.found
    if found.wall is not None:
        return found.wall.resource.partition(",")[0]
    return found.miss[1].wall if found.miss is not None else ""
