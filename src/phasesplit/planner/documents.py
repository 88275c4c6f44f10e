"""A plan as JSON can hold it, and its winner as a cluster file."""

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from phasesplit._version import __version__
from phasesplit.domain.slo import SPLITWISE
from phasesplit.io.policies import policy_text
from phasesplit.io.rule_settings import rules_from, rules_settings
from phasesplit.planner.days import day_verdict
from phasesplit.planner.designs import rules_for
from phasesplit.planner.drift import Day
from phasesplit.planner.misses import refusal
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import UNITS, Measure
from phasesplit.planner.sensitivity import Axis, flips
from phasesplit.planner.sources import MachineSources, sources_content
from phasesplit.simulator.result import Result

if TYPE_CHECKING:
    from phasesplit.io.schema import ClusterSpec
    from phasesplit.planner.question import Asked


def winner_result(plan: Plan) -> Result | None:
    """Return the winner's simulation on the first seed, with every metric; None where nothing keeps the SLO."""
    best = plan.best
    if best is None:
        return None
    question = Question(best.design, best.found.counts, best.rate_per_s, plan.problem.seeds[0])
    return Prober(plan.problem).result(question)


def plan_summary(
    plan: Plan, elapsed_s: float, result: Result | None, sources: tuple[MachineSources, ...] = ()
) -> dict[str, Any]:
    """Return what a plan says, in base units, as JSON can hold it; what is not defined is None.

    Args:
        plan: The plan.
        elapsed_s: How long it took.
        result: What `winner_result` returns.
        sources: What `plan_sources` returns.
    """
    problem, best = plan.problem, plan.best
    entries = [_entry(plan, entry) for entry in plan.entries]
    summary = {
        "best": None if best is None else {**entries[0], "slowdowns": _slowdowns(result), "binding": _binding(plan)},
        "verdict": None if plan.verdict is None else {**asdict(plan.verdict), "spread": plan.verdict.spread},
        "candidates": entries,
        "sensitivity": [_axis(plan, axis) for axis in Axis if any(point.axis == axis for point in plan.points)],
        "gains": [{**asdict(gain), "share": gain.rate_per_s / gain.base_per_s - 1} for gain in plan.gains],
        "bottlenecks": [asdict(bottleneck) for bottleneck in plan.bottlenecks],
        "pareto": pareto_designs(plan),
        "days": [_day(plan, day) for day in plan.days],
        "day_verdict": " ".join(day_verdict(plan)) or None,
        "day_notes": plan.day_notes,
        "days_complete": plan.days_complete,
        "model": problem.model.name,
        "traffic": problem.traffic.name,
        "rate_per_s": problem.traffic.rate_per_s if problem.objective is not None else None,
        "duration_s": problem.traffic.duration_s,
        "slo": problem.slo.name,
        "objective": "rate" if problem.objective is None else str(problem.objective),
        "budgets": {str(measure): most for measure, most in problem.budgets.items()},
        "seeds": list(problem.seeds),
        "rules": rules_settings(problem.rules),
        "times_sources": {offer.machine.name: offer.times.source for offer in problem.offers},
        "link_sources": {offer.machine.name: offer.machine.link_source for offer in problem.offers},
        "sources": sources_content(sources),
        "reference_times_source": problem.reference.source if problem.reference is not None else None,
        "questions": plan.questions,
        "complete": plan.complete,
        "elapsed_s": elapsed_s,
        "version": __version__,
    }
    finite: dict[str, Any] = _finite(summary)
    return finite


def pareto_designs(plan: Plan) -> list[str]:
    """Return the designs that no other beats in cost, power and rate at once."""
    return [entry.design.name for entry in plan.unbeaten]


def cluster_spec(plan: Plan, asked: "Asked") -> "ClusterSpec":
    """Return the winner as a cluster file has it, its rules included.

    Args:
        plan: A plan with a winner.
        asked: Its question, which knows how machines and model were written.
    """
    from phasesplit.io.schema import ClusterSpec, PoolSpec

    best = plan.best
    assert best is not None and best.cluster is not None  # noqa: S101, PT018 - asked by the caller
    rules = rules_for(plan.problem, best.design.kind)
    usual = rules_settings(rules_from({"published": rules.published}))
    settings = {name: value for name, value in rules_settings(rules).items() if value != usual[name]}
    if best.design.kind.is_split:
        settings.pop("unsplit_batching", None)  # no machine would use it
    if rules.published:
        settings = {"published": True, **settings}
    return ClusterSpec(
        name=best.cluster.name[:200],
        model=asked.model,
        pools=tuple(
            PoolSpec(role=pool.role, count=pool.count, machine=asked.written[pool.machine.name])
            for pool in best.cluster.pools
        ),
        rules=settings,
    )


