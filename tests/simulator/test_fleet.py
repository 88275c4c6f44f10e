"""Machines that start and drain while a run goes on."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import tiny_cluster, tiny_trace
from driving import begin, done_rows, drive
from invariants import check_records, check_state
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.scheduler.autoscaling import Counts, Joint, Policy, PolicyView, Schedule, Static, Threshold
from phasesplit.scheduler.ledger import DECODE, DRAINING, OFF, PREFILL, SERVING, STARTING, UNSPLIT
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.fleet import Fleet
from phasesplit.simulator.result import Autoscaling, Result
from phasesplit.simulator.run import check_drained, simulate
from phasesplit.simulator.setup import RunState
from strategies import Case, cases

NEVER_FULL = 1e12
HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted(Policy):
    """Does as it is told: counts of each role for each look, the last ones for ever."""

    name: ClassVar[str] = "scripted"

    steps: tuple[tuple[int, ...], ...]

    def wanted(self, seen: PolicyView) -> Counts:
        index = round(seen.now_s / self.interval_s) - 1
        return dict(zip(seen.pools, self.steps[min(index, len(self.steps) - 1)], strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Restless(Policy):
    """Wants other counts at every look, some of them impossible."""

    name: ClassVar[str] = "restless"

    seed: int

    def wanted(self, seen: PolicyView) -> Counts:
        rng = np.random.default_rng([self.seed, round(seen.now_s * 1e6)])
        return {role: int(rng.integers(-1, pool.most + 2)) for role, pool in seen.pools.items()}


def found(result: Result) -> Autoscaling:
    assert result.autoscaling is not None
    return result.autoscaling


def column(result: Result, name: str) -> list[Any]:
    assert result.columns is not None
    return result.columns[name].tolist()


def evenly(count: int, gap_s: float, prompt_tokens: int = 100, output_tokens: int = 2) -> Trace:
    return tiny_trace(*((gap_s * number, prompt_tokens, output_tokens) for number in range(count)))


THREE = evenly(3, 1.0)


def states_at(policy: Policy, *, looks: int, pools: tuple[tuple[str, int], ...]) -> list[list[int]]:
    """Return the states of all machines after each of so many calls of an idle fleet."""
    state, _ = begin(tiny_cluster(*pools), Rules(), tiny_trace((0.0, 1, 1), (1e6, 1, 1)))
    fleet = Fleet(tiny_cluster(*pools), policy, state.ledger, 0.0)
    states = [state.ledger.machines["state"].tolist()]
    for _ in range(looks):
        fleet.control(state.ledger)
        states.append(state.ledger.machines["state"].tolist())
    return states


@pytest.mark.parametrize("pools", [(("prefill", 2), ("decode", 2)), (("unsplit", 3),), (("prefill", 2), ("mixed", 2))])
@pytest.mark.parametrize(
    "policy",
    [
        Static(),
        Threshold(high_tokens=NEVER_FULL, low_tokens=0, interval_s=0.07, full_share=1.0),
        Joint(target_tokens_per_s=1.0, interval_s=0.07, signal_delay_s=0.01, stale_after_s=0.0),
    ],
    ids=lambda policy: policy.name,
)
def test_policy_that_changes_nothing_leaves_the_run_as_it_is(
    policy: Policy, pools: tuple[tuple[str, int], ...]
) -> None:
    """Looking at the machines would change what they do, or what they cost."""
    trace = evenly(60, 0.03, prompt_tokens=150, output_tokens=8)
    plain = simulate(tiny_cluster(*pools), trace)
    scaled = simulate(tiny_cluster(*pools), trace, autoscale=policy)
    assert (found(scaled).starts, found(scaled).stops) == (0, 0)
    assert plain.columns is not None
    assert scaled.columns is not None
    assert {name: values.tobytes() for name, values in plain.columns.items()} == {
        name: values.tobytes() for name, values in scaled.columns.items()
    }
    assert scaled.bill == plain.bill
    assert [asdict(pool) for pool in scaled.pools] == [asdict(pool) for pool in plain.pools]
    assert scaled.counts == plain.counts
    assert np.array_equal(scaled.timeline.samples, plain.timeline.samples)


def test_ordered_machine_serves_after_start_up_and_loading() -> None:
    """A machine would serve at once, or without having loaded the model, or not be paid while it does so."""
    policy = Scripted(initial=(1,), interval_s=10.0, startup_s=4.0, steps=((2,),))
    # Prompts of 10 s keep the first machine busy; whoever comes after 14 s finds the second one.
    trace = tiny_trace((0.0, 10_000, 1), (13.0, 10_000, 1), (13.9, 10_000, 1), (14.1, 10_000, 1))
    result = simulate(tiny_cluster(("unsplit", 2)), trace, autoscale=policy)
    assert column(result, "prefill_machine") == [0, 0, 0, 1]
    assert (found(result).starts, found(result).stops) == (1, 0)
    assert result.end_s == pytest.approx(33.0)  # 13 + 2 x 10: both prompts run one after the other
    assert result.machine_hours == {"unsplit:2:tiny": pytest.approx((33.0 + 23.0) / HOUR_S)}


def test_start_up_includes_loading_the_weights() -> None:
    """A large model would be there as fast as a small one."""
    cluster = tiny_cluster(("unsplit", 2))
    heavy = type(cluster.model)(**{**_fields(cluster.model), "weights_bytes": 3e9})
    larger = type(cluster)(name="tiny", model=heavy, pools=cluster.pools)
    policy = Scripted(initial=(1,), interval_s=10.0, startup_s=4.0, load_bytes_per_s=1e9, steps=((2,),))
    state, _ = begin(cluster, Rules(), tiny_trace((0.0, 1, 1)))
    fleet = Fleet(larger, policy, state.ledger, 0.0)
    fleet.control(state.ledger)
    assert fleet.next_s == pytest.approx(10.0 + 4.0 + 3.0)


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def test_stopped_machine_finishes_what_it_holds_and_takes_nothing_new() -> None:
    """A request would be lost, go to a machine that is going, or the machine be paid for when it is long off."""
    policy = Scripted(interval_s=1.0, steps=((1,),))
    # The first request goes to machine 0 until 5 s; at 1 s machine 1 has nothing and goes; the two others queue.
    trace = tiny_trace((0.0, 5_000, 1), (2.0, 1_000, 1), (3.0, 1_000, 1))
    result = simulate(tiny_cluster(("unsplit", 2)), trace, autoscale=policy)
    assert column(result, "prefill_machine") == [0, 0, 0]
    assert result.machine_hours["unsplit:2:tiny"] == pytest.approx((7.0 + 1.0) / HOUR_S)
    # Now machine 1 has the shorter prompt when it is told to go; it ends that at 2.1 s, and the third request waits.
    trace = tiny_trace((0.0, 5_000, 1), (0.1, 2_000, 1), (1.5, 100, 1))
    result = simulate(tiny_cluster(("unsplit", 2)), trace, Rules(batch_prompt_tokens=5_000), autoscale=policy)
    assert column(result, "prefill_machine") == [0, 1, 0]
    assert result.machine_hours["unsplit:2:tiny"] == pytest.approx((5.1 + 2.1) / HOUR_S)


def test_drained_prompt_machine_is_paid_until_its_kv_has_left() -> None:
    """A prefill machine would be switched off with KV on it that the decode machine still waits for."""
    cluster = tiny_cluster(("prefill", 2), ("decode", 1), nic_bytes_per_s=1e8)
    policy = Scripted(interval_s=1.0, steps=((1, 1),), cooldown_s=0.0)
    # Machine 0 computes until 3 s, machine 1 until 2 s, then sends 2,000 MB for 20 s. Fewest requests: a tie, the
    # highest number goes.
    trace = tiny_trace((0.0, 3_000, 1), (0.1, 2_000, 2), (4.0, 10, 1))
    result = simulate(cluster, trace, Rules(transfer=1, elastic=False), autoscale=policy)  # type: ignore[arg-type]
    assert column(result, "prefill_machine") == [0, 1, 0]
    assert result.end_s == pytest.approx(2.1 + 20 + 0.1, abs=0.01)
    prefill_s = result.machine_hours["prefill:2:tiny"] * HOUR_S
    assert prefill_s == pytest.approx(result.end_s + 2.1 + 20, abs=0.01)


def test_machine_that_drains_is_taken_back_at_once() -> None:
    """A machine that still holds the model would be left to go while another one starts from nothing."""
    policy = Scripted(interval_s=1.0, startup_s=100.0, steps=((1,), (2,)))
    trace = tiny_trace((0.0, 9_000, 1), (0.1, 8_000, 1), (2.5, 10, 1), (2.6, 10, 1))
    result = simulate(tiny_cluster(("unsplit", 2)), trace, Rules(batch_prompt_tokens=10_000), autoscale=policy)
    assert (found(result).starts, found(result).stops) == (1, 1)
    assert 1 in column(result, "prefill_machine")[2:]
    assert result.machine_hours["unsplit:2:tiny"] * HOUR_S == pytest.approx(2 * result.end_s)


def test_starting_machines_are_given_up_first() -> None:
    """A machine that serves would be drained while another one is still loading."""
    pools = (("unsplit", 3),)
    policy = Scripted(initial=(1,), interval_s=10.0, startup_s=100.0, steps=((3,), (2,), (1,)))
    assert states_at(policy, looks=3, pools=pools) == [
        [SERVING, OFF, OFF],
        [SERVING, STARTING, STARTING],
        [SERVING, STARTING, OFF],
        [SERVING, OFF, OFF],
    ]


def test_least_is_kept_whatever_is_wanted() -> None:
    """A role would be left without any machine, or more be started than there are."""
    pools = (("prefill", 3), ("decode", 2))
    wild = Scripted(interval_s=1.0, startup_s=0.0, least=2, cooldown_s=0.0, steps=((-5, 0), (99, 99)))
    states = states_at(wild, looks=3, pools=pools)
    assert states[1] == [SERVING, SERVING, OFF, SERVING, SERVING]
    assert states[3] == [SERVING] * 5


def test_late_and_stale_signals() -> None:
    """A policy would see what it cannot know yet, or not learn how old its signal is."""
    seen: list[PolicyView] = []

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Watching(Policy):
        name: ClassVar[str] = "watching"

        def wanted(self, seen_now: PolicyView) -> Counts:
            seen.append(seen_now)
            return {role: pool.ordered for role, pool in seen_now.pools.items()}

    trace = evenly(100, 0.1, prompt_tokens=10, output_tokens=3)
    policy = Watching(interval_s=1.0, signal_delay_s=2.5, stale_after_s=2.0)
    result = simulate(tiny_cluster(("unsplit", 1)), trace, autoscale=policy)
    assert [round(each.now_s, 9) for each in seen][:3] == [4.0, 5.0, 6.0]
    assert {round(each.age_s, 9) for each in seen} == {3.0}
    assert found(result).stale == len(seen)
    assert seen[-1].tokens_per_s == pytest.approx(30.0, rel=0.15)
    seen.clear()
    shifted = tiny_trace(*((0.1 + 0.3 * number, 10, 3) for number in range(100)))
    simulate(tiny_cluster(("unsplit", 1)), shifted, autoscale=Watching(interval_s=0.3, signal_delay_s=0.9))
    assert {round(each.age_s, 6) for each in seen} == {0.9}  # just arrived, although sums of 0.3 round
    prefill_now = simulate(tiny_cluster(("unsplit", 1)), trace, autoscale=Watching(interval_s=1.0))
    assert found(prefill_now).stale == 0


def test_pending_work_counts_for_the_phase_wherever_it_spilled_to() -> None:
    """A policy would see no prompt work while it overflows into the decode pool, or token work in the prefill pool."""
    seen: list[PolicyView] = []

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Watching(Policy):
        name: ClassVar[str] = "watching"

        def wanted(self, seen_now: PolicyView) -> Counts:
            seen.append(seen_now)
            return {role: pool.ordered for role, pool in seen_now.pools.items()}

    trace = tiny_trace(*((0.001 * number, 4_000, 50) for number in range(5)), oracle=True)
    cluster = tiny_cluster(("prefill", 1), ("decode", 1))
    result = simulate(cluster, trace, Rules(spill_tokens=8_000), autoscale=Watching(interval_s=1.0))
    assert result.counts["decode_to_mixed"] > 0
    assert seen[0].pools[PREFILL].pending_tokens == 5 * 4_000
    assert seen[0].pools[DECODE].pending_tokens == 5 * 50


def test_schedule_has_its_machines_ready_on_time() -> None:
    """A schedule would order machines when they should already serve."""
    policy = Schedule(entries=((0.0, (1,)), (HOUR_S, (2,)), (2 * HOUR_S, (1,))), interval_s=30.0, startup_s=300.0)
    trace = evenly(300, 30.0)
    result = simulate(tiny_cluster(("unsplit", 2)), trace, autoscale=policy)
    on = result.timeline.samples[:, UNSPLIT, 0]
    meanwhile = (result.timeline.time_s > HOUR_S) & (result.timeline.time_s < 2 * HOUR_S)
    assert (found(result).starts, found(result).stops) == (1, 1)
    assert set(on[meanwhile].tolist()) == {2.0}
    extra_s = result.machine_hours["unsplit:2:tiny"] * HOUR_S - result.end_s
    assert HOUR_S + 300 <= extra_s <= HOUR_S + 300 + 60


def test_bill_counts_only_machines_that_are_on() -> None:
    """Stopping machines would save nothing, or save what a busy machine draws."""
    trace = evenly(100, 1.0)
    cluster = tiny_cluster(("unsplit", 4))
    one = simulate(tiny_cluster(("unsplit", 1)), trace)
    scaled = simulate(cluster, trace, autoscale=Static(initial=(1,)))
    assert scaled.bill.usd == pytest.approx(one.bill.usd)
    assert scaled.bill.energy_j == pytest.approx(one.bill.energy_j)
    assert scaled.bill.embodied_kg_co2e == pytest.approx(one.bill.embodied_kg_co2e)
    assert scaled.bill.provisioned_w == 4 * one.bill.provisioned_w
    assert scaled.pools[0].busy_share == pytest.approx(one.pools[0].busy_share)


def test_threshold_follows_a_burst_up_and_down() -> None:
    """A pool would not grow under a queue, or stay large when it is gone."""
    burst = [(10.0 + 0.05 * number, 200, 2) for number in range(400)]
    calm = [(40.0 + number, 20, 2) for number in range(60)]
    policy = Threshold(
        initial=(1, 1), high_tokens=400, low_tokens=50, decode_high_tokens=NEVER_FULL, interval_s=1.0, cooldown_s=2.0,
        startup_s=1.0,
    )  # fmt: skip
    cluster = tiny_cluster(("prefill", 4), ("decode", 2))
    result = simulate(cluster, tiny_trace(*burst, *calm), Rules(elastic=False), autoscale=policy)
    on = result.timeline.samples[:, PREFILL, 0]
    assert on[0] == 1
    assert on.max() == 4
    assert on[-1] == 1
    assert result.timeline.samples[:, DECODE, 0].max() == 1


def test_repurposed_machine_counts_for_its_new_role() -> None:
    """A machine that changed its home would be counted, or started again, in the wrong role."""
    cluster = tiny_cluster(("prefill", 1), ("decode", 3), capacity_tokens=480)
    rows = [(0.02 * number, 30 + 37 * number % 250, 1 + 11 * number % 50) for number in range(120)]
    rules = Rules(block_tokens=4, kv_headroom=0.0, spill_tokens=200, batch_prompt_tokens=100, repurpose_after_s=0.5)
    homes: set[tuple[int, ...]] = set()
    policy = Restless(seed=3, interval_s=0.3, startup_s=0.1)
    state = drive(cluster, rules, tiny_trace(*rows), policy=policy, budget=1, after=lambda now: see(now, homes))
    assert state.ledger.counters["repurposed"][0] > 0
    assert len(homes) > 1
    assert all(PREFILL in each and DECODE in each for each in homes)


def see(state: RunState, homes: set[tuple[int, ...]]) -> None:
    check_state(state)
    machines = state.ledger.machines
    homes.add(tuple(sorted(machines["home"][machines["state"] != OFF].tolist())))


@settings(max_examples=80, deadline=None)
@given(case=cases(), seed=st.integers(0, 1_000), interval_s=st.sampled_from([0.02, 0.1, 0.5]), trees=st.booleans())
def test_restless_fleet_loses_nothing(case: Case, seed: int, interval_s: float, trees: bool) -> None:
    """A request would be stranded on a machine that went, memory leak, or a machine stand in no or two pools."""
    policy = Restless(seed=seed, interval_s=interval_s, startup_s=0.05, stale_after_s=1e9)
    state = drive(case.cluster, case.rules, case.trace, policy=policy, budget=1, after=check_state, trees=trees)
    assert state.ledger.counters["live"][0] == 0
    check_drained(state.ledger)
    check_records(done_rows(state), len(case.trace))


@settings(max_examples=40, deadline=None)
@given(case=cases(), seed=st.integers(0, 1_000))
def test_machine_time_is_that_of_the_timeline(case: Case, seed: int) -> None:
    """Machines would be billed for other times than they are on, or be busy while they are off."""
    policy = Restless(seed=seed, interval_s=0.1, startup_s=0.05)
    result = simulate(case.cluster, case.trace, case.rules, autoscale=policy)
    again = simulate(case.cluster, case.trace, case.rules, autoscale=policy)
    assert again.bill == result.bill
    assert again.machine_hours == result.machine_hours
    duration_s = result.end_s - result.first_arrival_s
    for pool, use in zip(case.cluster.pools, result.pools, strict=True):
        assert 0 <= use.machine_hours * HOUR_S <= pool.count * duration_s + 1e-9
        assert use.busy_share <= 1 + 1e-6


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: simulate(tiny_cluster(), THREE, Rules.as_published(), autoscale=Static()), "published"),
        (lambda: simulate(tiny_cluster(), THREE, place=lambda _: (0, 1), autoscale=Static()), "custom placement"),
        (lambda: simulate(tiny_cluster(), THREE, autoscale=Static(initial=(1,))), "initial: got '1'"),
        (lambda: simulate(tiny_cluster(), THREE, autoscale=Static(initial=(1, 2))), r"got '1\+2', .* 1\+1 at most"),
        (lambda: simulate(tiny_cluster(), THREE, autoscale=Schedule(entries=((0.0, (2, 1)),))), "0h: got"),
    ],
)  # fmt: skip
def test_policy_that_does_not_fit_is_refused(build: Callable[[], Result], message: str) -> None:
    """A policy would be ignored in part, or fail in the middle of the run."""
    with pytest.raises(SpecError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_states_are_seen() -> None:
    """A draining machine would be taken for a serving or a switched-off one."""
    cluster = tiny_cluster(("mixed", 2))
    seen: set[int] = set()
    policy = Scripted(interval_s=1.0, startup_s=1.0, steps=((1,), (1,), (2,)))
    trace = tiny_trace((0.0, 3_000, 1), (0.0, 1_500, 1), (2.5, 10, 1), (6.0, 10, 1))
    drive(cluster, Rules(), trace, policy=policy, budget=1, after=lambda now: seen.update(now.ledger.machines["state"]))
    assert seen == {SERVING, STARTING, DRAINING, OFF}
