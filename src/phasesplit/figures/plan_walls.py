"""What the winner runs out of next: the share of each resource that it needs, and what one more of each thing buys."""

from math import isinf
from typing import Any

from phasesplit.figures import readable
from phasesplit.figures.plan_words import bought
from phasesplit.figures.style import colour, note, title
from phasesplit.planning.plan import Plan

_POOLS = ("prefill", "decode", "unsplit")
"""Pools, each with a colour of its name."""
_MOST_SHOWN = 1.3
_NEAR_LINE = 0.82


def draw_walls(axes: Any, plan: Plan) -> None:
    """Draw the share of each resource that each pool of the winner needs at the least."""
    walls = plan.walls
    pools = [pool for pool in _POOLS if any(pool in wall.where for wall in walls)]
    title(axes, "Resources needed, at the least", [(pool, pool) for pool in pools])
    if not walls:
        note(axes, "No design keeps the SLO." if plan.best is None else "Not looked at.")
        return
    rows = list(range(len(walls), 0, -1))
    for row, wall in zip(rows, walls, strict=True):
        tint = next((pool for pool in pools if pool in wall.where), "ink")
        shown = min(wall.share, _MOST_SHOWN)
        axes.barh(row, shown, height=0.62, color=colour(tint))
        text = "∞" if isinf(wall.share) else readable.percent(wall.share)
        beside = max(shown, 1.0 if shown > _NEAR_LINE else 0.0)
        axes.text(beside + 0.02, row, text, va="center", fontsize=6.5)
    axes.axvline(1.0, color=colour("ink"), linewidth=1.0)
    axes.set(xlim=(0, _MOST_SHOWN + 0.2), ylim=(0.4, len(walls) + 0.6), xlabel="share of what the pool has")
    axes.set_xticks([0, 0.5, 1.0], labels=["0", "50 %", "100 %"])
    axes.set_yticks(rows, labels=[wall.resource for wall in walls])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def walls_line(plan: Plan) -> str:
    """Return which wall the winner is nearest to, in words."""
    if not plan.walls:
        return "No winner whose resources could be looked at."
    nearest = max(plan.walls, key=lambda wall: wall.share)
    share = "more than there is" if isinf(nearest.share) else readable.percent(nearest.share)
    line = f"Nearest to its wall: {nearest.resource} of {nearest.where}, {share}."
    best = plan.best
    if best is not None and best.capacity is not None and best.capacity.wall:
        line += f" Above the capacity breaks first: {best.capacity.wall}."
    return line


def draw_gains(axes: Any, plan: Plan) -> None:
    """Draw the rate that one more of each thing adds to the winner's capacity."""
    title(axes, "One more buys …")
    if not plan.gains:
        note(axes, "No design keeps the SLO." if plan.best is None else "Not looked at.")
        return
    most = max(*(abs(gain.more_per_s) for gain in plan.gains), 1e-9)
    scale = max(most, 0.05 * plan.gains[0].base_per_s)
    rows = list(range(len(plan.gains), 0, -1))
    for row, gain in zip(rows, plan.gains, strict=True):
        more = max(gain.more_per_s, 0.0) if gain.is_resolved else 0.0
        tint = next((pool for pool in _POOLS if f" {pool} " in f" {gain.what} "), "transfer")
        axes.barh(row - 0.1, more, height=0.36, color=colour(tint))
        axes.text(0, row + 0.16, gain.what, va="bottom", fontweight="bold")
        axes.text(more + 0.02 * scale, row - 0.1, bought(gain), va="center")
    axes.set(xlim=(0, 1.9 * scale), ylim=(0.5, len(plan.gains) + 0.62), xlabel="requests/s of capacity")
    axes.set_yticks([])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def gains_line(plan: Plan) -> str:
    """Return what helps most, in words."""
    if not plan.gains:
        return "No winner to add to."
    best = max(plan.gains, key=lambda gain: gain.more_per_s)
    base = readable.number(best.base_per_s)
    if not best.is_resolved:
        return f"No one addition alone buys more than searches resolve, on top of {base}/s."
    return readable.sentence(f"{best.what} buys {bought(best)} on top of {base}/s")
