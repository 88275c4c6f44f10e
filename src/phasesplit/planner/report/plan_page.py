"""A plan as one HTML file: split or not, which machines, why, what would change the answer, and its days."""

from collections.abc import Sequence
from html import escape
from math import isnan
from pathlib import Path
from typing import Any

from phasesplit._version import __version__
from phasesplit.domain.money import JOULES_PER_KWH
from phasesplit.io.compression import write_bytes
from phasesplit.planner.capacity import TOLERANCE
from phasesplit.planner.days import day_unit, day_verdict, taken
from phasesplit.planner.designs import counts_text
from phasesplit.planner.documents import policy_name, policy_setting
from phasesplit.planner.plan import Plan
from phasesplit.planner.report import plan_tables
from phasesplit.planner.report.plan_panels import (
    PlanPanel,
    choice_panels,
    crossover_panels,
    has_map,
    latency_panels,
    miss_panel,
    next_panels,
    points_of,
)
from phasesplit.planner.report.plan_tables import MEASURE_NAMES, amount, asked, heading, verdict_lines
from phasesplit.planner.search import EXACT_CELLS, RESOLUTION
from phasesplit.planner.sensitivity import Axis
from phasesplit.planner.sources import MachineSources
from phasesplit.report import readable
from phasesplit.report.page import (
    Cell,
    Drawing,
    Markup,
    Value,
    banner,
    colour,
    drawings,
    inline_svg,
    page,
    paragraph,
    section,
    side_by_side,
    table,
    terms,
    tiles,
    title,
)
from phasesplit.simulator.result import Result

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
    for row, day, length in zip(rows, plan.days, amounts, strict=True):
        tint = colour(sides[day.design.kind.is_split][1])
        axes.barh(
            row,
            length,
            height=0.62,
            facecolor=tint if day.holds else "none",
            edgecolor=tint,
            hatch="" if day.holds else "////",
            linewidth=0.7,
        )
        missed = "" if isnan(day.missed_share) else f", {readable.percent(day.missed_share)} missed"
        axes.text(length + 0.02 * scale, row, f"{readable.number(length)}{missed}", va="center")
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


PLAN_GLOSSARY = (
    ("split", "prefill phase and decode phase on different machines; the KV moves between them"),
    (
        "static, elastic",
        "pools that stay what they are; pools whose machines help the other one out as load spills over",
    ),
    ("unsplit", "machines that do both phases of their requests throughout"),
    (
        "chunked, whole prompts",
        "prompts computed in pieces, in the same iterations as decode; or one after the other, before decode",
    ),
    ("capacity", "the highest rate at which a cluster keeps the SLO on the seeds"),
    ("slowdown", "a latency over that of the same request alone on the reference machine"),
    (
        "TTFT, ITL, E2E",
        "time to first token; inter-token latency, the gap between two tokens; time from arrival to last token",
    ),
    ("SLO", "service-level objective: limits on percentiles, all of which must hold"),
    ("provisioned power", "what must be reserved for the machines, whatever they draw"),
    ("CO₂e", "greenhouse gases of the electricity drawn and of making the machines"),
    ("HBM, KV", "the memory of the accelerators; the keys and values of all tokens so far, which lie in it"),
    ("bottleneck", "a resource of which more is needed than there is, or a limit that an idle machine already breaks"),
)
"""Words of the report."""


