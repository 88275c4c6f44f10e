"""Which days a plan spends, and what they say of splitting."""

from dataclasses import replace

import pytest

from phasesplit.planner.days import MOST_REQUESTS_OF_A_DAY, best_day, day_verdict, days_ahead
from phasesplit.planner.designs import Design, DesignKind, design
from phasesplit.planner.drift import Day, requests_of
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.search import Found
from phasesplit.scheduler.autoscaling import Joint, Policy, Static
from planner.problems import offer, problem

pytestmark = pytest.mark.slow

SPLIT, UNSPLIT = DesignKind.STATIC, DesignKind.CHUNKED


def planned(made: Problem, split_per_s: float = 8.0, unsplit_per_s: float = 8.0) -> Plan:
    """Return a plan with a split and an unsplit design, as if it had been searched for."""
    sizes = (
        (design(made, SPLIT, [0, 0]), (3, 2), split_per_s),
        (design(made, UNSPLIT, [0]), (4,), unsplit_per_s),
    )
    entries = [
        RankedDesign(
            found=Found(design=one, counts=counts, value=float(sum(counts))), cluster=None, taken={}, rate_per_s=rate
        )
        for one, counts, rate in sizes
    ]
    return Plan(problem=made, entries=entries)


def day(of: Design, policy: Policy, usd: float, *, holds: bool = True, energy_j: float = 1.0, kg: float = 1.0) -> Day:
    return Day(
        design=of, counts=(3, 2), policy=policy, written="", requests=100, machine_hours=usd, usd=usd,
        energy_j=energy_j, kg_co2e=kg, changes=0, missed_share=0.0, worst_hour_share=0.0, holds=holds,
    )  # fmt: skip


def plan_with(made: Problem, *days: tuple[DesignKind, Policy, float, bool]) -> Plan:
    plan = planned(made)
    designs = {entry.design.kind: entry.design for entry in plan.entries}
    plan.days = [day(designs[kind], policy, usd, holds=holds) for kind, policy, usd, holds in days]
    return plan


def test_both_designs_get_the_same_day_under_every_policy() -> None:
    """Designs would be compared under different load or different policies."""
    ahead = days_ahead(planned(problem()), {})
    asked = [(one.design.kind, one.policy.name, one.seed, one.written) for one in ahead.questions]
    names = ("static", "threshold", "joint", "schedule")
    assert asked == [(kind, name, 0, "") for kind in (SPLIT, UNSPLIT) for name in names]
    assert ahead.notes == ()


def test_each_design_gets_the_rate_that_it_was_planned_for() -> None:
    """Where the highest rate was looked for, one of the two would be overloaded for hours, or idle."""
    made = replace(problem(rate=1.0), objective=None)
    ahead = days_ahead(planned(made, 9.0, 7.0), {})
    assert {(one.design.kind, one.rate_per_s) for one in ahead.questions} == {(SPLIT, 9.0), (UNSPLIT, 7.0)}
    assert ahead.requests == sum(requests_of(replace(made.traffic, rate_per_s=rate)) * 4 for rate in (9.0, 7.0))


def test_policies_of_ones_own_go_to_the_designs_that_they_fit() -> None:
    """A policy for two pools would end the plan at the unsplit design, or be left out without a word."""
    own = {"mine": Joint(target_tokens_per_s=9.0), "two": Static(initial=(2, 2)), "wide": Static(least=4)}
    ahead = days_ahead(planned(problem()), own)
    asked = [(one.design.kind, one.written) for one in ahead.questions if one.written]
    assert asked == [(SPLIT, "mine"), (SPLIT, "two"), (UNSPLIT, "mine"), (UNSPLIT, "wide")]
    assert [note.partition(" does not fit ")[0] for note in ahead.notes] == ["wide", "two"]
    assert "unsplit" in ahead.notes[1]


