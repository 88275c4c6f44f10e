"""Policies by hand: what was seen, and what is wanted."""

import math
from collections.abc import Callable

import pytest

from phasesplit.errors import SpecError
from phasesplit.scheduler.autoscaling import Joint, Policy, PolicyView, PoolFacts, Schedule, Static, Threshold
from phasesplit.scheduler.ledger import DECODE, MIXED, PREFILL, UNSPLIT

HOUR_S = 3_600.0
THRESHOLD = Threshold(high_tokens=1_000, low_tokens=200, decode_high_tokens=5_000, decode_low_tokens=2_000)
JOINT = Joint(target_tokens_per_s=100.0)


def pool(
    serving: int,
    pending_tokens: float = 0.0,
    *,
    starting: int = 0,
    most: int = 10,
    since_change_s: float = math.inf,
    committed_share: float = 0.0,
) -> PoolFacts:
    return PoolFacts(
        serving=serving,
        starting=starting,
        most=most,
        since_change_s=since_change_s,
        startup_s=100.0,
        pending_tokens=pending_tokens,
        committed_share=committed_share,
    )


def seen(
    *pools: tuple[int, PoolFacts], now_s: float = 0.0, age_s: float = 0.0, tokens_per_s: float = 0.0
) -> PolicyView:
    return PolicyView(now_s=now_s, age_s=age_s, tokens_per_s=tokens_per_s, pools=dict(pools))


def test_static_wants_what_there_is() -> None:
    """The policy that others are compared with would change something."""
    assert Static().wanted(seen((PREFILL, pool(3, 1e9, starting=1)), (DECODE, pool(2)))) == {PREFILL: 4, DECODE: 2}


@pytest.mark.parametrize(
    ("role", "facts", "wanted"),
    [
        (PREFILL, pool(3, 3_001), 4),
        (PREFILL, pool(3, 3_000), 3),
        (PREFILL, pool(3, 600), 3),
        (PREFILL, pool(3, 599), 2),
        (PREFILL, pool(1, 0), 1),
        (PREFILL, pool(1, 1_500, starting=1), 2),  # what is on its way is counted
        (DECODE, pool(3, 15_000), 3),
        (DECODE, pool(3, 15_001), 4),
        (DECODE, pool(3, 5_999), 2),
        (MIXED, pool(3, 3_001), 4),
        (UNSPLIT, pool(3, 599), 2),
        (DECODE, pool(3, 9_000, committed_share=0.91), 4),
        (DECODE, pool(3, 0, committed_share=0.60), 2),  # 3 x 0.6 on two machines: just 0.9
        (DECODE, pool(3, 0, committed_share=0.61), 3),
    ],
)
def test_threshold_takes_one_step_beyond_its_limits(role: int, facts: PoolFacts, wanted: int) -> None:
    """A pool would grow or shrink at another load than was set, or shrink into full memory."""
    assert THRESHOLD.wanted(seen((role, facts))) == {role: wanted}


def test_threshold_steps_are_as_wide_as_set() -> None:
    """A pool would take single steps although larger ones were asked for, or fall below one machine."""
    wide = Threshold(high_tokens=1_000, low_tokens=200, step=3)
    assert wide.wanted(seen((PREFILL, pool(3, 9_000)))) == {PREFILL: 6}
    assert wide.wanted(seen((PREFILL, pool(3, 0)))) == {PREFILL: 1}


@pytest.mark.parametrize("policy", [THRESHOLD, JOINT], ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    ("since_change_s", "age_s", "acts"),
    [(120.0, 0.0, True), (119.9, 0.0, False), (130.0, 10.0, True), (129.9, 10.0, False), (math.inf, 120.1, False)],
)
def test_too_early_and_too_old_signals_are_not_acted_on(
    policy: Policy, since_change_s: float, age_s: float, acts: bool
) -> None:
    """A pool would be changed twice for one reason, or by a signal of long ago."""
    facts = pool(2, 50_000, since_change_s=since_change_s)
    wanted = policy.wanted(seen((DECODE, facts), age_s=age_s, tokens_per_s=250.0))
    assert (wanted[DECODE] > 2) == acts


@pytest.mark.parametrize(
    ("tokens_per_s", "now", "wanted"),
    [
        (250.0, (4, 2), (6, 3)),
        (300.0, (4, 2), (6, 3)),
        (301.0, (4, 2), (8, 4)),
        (0.0, (4, 2), (2, 1)),
        (181.0, (6, 3), (6, 3)),  # two machines would be above 90 % of their target
        (180.0, (6, 3), (4, 2)),
    ],
)
def test_joint_sizes_both_pools_by_the_token_rate(
    tokens_per_s: float, now: tuple[int, int], wanted: tuple[int, int]
) -> None:
    """The pools would not follow the rate, lose their ratio, or go up and down at one and the same rate."""
    facts = seen((PREFILL, pool(now[0])), (DECODE, pool(now[1])), tokens_per_s=tokens_per_s)
    assert Joint(target_tokens_per_s=100.0, ratio=2.0).wanted(facts) == {PREFILL: wanted[0], DECODE: wanted[1]}


