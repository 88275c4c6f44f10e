"""Designs by what they cost and what power they need: those that no other beats, and the rest."""

from typing import Any

from phasesplit.figures import readable
from phasesplit.figures.style import colour, note, title
from phasesplit.planning.objective import Measure
from phasesplit.planning.plan import Entry, Plan

_LEAST_AREA, _MOST_AREA = 25.0, 190.0
_OFFSETS = ((7, 5), (7, -11), (-7, 5), (-7, -11), (0, 11), (0, -17), (15, 13), (-15, 13), (15, -21), (-15, -21))
"""Where a label may stand, in points from its marker, the best place first."""
_FARTHEST = 2.0
"""Times the least cost or power; what takes more, and more than the best of each kind, is named, not drawn."""
_LONGEST_NOTE = 28
_MOST_BARS = 8
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


def _draw_rates(axes: Any, holding: list[Entry], names: list[tuple[str, str]]) -> None:
    """Draw the capacity of designs that all take the same: there is nothing else to tell them apart."""
    title(axes, "Capacity, at the same cost and power", names)
    shown = holding[:_MOST_BARS]
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


def _place(entry: Entry) -> tuple[float, float]:
    """Return cost and power, in kW, so rounded that the same machines added up in another order are in one place."""
    return round(entry.taken[Measure.COST], 6), round(entry.taken[Measure.POWER] / 1e3, 6)


def _farthest(plan: Plan, places: list[tuple[float, float]]) -> tuple[float, float]:
    """Return up to where designs are shown: as far as what the verdict compares, the rest without crowding it."""
    compared = [_place(entry) for entry in (plan.best_split, plan.best_unsplit) if entry is not None]
    usd, kw = (max(_FARTHEST * min(one[end] for one in places), *(one[end] for one in compared)) for end in (0, 1))
    return usd, kw


def _few() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(5)


def _write(axes: Any, labels: dict[tuple[float, float], list[int]], best: set[int]) -> None:
    """Write ranks beside markers where they cover neither one another nor a marker; where there is no room, nothing."""
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
