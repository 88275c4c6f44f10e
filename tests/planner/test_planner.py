"""A plan is the same every time, says "do not split" where that is so, and is honest when it is cut short."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from phasesplit.domain.slo import Limit, Slo
from phasesplit.domain.workload import LengthTable
from phasesplit.errors import WorkerLostError
from phasesplit.planner.designs import DesignKind, design
from phasesplit.planner.plan import Plan, PlanStep
from phasesplit.planner.planner import Planner
from phasesplit.planner.probe import Answer, Prober, Question
from phasesplit.planner.problem import AS_ASKED, Measure, Problem
from phasesplit.planner.sensitivity import FACTORS, Axis, varied
from planner.problems import Answering, offer, problem, workload

SMOOTH = Slo("smooth", (Limit("ttft_s", 90.0, 2.0), Limit("itl_max_s", 90.0, 0.15)))
"""No token may wait long for the next, so prompts in the same iterations hurt."""


def table(prompt: int, output: int) -> LengthTable:
    return LengthTable(np.array([prompt], np.int32), np.array([output], np.int32), np.array([1], np.int64))


def long_prompts(**fields: Any) -> Problem:
    """Whole prompts of 400 ms between tokens that must come every 150 ms: a split keeps them apart."""
    fast = offer(decode_s=0.02, decode_s_per_request=0.004, nic_bytes_per_s=1e11)
    return problem(fast, rate=3.0, duration_s=20.0, source=workload(table(400, 20)), slo=SMOOTH, **fields)


def long_outputs(**fields: Any) -> Problem:
    """Prompts of 10 ms and outputs of 3 s: a machine for prompts alone would idle."""
    fast = offer(decode_s=0.02, decode_s_per_request=0.004, nic_bytes_per_s=1e11)
    return problem(fast, rate=4.0, duration_s=20.0, source=workload(table(10, 100)), slo=SMOOTH, **fields)


def planned(made: Problem, answer: Callable[[Question], Answer] | None = None, **options: Any) -> Plan:
    width = options.pop("width", 1)
    return Planner(problem=made, workers=Answering(answer or Prober(made), width), **options).make()


def facts(plan: Plan) -> list[Any]:
    """Return all of a plan that can be compared."""
    return [
        [
            (one.design, one.found.counts, one.found.value, one.taken, one.capacity, one.per_seed)
            for one in plan.entries
        ],
        plan.verdict,
        plan.bottlenecks,
        plan.gains,
        plan.grid,
        plan.points,
        plan.complete,
    ]


def test_it_says_split_where_prompts_hurt_the_tokens() -> None:
    """If wrong, a plan misses the case that splitting is for."""
    made = long_prompts(rules=replace(problem().rules, batch_prompt_tokens=400))
    plan = planned(made)
    assert plan.complete
    assert plan.verdict is not None
    assert plan.verdict.split
    assert plan.verdict.text.startswith("Split: ")
    assert plan.best is not None
    assert plan.best.design.kind.is_split
    assert plan.best is plan.best_split
    assert plan.gains
    assert {bottleneck.resource for bottleneck in plan.bottlenecks} >= {
        "FLOPs",
        "HBM bytes",
        "KV capacity",
        "network bytes",
    }


def test_it_says_do_not_split_where_a_machine_for_prompts_would_idle() -> None:
    """If wrong, a plan sells a split to people who are better off without."""
    plan = planned(long_outputs())
    assert plan.verdict is not None
    assert not plan.verdict.split
    assert plan.verdict.sure
    assert plan.verdict.text.startswith("Do not split: ")
    assert plan.best is not None
    assert not plan.best.design.kind.is_split


def test_the_same_plan_twice_is_equal_whatever_the_workers() -> None:
    """If wrong, a plan depends on chance or on the number of cores."""
    made = problem(
        offer("slow", price=1.0, decode_s=0.02, decode_s_per_request=0.01),
        offer("fast", price=2.2, prefill_s_per_token=4e-4, decode_s=0.01, decode_s_per_request=0.004),
        rate=6.0,
        duration_s=6.0,
    )
    first = planned(made, mapped=True)
    prober = cache(Prober(made))
    again, wide = (planned(made, prober, width=width, mapped=True) for width in (1, 4))
    assert facts(first) == facts(again) == facts(wide)
    assert len(first.entries) == 12
    assert first.grid
    assert first.best is not None
    assert first.best.found.counts in first.grid


def test_a_plan_whose_workers_are_lost_keeps_what_it_knows() -> None:
    """If wrong, minutes of answers are thrown away with the last one that memory had no room for."""
    made = long_prompts()
    prober = Prober(made)
    whole = planned(made)
    for allowed in (0, whole.questions - 1):
        left = [allowed]

        def answer(question: Question, left: list[int] = left) -> Answer:
            if not left[0]:
                raise WorkerLostError("a worker process was ended by signal 9 (Killed)")
            left[0] -= 1
            return prober(question)

        if not allowed:
            with pytest.raises(WorkerLostError):
                planned(made, answer)
            continue
        plan = planned(made, answer)
        assert not plan.complete
        assert "signal 9" in plan.lost
        assert plan.best is not None
        assert whole.best is not None
        assert plan.best.found.counts == whole.best.found.counts


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.7, 0.95])
def test_interrupted_at_any_question_it_is_the_best_so_far(share: float) -> None:
    """If wrong, an interruption ends in a traceback, loses what was found, or passes for a whole plan."""
    made = long_prompts(rules=replace(problem().rules, batch_prompt_tokens=400))
    prober = cache(Prober(made))
    whole = planned(made, prober)
    stop_at = int(share * whole.questions)
    steps: list[PlanStep] = []
    asked = [0]

    def interrupt(question: Question) -> Answer:
        asked[0] += 1
        if asked[0] > stop_at:
            raise KeyboardInterrupt
        return prober(question)

    plan = planned(made, interrupt, on_step=steps.append)
    assert not plan.complete
    best = min((step.best[2] for step in steps if step.best), default=float("inf"))
    if best < float("inf"):
        assert plan.best is not None
        assert plan.best.found.value == best
        assert whole.best is not None
        assert best >= whole.best.found.value
    if plan.verdict is not None:
        assert plan.verdict == whole.verdict
        assert [one.capacity for one in plan.entries] == [one.capacity for one in whole.entries]


def test_every_step_says_what_is_best_so_far() -> None:
    """If wrong, the progress bar shows nothing, or a best that gets worse."""
    steps: list[PlanStep] = []
    plan = planned(long_outputs(), on_step=steps.append)
    assert [step.questions for step in steps] == list(range(1, len(steps) + 1))
    assert plan.questions == len(steps)
    sizing = [step.best[2] for step in steps if step.best]
    assert sizing == sorted(sizing, reverse=True)
    assert len({step.stage for step in steps}) >= 3


def test_of_equals_the_one_further_from_its_limits_comes_first() -> None:
    """If wrong, of two designs that take the same the one that nearly fails is advised."""
    made = problem(rate=0.1)
    worst = {DesignKind.CHUNKED: 0.9, DesignKind.WHOLE: 0.3, DesignKind.ELASTIC: 0.5, DesignKind.STATIC: 0.4}

    def answer(question: Question) -> Answer:
        holds = sum(question.counts) >= 2
        return Answer(holds, worst[question.design.kind] if holds else 2.0, "", (1.0,), 1.0, 1.0, (0.5,), (0.5,))

    plan = planned(made, answer, thorough=False)
    assert [one.design.kind for one in plan.entries] == [
        DesignKind.WHOLE,
        DesignKind.STATIC,
        DesignKind.ELASTIC,
        DesignKind.CHUNKED,
    ]
    assert {one.found.value for one in plan.entries} == {2.0}


def test_each_variation_asks_about_what_it_bends_and_nothing_else() -> None:
    """If wrong, a line of the sensitivity table shows the effect of something else."""
    made = long_prompts()
    workers = Answering(cache(Prober(made)))
    plan = Planner(problem=made, workers=workers).make()
    places = {
        (rate * made.traffic.rate_per_s, variation)
        for axis in Axis
        for rate, variation in (varied(axis, factor) for factor in FACTORS[axis])
    }
    varied_ones = [
        question
        for question in workers.asked
        if question.variation != AS_ASKED and question.variation.link <= 1  # one card more is no part of the table
    ]
    assert {(question.rate_per_s, question.variation) for question in varied_ones} <= places
    assert {point.axis for point in plan.points} == set(Axis)
    as_asked = {(point.split, point.unsplit) for point in plan.points if point.factor == 1.0}
    assert len(as_asked) == 1
    tight = [point for point in plan.points if point.axis == Axis.TIGHTNESS]
    assert [point.split for point in tight] == sorted((point.split for point in tight), reverse=True)
    assert [point.unsplit for point in tight] == sorted((point.unsplit for point in tight), reverse=True)
    link = [point for point in plan.points if point.axis == Axis.LINK]
    assert len({point.unsplit for point in link}) == 1
    assert all(question.variation.link == 1 for question in workers.asked if not question.design.kind.is_split)
    rates = [point for point in plan.points if point.axis == Axis.RATE]
    assert [point.split for point in rates] == sorted(point.split for point in rates)
    assert all(question.seed == made.seeds[0] for question in varied_ones)
    assert any(question.variation == AS_ASKED for question in workers.asked)


def test_a_variant_takes_the_place_of_what_it_varies_only_if_it_is_better() -> None:
    """If wrong, a power cap or a slice is advised that saves nothing, or one that saves is not found."""
    base = {"decode_s": 0.02, "decode_s_per_request": 0.004, "nic_bytes_per_s": 1e11}
    source = workload(table(10, 100))
    for power, wins in ((300.0, True), (400.0, False), (900.0, False)):
        made = problem(
            offer("whole", **base),
            offer("whole@75%", power=power, variant_of="whole", **base),
            rate=4.0,
            duration_s=10.0,
            source=source,
            slo=SMOOTH,
            objective=Measure.POWER,
        )
        plan = planned(made, thorough=False)
        assert plan.best is not None
        assert ("whole@75%" in plan.best.design.name) == wins


def test_existing_machines_are_divided_and_the_rate_is_the_objective() -> None:
    """If wrong, a plan for the machines that one has buys others, or sizes for the rate instead of finding it."""
    base = {"decode_s": 0.02, "decode_s_per_request": 0.004, "nic_bytes_per_s": 1e11}
    made = problem(
        offer("h", existing=2, prefill_s_per_token=4e-4, **base),
        offer("a", existing=1, prefill_s_per_token=5e-4, **base),
        duration_s=10.0,
        slo=SMOOTH,
        objective=None,
        seeds=(0,),
    )
    plan = planned(made)
    assert plan.best is not None
    assert plan.best.rate_per_s == -plan.best.found.value > 0
    assert plan.best.capacity is not None
    assert plan.best.capacity.rate_per_s == pytest.approx(plan.best.rate_per_s, rel=0.03)
    for entry in plan.entries:
        if entry.found.holds:
            there = {0: 2, 1: 1}
            assert entry.taken[Measure.MACHINES] == sum(there[number] for number in {n for _, n in entry.design.slots})
    assert plan.verdict is not None
    # One cluster of both types is no match for each type by itself, and that is what the split is held against.
    side = plan.unsplit_side
    assert len(side) == 2
    assert plan.verdict.advantage == pytest.approx(plan.best.rate_per_s / sum(one.rate_per_s for one in side) - 1)
    assert "rate" in plan.verdict.text


def test_nothing_that_holds_is_a_plan_too() -> None:
    """If wrong, an SLO that nothing keeps ends in a traceback."""
    plan = planned(problem(slo=Slo("hopeless", (Limit("ttft_s", 50.0, 1e-7),))))
    assert plan.complete
    assert plan.best is None
    assert plan.verdict is not None
    assert plan.verdict.text == "Neither a split nor an unsplit cluster keeps the SLO."
    assert all(entry.found.bottleneck is not None for entry in plan.entries)


def test_a_gain_is_the_capacity_with_one_more() -> None:
    """If wrong, a report promises something that one more machine does not buy."""
    made = long_outputs()
    plan = planned(made)
    assert plan.best is not None
    assert plan.best.capacity is not None
    [gain] = plan.gains
    assert gain.what == "one more unsplit tiny"
    assert gain.base_per_s == plan.best.capacity.rate_per_s
    one = design(made, plan.best.design.kind, [0])
    assert plan.best.design == one
    prober = Prober(made)
    more = (plan.best.found.counts[0] + 1,)
    for seed in made.seeds:
        assert prober(Question(one, more, gain.rate_per_s, seed)).holds
    assert gain.rate_per_s > gain.base_per_s
