"""The cases of the published provisioning study as data, and the searches that measure each of them."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from phasesplit.domain.money import WORLD_GRID_KG_PER_KWH
from phasesplit.domain.slo import Slo
from phasesplit.planner.capacity import capacity
from phasesplit.planner.designs import Counts, Design, DesignKind, design
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.probe import UNSERVED, Answer, Prober, Question, limit_name
from phasesplit.planner.problem import AS_ASKED, Measure, Problem, Variation, of_one
from phasesplit.planner.search import CountSearch, Found, RateSearch
from phasesplit.planner.study.ablation import A100, CAPPED, H100, MACHINES, AblationStep, Stock, problem_at

CODING, CONVERSATION = "azure-coding", "azure-conversation"
BLOOM, LLAMA = "bloom-176b", "llama2-70b"

LAYOUTS: dict[str, tuple[str, ...]] = {
    "A100": (A100,),
    "H100": (H100,),
    "AA": (A100, A100),
    "HH": (H100, H100),
    "HA": (H100, A100),
    "HHcap": (H100, CAPPED),
}
"""Machines of the designs: one type unsplit, or prefill machines and decode machines."""

SPLITS = tuple(name for name, machines in LAYOUTS.items() if len(machines) == 2)

ISO_POWER: dict[str, dict[str, Counts]] = {
    CODING: {"A100": (70,), "H100": (40,), "AA": (55, 15), "HH": (35, 5), "HA": (35, 8), "HHcap": (35, 7)},
    CONVERSATION: {"A100": (70,), "H100": (40,), "AA": (45, 25), "HH": (25, 15), "HA": (25, 26), "HHcap": (25, 21)},
}
"""The paper's clusters of the power of 40 DGX-H100. Source: Splitwise, table of section VI."""

ISO_COST: dict[str, Counts] = {
    "A100": (86,), "H100": (40,), "AA": (51, 35), "HH": (25, 15), "HA": (30, 21), "HHcap": (30, 10),
}  # fmt: skip
"""The paper's clusters of the price of 40 DGX-H100, for conversation. Source: Splitwise, table of section VI."""

CODING_RATE_PER_S = 70.0
PAPER_OPTIMUM: Counts = (27, 3)
_BATCH_OVERLOAD = 2.0
"""Factor on the rate that no cluster can exceed: at twice of it most requests wait from the start."""
_MIDDLE = (0.25, 0.75)
"""Share of the requests between which the rate is taken: neither filling up nor draining counts."""


class Case(NamedTuple):
    """A cluster, and what it serves.

    Attributes:
        layout: A key of LAYOUTS.
        counts: Machines of each of its types.
        workload: Name of the workload.
        model: Name of the model.
    """

    layout: str
    counts: Counts
    workload: str
    model: str = BLOOM

    @property
    def name(self) -> str:
        """As the paper calls it, with its counts."""
        return named(self.layout, self.counts)


class Place(NamedTuple):
    """Which problem a question is about.

    Attributes:
        ablation_step: What is right.
        workload: Name of the workload.
        model: Name of the model.
    """

    ablation_step: AblationStep
    workload: str
    model: str


class Ask(NamedTuple):
    """A question about one of the study's problems.

    Attributes:
        place: Which problem.
        question: The question.
        backlog: Ask not whether the SLO is kept but how many requests a second an endless backlog is served at.
    """

    place: Place
    question: Question
    backlog: bool = False