def test_a_day_that_is_too_long_to_wait_for_is_left_out() -> None:
    """A person would wait for hours without a warning."""
    plan = planned(problem(), 1_000.0, 7.0)
    ahead = days_ahead(plan, {})
    assert {one.design.kind for one in ahead.questions} == {UNSPLIT}
    too_long = f"a day of 57,600,000 requests, allowed are at most {MOST_REQUESTS_OF_A_DAY:,}"
    assert ahead.notes == (f"{plan.entries[0].design.name}: {too_long}",)


def test_the_best_day_of_each_side_is_the_cheapest_that_keeps_the_slo() -> None:
    """A policy that saves by breaking the SLO would win."""
    joint = Joint(target_tokens_per_s=1.0)
    plan = plan_with(
        problem(),
        (SPLIT, Static(), 100.0, True), (SPLIT, joint, 50.0, False), (UNSPLIT, Static(), 110.0, True),
        (UNSPLIT, joint, 88.0, True),
    )  # fmt: skip
    assert best_day(plan, split=True) is plan.days[0]
    assert best_day(plan, split=False) is plan.days[3]
    text = " ".join(day_verdict(plan))
    assert "split 100 USD (static); unsplit 88 USD (joint, 20% less than with all always on)." in text
    assert "Over the day the split takes 14% more than unsplit for each request." in text
    assert "fitted to the planned rate, not tuned" in text
    assert "a schedule knows the day" in text


@pytest.mark.parametrize(("objective", "best"), [(Measure.COST, 0), (Measure.ENERGY, 1), (Measure.CARBON, 2)])
def test_days_are_compared_by_what_the_plan_minimises(objective: Measure, best: int) -> None:
    """A plan for little carbon would advise the cheapest day."""
    plan = planned(problem(objective=objective))
    of = plan.entries[0].design
    spent = ((1.0, 9.0, 9.0), (9.0, 1.0, 9.0), (9.0, 9.0, 1.0))
    plan.days = [day(of, Static(), usd, energy_j=3.6e6 * kwh, kg=kg) for usd, kwh, kg in spent]
    assert best_day(plan, split=True) is plan.days[best]
    assert f"split 1 {('USD', 'kWh', 'kg CO2e')[best]} " in day_verdict(plan)[0]


def test_designs_that_serve_different_rates_are_compared_by_the_request() -> None:
    """The design that serves more would look worse for it."""
    plan = plan_with(
        replace(problem(), objective=None), (SPLIT, Static(), 100.0, True), (UNSPLIT, Static(), 80.0, True)
    )
    plan.days[0] = replace(plan.days[0], requests=200)
    assert "Over the day the split takes 38% less than unsplit for each request." in day_verdict(plan)


def test_a_side_that_keeps_nothing_is_said() -> None:
    """A comparison would be made up where one side has no day that counts."""
    plan = plan_with(problem(), (SPLIT, Static(), 100.0, False), (UNSPLIT, Static(), 110.0, True))
    lines = day_verdict(plan)
    assert lines[0] == "The least over the day that keeps the SLO: none split; unsplit 110 USD (static)."
    assert not any("Over the day the split takes" in line for line in lines)
    assert day_verdict(planned(problem())) == []


def test_an_hour_of_misses_is_said_though_the_day_keeps_the_slo() -> None:
    """A policy that fails for an hour would be praised for its savings."""
    plan = plan_with(problem(), (SPLIT, Static(), 100.0, True))
    plan.days[0] = replace(plan.days[0], worst_hour_share=0.15)
    assert "split 100 USD (static, but 15% missed in its worst hour)." in day_verdict(plan)[0]


def test_parts_of_servers_that_nobody_rents_save_nothing() -> None:
    """A policy would win by sending half a server home."""
    joint = Joint(target_tokens_per_s=1.0)
    plan = plan_with(problem(offer(slices=2)), (SPLIT, Static(), 100.0, True), (SPLIT, joint, 50.0, True))
    lines = day_verdict(plan)
    assert "split 100 USD (static)" in lines[0]
    assert any("a part of a server: shown, not compared" in line for line in lines)
