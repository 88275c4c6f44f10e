"""The counts around the winner's: how far each is inside or beyond the SLO, with the border between."""

from collections.abc import Iterable
from math import isinf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.figures import readable
from phasesplit.figures.style import colour, note, title
from phasesplit.planning.objective import ADDITIVE, Measure, of_one
from phasesplit.planning.plan import Plan
from phasesplit.planning.probe import Answer

Floats = NDArray[np.float64]

_CLASSES = (
    (0.5, "keeps-far", "below 50 %"),
    (0.8, "keeps", "50 to 80 %"),
    (1.0, "keeps-near", "80 to 100 %"),
    (1.5, "breaks-near", "100 to 150 %"),
    (3.0, "breaks", "150 to 300 %"),
    (float("inf"), "breaks-far", "beyond 300 %"),
)
"""The largest value over its limit in each class, the name of its colour, and how the key calls it."""
_UNSTABLE = ("idle", "backlog grows")
_MOST_WRITTEN = 110
_MOST_TICKS = 12
_MOST_SLOTS = 2
_TIMES = 10.0
"""From so many times the limit on, cells say how many times instead of how many per cent."""
_LEVELS = (0.5, 0.75, 1.25, 1.5, 2.0)
_HIGHEST_DRAWN = 3.0


def tint(answer: Answer) -> str:
    """Return the name of the colour of an answer."""
    if isinf(answer.worst):
        return _UNSTABLE[0]
    if not answer.holds and answer.worst <= 1.0:
        return "breaks-near"
    return next(name for most, name, _ in _CLASSES if answer.worst < most or most == float("inf"))


def iso_measure(plan: Plan) -> Measure:
    """Return the measure whose equal lines a map shows: what follows from the machines alone, as asked for."""
    problem = plan.problem
    wanted = [problem.objective, *problem.budgets]
    return next((measure for measure in wanted if measure is not None and measure in ADDITIVE), Measure.COST)


def has_map(plan: Plan) -> bool:
    """Return whether there are counts around the winner's, of two pools at most, that can be drawn."""
    return plan.best is not None and bool(plan.grid) and len(plan.best.design.slots) <= _MOST_SLOTS


def draw_map(axes: Any, plan: Plan) -> None:
    """Draw how counts around the winner's do: a map for two pools, a curve for one."""
    best = plan.best
    if best is not None and has_map(plan):
        draw = _draw_curve if len(best.design.slots) == 1 else _draw_cells
        draw(axes, plan)
        return
    title(axes, "Around the winner")
    if best is None:
        note(axes, "No design keeps the SLO.")
    elif not plan.grid:
        note(axes, "Not looked at.")
    else:
        note(axes, f"Its design has {len(best.design.slots)} kinds of pools,\nmore than a map can show.")


def _draw_cells(axes: Any, plan: Plan) -> None:
    from matplotlib.patches import Rectangle

    best = plan.best
    assert best is not None  # noqa: S101 - asked by `draw_map`
    seen = {tint(answer) for answer in plan.grid.values()}
    key = [(text, name) for _, name, text in _CLASSES if name in seen]
    key += [(_UNSTABLE[1], _UNSTABLE[0])] if _UNSTABLE[0] in seen else []
    title(axes, "Around the winner: % of its limit", key, columns=3)
    rows, columns = (sorted({counts[slot] for counts in plan.grid}) for slot in (1, 0))
    places = {counts: (columns.index(counts[0]), rows.index(counts[1])) for counts in plan.grid}
    written = len(plan.grid) <= _MOST_WRITTEN
    for counts, answer in plan.grid.items():
        x, y = places[counts]
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color=colour(tint(answer)), linewidth=0.4))
        if written and not isinf(answer.worst):
            size = 6.0 if len(columns) < 10 else 5.0
            axes.text(x, y, _in_cell(answer.worst), ha="center", va="center", fontsize=size, zorder=4)
    _draw_border(axes, {place: plan.grid[counts].holds for counts, place in places.items()})
    _draw_equals(axes, plan, columns, rows)
    if best.found.counts in places:
        x, y = places[best.found.counts]
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=colour("alarm"), linewidth=2.0))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(-0.5, len(rows) - 0.5))
    axes.set_xticks(*_ticks(columns))
    axes.set_yticks(*_ticks(rows))
    names = [f"{role} {plan.problem.offers[number].machine.name}" for role, number in best.design.slots]
    axes.set(xlabel=names[0], ylabel=names[1])


def _in_cell(worst: float) -> str:
    return f"{100 * worst:.0f}" if worst < _TIMES else f"{worst:.0f}×"


