"""A day under a plan: its load, the policies fitted to a cluster, and what a day takes."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from phasesplit.domain.arrivals import Gamma
from phasesplit.domain.cluster import Role
from phasesplit.planner.designs import Counts, Design, DesignKind, design
from phasesplit.planner.drift import DayQuestion, by_role, day_of, mean_of, policies_for, requests_of, simulate_day
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import Problem
from phasesplit.scheduler.autoscaling import DAY_S, Joint, Policy, Schedule, Static, Threshold
from planner.problems import burst, offer, problem

HOUR_S = 3_600.0
DIVIDED = Design(
    DesignKind.STATIC, ((Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0), (Role.DECODE, 1)), "split, static: both"
)


def fitted(made: Problem, of: Design, counts: Counts) -> dict[str, Policy]:
    at_peak = Prober(made).result(Question(of, counts, made.traffic.rate_per_s, 0))
    return {policy.name: policy for policy in policies_for(made, of, counts, at_peak)}


def test_the_peak_of_a_day_is_the_planned_rate() -> None:
    """The cluster would be judged on a day that it was not sized for."""
    traffic = problem(rate=3.0).traffic
    (day,) = day_of(traffic, 0)
    assert len(day) == requests_of(traffic) == 172_800
    by_hour = np.bincount((day.arrival_s // HOUR_S).astype(int), minlength=24)[:24] / HOUR_S
    assert by_hour.max() == pytest.approx(3.0, rel=0.05)
    assert by_hour.argmax() in (13, 14)
    assert by_hour.min() == pytest.approx(1.0, rel=0.1)


def test_a_recorded_trace_keeps_its_pattern_and_fills_the_day() -> None:
    """The peaks of a recording would be smoothed away, or the day would end when the recording does."""
    source = burst(*[(40, 5)] * 9)
    source = replace(source, arrival_s=np.array([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 40.0]))
    traffic = problem(source=source, rate=0.05).traffic
    (day,) = day_of(traffic, 0)
    assert mean_of(traffic) == 0.05
    assert len(day) == pytest.approx(0.05 * DAY_S, rel=0.01)
    assert day.arrival_s[-1] > 0.99 * DAY_S
    gaps = np.diff(day.arrival_s[:9])
    assert gaps[-1] / gaps[0] == pytest.approx(33.0)
    (bursty,) = day_of(replace(traffic, arrivals=Gamma(cv=2.0)), 0)
    assert not np.array_equal(bursty.arrival_s[:50], day.arrival_s[:50])


def test_policies_are_fitted_to_what_each_machine_does_at_the_peak() -> None:
    """A policy would run on settings for another cluster, and its savings mean nothing."""
    made = problem(offer(), rate=8.0)
    of = design(made, DesignKind.STATIC, [0, 0])
    found = fitted(made, of, (3, 2))
    assert list(found) == ["static", "threshold", "joint", "schedule"]
    joint, threshold = found["joint"], found["threshold"]
    assert isinstance(joint, Joint)
    assert joint.target_tokens_per_s == pytest.approx(8.0 * made.traffic.lengths.mean_output_tokens / 2, rel=1e-3)
    assert joint.ratio is None
    assert isinstance(threshold, Threshold)
    result = Prober(made).result(Question(of, (3, 2), 8.0, 0))
    assert result.columns is not None
    # By Little's law, of every request its own tokens for its own time.
    waiting = 8.0 * float((result.columns["prompt_tokens"] * result.columns["ttft_s"]).mean()) / 3
    assert threshold.low_tokens < waiting < threshold.high_tokens == pytest.approx(1.2 * waiting, rel=1e-3)
    low, high = threshold.limits(1)
    assert low > high > 0


def test_a_schedule_has_the_machines_of_the_peak_in_proportion_to_the_hour() -> None:
    """A schedule would be short of machines in some hour, ask for more than there are, or save nothing."""
    made = problem(offer(), rate=8.0)
    schedule = fitted(made, design(made, DesignKind.CHUNKED, [0]), (9,))["schedule"]
    assert isinstance(schedule, Schedule)
    for quarter in range(96):
        at_s = quarter * 900.0
        load = 9 * (1 + 0.5 * np.cos(2 * np.pi * (at_s / HOUR_S - 14) / 24)) / 1.5
        (count,) = schedule.at(at_s)
        assert load - 1e-9 <= count <= min(load + 2.2, 9)
    assert schedule.at(14 * HOUR_S) == (9,)
    assert schedule.at(2 * HOUR_S) < (5,)
    assert all(before != after for (_, before), (_, after) in pairwise(schedule.entries))
    single = fitted(made, design(made, DesignKind.STATIC, [0, 0]), (3, 1))["schedule"]
    assert isinstance(single, Schedule)
    assert {counts[1] for _, counts in single.entries} == {1}


def test_nobody_has_a_schedule_for_a_day_that_nobody_knows() -> None:
    """A recorded day would be compared with a schedule for another one."""
    made = problem(offer(), source=burst(*[(40, 5)] * 50), rate=2.0)
    assert "schedule" not in fitted(made, design(made, DesignKind.CHUNKED, [0]), (3,))


def test_only_whole_servers_are_switched_where_machines_are_parts_of_one() -> None:
    """Half a server would be sent home that nobody rents by the half."""
    made = problem(offer(slices=2), rate=8.0)
    found = fitted(made, design(made, DesignKind.STATIC, [0, 0]), (6, 4))
    schedule, threshold = found["schedule"], found["threshold"]
    assert isinstance(schedule, Schedule)
    assert all(count % 2 == 0 for _, counts in schedule.entries for count in counts)
    assert isinstance(threshold, Threshold)
    assert (threshold.step, threshold.least) == (2, 2)
    both = problem(offer("half", slices=2), offer("whole"), rate=8.0)
    mixed = fitted(both, design(both, DesignKind.STATIC, [0, 1]), (6, 5))["schedule"]
    assert isinstance(mixed, Schedule)
    assert all(prompt % 2 == 0 for _, (prompt, _) in mixed.entries)
    assert {token for _, (_, token) in mixed.entries} == {2, 3, 4, 5}


def test_machines_of_several_types_in_one_role_are_one_pool() -> None:
    """A division of machines that exist would be refused, or part of its machines never be switched."""
    made = problem(offer("a", existing=3), offer("b", existing=3), rate=0.5)
    assert by_role(DIVIDED, (2, 1, 1, 2)) == (3, 3)
    for counts in ((2, 1, 1, 2), (3, 0, 0, 3)):
        for policy in fitted(made, DIVIDED, counts).values():
            day = simulate_day(made, DayQuestion(DIVIDED, counts, 0.5, policy, 0))
            assert day.machine_hours <= 6 * 24.1
            assert day.holds


def test_a_day_takes_its_machines_as_long_as_they_are_on() -> None:
    """Machine-hours of slices would count as whole servers, or money would not follow from them."""
    days = {}
    for slices in (1, 2):
        made = problem(offer(slices=slices, price=1.0 / slices), rate=0.3)
        of = design(made, DesignKind.CHUNKED, [0])
        days[slices] = simulate_day(made, DayQuestion(of, (2 * slices,), 0.3, Static(), 0))
    for day in days.values():
        assert day.requests == 17_280
        assert day.machine_hours == pytest.approx(2 * 24.0, rel=0.02)
        assert day.usd == pytest.approx(day.machine_hours)
        assert (day.changes, day.missed_share, day.worst_hour_share, day.holds) == (0, 0.0, 0.0, True)


def test_policies_save_machine_hours_and_are_charged_for_what_they_miss() -> None:
    """A policy that serves nobody would look best, or one that does nothing look thrifty."""
    made = problem(offer(), rate=2.0)
    of = design(made, DesignKind.CHUNKED, [0])
    found = fitted(made, of, (4,))
    days = {name: simulate_day(made, DayQuestion(of, (4,), 2.0, policy, 0)) for name, policy in found.items()}
    for name in ("joint", "schedule"):
        assert days[name].machine_hours < 0.9 * days["static"].machine_hours
        assert days[name].usd < 0.9 * days["static"].usd
        assert days[name].changes > 0
    never = Schedule(entries=((0.0, (1,)),), startup_s=0.0)
    slow = problem(offer(decode_s=0.9), rate=2.0)
    day = simulate_day(slow, DayQuestion(of, (4,), 2.0, never, 0, "mine"))
    assert day.written == "mine"
    assert 0 < day.missed_share <= day.worst_hour_share
    assert not day.holds
