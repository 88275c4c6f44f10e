"""`phasesplit.plan`, from a question to a plan."""

from pathlib import Path
from typing import Any

import pytest

import phasesplit
from phasesplit.errors import InfeasibleError, SpecError, WorkerLostError
from phasesplit.planner import provision
from phasesplit.planner.drift import Day
from phasesplit.planner.plan import Plan
from phasesplit.planner.problem_file import read_problem
from phasesplit.planner.provision import make_plan, simulate_days
from refusals import assert_refused

SMALL: dict[str, Any] = {
    "model": "llama-3.1-70b", "machines": ["dgx-h100"], "workload": "azure-conversation", "rate": 4, "duration": 20,
    "seeds": 1,
}  # fmt: skip


def answer(plan: Plan) -> list[tuple[Any, ...]]:
    return [(entry.design.name, entry.found.counts, entry.found.value, entry.capacity) for entry in plan.entries]


def test_a_plan_takes_one_call() -> None:
    """A notebook would have to put readers, workers and searches together by itself."""
    plan = phasesplit.plan(**SMALL, workers=1, thorough=False)
    assert plan.best is not None
    assert plan.best.cluster is not None
    result = phasesplit.simulate(plan.best.cluster, phasesplit.load_workload("azure-conversation").trace(4, 20))
    assert result.statuses["completed"] == result.requests


def test_workers_do_not_change_a_plan() -> None:
    """The answer would hang on how many cores a machine has."""
    asked = read_problem(None, SMALL)
    one = make_plan(asked, workers=1, thorough=False)
    two = make_plan(asked, workers=2, thorough=False)
    assert answer(one) == answer(two)
    assert one.verdict == two.verdict


def test_a_plan_that_goes_on_simulates_nothing_again(tmp_path: Path) -> None:
    """An interrupted plan would begin from the start, or come out otherwise."""
    asked = read_problem(None, SMALL)
    journal = tmp_path / "journal"
    steps: list[int] = []
    first = make_plan(asked, workers=1, resume=journal)
    written = journal.read_bytes()
    again = make_plan(asked, workers=1, resume=journal, on_step=lambda step: steps.append(step.questions))
    assert steps == []
    assert answer(first) == answer(again)
    assert first.points == again.points
    assert first.gains == again.gains
    assert journal.read_bytes() == written


def test_equal_throughput_is_that_of_the_baseline() -> None:
    """The comparison would be at a rate that the baseline does not hold."""
    values = {name: value for name, value in SMALL.items() if name != "rate"}
    asked = read_problem(None, {**values, "preset": "iso-throughput", "baseline": "3:dgx-h100"})
    plan = make_plan(asked, workers=1, thorough=False)
    chunked = next(entry for entry in plan.entries if entry.design.name == "unsplit, chunked prompts: dgx-h100")
    assert chunked.found.counts == (3,)
    assert plan.problem.traffic.rate_per_s == pytest.approx(chunked.capacity.rate_per_s, rel=0.03)


def test_no_design_is_an_error_that_names_the_nearest_miss() -> None:
    """A program would go on with no cluster, and not know why."""
    with pytest.raises(InfeasibleError) as caught:
        phasesplit.plan(**SMALL, slo="ttft_p50<1ms", workers=1)
    assert_refused(caught.value, "SLO", "nearest", "the limit")


def test_a_wrong_field_is_named_as_the_program_wrote_it() -> None:
    """The message would speak of options to somebody who gave arguments."""
    with pytest.raises(SpecError) as caught:
        phasesplit.plan(**{**SMALL, "machines": ["dgx-h10"]})
    assert_refused(caught.value, "machines", "'dgx-h10'")


def test_workers_do_not_change_the_days_of_a_plan() -> None:
    """What a day takes would hang on how many cores a machine has, or days come in any order."""
    asked = read_problem(None, {**SMALL, "rate": 0.3, "duration": 60, "day": True})
    made = make_plan(asked, workers=1, thorough=False)
    found = []
    for workers in (1, 2):
        reported: list[Day] = []
        simulate_days(made, asked, workers=workers, on_day=reported.append)
        assert sorted(reported, key=made.days.index) == made.days
        found.append(made.days)
    assert len(found[0]) == 8
    assert found[0] == found[1]


def test_a_lost_worker_leaves_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of planning would be thrown away because a day took too much memory."""
    asked = read_problem(None, {**SMALL, "rate": 0.3, "duration": 60, "day": True})
    made = make_plan(asked, workers=1, thorough=False)

    def lost(*_: Any) -> Day:
        raise WorkerLostError("a worker process was ended by signal 9")

    monkeypatch.setattr(provision, "simulate_day", lost)
    simulate_days(made, asked, workers=1)
    assert (made.days, made.days_complete) == ([], False)
    assert made.day_notes == ["a worker process was ended by signal 9"]