@dataclass(slots=True, eq=False)
class Bench:
    """The study's problems, and what answers questions about them.

    Attributes:
        stock: What they are made of.
        duration_s: Length of each simulated trace.
        seeds: Seeds of the traces.
    """

    stock: Stock
    duration_s: float
    seeds: tuple[int, ...]
    _probers: dict[Place, Prober] = field(init=False, repr=False, default_factory=dict)
    _lower_bounds: dict[Place, LowerBounds] = field(init=False, repr=False, default_factory=dict)

    def __reduce__(self) -> tuple[type["Bench"], tuple[Stock, float, tuple[int, ...]]]:
        return Bench, (self.stock, self.duration_s, self.seeds)

    def prober(self, place: Place) -> Prober:
        """Return what answers questions about a problem."""
        if place not in self._probers:
            self._probers[place] = Prober(
                problem_at(
                    self.stock,
                    place.ablation_step,
                    place.workload,
                    place.model,
                    rate_per_s=CODING_RATE_PER_S,
                    duration_s=self.duration_s,
                    seeds=self.seeds,
                )
            )
        return self._probers[place]

    def problem(self, place: Place) -> Problem:
        """Return a problem."""
        return self.prober(place).problem

    def lower_bounds(self, place: Place) -> LowerBounds:
        """Return the bounds of a problem."""
        if place not in self._lower_bounds:
            self._lower_bounds[place] = LowerBounds(self.problem(place))
        return self._lower_bounds[place]

    def design(self, layout: str, place: Place) -> Design:
        """Return the design of a layout in a problem."""
        machines = LAYOUTS[layout]
        kind = (
            DesignKind.ELASTIC
            if len(machines) == 2
            else DesignKind.CHUNKED
            if place.ablation_step >= AblationStep.CHUNKED
            else DesignKind.WHOLE
        )
        return design(self.problem(place), kind, [MACHINES.index(name) for name in machines])

    def __call__(self, ask: Ask) -> Any:
        """Return the Answer to a question or, for a backlog, the requests served a second."""
        prober = self.prober(ask.place)
        if not ask.backlog:
            answer = prober(ask.question)
            if prober.problem.rules.published:
                return _by_limits_alone(answer, prober.problem.slo.scaled(ask.question.variation.tightness))
            return answer
        columns = prober.result(ask.question, keep_all=False).columns
        assert columns is not None  # noqa: S101 - rows are kept by default
        ends_s = np.sort(columns["arrival_s"] + columns["e2e_s"])
        first, last = (int(share * ends_s.size) for share in _MIDDLE)
        return float((last - first) / (ends_s[last] - ends_s[first]))


def _by_limits_alone(answer: Answer, slo: Slo) -> Answer:
    """Return an answer as the published study gives it: it looks at the nine slowdowns, not at backlogs."""
    if answer.holds or answer.bottleneck == UNSERVED:
        return answer
    shares = [value / limit.below for value, limit in zip(answer.values, slo.limits, strict=True)]
    worst = max(shares)
    return answer._replace(holds=worst < 1, worst=worst, bottleneck=limit_name(slo.limits[shares.index(worst)]))


Searching = Generator[Sequence[Ask], Sequence[Any], Any]


def held(
    bench: Bench, case: Case, ablation_step: AblationStep, seeds: tuple[int, ...], tightness: float = 1.0
) -> Searching:
    """Find the highest rate at which a cluster keeps the nine slowdowns, times a factor, on all seeds."""
    place = Place(ablation_step, case.workload, case.model)
    search = capacity(
        bench.lower_bounds(place),
        bench.design(case.layout, place),
        case.counts,
        seeds,
        variation=Variation(tightness=tightness),
    )
    found = yield from routed(place, search)
    return found.rate_per_s


def cheapest(
    bench: Bench,
    layout: str,
    workload: str,
    ablation_step: AblationStep,
    rate_per_s: float,
    measure: Measure = Measure.COST,
) -> Searching:
    """Find the counts of a layout that take least of a measure and keep the nine slowdowns at a rate."""
    place = Place(ablation_step, workload, BLOOM)
    count_search = CountSearch(
        problem=bench.problem(place),
        lower_bounds=bench.lower_bounds(place),
        design=bench.design(layout, place),
        rate_per_s=rate_per_s,
        measure=measure,
        variation=AS_ASKED,
        seeds=bench.seeds,
    )
    found: Found = yield from routed(place, count_search.run())
    return found.counts


