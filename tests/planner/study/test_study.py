"""The published provisioning study: its cases, the ablation from published to right, and what it finds."""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.pool import InThisProcess
from phasesplit.planner.probe import Question
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.study.ablation import (
    A100,
    CAPPED,
    COST_OPTIMAL,
    DEFAULT,
    H100,
    NOTHING,
    PAPER_POWER,
    REPORTED,
    RERUN,
    RERUN_STEP_PER_S,
    TAGS,
    AblationStep,
    Stock,
    beside_paper,
    changes,
    effective,
    independent,
    problem_at,
    why,
    why_bursty,
)
from phasesplit.planner.study.parts import parts
from phasesplit.planner.study.reproduce_command import load_stock
from phasesplit.planner.study.reproduction import Findings, StudyProgress, ablation_steps_of, reproduce
from phasesplit.planner.study.study import (
    BLOOM,
    CODING,
    CONVERSATION,
    ISO_COST,
    ISO_POWER,
    LAYOUTS,
    LLAMA,
    Ask,
    Bench,
    Case,
    Place,
    held,
    taken,
)
from phasesplit.scheduler.rules import Rules
from planner.study.studies import LESS_AT_EACH_STEP, PER_MACHINE_PER_S, MadeUp, made_up_findings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stock() -> Stock:
    return load_stock()


@pytest.fixture(scope="module")
def minute(stock: Stock) -> Bench:
    """Return the study as the published simulator was run again: a minute of requests, one seed."""
    return Bench(stock, 60.0, (0,))


def at(stock: Stock, ablation_step: AblationStep, model: str = BLOOM) -> Problem:
    return problem_at(stock, ablation_step, CONVERSATION, model, rate_per_s=70.0, duration_s=60.0, seeds=(0,))


def rate_held(bench: Bench, case: Case, ablation_step: AblationStep) -> float:
    search: Any = held(bench, case, ablation_step, bench.seeds)
    workers: Any = InThisProcess(bench)
    return float(drive({0: search}, workers, MemoryJournal())[0])


def test_published_step_is_the_published_setting(stock: Stock) -> None:
    """The first column would not be the published study: other rules, times, arrivals or lengths."""
    problem = at(stock, AblationStep.PUBLISHED)
    assert problem.rules == Rules.as_published()
    for offer, name in zip(problem.offers, (A100, H100, CAPPED), strict=True):
        assert offer.times is stock.published[BLOOM, name]
    assert problem.reference is stock.published[BLOOM, A100]
    trace = problem.traffic.trace(70.0, 0)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)
    assert trace.output_tokens.min() >= 2


def test_default_step_is_the_default(stock: Stock) -> None:
    """The second column would not be what phasesplit says by default."""
    problem = at(stock, DEFAULT)
    assert problem.rules == Rules()
    assert problem.model is stock.models[BLOOM]
    assert problem.traffic.source is stock.workloads[CONVERSATION]
    for offer, name in zip(problem.offers, (A100, H100, CAPPED), strict=True):
        assert offer.times is stock.right[BLOOM, name]
        assert offer.machine == replace(stock.machines[name], provisioned_w=offer.machine.provisioned_w)


def test_only_the_last_step_is_bursty(stock: Stock) -> None:
    """Burstiness would be mixed up with other corrections, or real arrivals would be Poisson too."""
    trace = problem_at(
        stock, AblationStep.BURSTY, CODING, BLOOM, rate_per_s=70.0, duration_s=600.0, seeds=(0,)
    ).traffic.trace(70.0, 0)
    gaps = np.diff(trace.arrival_s)
    assert gaps.std() / gaps.mean() > 4
    assert all(
        at(stock, ablation_step).traffic.arrivals is not None
        for ablation_step in AblationStep
        if ablation_step < AblationStep.BURSTY
    )


@pytest.mark.parametrize("ablation_step", [AblationStep.DECODE, AblationStep.CONTEXT, AblationStep.TIMES])
def test_token_times_by_batch_are_the_measured_ones(stock: Stock, ablation_step: AblationStep) -> None:
    """A correction to token times would not be the measurement: 63.8 ms for 64 requests of 512 tokens on DGX-H100."""
    times = at(stock, ablation_step).offers[1].times
    assert float(times.decode_time_s(64, 64 * 512)) == pytest.approx(63.8e-3, rel=0.01)
    looked_up = at(stock, AblationStep.PUBLISHED).offers[1].times
    assert float(looked_up.decode_time_s(64, 0)) == pytest.approx(35.53e-3, rel=1e-3)


def test_kv_of_grouped_heads_is_right_from_its_step_on(stock: Stock) -> None:
    """The effect of grouped-query attention would be lost or booked elsewhere."""
    assert at(stock, AblationStep.SCHEDULER, LLAMA).model.kv_bytes_per_token == 2_621_440
    assert at(stock, AblationStep.GQA, LLAMA).model.kv_bytes_per_token == 327_680