def _draw_border(axes: Any, holds: dict[tuple[int, int], bool]) -> None:
    for (x, y), own in holds.items():
        if holds.get((x + 1, y), own) != own:
            axes.plot(
                [x + 0.5] * 2, [y - 0.5, y + 0.5], color=colour("ink"), linewidth=1.8, solid_capstyle="projecting"
            )
        if holds.get((x, y + 1), own) != own:
            axes.plot(
                [x - 0.5, x + 0.5], [y + 0.5] * 2, color=colour("ink"), linewidth=1.8, solid_capstyle="projecting"
            )


def _draw_equals(axes: Any, plan: Plan, columns: list[int], rows: list[int]) -> None:
    """Draw lines of an equal measure, the winner's and some others."""
    best, measure = plan.best, iso_measure(plan)
    assert best is not None  # noqa: S101 - asked by `draw_map`
    if len(columns) < 2 or len(rows) < 2:
        return
    each = [of_one(measure, plan.problem.offers[number].machine, 0.0) for _, number in best.design.slots]
    at = np.arange(-0.5, len(columns)), np.arange(-0.5, len(rows))
    # Counts lie at equal distances, so places and counts are proportional.
    x, y = (first[0] + place * (first[1] - first[0]) for first, place in zip((columns, rows), at, strict=True))
    taken = each[0] * x[None, :] + each[1] * y[:, None]
    own = best.taken[measure]
    others = [own * level for level in _LEVELS if taken.min() < own * level < taken.max()]
    for levels, style, width in (([own], "solid", 1.2), (others, "dashed", 0.7)):
        if levels:
            axes.contour(*at, taken, levels, colors=colour("faint"), linestyles=style, linewidths=width, zorder=1.5)
    for level in (own, *others):
        _write_level(axes, _short(measure, level), at, taken, level)


def _write_level(axes: Any, text: str, at: tuple[Floats, Floats], taken: Floats, level: float) -> None:
    """Write what a line stands for where it ends: at the lower edge, or at the right one."""
    if taken[0, -1] >= level:
        x, y = float(np.interp(level, taken[0], at[0])), float(at[1][0])
        shift, across, up = (0, 0), "center", "center"
    else:
        x, y = float(at[0][-1]), float(np.interp(level, taken[:, -1], at[1]))
        shift, across, up = (3, 0), "left", "center"
    axes.annotate(
        text, (x, y), xytext=shift, textcoords="offset points", ha=across, va=up, fontsize=5.5, color=colour("ink"),
        bbox={"facecolor": colour("paper"), "edgecolor": "none", "pad": 0.6}, zorder=5, annotation_clip=False,
    )  # fmt: skip


def _short(measure: Measure, value: float) -> str:
    if measure == Measure.COST:
        return f"${value:,.0f}"
    return readable.with_prefix(value, "W") if measure == Measure.POWER else f"{value:.0f}"


def _draw_curve(axes: Any, plan: Plan) -> None:
    best = plan.best
    assert best is not None  # noqa: S101 - asked by `draw_map`
    title(axes, "Around the winner")
    counts = np.array(sorted(one[0] for one in plan.grid))
    answers = [plan.grid[int(count),] for count in counts]
    worst = np.array([min(answer.worst, _HIGHEST_DRAWN) for answer in answers])
    axes.plot(counts, worst, color=colour("unsplit"), linewidth=1.4)
    for count, height, answer in zip(counts, worst, answers, strict=True):
        style = "o" if answer.worst <= _HIGHEST_DRAWN else "^"
        axes.plot(count, height, style, markersize=5, color=colour("unsplit" if answer.holds else "decode"))
    axes.axhline(1.0, color=colour("ink"), linewidth=1.0)
    axes.axvline(best.found.counts[0], color=colour("alarm"), linewidth=1.0, linestyle="dashed")
    top = min(_HIGHEST_DRAWN, max(1.2, float(worst.max()))) * 1.1
    axes.text(best.found.counts[0], top, " the winner", va="top", color=colour("alarm"), fontweight="bold")
    role, number = best.design.slots[0]
    axes.set(
        ylim=(0, top), xlabel=f"{role} {plan.problem.offers[number].machine.name}", ylabel="worst value, of its limit"
    )
    axes.set_xticks(*_ticks(counts.tolist(), own_places=True))
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.grid(visible=True, axis="y")


def _ticks(counts: list[int], *, own_places: bool = False) -> tuple[list[int], list[str]]:
    every = -(-len(counts) // _MOST_TICKS)
    shown: Iterable[int] = range(0, len(counts), every)
    return [counts[index] if own_places else index for index in shown], [str(counts[index]) for index in shown]