def divided(bench: Bench, layout: str, workload: str, ablation_step: AblationStep) -> Searching:
    """Find how a layout within the power of 40 DGX-H100 is best divided: its counts and the rate that they hold."""
    place = Place(ablation_step, workload, BLOOM)
    problem = bench.problem(place)
    budget_w = 40 * problem.offers[MACHINES.index(H100)].machine.provisioned_w
    within = replace(problem, objective=None, budgets={Measure.POWER: budget_w})
    search = RateSearch(
        problem=within, lower_bounds=bench.lower_bounds(place), design=bench.design(layout, place), seeds=bench.seeds
    )
    found: Found = yield from routed(place, search.run())
    return found.counts, (-found.value if found.holds else 0.0)


def as_fast_as_unsplit(
    bench: Bench, workload: str, ablation_step: AblationStep, wanted: Sequence[tuple[str, Measure]]
) -> Searching:
    """Find the rate of 40 unsplit DGX-H100 and, of each layout, the counts that hold it and take least of a measure."""
    rate_per_s = yield from held(bench, Case("H100", (40,), workload), ablation_step, bench.seeds)
    counts = {}
    for layout, measure in wanted:
        counts[layout, measure] = yield from cheapest(bench, layout, workload, ablation_step, rate_per_s, measure)
    return rate_per_s, counts


def backlog(bench: Bench, case: Case, ablation_step: AblationStep) -> Searching:
    """Find the requests served a second, latencies of no concern, when more wait than can be served; mean of seeds."""
    place = Place(ablation_step, case.workload, case.model)
    asked = bench.design(case.layout, place)
    rate_per_s = _BATCH_OVERLOAD * bench.lower_bounds(place).rate_per_s(asked, case.counts)
    served = yield [Ask(place, Question(asked, case.counts, rate_per_s, seed), backlog=True) for seed in bench.seeds]
    return float(np.mean(served))


def drawn_w(bench: Bench, case: Case, ablation_step: AblationStep, rate_per_s: float) -> Searching:
    """Find the power that a cluster draws at a rate, in watts; mean of seeds."""
    place = Place(ablation_step, case.workload, case.model)
    asked = bench.design(case.layout, place)
    answers = yield [Ask(place, Question(asked, case.counts, rate_per_s, seed)) for seed in bench.seeds]
    return float(np.mean([answer.energy_w for answer in answers]))


def one_question(bench: Bench, case: Case) -> Ask:
    """Return a small question, for whoever wants the simulator compiled."""
    place = Place(AblationStep.PUBLISHED, case.workload, case.model)
    return Ask(place, Question(bench.design(case.layout, place), case.counts, 1.0, bench.seeds[0]))


def routed(place: Place, search: Generator[Sequence[Question], Sequence[Any], Any]) -> Searching:
    """Run a search whose questions are about one of the problems."""
    try:
        questions = next(search)
        while True:
            answers = yield [Ask(place, question) for question in questions]
            questions = search.send(answers)
    except StopIteration as end:
        return end.value


def taken(stock: Stock, layout: str, counts: Counts, measure: Measure) -> float:
    """Return what a cluster takes of a measure, by the nameplate."""
    machines = (stock.machines[name] for name in LAYOUTS[layout])
    return sum(
        count * of_one(measure, machine, WORLD_GRID_KG_PER_KWH) for count, machine in zip(counts, machines, strict=True)
    )


def named(layout: str, counts: Counts) -> str:
    """Return a cluster's name as the paper writes it."""
    if len(LAYOUTS[layout]) == 1:
        return f"Baseline-{layout} {counts[0]}" if counts else f"Baseline-{layout}"
    return f"Splitwise-{layout} {pool_text(counts)}" if counts else f"Splitwise-{layout}"


def pool_text(counts: Counts) -> str:
    """Return counts as the paper writes them."""
    return f"{counts[0]}P {counts[1]}T" if len(counts) == 2 else f"{counts[0]}" if counts else "none"