def test_steps_that_change_nothing_are_not_run(minute: Bench) -> None:
    """The study would take longer than it must, or skip a step that matters."""
    assert AblationStep.CHUNKED not in ablation_steps_of(minute, "HH", LLAMA)
    assert AblationStep.TRANSFER not in ablation_steps_of(minute, "H100", LLAMA)
    assert AblationStep.GQA in ablation_steps_of(minute, "HH", LLAMA)
    assert AblationStep.GQA not in ablation_steps_of(minute, "HH", BLOOM)
    assert effective(AblationStep.GQA, split=True, grouped=False) == AblationStep.SCHEDULER
    assert effective(AblationStep.CHUNKED, split=False, grouped=False) == AblationStep.CHUNKED


def test_independent_lengths_keep_the_marginals(stock: Stock) -> None:
    """The published lengths would have another distribution, or still the pairs of the trace."""
    joint = stock.workloads[CONVERSATION].lengths
    apart = independent(joint)
    assert np.average(apart.prompt_tokens, weights=apart.requests) == np.average(
        joint.prompt_tokens, weights=joint.requests
    )
    assert apart.mean_output_tokens == pytest.approx(joint.mean_output_tokens, rel=1e-3)
    weights = apart.requests.astype(float)
    assert abs(np.cov(apart.prompt_tokens, apart.output_tokens, fweights=apart.requests)[0, 1]) < 0.02 * math.sqrt(
        np.cov(apart.prompt_tokens, aweights=weights) * np.cov(apart.output_tokens, aweights=weights)
    )


@pytest.mark.parametrize("workload", [CODING, CONVERSATION])
def test_clusters_of_equal_power(workload: str) -> None:
    """A cluster would be mistyped: the published notebook fills up what the prefill machines leave of 40 DGX-H100."""
    for layout, counts in ISO_POWER[workload].items():
        used = sum(n * PAPER_POWER[name] for n, name in zip(counts, LAYOUTS[layout], strict=True))
        last = PAPER_POWER[LAYOUTS[layout][-1]]
        assert used <= 40 * PAPER_POWER[H100] < used + 2 * last


def test_clusters_of_equal_price(stock: Stock) -> None:
    """A cluster would be mistyped: none may cost more than 40 DGX-H100."""
    for layout, counts in ISO_COST.items():
        cost = taken(stock, layout, counts, Measure.COST)
        assert 0.99 * 40 * 38.08 <= cost <= 40 * 38.08


def test_published_figures_name_their_source(stock: Stock) -> None:
    """A figure would be printed as published although nobody knows where from."""
    for part in parts(made_up_findings()):
        for row in part.rows:
            assert row.published.tag in TAGS or row.published == NOTHING


@pytest.mark.parametrize("layout", RERUN)
def test_published_setting_meets_the_rerun(minute: Bench, layout: str) -> None:
    """Setting `published` would not give the published simulator's throughput to within a step of its grid."""
    rate = rate_held(minute, Case(layout, ISO_POWER[CONVERSATION][layout], CONVERSATION), AblationStep.PUBLISHED)
    on_grid = rate // RERUN_STEP_PER_S * RERUN_STEP_PER_S
    assert abs(on_grid - RERUN[layout].number) <= RERUN_STEP_PER_S


def test_published_optimum_is_about_the_least(minute: Bench) -> None:
    """The paper's cheapest cluster would not keep the SLO, or one of 20 % fewer machines would."""
    place = Place(AblationStep.PUBLISHED, CODING, BLOOM)
    design = minute.design("HH", place)
    answers = {counts: minute(Ask(place, Question(design, counts, 70.0, 0))) for counts in ((27, 3), (21, 3), (22, 2))}
    assert [answer.holds for answer in answers.values()] == [True, False, False]


def test_decode_time_takes_most_of_the_published_throughput(minute: Bench) -> None:
    """The study's first finding would not show: right token times cost DGX-A100 decode machines half their rate."""
    case = Case("AA", ISO_POWER[CONVERSATION]["AA"], CONVERSATION)
    ablated_steps = {
        ablation_step: rate_held(minute, case, ablation_step)
        for ablation_step in (AblationStep.PUBLISHED, AblationStep.DECODE)
    }
    assert -0.6 < changes(ablated_steps)[0].share < -0.4


def test_changes_are_taken_one_after_the_other() -> None:
    """A correction would be credited with what another one did."""
    ablated_steps = {
        AblationStep.PUBLISHED: 100.0,
        AblationStep.DECODE: 50.0,
        AblationStep.CHUNKED: 51.0,
        DEFAULT: 61.2,
        AblationStep.BURSTY: 30.6,
    }
    assert [(one.ablation_step, round(one.share, 6)) for one in changes(ablated_steps)] == [
        (AblationStep.DECODE, -0.5),
        (AblationStep.CHUNKED, 0.02),
        (DEFAULT, 0.2),
        (AblationStep.BURSTY, -0.5),
    ]
    assert why(ablated_steps) == "decode time grows with the batch -50 %; joint lengths +20 %"
    assert why_bursty(ablated_steps) == "real burstiness -50 %"
    assert "no correction" in why({AblationStep.PUBLISHED: 100.0, DEFAULT: 101.0})