def test_joint_ratio_is_by_default_that_of_the_cluster() -> None:
    """Two thirds would be rounded up to a whole machine too many, or the ratio be one."""
    facts = seen((PREFILL, pool(2, most=6)), (DECODE, pool(2, most=9)), tokens_per_s=600.0)
    assert JOINT.wanted(facts) == {PREFILL: 4, DECODE: 6}


def test_joint_sizes_a_pool_that_does_both() -> None:
    """An unsplit or mixed cluster would not be scaled, or a mixed pool beside the others be."""
    assert JOINT.wanted(seen((UNSPLIT, pool(2)), tokens_per_s=500.0)) == {UNSPLIT: 5}
    assert JOINT.wanted(seen((MIXED, pool(2)), tokens_per_s=500.0)) == {MIXED: 5}
    three = seen((PREFILL, pool(2)), (DECODE, pool(2)), (MIXED, pool(2)), tokens_per_s=500.0)
    assert JOINT.wanted(three) == {PREFILL: 5, DECODE: 5, MIXED: 2}


SCHEDULE = Schedule(entries=((8 * HOUR_S, (10, 6)), (20 * HOUR_S, (4, 2))), startup_s=0.0, interval_s=30.0)


@pytest.mark.parametrize(
    ("hour", "wanted"),
    [(0, (4, 2)), (7.9, (4, 2)), (8, (10, 6)), (19.99, (10, 6)), (20, (4, 2)), (24, (4, 2)), (24 + 12, (10, 6))],
)
def test_schedule_by_the_time_of_day(hour: float, wanted: tuple[int, int]) -> None:
    """A schedule would not be repeated every day, or begin with nothing."""
    assert SCHEDULE.at(hour * HOUR_S) == wanted


@pytest.mark.parametrize(
    ("before_s", "prefill"), [(131, 4), (130, 10), (0, 10), (-12 * HOUR_S + 130, 10), (-12 * HOUR_S, 4)]
)
def test_schedule_orders_ahead_and_stops_on_time(before_s: float, prefill: int) -> None:
    """Machines would be ordered when they should serve already (100 s, and 30 s to the next look), or go too early."""
    facts = seen((PREFILL, pool(4)), (DECODE, pool(2)), now_s=8 * HOUR_S - before_s)
    assert SCHEDULE.wanted(facts)[PREFILL] == prefill


def test_opening_counts() -> None:
    """A run would not begin with the machines that the policy names."""
    most = {PREFILL: 10, DECODE: 6}
    assert Static().opening(0.0, most) == most
    assert Static(initial=(3, 2)).opening(0.0, most) == {PREFILL: 3, DECODE: 2}
    assert SCHEDULE.opening(9 * HOUR_S, most) == {PREFILL: 10, DECODE: 6}
    assert SCHEDULE.opening(1 * HOUR_S, most) == {PREFILL: 4, DECODE: 2}


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Static(least=0), "autoscale static, least: got 0"),
        (lambda: Static(initial=(0, 1)), "initial: got"),
        (lambda: Static(initial=()), "initial: got"),
        (lambda: Static(interval_s=0.0), "interval_s: got 0"),
        (lambda: Static(startup_s=-1.0), "startup_s: got -1"),
        (lambda: Static(startup_s=math.nan), "startup_s: got nan"),
        (lambda: Static(load_bytes_per_s=0.0), "load_bytes_per_s: got 0"),
        (lambda: Threshold(high_tokens=100, low_tokens=100), r"low_tokens: got 100, .* 0 to below high \(100\)"),
        (lambda: Threshold(high_tokens=100, low_tokens=10, decode_high_tokens=5), "decode_low_tokens"),
        (lambda: Threshold(high_tokens=100, low_tokens=10, full_share=0.0), "full_share: got 0"),
        (lambda: Threshold(high_tokens=100, low_tokens=10, step=0), "step: got 0"),
        (lambda: Joint(target_tokens_per_s=0.0), "target_tokens_per_s: got 0"),
        (lambda: Joint(target_tokens_per_s=1.0, ratio=-1.0), "ratio: got -1"),
        (lambda: Joint(target_tokens_per_s=1.0, slack=1.0), "slack: got 1"),
        (lambda: Schedule(entries=()), "entries: got"),
        (lambda: Schedule(entries=((24 * HOUR_S, (1,)),)), "entries: got"),
        (lambda: Schedule(entries=((HOUR_S, (1,)), (0.0, (1,)))), "entries: got"),
        (lambda: Schedule(entries=((0.0, (1,)),), initial=(1,)), "initial: got"),
        (lambda: Static(initial=(3, 2)).opening(0.0, {UNSPLIT: 9}), r"initial: got '3\+2', allowed is 9 at most"),
        (lambda: Static(least=3).opening(0.0, {PREFILL: 9, DECODE: 2}), "least: got 3, allowed is at most 2"),
        (lambda: SCHEDULE.opening(0.0, {PREFILL: 9, DECODE: 6}), r"8h: got '10\+6', allowed is 9\+6 at most"),
    ],
)  # fmt: skip
def test_policies_that_cannot_be_followed_are_refused(build: Callable[[], object], message: str) -> None:
    """A policy would run that scales to nothing, flaps at one load, or means other machines than it says."""
    with pytest.raises(SpecError, match=message):
        build()
