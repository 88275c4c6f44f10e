"""What the bounds refuse no simulation keeps; each resource can bind, and more of what the bottleneck names helps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.domain.machine import Link
from phasesplit.domain.slo import Limit, Slo
from phasesplit.planner.designs import Design, DesignKind, cluster_for, design, divisions_of, rules_for
from phasesplit.planner.lower_bounds import LowerBounds, Resource
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import Problem, Variation
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate
from planner.problems import burst, offer, problem
from strategies import RULES

KNOTS = st.lists(st.floats(1e-3, 5.0), min_size=4, max_size=4)
"""Times at the knots: any shape, rising or not."""
SLOW_LINK = Link(bytes_per_s=2e8, latency_s=0.01, per_layer_s=1e-3, streaming_slowdown=0.5)
FAST_LINK = Link(bytes_per_s=1e12, latency_s=0.0, per_layer_s=0.0, streaming_slowdown=0.0)


@st.composite
def offers(draw: st.DrawFn, *, hbm_share: float = 0.9) -> object:
    made = offer(
        draw(st.sampled_from("abc")),
        prefill_pair_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        decode_context_s=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        capacity_tokens=draw(st.sampled_from([500, 900, 2_000, 100_000])),
        nic_bytes_per_s=draw(st.sampled_from([1e9, 1e11])),
        link=draw(st.sampled_from([None, SLOW_LINK, FAST_LINK])),
        hbm_share=hbm_share,
    )
    base = draw(st.sampled_from([1e-3, 1e-2, 1e-1]))
    times = replace(
        made.times,
        prefill_knots_tokens=np.array([4.0, 50.0, 200.0, 1000.0]),
        prefill_knots_s=base * np.array(draw(KNOTS)),
        decode_knots_requests=np.array([1.0, 4.0, 16.0, 64.0]),
        decode_knots_s=base * np.array(draw(KNOTS)),
    )
    return replace(made, times=times)


@st.composite
def runs(draw: st.DrawFn, *, published: bool = False) -> tuple[Problem, Design, tuple[int, ...]]:
    requests = draw(
        st.lists(
            st.tuples(st.integers(1, 300), st.sampled_from([1, 2, 5, 40, 100][published:])), min_size=1, max_size=40
        )
    )
    share = 1.0 if published else 0.9
    made = problem(
        draw(offers(hbm_share=share)),
        draw(offers(hbm_share=share)),
        reference=offer().times,
        source=burst(*requests, rate_per_s=draw(st.sampled_from([1.0, 1e3]))),
        rules=Rules.as_published() if published else replace(draw(RULES), hbm_share=0.9),
    )
    kind = draw(st.sampled_from([DesignKind.WHOLE, DesignKind.ELASTIC] if published else list(DesignKind)))
    whole = draw(st.booleans())
    if whole:
        chosen = next(one for one in divisions_of(made) if one.kind == kind)
    else:
        chosen = design(made, kind, [draw(st.integers(0, 1)) for _ in range(2 if kind.is_split else 1)])
    return made, chosen, tuple(draw(st.integers(1, 2)) for _ in chosen.slots)


def simulated(made: Problem, chosen: Design, counts: tuple[int, ...]) -> Result:
    trace = made.traffic.source
    return simulate(cluster_for(made, chosen, counts), trace, rules_for(made, chosen.kind))


@pytest.mark.parametrize("published", [False, True])
def test_no_cluster_is_faster_than_its_bounds(published: bool) -> None:
    """If wrong, a plan refuses clusters that would have done: the bounds claim more work than there is."""

    @settings(max_examples=100, deadline=None)
    @given(runs(published=published))
    def check(run: tuple[Problem, Design, tuple[int, ...]]) -> None:
        made, chosen, counts = run
        result = simulated(made, chosen, counts)
        if result.statuses["completed"] < result.requests:
            return
        took_s = result.end_s - result.first_arrival_s
        if took_s > 0:
            bottleneck = LowerBounds(made).bottleneck(chosen, counts, result.requests / took_s * (1 - 1e-9))
            assert bottleneck is None or bottleneck.resource == Resource.NETWORK_MESSAGES

    check()


def test_no_request_is_faster_than_alone_on_the_best_machine() -> None:
    """If wrong, a design is refused for a limit that its requests do keep."""

    @settings(max_examples=100, deadline=None)
    @given(runs(), st.sampled_from([0.0, 50.0, 90.0, 100.0]))
    def check(run: tuple[Problem, Design, tuple[int, ...]], percentile: float) -> None:
        made, chosen, counts = run
        result = simulated(made, chosen, counts)
        if result.statuses["completed"] < result.requests or result.counts["preemptions"]:
            return
        names = ("ttft_s", "itl_mean_s", "itl_max_s", "e2e_s", "ttft_slowdown", "itl_slowdown", "e2e_slowdown")
        limits = []
        for name in names:
            values = np.sort(result.metrics[name].curve(10_000)[0])
            if not values.size:
                continue
            # The value that a share of the requests is at or below, without interpolation.
            at = values[max(int(np.ceil(percentile / 100 * values.size)) - 1, 0)]
            limits.append(Limit(name, percentile, max(at, 1e-12) * (1 + 1e-9)))
        assert LowerBounds(replace(made, slo=Slo("as measured", tuple(limits)))).idle_bottleneck(chosen) is None

    check()


LONG_PROMPTS = [(400, 2)] * 40
LONG_OUTPUTS = [(5, 200)] * 40


@pytest.mark.parametrize(
    ("resource", "requests", "machine"),
    [
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"decode_s": 0.0001, "decode_s_per_request": 0.1, "nic_bytes_per_s": 1e13}),
        (Resource.NETWORK_BYTES, LONG_PROMPTS, {"nic_bytes_per_s": 1e8}),
        (
            Resource.NETWORK_MESSAGES,
            [(1, 2)] * 40,
            {"prefill_s_per_token": 1e-9, "decode_s": 1e-9, "nic_bytes_per_s": 1e15},
        ),
        (Resource.KV_CAPACITY, [(100, 200)] * 40, {"capacity_tokens": 320, "decode_s": 0.1, "nic_bytes_per_s": 1e13}),
    ],
)
def test_each_resource_can_be_the_wall_and_more_machines_take_it_away(
    resource: Resource, requests: list[tuple[int, int]], machine: dict[str, float]
) -> None:
    """If wrong, a report names the wrong bottleneck, or one that more machines do not move."""
    made = problem(offer(**machine), source=burst(*requests))
    static = design(made, DesignKind.STATIC, [0, 0])
    lower_bounds = LowerBounds(made)
    most = lower_bounds.rate_per_s(static, (1, 1))
    bottleneck = lower_bounds.bottleneck(static, (1, 1), most * 1.5)
    assert bottleneck is not None
    assert bottleneck.resource == resource
    assert bottleneck.share == pytest.approx(1.5)
    assert lower_bounds.bottleneck(static, (1, 1), most * 0.999) is None
    assert lower_bounds.bottleneck(static, (2, 2), most * 1.5) is None


def test_one_machine_of_the_named_pool_takes_its_wall_away() -> None:
    """If wrong, the bottleneck names the pool that has enough."""
    made = problem(offer(nic_bytes_per_s=1e13), source=burst(*LONG_PROMPTS))
    static = design(made, DesignKind.STATIC, [0, 0])
    lower_bounds = LowerBounds(made)
    rate = lower_bounds.rate_per_s(static, (1, 1)) * 1.5
    bottleneck = lower_bounds.bottleneck(static, (1, 1), rate)
    assert bottleneck is not None
    assert bottleneck.where == "the prefill machines"
    assert lower_bounds.bottleneck(static, (2, 1), rate) is None
    assert lower_bounds.bottleneck(static, (1, 2), rate) is not None


def test_a_faster_link_moves_the_network_wall_alone() -> None:
    """If wrong, a variation of the link changes something else, or nothing."""
    made = problem(offer(nic_bytes_per_s=1e8), source=burst(*LONG_PROMPTS))
    static = design(made, DesignKind.STATIC, [0, 0])
    slow = {
        bottleneck.resource + bottleneck.where: bottleneck.share
        for bottleneck in LowerBounds(made).shares(static, (1, 1), 1.0)
    }
    fast = {
        bottleneck.resource + bottleneck.where: bottleneck.share
        for bottleneck in LowerBounds(made, Variation(link=4.0)).shares(static, (1, 1), 1.0)
    }
    for name, share in slow.items():
        factor = 4.0 if name.startswith(Resource.NETWORK_BYTES) else 1.0
        assert fast[name] == pytest.approx(share / factor)


@pytest.mark.parametrize("nic_bytes_per_s", [1e8, 1e13])
def test_the_network_wall_is_that_of_a_measured_link(nic_bytes_per_s: float) -> None:
    """If wrong, a plan refuses what a measured link carries, or simulates what it never could."""
    link = Link(bytes_per_s=1e9, latency_s=0.0, per_layer_s=0.0, streaming_slowdown=0.0)
    made = problem(offer(nic_bytes_per_s=nic_bytes_per_s, link=link), source=burst(*LONG_PROMPTS))
    static = design(made, DesignKind.STATIC, [0, 0])
    as_plain = problem(offer(nic_bytes_per_s=1e9), source=burst(*LONG_PROMPTS))
    assert LowerBounds(made).shares(static, (1, 1), 1.0) == LowerBounds(as_plain).shares(static, (1, 1), 1.0)
    faster = Variation(link=4.0)
    assert LowerBounds(made, faster).shares(static, (1, 1), 1.0) == LowerBounds(as_plain, faster).shares(
        static, (1, 1), 1.0
    )


def test_what_is_refused_saturates_or_breaks_in_simulation() -> None:
    """If wrong, the bounds refuse what a simulation keeps, with traffic as it is drawn and not in one burst."""
    made = problem(offer(decode_s=0.02, decode_s_per_request=0.01, decode_context_s=1e-4), duration_s=200.0, seeds=(0,))
    prober, lower_bounds = Prober(made), LowerBounds(made)
    for kind in DesignKind:
        chosen = design(made, kind, [0, 0] if kind.is_split else [0])
        counts = (2,) * len(chosen.slots)
        most = lower_bounds.rate_per_s(chosen, counts)
        answer = prober(Question(chosen, counts, most * 1.1, 0))
        assert not answer.holds, kind


def test_the_least_counts_pass_the_bounds_and_one_less_does_not() -> None:
    """If wrong, a search starts above the cheapest cluster, or far below it."""
    made = problem(offer(slices=2), offer("other", prefill_s_per_token=5e-4))
    lower_bounds = LowerBounds(made)
    for kind, chosen in ((DesignKind.STATIC, [0, 1]), (DesignKind.CHUNKED, [0]), (DesignKind.WHOLE, [1])):
        one = design(made, kind, chosen)
        for rate in (0.1, 3.0, 47.0, 311.0):
            least = lower_bounds.least(one, rate)
            assert lower_bounds.bottleneck(one, least, rate) is None
            for slot, (_, number) in enumerate(one.slots):
                step = made.offers[number].machine.instances_per_server
                assert least[slot] % step == 0
                if least[slot] > step:
                    less = (*least[:slot], least[slot] - step, *least[slot + 1 :])
                    assert lower_bounds.bottleneck(one, less, rate) is not None
    exactly = lower_bounds.rate_per_s(design(made, DesignKind.WHOLE, [1]), (7,))
    assert lower_bounds.least(design(made, DesignKind.WHOLE, [1]), exactly) == (7,)


def test_machines_of_two_types_are_not_taken_for_worse_than_they_are_together() -> None:
    """If wrong, a cluster is refused in which each type does what it is better at."""
    short, long = offer("short", prefill_pair_s=1e-4), offer("long", prefill_s_per_token=1e-2)
    made = problem(short, long, source=burst(*[(1, 1), (500, 1)] * 20))
    whole = divisions_of(made)[1]
    # Apart, short prompts on one and long ones on the other, they do more than the sum of what each does of both.
    apart = LowerBounds(made).rate_per_s(whole, (1, 1))
    alone = LowerBounds(made).rate_per_s(whole, (1, 0)) + LowerBounds(made).rate_per_s(whole, (0, 1))
    assert apart > alone * 1.1


def test_a_limit_below_an_idle_machine_is_refused_by_name() -> None:
    """If wrong, a plan simulates ever larger clusters for a limit that none can keep, or refuses one that some can."""
    made = problem(
        offer(decode_s=0.1), slo=Slo("tight", (Limit("ttft_s", 99.0, 10.0), Limit("itl_mean_s", 50.0, 0.05)))
    )
    bottleneck = LowerBounds(made).idle_bottleneck(design(made, DesignKind.CHUNKED, [0]))
    assert bottleneck is not None
    assert "ITL mean p50" in bottleneck.resource
    assert bottleneck.share == pytest.approx(2.0)
    assert LowerBounds(made, Variation(tightness=2.1)).idle_bottleneck(design(made, DesignKind.CHUNKED, [0])) is None


def test_an_elastic_design_may_use_either_machine_and_a_static_one_may_not() -> None:
    """If wrong, a static design is spared for machines it does not use, or an elastic one refused."""
    made = problem(
        offer("slow", decode_s=0.2), offer("fast", decode_s=0.01), slo=Slo("tight", (Limit("itl_mean_s", 90.0, 0.05),))
    )
    lower_bounds = LowerBounds(made)
    assert lower_bounds.idle_bottleneck(design(made, DesignKind.STATIC, [1, 0])) is not None
    assert lower_bounds.idle_bottleneck(design(made, DesignKind.ELASTIC, [1, 0])) is None
    assert lower_bounds.idle_bottleneck(design(made, DesignKind.STATIC, [0, 1])) is None


def test_a_pool_without_machines_is_an_infinite_wall() -> None:
    """If wrong, an empty pool divides by zero, or passes for enough."""
    made = problem()
    static = design(made, DesignKind.STATIC, [0, 0])
    bottleneck = LowerBounds(made).bottleneck(static, (3, 0), 1.0)
    assert bottleneck is not None
    assert "no number of machines suffices" in str(bottleneck)
    assert LowerBounds(made).rate_per_s(static, (3, 0)) == 0.0


@pytest.mark.parametrize(
    ("resource", "requests", "machine"),
    [
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13}),
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13, "prefill_s_per_token": 1e-6, "prefill_pair_s": 1e-5}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"decode_s": 0.0001, "decode_s_per_request": 0.1, "nic_bytes_per_s": 1e13}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"decode_s": 1e-5, "decode_context_s": 1e-3, "nic_bytes_per_s": 1e13}),
        (Resource.NETWORK_BYTES, LONG_PROMPTS, {"nic_bytes_per_s": 1e8}),
        (
            Resource.KV_CAPACITY,
            [(100, 200)] * 40,
            {"capacity_tokens": 320, "decode_s": 0.1, "prefill_base_s": 0.1, "nic_bytes_per_s": 1e13},
        ),
    ],
)
def test_a_wall_is_near_what_a_simulation_reaches(
    resource: Resource, requests: list[tuple[int, int]], machine: dict[str, float]
) -> None:
    """If wrong, a bound is off by a factor: it refuses what could be, or never refuses anything."""
    made = problem(offer(**machine), source=burst(*requests, rate_per_s=1e6))
    static = design(made, DesignKind.STATIC, [0, 0])
    result = simulated(made, static, (1, 1))
    assert result.statuses["completed"] == len(requests)
    shares = LowerBounds(made).shares(static, (1, 1), len(requests) / (result.end_s - result.first_arrival_s))
    nearest = max(shares, key=lambda bottleneck: bottleneck.share)
    assert nearest.resource == resource
    assert 0.55 < nearest.share <= 1.0
