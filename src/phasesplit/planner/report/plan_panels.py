"""The panels of a plan, each of which draws itself onto axes and says in its caption what to see.

1. the counts around the winner's: how far each is inside or beyond the SLO, with the border between (`draw_map`);
2. the designs by what they cost and what power they need: those that no other beats, and the rest (`draw_front`);
3. without a winner, how far each design is from keeping the SLO, and what is in its way (`draw_misses`);
4. the latencies of the winner (`latency_panels`);
5. what the winner needs of each resource (`draw_bottlenecks`), and what one more of each thing adds (`draw_gains`);
6. where the verdict flips: the advantage of the split as one thing after another is varied (`draw_crossover`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isinf, isnan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.slo import GOODPUT_RATIO, is_slowdown
from phasesplit.planner.misses import distance
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.probe import Answer
from phasesplit.planner.problem import ADDITIVE, Measure, of_one
from phasesplit.planner.report.plan_tables import MEASURE_NAMES, amount, bought, factor, nearest
from phasesplit.planner.sensitivity import Axis, Point, changes, flips
from phasesplit.report import readable
from phasesplit.report.page import colour, note, title
from phasesplit.report.panels import draw_latency, draw_slo, metric_of
from phasesplit.simulator.result import Result

AXIS_NAMES = {
    Axis.RATE: "Request rate",
    Axis.RATIO: "Prompt:output ratio",
    Axis.LINK: "Link speed",
    Axis.TIGHTNESS: "SLO limits (right: looser)",
}
_LEAST_REACH = 0.06


def points_of(plan: Plan, axis: Axis) -> list[Point]:
    """Return the points of one axis, by rising factor."""
    return sorted((point for point in plan.points if point.axis == axis), key=lambda point: point.factor)


def draw_crossover(axes: Any, plan: Plan, axis: Axis) -> None:
    """Draw the advantage of the split over the factor on one thing; above the line, split."""
    title(axes, AXIS_NAMES[axis])
    points = points_of(plan, axis)
    if not points:
        note(axes, _nothing(plan, axis))
        return
    known = [point.advantage for point in points if not isnan(point.advantage)]
    low, high = min(-_LEAST_REACH, *known, 0.0), max(_LEAST_REACH, *known, 0.0)
    reach = high - low
    low, high = low - 0.22 * reach, high + 0.22 * reach
    axes.axhspan(0, high, color=colour("keeps-near"), linewidth=0)
    axes.axhline(0, color=colour("ink"), linewidth=1.0)
    axes.plot(
        [point.factor for point in points], [point.advantage for point in points], "-o", color=colour("transfer"),
        markersize=4,
    )  # fmt: skip
    for point in points:
        if isnan(point.advantage):
            _say_why(axes, point, low, high)
    for (before, _), (left, right) in zip(changes(points), flips(points), strict=True):
        _mark_flip(axes, left, right, (low, high), rising=before.lead <= 0)
    factors = [point.factor for point in points]
    span = factors[-1] / factors[0]
    axes.set(xscale="log", xlim=(factors[0] / span**0.12, factors[-1] * span**0.12), ylim=(low, high))
    axes.set_xticks(factors, labels=[factor(one) for one in factors])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:+.0f} %" if share else "even")
    axes.set(xlabel="times what was asked", ylabel="advantage of the split")
    centre = (factors[0] * factors[-1]) ** 0.5
    is_free = all(right > centre for _, right in flips(points))
    for text, height, up in (("split is better", 0.97, "top"), ("unsplit is better", 0.03, "bottom")):
        place, across = (0.015, "left") if is_free else (0.985, "right")
        axes.text(place, height, text, transform=axes.transAxes, ha=across, va=up, color=colour("faint"), fontsize=6.5)


def _say_why(axes: Any, point: Point, low: float, high: float) -> None:
    at, text = {1: (0.75 * high, "only\nsplit"), -1: (0.6 * low, "only\nunsplit"), 0: (0.0, "neither")}[point.lead]
    axes.text(
        point.factor, at, text, ha="center", va="center", color=colour("alarm"), fontweight="bold", fontsize=6.5,
        linespacing=1.0,
    )  # fmt: skip


def _mark_flip(axes: Any, left: float, right: float, ends: tuple[float, float], *, rising: bool) -> None:
    low, high = ends
    if left == right:
        axes.axvline(left, color=colour("alarm"), linewidth=1.0, linestyle="dashed")
    else:
        axes.axvspan(left, right, color=colour("breaks-near"), alpha=0.6, linewidth=0)
    middle = (left * right) ** 0.5
    text = f"flips at {readable.number(middle)}" if left == right else "flips between"
    is_above = high > -low
    # On the side of the line where the curve is in the other half.
    shift, across = ((-2, 0), "right") if rising == is_above else ((2, 0), "left")
    axes.annotate(
        text, (middle, high - 0.12 * (high - low) if is_above else low + 0.12 * (high - low)), xytext=shift,
        textcoords="offset points", rotation=90, ha=across, va="top" if is_above else "bottom",
        color=colour("alarm"), fontsize=6.5,
    )  # fmt: skip


def _nothing(plan: Plan, axis: Axis) -> str:
    if axis == Axis.RATE and plan.problem.objective is None:
        return "The rate is what is searched for."
    if plan.problem.machines_exist:
        return "Not looked at for machines\nthat exist."
    if plan.best_split is None or plan.best_unsplit is None:
        return "Needs a split and an unsplit design\nthat keep the SLO."
    return "Not looked at."


def crossover_line(plan: Plan, axis: Axis) -> str:
    """Return where the lead changes along one axis, in words."""
    points = points_of(plan, axis)
    if not points:
        return _nothing(plan, axis).replace("\n", " ")
    parts = [_flip_line(left, right) for left, right in flips(points)]
    if not parts:
        leads = {point.lead for point in points}
        parts = ["split stays ahead throughout" if leads == {1} else "no flip in this range"]
    return f"{AXIS_NAMES[axis].partition(' (')[0]}: {'; '.join(parts)}{_alone(points)}."


def _flip_line(left: float, right: float) -> str:
    if left == right:
        return f"the lead changes at {readable.number(left)} times what was asked"
    return f"the lead changes between {factor(left)} and {factor(right)} times what was asked"


def _alone(points: Sequence[Point]) -> str:
    unsplit = [factor(one.factor) for one in points if isinf(one.split) and not isinf(one.unsplit)]
    split = [factor(one.factor) for one in points if isinf(one.unsplit) and not isinf(one.split)]
    neither = [factor(one.factor) for one in points if isinf(one.unsplit) and isinf(one.split)]
    named = {"only unsplit": unsplit, "only split": split, "neither": neither}
    return "".join(f"; {who} keeps the SLO at {', '.join(at)}" for who, at in named.items() if at)


_LEAST_AREA, _MOST_AREA = 25.0, 190.0
_OFFSETS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 11), (0, -17), (15, 13), (-15, 13), (15, -21), (-15, -21))
"""Where a label may stand, in points from its marker, the best place first."""
_FARTHEST_FRONT = 2.0
"""Times the least cost or power; what takes more, and more than the best of each kind, is named, not drawn."""
_LONGEST_NOTE = 28
_MOST_FRONT_BARS = 8
_CHARACTER, _LINE = 4.6, 9.0
"""Room of a label in points."""


def unbeaten(plan: Plan) -> list[int]:
    """Return the ranks, from 1, of the designs that no other beats in cost, power and capacity at once."""
    best = plan.unbeaten
    return [rank for rank, entry in enumerate(plan.entries, 1) if entry in best]


def draw_front(axes: Any, plan: Plan) -> None:
    """Draw cost against power; the area of a marker tells the capacity, its number the rank."""
    holding = [entry for entry in plan.entries if entry.found.holds]
    kinds = {entry.design.kind.is_split for entry in holding}
    names = [("split", "transfer"), ("unsplit", "unsplit")] if len(kinds) > 1 else []
    title(axes, "Cost, power, and capacity (area)", names)
    if not holding:
        note(axes, "No design keeps the SLO.")
        return
    if len({(entry.taken[Measure.COST], entry.taken[Measure.POWER]) for entry in holding}) == 1:
        _draw_rates(axes, holding, names)
        return
    best = set(unbeaten(plan))
    places = {rank: _place(entry) for rank, entry in enumerate(holding, 1)}
    farthest = _farthest(plan, list(places.values()))
    nearby = {rank for rank, place in places.items() if place[0] <= farthest[0] and place[1] <= farthest[1]}
    most = max(entry.first_seed_per_s for entry in holding) or 1.0
    labels: dict[tuple[float, float], list[int]] = {}
    by_area = sorted(enumerate(holding, 1), key=lambda item: (-item[1].first_seed_per_s, item[0]))
    for above, (rank, entry) in enumerate(by_area):
        if rank not in nearby:
            continue
        place = places[rank]
        is_best = rank in best
        axes.scatter(
            *place,
            s=_LEAST_AREA + (_MOST_AREA - _LEAST_AREA) * (entry.first_seed_per_s / most) ** 2,
            marker="o" if entry.design.kind.is_split else "s",
            color=colour("transfer" if entry.design.kind.is_split else "unsplit"),
            alpha=1.0 if is_best else 0.35,
            linewidths=0,
            zorder=2 + 0.001 * above,
        )
        labels.setdefault(place, []).append(rank)
    for end, values in (("x", [x for x, _ in labels]), ("y", [y for _, y in labels])):
        room = 0.18 * (max(values) - min(values)) or 0.1 * max(values) or 1.0
        getattr(axes, f"set_{end}lim")(min(values) - room, max(values) + room)
    axes.xaxis.set_major_formatter(lambda usd, _: f"${usd:,.0f}")
    axes.xaxis.set_major_locator(_few())
    axes.yaxis.set_major_locator(_few())
    axes.set(xlabel="cost an hour", ylabel="provisioned power, kW")
    axes.grid(visible=True)
    _write(axes, {place: sorted(ranks) for place, ranks in labels.items()}, best)
    if len(nearby) < len(holding):
        beyond = ", ".join(str(rank) for rank in range(1, len(holding) + 1) if rank not in nearby)
        text = readable.shortened(f"far beyond: {beyond}", _LONGEST_NOTE)
        axes.text(1.0, 1.015, text, transform=axes.transAxes, ha="right", va="bottom", color=colour("faint"))


def _draw_rates(axes: Any, holding: list[RankedDesign], names: list[tuple[str, str]]) -> None:
    """Draw the capacity of designs that all take the same: there is nothing else in which they differ."""
    title(axes, "Capacity, at the same cost and power", names)
    shown = holding[:_MOST_FRONT_BARS]
    most = max(entry.first_seed_per_s for entry in shown) or 1.0
    rows = list(range(len(shown), 0, -1))
    for row, entry in zip(rows, shown, strict=True):
        held = entry.first_seed_per_s
        axes.barh(row - 0.1, held, height=0.36, color=colour("transfer" if entry.design.kind.is_split else "unsplit"))
        axes.text(0, row + 0.14, f"{len(shown) + 1 - row}  {entry.design.kind}", va="bottom", fontweight="bold")
        axes.text(held + 0.02 * most, row - 0.1, f"{readable.number(held)}/s", va="center")
    axes.set(xlim=(0, 1.25 * most), ylim=(0.5, len(shown) + 0.62), xlabel="requests/s, first seed")
    axes.set_yticks([])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _place(entry: RankedDesign) -> tuple[float, float]:
    """Return cost and power, in kW, so rounded that the same machines added up in another order are in one place."""
    return round(entry.taken[Measure.COST], 6), round(entry.taken[Measure.POWER] / 1e3, 6)


def _farthest(plan: Plan, places: list[tuple[float, float]]) -> tuple[float, float]:
    """Return up to where designs are shown: as far as what the verdict compares, the rest without crowding it."""
    compared = [_place(entry) for entry in (plan.best_split, plan.best_unsplit) if entry is not None]
    usd, kw = (
        max(_FARTHEST_FRONT * min(one[end] for one in places), *(one[end] for one in compared)) for end in (0, 1)
    )
    return usd, kw


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5)


def _write(axes: Any, labels: dict[tuple[float, float], list[int]], best: set[int]) -> None:
    """Write ranks next to markers, without covering another rank or a marker; without room, write nothing."""
    axes.figure.draw_without_rendering()  # places in points are known only once the panel has its size
    point = axes.figure.dpi / 72
    markers = {place: axes.transData.transform(place) / point for place in labels}
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in markers.values()]
    for place, ranks in sorted(labels.items(), key=lambda item: min(item[1])):
        text = ", ".join(map(str, ranks))
        wide = _CHARACTER * len(text)
        for across, up in _OFFSETS:
            x, y = markers[place]
            left = x + across - (0 if across > 0 else wide if across < 0 else wide / 2)
            box = (left, y + up - 1, left + wide, y + up + _LINE - 1)
            others = [one for one in taken if one[:2] != (x - 6, y - 6)]
            if not any(_touch(box, one) for one in others):
                taken.append(box)
                axes.annotate(
                    text,
                    place,
                    xytext=(across, up),
                    textcoords="offset points",
                    ha="left" if across > 0 else "right" if across < 0 else "center",
                    color=colour("ink" if best & set(ranks) else "faint"),
                    fontweight="bold" if best & set(ranks) else "normal",
                )
                break


def _touch(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def front_line(plan: Plan) -> str:
    """Return which designs no other beats, in words."""
    holding = [entry for entry in plan.entries if entry.found.holds]
    if not holding:
        return "There is no design to compare."
    ranks = unbeaten(plan)
    if len(holding) == 1:
        return "One design keeps the SLO."
    some = ", ".join(map(str, ranks))
    return f"Numbers are ranks. Beaten by none in cost, power and capacity on the first seed at once (strong): {some}."


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


_MOST_BARS = 6
_FARTHEST = 3.0
_LONGEST_NAME = 48


def draw_misses(axes: Any, plan: Plan) -> None:
    """Draw how many times over its limit each design is, the nearest first."""
    known = [entry for entry in plan.entries if entry.found.bottleneck is not None or entry.found.miss is not None]
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


def _in_bar(entry: RankedDesign) -> str:
    found = entry.found
    if found.bottleneck is not None:
        return found.bottleneck.resource.partition(",")[0]
    return found.miss[1].bottleneck if found.miss is not None else ""


_POOLS = ("prefill", "decode", "unsplit")
"""Pools, each with a colour of its name."""
_MOST_SHOWN = 1.3
_NEAR_LINE = 0.82


def draw_bottlenecks(axes: Any, plan: Plan) -> None:
    """Draw the share of each resource that each pool of the winner needs at the least."""
    bottlenecks = plan.bottlenecks
    pools = [pool for pool in _POOLS if any(pool in bottleneck.where for bottleneck in bottlenecks)]
    title(axes, "Resources needed, at the least", [(pool, pool) for pool in pools])
    if not bottlenecks:
        note(axes, "No design keeps the SLO." if plan.best is None else "Not looked at.")
        return
    rows = list(range(len(bottlenecks), 0, -1))
    for row, bottleneck in zip(rows, bottlenecks, strict=True):
        tint = next((pool for pool in pools if pool in bottleneck.where), "ink")
        shown = min(bottleneck.share, _MOST_SHOWN)
        axes.barh(row, shown, height=0.62, color=colour(tint))
        text = "∞" if isinf(bottleneck.share) else readable.percent(bottleneck.share)
        right = max(shown, 1.0 if shown > _NEAR_LINE else 0.0)
        axes.text(right + 0.02, row, text, va="center", fontsize=6.5)
    axes.axvline(1.0, color=colour("ink"), linewidth=1.0)
    axes.set(xlim=(0, _MOST_SHOWN + 0.2), ylim=(0.4, len(bottlenecks) + 0.6), xlabel="share of what the pool has")
    axes.set_xticks([0, 0.5, 1.0], labels=["0", "50 %", "100 %"])
    axes.set_yticks(rows, labels=[bottleneck.resource for bottleneck in bottlenecks])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def bottlenecks_line(plan: Plan) -> str:
    """Return which bottleneck the winner is nearest to, in words."""
    if not plan.bottlenecks:
        return "No winner whose resources could be looked at."
    nearest = max(plan.bottlenecks, key=lambda bottleneck: bottleneck.share)
    share = "more than there is" if isinf(nearest.share) else readable.percent(nearest.share)
    line = f"Nearest to its bottleneck: {nearest.resource} of {nearest.where}, {share}."
    best = plan.best
    if best is not None and best.capacity is not None and best.capacity.bottleneck:
        line += f" Above the capacity breaks first: {best.capacity.bottleneck}."
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


_LEAST_LATENCIES = 3


@dataclass(frozen=True, slots=True)
class PlanPanel:
    """One panel.

    Attributes:
        name: In one word, for identifiers.
        draw: Draws it onto axes.
        caption: One sentence that says what to see.
    """

    name: str
    draw: Callable[[Any], None]
    caption: str


def choice_panels(plan: Plan) -> list[PlanPanel]:
    """Return the map around the winner and the front of all designs."""
    return [
        PlanPanel("map", lambda axes: draw_map(axes, plan), map_line(plan)),
        PlanPanel("front", lambda axes: draw_front(axes, plan), front_line(plan)),
    ]


def miss_panel(plan: Plan) -> PlanPanel:
    """Return how far each design is from keeping the SLO, for a plan without a winner."""
    return PlanPanel("misses", lambda axes: draw_misses(axes, plan), nearest(plan))


def next_panels(plan: Plan) -> list[PlanPanel]:
    """Return what the winner runs out of, and what one more of each buys."""
    return [
        PlanPanel("bottlenecks", lambda axes: draw_bottlenecks(axes, plan), bottlenecks_line(plan)),
        PlanPanel("gains", lambda axes: draw_gains(axes, plan), gains_line(plan)),
    ]


def crossover_panels(plan: Plan) -> list[PlanPanel]:
    """Return one panel for each thing that is varied."""
    return [_crossover(plan, axis) for axis in Axis]


def latency_panels(plan: Plan, result: Result | None) -> list[PlanPanel]:
    """Return the distribution of each metric that the SLO limits, at least three, and all limits in one panel."""
    found = [_latency(plan, result, metric) for metric in latency_metrics(plan)]
    return [*found, PlanPanel("slo", lambda axes: _draw_slo(axes, result), _slo_line(result))]


def latency_metrics(plan: Plan) -> list[str]:
    """Return the metrics that the SLO limits, in its order, and others to make it three."""
    limited = list(dict.fromkeys(limit.metric for limit in plan.problem.slo.limits))
    families = {metric.partition("_")[0] for metric in limited}
    more = [metric for metric in ("ttft_s", "itl_s", "e2e_s") if metric.partition("_")[0] not in families]
    return limited + more[: max(0, _LEAST_LATENCIES - len(limited))]


def map_line(plan: Plan) -> str:
    """Return what the map around the winner shows, in words."""
    best = plan.best
    if best is None or not has_map(plan):
        return "There is no map of counts around the winner's."
    keep = sum(answer.holds for answer in plan.grid.values())
    seed, rate = plan.problem.seeds[0], readable.number(best.rate_per_s)
    line = f"{keep} of {readable.counted(len(plan.grid), 'cluster')} tried keep the SLO at {rate}/s on seed {seed}."
    if len(best.design.slots) != 2:
        return line
    measure = iso_measure(plan)
    own = amount(measure, best.taken[measure])
    return (
        f"{line} Thick: the border of what keeps it. Boxed: the winner. "
        f"Thin: equal {MEASURE_NAMES[measure]}, solid at the winner's {own}."
    )


def _latency(plan: Plan, result: Result | None, metric: str) -> PlanPanel:
    name = "Share of the limits taken" if metric == GOODPUT_RATIO else readable.metric_name(metric)
    of = "gaps" if metric == "itl_s" else "requests"

    def draw(axes: Any) -> None:
        if result is None:
            title(axes, name)
            note(axes, "No design keeps the SLO." if plan.best is None else "The winner was not simulated in full.")
            return
        draw_latency(axes, metric, metric_of(result, metric), name=name, of=of, limits=plan.problem.slo.limits)

    return PlanPanel(metric.replace("_", "-"), draw, _latency_line(plan, result, metric))


def _latency_line(plan: Plan, result: Result | None, metric: str) -> str:
    if result is None or not metric_of(result, metric).count:
        return f"{readable.metric_name(metric)}: nothing to show."
    values = metric_of(result, metric)
    parts = []
    for limit in plan.problem.slo.limits:
        if limit.metric == metric:
            value = values.quantile(limit.percentile / 100)
            parts.append(f"p{limit.percentile:g} {readable.against(metric, value, limit.below)}")
    if not parts:
        parts = [f"p{100 * q:g} {readable.measure(metric, values.quantile(q))}" for q in (0.5, 0.99)]
    kind = " over the same request alone on the reference machine" if is_slowdown(metric) else ""
    return f"{readable.metric_name(metric)}{kind}: {', '.join(parts)}."


def _draw_slo(axes: Any, result: Result | None) -> None:
    if result is None or result.slo is None:
        title(axes, "Limits of the SLO")
        note(axes, "Nothing was simulated in full.")
        return
    draw_slo(axes, result.slo)


def _slo_line(result: Result | None) -> str:
    if result is None or result.slo is None or not result.slo.findings:
        return "There is nothing to compare with limits."
    broken = sum(not finding.holds for finding in result.slo.findings)
    limits = readable.counted(len(result.slo.findings), "limit")
    return f"All {limits} hold." if not broken else f"{broken} of {limits} broken."


def _crossover(plan: Plan, axis: Axis) -> PlanPanel:
    name = f"flip-{axis.name.lower()}"
    return PlanPanel(name, lambda axes: draw_crossover(axes, plan, axis), crossover_line(plan, axis))