def _entry(plan: Plan, entry: RankedDesign) -> dict[str, Any]:
    found, problem = entry.found, plan.problem
    shown: dict[str, Any] = {
        "design": entry.design.name,
        "kind": str(entry.design.kind),
        "machines": [problem.offers[number].machine.name for _, number in entry.design.slots],
        "holds": found.holds,
        "probes": found.probes,
        "complete": found.complete,
    }
    if not found.holds or entry.cluster is None:
        miss = None
        if found.miss is not None:
            counts, answer = found.miss
            miss = {
                "counts": counts,
                "bottleneck": answer.bottleneck,
                "worst": answer.worst,
                "slo": _limits(plan, [answer.values]),
            }
        return {**shown, "refused": refusal(problem, entry), "nearest_miss": miss}
    return {
        **shown,
        "pools": [
            {
                "role": str(pool.role),
                "machine": pool.machine.name,
                "count": pool.count,
                "servers": pool.count / pool.machine.instances_per_server,
            }
            for pool in entry.cluster.pools
        ],
        "objective": abs(found.value),
        "objective_unit": "requests/s" if problem.objective is None else UNITS[problem.objective],
        "capacity_per_s": entry.capacity.rate_per_s if entry.capacity is not None else None,
        "rate_per_s": entry.rate_per_s,
        "cost_usd_per_hour": entry.taken[Measure.COST],
        "provisioned_power_w": entry.taken[Measure.POWER],
        "energy_w": entry.taken[Measure.ENERGY],
        "kg_co2e_per_hour": entry.taken[Measure.CARBON],
        "servers": entry.taken[Measure.MACHINES],
        "slo": _limits(plan, [answer.values for answer in found.answers]),
        "nearest_limit": max(found.answers, key=lambda answer: answer.worst).bottleneck if found.answers else None,
        "nearest_limit_share": max((answer.worst for answer in found.answers), default=None),
        "capacity_per_seed_per_s": [one.rate_per_s for one in entry.per_seed],
    }


def policy_name(day: Day) -> str:
    """Return a policy as its person wrote it, or the name of a fitted one."""
    return day.written or day.policy.name


def policy_setting(day: Day) -> str:
    """Return what `phasesplit simulate --autoscale` takes for the policy of a day."""
    return day.written or policy_text(day.policy)


def _day(plan: Plan, day: Day) -> dict[str, Any]:
    left_out = ("design", "policy", "written")
    return {
        "design": day.design.name,
        "machines": [plan.problem.offers[number].machine.name for _, number in day.design.slots],
        "policy": day.policy.name,
        "autoscale": policy_setting(day),
        "fitted": not day.written,
        **{one.name: getattr(day, one.name) for one in fields(day) if one.name not in left_out},
    }


def _limits(plan: Plan, by_seed: list[tuple[float, ...]]) -> list[dict[str, Any]]:
    """Return each limit with its value on each seed."""
    return [
        {
            "metric": limit.metric,
            "percentile": limit.percentile,
            "below": limit.below,
            "value": max(values),
            "values": values,
        }
        for limit, values in zip(plan.problem.slo.limits, zip(*by_seed, strict=True), strict=False)
    ]


def _slowdowns(result: Result | None) -> dict[str, float] | None:
    """Return the nine slowdowns of the paper, whatever the SLO is; None without a reference."""
    if result is None or SPLITWISE.limits[0].metric not in result.metrics:
        return None
    return {
        f"{limit.metric.removesuffix('_slowdown')}_p{limit.percentile:g}": result.metrics[limit.metric].quantile(
            limit.percentile / 100
        )
        for limit in SPLITWISE.limits
    }


def _binding(plan: Plan) -> dict[str, Any]:
    best = plan.best
    bottleneck = max(plan.bottlenecks, key=lambda one: one.share, default=None)
    return {
        "breaks_first": best.capacity.bottleneck if best is not None and best.capacity is not None else None,
        "resource": None if bottleneck is None else asdict(bottleneck),
    }


def _axis(plan: Plan, axis: Axis) -> dict[str, Any]:
    points = [point for point in plan.points if point.axis == axis]
    shown = [
        {"factor": one.factor, "split": one.split, "unsplit": one.unsplit, "advantage": one.advantage} for one in points
    ]
    return {"axis": str(axis), "points": shown, "flips": flips(points)}


def _finite(value: Any) -> Any:
    """Return a value with None in place of every number that is none."""
    if isinstance(value, Mapping):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
