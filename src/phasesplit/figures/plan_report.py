"""A plan as one HTML file: split or not, which machines, why, and what would change the answer."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from phasesplit._version import __version__
from phasesplit.figures import plan_tables, readable
from phasesplit.figures.page import (
    Drawing,
    Markup,
    Value,
    banner,
    beside,
    drawings,
    page,
    paragraph,
    section,
    terms,
    tiles,
)
from phasesplit.figures.plan_crossover import points_of
from phasesplit.figures.plan_days import days_blocks
from phasesplit.figures.plan_map import has_map
from phasesplit.figures.plan_panels import (
    PlanPanel,
    choice_panels,
    crossover_panels,
    latency_panels,
    miss_panel,
    next_panels,
)
from phasesplit.figures.plan_words import MEASURE_NAMES, amount, asked, heading, verdict_lines
from phasesplit.figures.svg import inline_svg
from phasesplit.files.compression import write_bytes
from phasesplit.files.plan_sources import MachineSources
from phasesplit.planning.capacity import TOLERANCE
from phasesplit.planning.designs import counts_text
from phasesplit.planning.plan import Plan
from phasesplit.planning.search import EXACT_CELLS, RESOLUTION
from phasesplit.planning.sensitivity import Axis
from phasesplit.simulation.result import Result

PLAN_GLOSSARY = (
    ("split", "prompt phase and token phase on different machines; the KV moves between them"),
    (
        "static, elastic",
        "pools that stay what they are; pools whose machines help the other one out as load spills over",
    ),
    ("unsplit", "machines that do both phases of their requests throughout"),
    ("chunked, whole prompts", "prompts computed in pieces beside the token phase; or one after the other, first"),
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
    ("wall", "a resource of which more is needed than there is, or a limit that an idle machine already breaks"),
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
            section("Around the winner, and beside it", _drawn(choice_panels(plan)[0 if has_map(plan) else 1 :])),
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
    if not plan.walls and not plan.gains:
        return [paragraph("Not looked at.")]
    return [_drawn(next_panels(plan)), beside(plan_tables.walls(plan), plan_tables.gains(plan))]


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
        ("walls", "Shares are safe lower bounds: what they refuse no simulation would keep, what they allow may fail."),
        ("money, power, carbon", f"List prices, provisioned power and lifetimes of the machine files; electricity at "
                                 f"{readable.number(problem.grid_kg_per_kwh)} kg CO₂e/kWh."),
        ("simulations", f"{plan.questions:,} in this run."),
    ]  # fmt: skip
