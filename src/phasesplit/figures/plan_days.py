"""A plan's days: what each policy takes on the best split and the best unsplit design, and who missed the SLO."""

from collections.abc import Sequence
from html import escape
from math import isnan
from typing import Any

from phasesplit.domain.money import JOULES_PER_KWH
from phasesplit.figures import readable
from phasesplit.figures.page import Cell, Drawing, Markup, Value, drawings, paragraph, table
from phasesplit.figures.style import colour, title
from phasesplit.figures.svg import inline_svg
from phasesplit.files.plans import policy_name, policy_setting
from phasesplit.planning.days import day_unit, day_verdict, taken
from phasesplit.planning.designs import counts_text
from phasesplit.planning.plan import Plan

_LONGEST = 22
_ROOM = 1.75


def days_blocks(plan: Plan) -> list[Markup]:
    """Return what the report says of the days; nothing where none were asked for."""
    found: list[Markup] = []
    if plan.days:
        caption = "Filled: the SLO is kept over the day. Hatched: it is broken."
        svg = Markup(inline_svg("days", escape(caption), lambda axes: draw_days(axes, plan)))
        found += [paragraph(" ".join(day_verdict(plan))), drawings([Drawing(svg, caption)]), _table(plan)]
    notes = [*plan.day_notes, *(() if plan.days_complete else ("Interrupted: days are missing.",))]
    return [*found, *(paragraph(note, "note") for note in notes)]


def draw_days(axes: Any, plan: Plan) -> None:
    """Draw what each day takes, a bar for each policy."""
    sides = {True: ("split", "transfer"), False: ("unsplit", "unsplit")}
    title(axes, "A day under each policy", [sides[one] for one in sides if one in _kinds(plan)])
    amounts = [taken(plan.problem, day) for day in plan.days]
    scale = max(amounts) or 1.0
    rows = list(range(len(amounts), 0, -1))
    for row, day, amount in zip(rows, plan.days, amounts, strict=True):
        tint = colour(sides[day.design.kind.is_split][1])
        axes.barh(
            row,
            amount,
            height=0.62,
            facecolor=tint if day.holds else "none",
            edgecolor=tint,
            hatch="" if day.holds else "////",
            linewidth=0.7,
        )
        missed = "" if isnan(day.missed_share) else f", {readable.percent(day.missed_share)} missed"
        axes.text(amount + 0.02 * scale, row, f"{readable.number(amount)}{missed}", va="center")
    axes.set(xlim=(0, _ROOM * scale), ylim=(0.4, len(rows) + 0.6), xlabel=f"{day_unit(plan.problem)} over the day")
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= scale])
    axes.set_yticks(rows, labels=[readable.shortened(policy_name(day), _LONGEST) for day in plan.days])
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _table(plan: Plan) -> Markup:
    rows: list[Sequence[Cell]] = [
        (
            f"{counts_text(plan.problem, day.design, day.counts)}: {policy_setting(day)}",
            Value(day.machine_hours, readable.number(day.machine_hours)),
            Value(day.usd, readable.usd(day.usd)),
            Value(day.energy_j / JOULES_PER_KWH, f"{readable.number(day.energy_j / JOULES_PER_KWH)} kWh"),
            Value(day.kg_co2e, readable.carbon(day.kg_co2e)),
            Value(day.changes, readable.number(day.changes)),
            _share(day.missed_share),
            _share(day.worst_hour_share),
            Value(float("nan"), "kept" if day.holds else "broken", broken=not day.holds),
        )
        for day in plan.days
    ]
    columns = ("design: policy", "machine-hours", "money", "energy", "CO₂e", "starts, stops", "missed the SLO",
               "in the worst hour", "SLO over the day")  # fmt: skip
    return table(columns, rows)


def _share(share: float) -> Value:
    return Value(share, readable.NONE if isnan(share) else readable.percent(share))


def _kinds(plan: Plan) -> set[bool]:
    return {day.design.kind.is_split for day in plan.days}
