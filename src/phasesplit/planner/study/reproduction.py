"""Runs the published provisioning study: all its searches over one set of workers."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from phasesplit.planner.designs import Counts
from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.problem import Measure
from phasesplit.planner.study.ablation import DEFAULT, REPORTED, AblationStep, effective
from phasesplit.planner.study.study import (
    BLOOM,
    CODING,
    CODING_RATE_PER_S,
    CONVERSATION,
    ISO_COST,
    ISO_POWER,
    LAYOUTS,
    LLAMA,
    PAPER_OPTIMUM,
    SPLITS,
    Bench,
    Case,
    Searching,
    as_fast_as_unsplit,
    backlog,
    cheapest,
    divided,
    drawn_w,
    held,
)

WANTED = (
    ("A100", Measure.COST),
    ("AA", Measure.COST),
    ("HH", Measure.COST),
    ("HA", Measure.COST),
    ("HA", Measure.POWER),
    ("HHcap", Measure.POWER),
)
"""What is sized for the throughput of the unsplit cluster: layout, and what it is to take least of.

With one type of machine, the cheapest cluster also takes least power; a capped DGX-H100 costs what others cost.
"""

STEADY = (AblationStep.PUBLISHED, DEFAULT)
"""Rungs at which clusters are divided anew and sized anew: the conversation workload is hardly bursty."""


LOOSER = 1.05
"""Factor on all limits, to see whether a capacity is sensitive to them: past some rate latencies hardly grow."""

_TOGETHER = 24


class StudyProgress(NamedTuple):
    """How far the study is.

    Attributes:
        done: Searches at their end.
        searches: All searches.
        questions: Simulations so far.
    """

    done: int
    searches: int
    questions: int


@dataclass(slots=True, eq=False)
class Findings:
    """What the searches found.

    Attributes:
        bench: What was asked.
        rates: Highest rate of a cluster at a step.
        loose: The same at the steps of REPORTED with all limits LOOSER times as high.
        per_seed: The same in setting `published`, on each seed alone.
        optimum: Cheapest Splitwise-HH for coding at CODING_RATE_PER_S, by step.
        division: Counts and rate of a layout divided anew, by layout, workload and step.
        fast: Rate of the unsplit cluster and counts that match it, by step.
        batch: Requests/s from a backlog, by case and step up to the default's (arrivals do not matter then).
        drawn_w: Power drawn by CAP_CASES at CAP_RATE_PER_S.
        questions: Simulations that were run.
    """

    bench: Bench
    rates: dict[tuple[Case, AblationStep], float] = field(default_factory=dict)
    loose: dict[tuple[Case, AblationStep], float] = field(default_factory=dict)
    per_seed: dict[Case, tuple[float, ...]] = field(default_factory=dict)
    optimum: dict[AblationStep, Counts] = field(default_factory=dict)
    division: dict[tuple[str, str, AblationStep], tuple[Counts, float]] = field(default_factory=dict)
    fast: dict[AblationStep, tuple[float, dict[tuple[str, Measure], Counts]]] = field(default_factory=dict)
    batch: dict[tuple[Case, AblationStep], float] = field(default_factory=dict)
    drawn_w: dict[Case, float] = field(default_factory=dict)
    questions: int = 0

    def ablated_steps(self, case: Case) -> dict[AblationStep, float]:
        """Return the highest rate of a cluster at every step."""
        return {
            ablation_step: self.rates[case, self._effective(case.layout, case.model, ablation_step)]
            for ablation_step in AblationStep
        }

    def batch_steps(self, case: Case) -> dict[AblationStep, float]:
        """Return the requests/s from a backlog at every step up to the default's."""
        ablation_steps = [ablation_step for ablation_step in AblationStep if ablation_step <= DEFAULT]
        return {
            ablation_step: self.batch[case, self._effective(case.layout, case.model, ablation_step)]
            for ablation_step in ablation_steps
        }

    def optima(self) -> dict[AblationStep, Counts]:
        """Return the cheapest Splitwise-HH at every step."""
        return {
            ablation_step: self.optimum[self._effective("HH", BLOOM, ablation_step)] for ablation_step in AblationStep
        }

    def _effective(self, layout: str, model: str, ablation_step: AblationStep) -> AblationStep:
        return ablation_step_of(self.bench, layout, model, ablation_step)


def iso_power_cases(workload: str) -> list[Case]:
    """Return the clusters of equal power."""
    return [Case(layout, counts, workload) for layout, counts in ISO_POWER[workload].items()]


def iso_cost_cases() -> list[Case]:
    """Return the clusters of equal price."""
    return [Case(layout, counts, CONVERSATION) for layout, counts in ISO_COST.items()]


def foreign_cases() -> list[Case]:
    """Return the conversation workload on the clusters that were sized for coding."""
    return [Case(layout, ISO_POWER[CODING][layout], CONVERSATION) for layout in SPLITS]


