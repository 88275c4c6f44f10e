"""One question to the simulator, and its answer: does a cluster keep the SLO at a rate, on one seed?"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.domain.slo import Limit
from phasesplit.planner.designs import Counts, Design, cluster_for, rules_for
from phasesplit.planner.problem import AS_ASKED, Measure, Problem, Variation, kg_per_hour
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

_TRACES_KEPT = 8
UNSERVED = "requests refused or left unfinished"
SATURATED = "a backlog that grows"
OVER_BUDGET = "budget of"
"""How the bottleneck begins where more is drawn than a budget allows."""


class Question(NamedTuple):
    """Whether a cluster keeps the SLO; small, so that it travels between processes.

    Attributes:
        design: What the machines do.
        counts: Instances of each slot.
        rate_per_s: Mean arrival rate.
        seed: Of the trace.
        variation: How the problem is varied.
    """

    design: Design
    counts: Counts
    rate_per_s: float
    seed: int
    variation: Variation = AS_ASKED


class Answer(NamedTuple):
    """What a simulation said.

    Attributes:
        holds: Every limit holds, every request was served, no backlog grew, and no more is drawn than budgets allow.
        worst: The largest value over its limit; infinite where requests were not served or a backlog grew.
        bottleneck: What is nearest to its limit, or broken: the limit as text, UNSERVED, SATURATED with what binds, or
            OVER_BUDGET with the measure.
        values: Value of each limit of the SLO, in order.
        energy_w: Power drawn: energy per request x rate.
        kg_per_hour: Greenhouse gases of that power and of the machines.
        busy_share: Busy share of each pool, in order.
        kv_share: Mean share of KV memory in use of each pool.
    """

    holds: bool
    worst: float
    bottleneck: str
    values: tuple[float, ...]
    energy_w: float
    kg_per_hour: float
    busy_share: tuple[float, ...]
    kv_share: tuple[float, ...]

    @property
    def is_over_budget(self) -> bool:
        """Whether more is drawn than a budget allows, which fewer machines may mend."""
        return not self.holds and self.bottleneck.startswith(OVER_BUDGET)


@dataclass(slots=True, eq=False)
class Prober:
    """Answers questions about one problem; keeps the traces it has drawn.

    Attributes:
        problem: The problem.
    """

    problem: Problem
    _drawn: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._drawn = lru_cache(_TRACES_KEPT)(self.problem.traffic.trace)

    def __reduce__(self) -> tuple[type["Prober"], tuple[Problem]]:
        return Prober, (self.problem,)

    def __call__(self, question: Question) -> Answer:
        """Simulate, and return what is of interest to a search."""
        return self.answer(self.result(question, keep_all=False))

    def result(self, question: Question, *, keep_all: bool = True) -> Result:
        """Return the simulation behind an answer, with every metric if wanted."""
        problem = self.problem
        varied = question.variation
        trace: Trace = self._drawn(question.rate_per_s, question.seed, varied.ratio)
        slo = problem.slo if varied.tightness == 1.0 else problem.slo.scaled(varied.tightness)
        return simulate(
            cluster_for(problem, question.design, question.counts, varied),
            trace,
            rules_for(problem, question.design.kind),
            slo=slo,
            grid_kg_per_kwh=problem.grid_kg_per_kwh,
            metrics=None if keep_all else slo.metrics,
        )

    def answer(self, result: Result) -> Answer:
        """Return what a search wants to know of a simulation."""
        verdict = result.slo
        assert verdict is not None  # noqa: S101 - a problem without a reference has no limits on slowdowns
        values = tuple(finding.value for finding in verdict.findings)
        ratios = np.array([0.0, *(f.value / f.limit.below if f.value == f.value else 0.0 for f in verdict.findings)])
        worst, bottleneck = float(ratios.max()), ""
        if len(ratios) > 1:
            bottleneck = limit_name(verdict.findings[int(ratios.argmax()) - 1].limit)
        holds = verdict.holds and result.overload is None
        if not verdict.complete:
            worst, bottleneck = float("inf"), UNSERVED
        elif result.overload is not None:
            worst, bottleneck = float("inf"), f"{SATURATED}: {result.overload.binding}"
        energy_w = result.bill.energy_j_per_request * result.rate_per_s
        embodied = result.bill.embodied_kg_co2e / max(result.bill.duration_s, 1e-9) * 3600
        kg = embodied + kg_per_hour(energy_w, self.problem.grid_kg_per_kwh)
        # What is drawn is known only now; other budgets bound the counts that are looked at.
        for measure, drawn in ((Measure.ENERGY, energy_w), (Measure.CARBON, kg)):
            share = drawn / self.problem.budgets.get(measure, float("inf"))
            if share > 1:
                holds = False
                if share > worst:
                    worst, bottleneck = share, f"{OVER_BUDGET} {measure}"
        return Answer(
            holds=holds,
            worst=worst,
            bottleneck=bottleneck,
            values=values,
            energy_w=energy_w,
            kg_per_hour=kg,
            busy_share=tuple(pool.busy_share for pool in result.pools),
            kv_share=tuple(pool.kv_share for pool in result.pools),
        )


def limit_name(limit: Limit) -> str:
    """Return how a limit reads: its metric and percentile."""
    metric = limit.metric.removesuffix("_s").replace("_", " ")
    for short in ("ttft", "itl", "e2e"):
        metric = metric.replace(short, short.upper())
    return f"{metric} p{limit.percentile:g}"


def value_of(measure: Measure, taken: float, answers: Sequence[Answer]) -> float:
    """Return how much a cluster takes of a measure: the mean over seeds for what is drawn, else what its machines take.

    Args:
        measure: The measure.
        taken: What its machines take, as `designs.nameplate` returns it.
        answers: One for each seed.
    """
    if measure == Measure.ENERGY:
        return float(np.mean([answer.energy_w for answer in answers]))
    if measure == Measure.CARBON:
        return float(np.mean([answer.kg_per_hour for answer in answers]))
    return taken