def write_plan_html(
    plan: Plan, result: Result | None, path: str | Path, *, sources: Sequence[MachineSources] = ()
) -> None:
    """Write a plan as one HTML file that needs no network; the same plan gives the same bytes.

    Args:
        plan: What was found, perhaps not complete.
        result: The winner, simulated with every metric on the first seed; None where there is none.
        path: Where to.
        sources: Phase times of the best designs' machines, by source.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, plan_report(plan, result, sources).encode())


def plan_report(plan: Plan, result: Result | None, sources: Sequence[MachineSources] = ()) -> str:
    """Return a plan as an HTML page; arguments as of `write_plan_html`."""
    blocks = [*_verdict(plan), *_winner(plan), section("All designs", *_designs(plan))]
    if plan.best is not None:
        blocks += [
            section(
                "Around the winner, and the other designs", _drawn(choice_panels(plan)[0 if has_map(plan) else 1 :])
            ),
            section("Latencies of the winner", *_latencies(plan, result)),
            section("What the winner hits next", *_next(plan)),
            section("Where the verdict flips", *_flips(plan)),
            *([section("Over a day", *days)] if (days := days_blocks(plan)) else []),
        ]
    blocks += [
        section("Where the phase times come from", plan_tables.sources(plan), *_compared(sources)),
        section("What this rests on", terms(_limits(plan))),
        section("Words", terms(PLAN_GLOSSARY)),
    ]
    return page(f"Plan for {plan.problem.model.name}", asked(plan.problem), blocks, f"phasesplit {__version__}")


def _verdict(plan: Plan) -> list[Markup]:
    found = []
    if not plan.complete:
        line = f"Ended after {readable.counted(plan.questions, 'simulation')}: better designs may not have been tried."
        found.append(banner("Interrupted: this plan is not complete", [line], alarm=True))
    found.append(banner(heading(plan), verdict_lines(plan), alarm=plan.best is None))
    return found


def _winner(plan: Plan) -> list[Markup]:
    best, problem = plan.best, plan.problem
    if best is None:
        return []
    entries = [(MEASURE_NAMES[measure], Value(best.taken[measure], amount(measure, best.taken[measure])))
               for measure in MEASURE_NAMES]  # fmt: skip
    if problem.objective is None:
        entries.append(("highest rate", Value(best.rate_per_s, amount(None, best.rate_per_s))))
    else:
        entries.append(("rate asked for", Value(best.rate_per_s, amount(None, best.rate_per_s))))
    if best.capacity is not None:
        held = best.capacity.rate_per_s
        entries.append(("capacity", Value(held, amount(None, held))))
        if problem.objective is not None:
            headroom = held / best.rate_per_s - 1
            entries.append(("headroom", Value(headroom, readable.percent(max(headroom, 0.0)))))
    pools = counts_text(problem, best.design, best.found.counts)
    return [paragraph(f"Best: {pools} ({best.design.kind})", "verdict"), tiles(entries)]


def _designs(plan: Plan) -> list[Markup]:
    found = []
    if plan.best is not None:
        found.append(plan_tables.ranking(plan))
    elif plan.entries:
        found.append(_drawn([miss_panel(plan)]))
    if any(not entry.found.holds for entry in plan.entries):
        found.append(plan_tables.refused(plan))
    if any(entry.per_seed for entry in plan.entries):
        found.append(plan_tables.seeds(plan))
    return found or [paragraph("No design was looked at.")]


def _latencies(plan: Plan, result: Result | None) -> list[Markup]:
    if result is None:
        return [paragraph("The winner was not simulated with every metric.")]
    rate = f"{readable.number(result.rate_per_s)} requests/s in the trace that was drawn"
    asked_for = f"{readable.number(plan.best.rate_per_s)}/s as its mean" if plan.best is not None else "another mean"
    found = [paragraph(f"On seed {plan.problem.seeds[0]}: {rate}, with {asked_for}.", "note")]
    return [*found, _drawn(latency_panels(plan, result))]


def _next(plan: Plan) -> list[Markup]:
    if not plan.bottlenecks and not plan.gains:
        return [paragraph("Not looked at.")]
    return [_drawn(next_panels(plan)), side_by_side(plan_tables.bottlenecks(plan), plan_tables.gains(plan))]


def _flips(plan: Plan) -> list[Markup]:
    if not plan.points:
        return [paragraph(crossover_panels(plan)[-1].caption)]
    shown = [panel for panel, axis in zip(crossover_panels(plan), Axis, strict=True) if points_of(plan, axis)]
    return [_drawn(shown), plan_tables.sensitivity(plan)]


def _compared(sources: Sequence[MachineSources]) -> list[Markup]:
    found = []
    if any(one.rows for one in sources):
        found.append(paragraph("The same iterations by every source that covers them:"))
        found.append(plan_tables.compared(sources))
    for one in sources:
        reasons = "; ".join(f"{name}: {why}" for name, why in one.absent.items())
        if reasons:
            known = " and ".join(one.described)
            found.append(paragraph(f"{one.machine}: times by {known} alone. {reasons}.", "note"))
    return found


def _drawn(panels: Sequence[PlanPanel]) -> Markup:
    return drawings(
        Drawing(Markup(inline_svg(panel.name, escape(panel.caption), panel.draw)), panel.caption) for panel in panels
    )


def _limits(plan: Plan) -> list[tuple[str, str]]:
    problem, traffic = plan.problem, plan.problem.traffic
    requests = traffic.rate_per_s * traffic.duration_s
    seeds = ", ".join(map(str, problem.seeds))
    return [
        (
            "traces",
            f"Each simulated trace is finite: {readable.seconds(traffic.duration_s)}, about "
            f"{readable.counted(round(requests), 'request')}. Rarer bursts than it holds are not seen.",
        ),
        ("seeds", f"Drawn with seeds {seeds}. A design keeps the SLO only if it does on each of them; at every rate a "
                  "seed gives the same requests, so that designs differ by themselves and not by luck."),
        ("SLO", "A run in which a request is refused, is left unfinished, or a backlog grows keeps no SLO."),
        ("search", f"Up to {EXACT_CELLS} candidate counts are all tried. Beyond, more machines are taken never to "
                   f"break an SLO that fewer keep, and what is better by less than {100 * RESOLUTION:g} % is left."),
        ("capacity", f"Found to within {100 * TOLERANCE:g} %: for the best split and the best unsplit design "
                     "on every seed, for others on the first."),
        ("flips", "The points are simulated on the first seed alone."),
        ("bottlenecks", "Shares are safe lower bounds: what they refuse no simulation would keep, what they allow may "
                        "fail."),
        ("money, power, carbon", f"List prices, provisioned power and lifetimes of the machine files; electricity at "
                                 f"{readable.number(problem.grid_kg_per_kwh)} kg CO₂e/kWh."),
        ("simulations", f"{plan.questions:,} in this run."),
    ]  # fmt: skip
