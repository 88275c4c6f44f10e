"""Why a design is not in the ranking, and what came nearest where none is: in words."""

from math import inf, isfinite

from phasesplit.planner.designs import counts_text
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.problem import UNITS, Measure, Problem


def refusal(problem: Problem, entry: RankedDesign) -> str:
    """Return why a design is not in the ranking, "" if it is."""
    found = entry.found
    if found.holds:
        return ""
    if found.bottleneck is not None:
        resource, where, share = found.bottleneck.resource, found.bottleneck.where, found.bottleneck.share
        if resource in list(Measure):
            return f"{where} takes {share:.3g} times the {resource} there may be ({_bounds_text(problem)})"
        return f"{resource} {where} takes {share:.3g} times the limit"
    if not found.complete:
        return "interrupted before anything was found that keeps the SLO"
    if any(problem.offers[number].variant_of for _, number in entry.design.slots):
        return "nothing better than with the machines as asked for"
    if found.miss is not None:
        counts, answer = found.miss
        much = f" at {answer.worst:.3g} times the limit" if isfinite(answer.worst) else ""
        return f"{counts_text(problem, entry.design, counts)}: {answer.bottleneck}{much}"
    if found.least:
        least = counts_text(problem, entry.design, found.least)
        return f"takes {least} at the least, beyond {_bounds_text(problem)}"
    return f"keeps the SLO at no rate within {_bounds_text(problem)}"


def nearest_miss(plan: Plan) -> str:
    """Return in one sentence what comes nearest to the SLO where no design keeps it, and what binds there."""
    problem = plan.problem
    rate = "" if problem.objective is None else f" at {problem.traffic.rate_per_s:,.3g} requests/s"
    head = f"no design keeps the SLO {problem.slo.name}{rate}"
    if not plan.entries:
        return head
    nearest = min(plan.entries, key=distance)
    return f"{head}; nearest is {nearest.design.name}: {refusal(problem, nearest)}"


def distance(entry: RankedDesign) -> float:
    """Return how many times over its limit a refused design is: at its bottleneck, or at its nearest miss."""
    found = entry.found
    if found.bottleneck is not None:
        return found.bottleneck.share
    return inf if found.miss is None else found.miss[1].worst


def _bounds_text(problem: Problem) -> str:
    budgets = [f"{most:,.6g} {UNITS[measure]}" for measure, most in problem.budgets.items()]
    if problem.machines_exist:
        return "the machines that exist"
    return " and ".join(budgets) or f"{problem.most_servers:,} servers"