def test_nothing_is_said_beside_a_figure_that_is_not_known() -> None:
    """A comparison with a figure that nobody published would be made up."""
    assert beside_paper(NOTHING, 50.0, (49.0, 51.0)) == ""
    assert "within one step" in beside_paper(RERUN["H100"], 117.0, (117.0, 119.0), RERUN_STEP_PER_S)
    assert "beyond one step" in beside_paper(RERUN["H100"], 99.0, (), RERUN_STEP_PER_S)


def test_whole_study_over_made_up_simulations() -> None:
    """A row would be missing, or would show another cluster's figure."""
    found = made_up_findings()
    shown = {part.title[:2].rstrip("."): part for part in parts(found)}
    assert list(shown) == ["1", "2a", "2b", "3", "4", "5a", "5b", "6a", "6b", "7"]
    first = shown["2a"].rows[0]
    assert first.what == "Baseline-A100 70"
    assert first.ours[AblationStep.PUBLISHED].number == pytest.approx(70 * PER_MACHINE_PER_S, rel=0.011)
    assert first.ours[AblationStep.BURSTY].number == pytest.approx(
        70 * PER_MACHINE_PER_S * (1 - LESS_AT_EACH_STEP), rel=0.011
    )
    ratio = next(row for row in shown["2a"].rows if row.what == "Splitwise-AA / Baseline-A100")
    assert ratio.ours[AblationStep.PUBLISHED].number == pytest.approx(1.0, rel=0.02)
    optimum = shown["1"].rows[0]
    assert optimum.published == COST_OPTIMAL
    assert optimum.ours[AblationStep.PUBLISHED].number == pytest.approx(
        math.ceil(70 / PER_MACHINE_PER_S + 0.01) * 38.08
    )
    for part in shown.values():
        for row in part.rows:
            assert row.ours
            assert set(row.ours) <= set(REPORTED)
            assert row.why


def test_quick_study_leaves_out_only_published_divisions() -> None:
    """A quick study would lose rows that are no slower than the others."""
    whole, quick = parts(made_up_findings()), parts(made_up_findings(thorough=False))
    assert [[row.what for row in part.rows] for part in whole] == [[row.what for row in part.rows] for part in quick]
    for before, after in zip(whole, quick, strict=True):
        for row, other in zip(before.rows, after.rows, strict=True):
            assert dict(row.ours) == dict(other.ours) or "divided anew" in row.what


def test_bench_travels_without_what_it_has_drawn(minute: Bench) -> None:
    """Workers in other processes would be sent traces by the megabyte, or other problems."""
    import pickle

    packed = pickle.dumps(minute)
    assert len(packed) < 2_000_000
    other = pickle.loads(packed)  # noqa: S301 - packed a moment ago
    place = Place(AblationStep.PUBLISHED, CODING, BLOOM)
    ask = Ask(place, Question(minute.design("HH", place), (27, 3), 20.0, 0))
    assert other(ask) == minute(ask)


def test_progress_counts_searches_to_their_end(stock: Stock) -> None:
    """A person would see a study that is never done, or done before it is."""
    steps: list[StudyProgress] = []
    reproduce(Bench(stock, 60.0, (0,)), MadeUp(), steps.append, thorough=False)
    assert [step.questions for step in steps] == list(range(1, len(steps) + 1))
    assert all(before.done <= after.done for before, after in pairwise(steps))
    assert 0.9 * steps[-1].searches <= steps[-1].done <= steps[-1].searches
    assert steps[0].done == 0


def test_row_that_hangs_on_little_says_so() -> None:
    """A figure that 5 % of a limit would double, or that jumps by itself, would be read as sound."""
    sound = made_up_findings()
    doubled = replace(sound, loose={key: 2 * rate for key, rate in sound.loose.items()})
    case = Case("HHcap", ISO_POWER[CODING]["HHcap"], CONVERSATION)
    jumping = replace(
        sound, rates=sound.rates | {(case, AblationStep.JOINT): 2 * sound.rates[case, AblationStep.JOINT]}
    )

    def sensitive(found: Findings) -> set[str]:
        return {row.what for part in parts(found) for row in part.rows if "is sensitive" in " ".join(row.why)}

    assert sensitive(sound) == set()
    assert "Baseline-A100 70" in sensitive(doubled)
    assert sensitive(jumping) == {"Splitwise-HHcap 35P 7T against 25P 21T"}