def llama_cases() -> list[Case]:
    """Return Llama2-70B on the clusters that were sized for BLOOM-176B."""
    return [Case(layout, counts, CONVERSATION, LLAMA) for layout, counts in ISO_POWER[CONVERSATION].items()]


CAP_CASES = tuple(Case(layout, ISO_POWER[CONVERSATION]["HH"], CONVERSATION) for layout in ("HH", "HHcap"))
"""The same machines, decode machines without and with a power cap."""

CAP_RATE_PER_S = 60.0

PAPER_OPTIMUM_CASE = Case("HH", PAPER_OPTIMUM, CODING)


def ablation_step_of(bench: Bench, layout: str, model: str, ablation_step: AblationStep) -> AblationStep:
    """Return the last step up to this one that changes anything for a layout and a model."""
    served = bench.stock.models[model]
    grouped = served.kv_heads < served.query_heads
    return effective(ablation_step, split=len(LAYOUTS[layout]) == 2, grouped=grouped)


def ablation_steps_of(bench: Bench, layout: str, model: str) -> list[AblationStep]:
    """Return the steps that change something for a layout and a model."""
    return sorted({ablation_step_of(bench, layout, model, ablation_step) for ablation_step in AblationStep})


def reproduce(
    bench: Bench, workers: Any, on_step: Callable[[StudyProgress], None] | None = None, *, thorough: bool = True
) -> Findings:
    """Run all searches of the study.

    Args:
        bench: The study's problems.
        workers: Where `bench` answers, as of `drive`.
        thorough: Divide clusters anew in setting `published` too, which takes a quarter of the time.
        on_step: Called after every simulation.

    Raises:
        Interrupted: On a KeyboardInterrupt.
    """
    findings = Findings(bench)
    searches = list(_searches(bench, thorough=thorough))
    journal = MemoryJournal()
    found: dict[Any, Any] = {}
    ended = 0

    def counted(search: Searching) -> Searching:
        nonlocal ended
        value = yield from search
        ended += 1
        return value

    def heard(_key: Hashable, _question: Any, _answer: Any) -> None:
        findings.questions += 1
        if on_step is not None:
            on_step(StudyProgress(ended, len(searches), findings.questions))

    # Not all at once: then none would end before the others, and nobody could see how far the study is.
    together = max(_TOGETHER, 4 * workers.width)
    for first in range(0, len(searches), together):
        several: dict[Any, Any] = {key: counted(search) for key, search in searches[first : first + together]}
        found |= drive(several, workers, journal, heard)
    for (table, *key), value in found.items():
        if table == "per_seed":
            case, _ = key
            findings.per_seed[case] = (*findings.per_seed.get(case, ()), value)
        else:
            getattr(findings, table)[key[0] if len(key) == 1 else tuple(key)] = value
    return findings


def _searches(bench: Bench, *, thorough: bool) -> Iterator[tuple[tuple[Any, ...], Searching]]:
    """Yield the table of `Findings` and the key that each search fills, and the search; the longest ones first."""
    for ablation_step in ablation_steps_of(bench, "HH", BLOOM):
        yield ("optimum", ablation_step), cheapest(bench, "HH", CODING, ablation_step, CODING_RATE_PER_S)
    for ablation_step in STEADY:
        yield ("fast", ablation_step), as_fast_as_unsplit(bench, CONVERSATION, ablation_step, WANTED)
        if ablation_step == AblationStep.PUBLISHED and not thorough:
            continue
        for workload in (CODING, CONVERSATION):
            for layout in SPLITS:
                yield ("division", layout, workload, ablation_step), divided(bench, layout, workload, ablation_step)
    powered = [*iso_power_cases(CODING), *iso_power_cases(CONVERSATION)]
    ablated = [*powered, *iso_cost_cases(), *foreign_cases(), *llama_cases(), PAPER_OPTIMUM_CASE]
    for case in ablated:
        for ablation_step in ablation_steps_of(bench, case.layout, case.model):
            yield ("rates", case, ablation_step), held(bench, case, ablation_step, bench.seeds)
        for ablation_step in REPORTED:
            yield ("loose", case, ablation_step), held(bench, case, ablation_step, bench.seeds, LOOSER)
    for case in powered:
        for seed in bench.seeds:
            yield ("per_seed", case, seed), held(bench, case, AblationStep.PUBLISHED, (seed,))
        for ablation_step in ablation_steps_of(bench, case.layout, case.model):
            if ablation_step <= DEFAULT:
                yield ("batch", case, ablation_step), backlog(bench, case, ablation_step)
    for case in CAP_CASES:
        yield ("drawn_w", case), drawn_w(bench, case, DEFAULT, CAP_RATE_PER_S)
    yield ("rates", CAP_CASES[1], DEFAULT), held(bench, CAP_CASES[1], DEFAULT, bench.seeds)
