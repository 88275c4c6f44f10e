"""The panels of a plan, in the order in which they are read: each draws itself onto axes and says what to see."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phasesplit.domain.slo import GOODPUT_RATIO, is_slowdown
from phasesplit.figures import readable
from phasesplit.figures.latency import draw_latency, draw_slo
from phasesplit.figures.panels import metric_of
from phasesplit.figures.plan_crossover import crossover_line, draw_crossover
from phasesplit.figures.plan_front import draw_front, front_line
from phasesplit.figures.plan_map import draw_map, has_map, iso_measure
from phasesplit.figures.plan_misses import draw_misses
from phasesplit.figures.plan_walls import draw_gains, draw_walls, gains_line, walls_line
from phasesplit.figures.plan_words import MEASURE_NAMES, amount, nearest
from phasesplit.figures.style import note, title
from phasesplit.planning.plan import Plan
from phasesplit.planning.sensitivity import Axis
from phasesplit.simulation.result import Result

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
        PlanPanel("walls", lambda axes: draw_walls(axes, plan), walls_line(plan)),
        PlanPanel("gains", lambda axes: draw_gains(axes, plan), gains_line(plan)),
    ]


def crossover_panels(plan: Plan) -> list[PlanPanel]:
    """Return one panel for each thing that is bent."""
    return [_crossover(plan, axis) for axis in Axis]


def latency_panels(plan: Plan, result: Result | None) -> list[PlanPanel]:
    """Return the distribution of each metric that the SLO limits, at least three, and the limits beside one another."""
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
