"""What the bounds refuse no simulation keeps; each resource can bind; the wall says which, and more of it helps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.domain.link import Link
from phasesplit.domain.slo import Limit, Slo
from phasesplit.planning.designs import Design, Kind, cluster_for, design, divisions_of, rules_for
from phasesplit.planning.floors import Floors, Resource
from phasesplit.planning.probe import Prober, Question
from phasesplit.planning.problem import Problem, Variation
from phasesplit.scheduling.rules import Rules
from phasesplit.simulation.result import Result
from phasesplit.simulation.run import simulate
from planning.problems import burst, offer, problem
from strategies import RULES

KNOTS = st.lists(st.floats(1e-3, 5.0), min_size=4, max_size=4)
"""Times at the knots: any shape, rising or not."""
SLOW_LINK = Link(bytes_per_s=2e8, latency_s=0.01, per_layer_s=1e-3, streaming_slowdown=0.5)
FAST_LINK = Link(bytes_per_s=1e12, latency_s=0.0, per_layer_s=0.0, streaming_slowdown=0.0)


@st.composite
def offers(draw: st.DrawFn, *, hbm_share: float = 0.9) -> object:
    made = offer(
        draw(st.sampled_from("abc")),
        prompt_pair_s=draw(st.sampled_from([0.0, 1e-6, 1e-4])),
        token_context_s=draw(st.sampled_from([0.0, 1e-5, 1e-3])),
        capacity_tokens=draw(st.sampled_from([500, 900, 2_000, 100_000])),
        nic_bytes_per_s=draw(st.sampled_from([1e9, 1e11])),
        link=draw(st.sampled_from([None, SLOW_LINK, FAST_LINK])),
        hbm_share=hbm_share,
    )
    base = draw(st.sampled_from([1e-3, 1e-2, 1e-1]))
    times = replace(
        made.times,
        prompt_knots_tokens=np.array([4.0, 50.0, 200.0, 1000.0]),
        prompt_knots_s=base * np.array(draw(KNOTS)),
        token_knots_requests=np.array([1.0, 4.0, 16.0, 64.0]),
        token_knots_s=base * np.array(draw(KNOTS)),
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
    kind = draw(st.sampled_from([Kind.WHOLE, Kind.ELASTIC] if published else list(Kind)))
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
            wall = Floors(made).wall(chosen, counts, result.requests / took_s * (1 - 1e-9))
            assert wall is None or wall.resource == Resource.NETWORK_MESSAGES

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
        assert Floors(replace(made, slo=Slo("as measured", tuple(limits)))).idle_wall(chosen) is None

    check()


LONG_PROMPTS = [(400, 2)] * 40
LONG_OUTPUTS = [(5, 200)] * 40


@pytest.mark.parametrize(
    ("resource", "requests", "machine"),
    [
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"token_s": 0.0001, "token_s_per_request": 0.1, "nic_bytes_per_s": 1e13}),
        (Resource.NETWORK_BYTES, LONG_PROMPTS, {"nic_bytes_per_s": 1e8}),
        (
            Resource.NETWORK_MESSAGES,
            [(1, 2)] * 40,
            {"prompt_s_per_token": 1e-9, "token_s": 1e-9, "nic_bytes_per_s": 1e15},
        ),
        (Resource.KV_CAPACITY, [(100, 200)] * 40, {"capacity_tokens": 320, "token_s": 0.1, "nic_bytes_per_s": 1e13}),
    ],
)
def test_each_resource_can_be_the_wall_and_more_machines_take_it_away(
    resource: Resource, requests: list[tuple[int, int]], machine: dict[str, float]
) -> None:
    """If wrong, a report names the wrong wall, or one that more machines do not move."""
    made = problem(offer(**machine), source=burst(*requests))
    static = design(made, Kind.STATIC, [0, 0])
    floors = Floors(made)
    most = floors.rate_per_s(static, (1, 1))
    wall = floors.wall(static, (1, 1), most * 1.5)
    assert wall is not None
    assert wall.resource == resource
    assert wall.share == pytest.approx(1.5)
    assert floors.wall(static, (1, 1), most * 0.999) is None
    assert floors.wall(static, (2, 2), most * 1.5) is None


def test_one_machine_of_the_named_pool_takes_its_wall_away() -> None:
    """If wrong, the wall names the pool that has enough."""
    made = problem(offer(nic_bytes_per_s=1e13), source=burst(*LONG_PROMPTS))
    static = design(made, Kind.STATIC, [0, 0])
    floors = Floors(made)
    rate = floors.rate_per_s(static, (1, 1)) * 1.5
    wall = floors.wall(static, (1, 1), rate)
    assert wall is not None
    assert wall.where == "the prefill machines"
    assert floors.wall(static, (2, 1), rate) is None
    assert floors.wall(static, (1, 2), rate) is not None


def test_a_faster_link_moves_the_network_wall_alone() -> None:
    """If wrong, a variation of the link bends something else, or nothing."""
    made = problem(offer(nic_bytes_per_s=1e8), source=burst(*LONG_PROMPTS))
    static = design(made, Kind.STATIC, [0, 0])
    slow = {wall.resource + wall.where: wall.share for wall in Floors(made).shares(static, (1, 1), 1.0)}
    fast = {
        wall.resource + wall.where: wall.share for wall in Floors(made, Variation(link=4.0)).shares(static, (1, 1), 1.0)
    }
    for name, share in slow.items():
        factor = 4.0 if name.startswith(Resource.NETWORK_BYTES) else 1.0
        assert fast[name] == pytest.approx(share / factor)


@pytest.mark.parametrize("nic_bytes_per_s", [1e8, 1e13])
def test_the_network_wall_is_that_of_a_measured_link(nic_bytes_per_s: float) -> None:
    """If wrong, a plan refuses what a measured link carries, or simulates what it never could."""
    link = Link(bytes_per_s=1e9, latency_s=0.0, per_layer_s=0.0, streaming_slowdown=0.0)
    made = problem(offer(nic_bytes_per_s=nic_bytes_per_s, link=link), source=burst(*LONG_PROMPTS))
    static = design(made, Kind.STATIC, [0, 0])
    as_plain = problem(offer(nic_bytes_per_s=1e9), source=burst(*LONG_PROMPTS))
    assert Floors(made).shares(static, (1, 1), 1.0) == Floors(as_plain).shares(static, (1, 1), 1.0)
    faster = Variation(link=4.0)
    assert Floors(made, faster).shares(static, (1, 1), 1.0) == Floors(as_plain, faster).shares(static, (1, 1), 1.0)


def test_what_is_refused_saturates_or_breaks_in_simulation() -> None:
    """If wrong, the bounds refuse what a simulation keeps, with traffic as it is drawn and not in one burst."""
    made = problem(offer(token_s=0.02, token_s_per_request=0.01, token_context_s=1e-4), duration_s=200.0, seeds=(0,))
    prober, floors = Prober(made), Floors(made)
    for kind in Kind:
        chosen = design(made, kind, [0, 0] if kind.is_split else [0])
        counts = (2,) * len(chosen.slots)
        most = floors.rate_per_s(chosen, counts)
        answer = prober(Question(chosen, counts, most * 1.1, 0))
        assert not answer.holds, kind


def test_the_least_counts_pass_the_bounds_and_one_less_does_not() -> None:
    """If wrong, a search starts above the cheapest cluster, or far below it."""
    made = problem(offer(slices=2), offer("other", prompt_s_per_token=5e-4))
    floors = Floors(made)
    for kind, chosen in ((Kind.STATIC, [0, 1]), (Kind.CHUNKED, [0]), (Kind.WHOLE, [1])):
        one = design(made, kind, chosen)
        for rate in (0.1, 3.0, 47.0, 311.0):
            least = floors.least(one, rate)
            assert floors.wall(one, least, rate) is None
            for slot, (_, number) in enumerate(one.slots):
                step = made.offers[number].machine.instances_per_server
                assert least[slot] % step == 0
                if least[slot] > step:
                    less = (*least[:slot], least[slot] - step, *least[slot + 1 :])
                    assert floors.wall(one, less, rate) is not None
    exactly = floors.rate_per_s(design(made, Kind.WHOLE, [1]), (7,))
    assert floors.least(design(made, Kind.WHOLE, [1]), exactly) == (7,)


def test_machines_of_two_types_are_not_taken_for_worse_than_they_are_together() -> None:
    """If wrong, a cluster is refused in which each type does what it is better at."""
    short, long = offer("short", prompt_pair_s=1e-4), offer("long", prompt_s_per_token=1e-2)
    made = problem(short, long, source=burst(*[(1, 1), (500, 1)] * 20))
    whole = divisions_of(made)[1]
    # Apart, short prompts on one and long ones on the other, they do more than the sum of what each does of both.
    apart = Floors(made).rate_per_s(whole, (1, 1))
    alone = Floors(made).rate_per_s(whole, (1, 0)) + Floors(made).rate_per_s(whole, (0, 1))
    assert apart > alone * 1.1


def test_a_limit_below_an_idle_machine_is_refused_by_name() -> None:
    """If wrong, a plan simulates ever larger clusters for a limit that none can keep, or refuses one that some can."""
    made = problem(offer(token_s=0.1), slo=Slo("tight", (Limit("ttft_s", 99.0, 10.0), Limit("itl_mean_s", 50.0, 0.05))))
    wall = Floors(made).idle_wall(design(made, Kind.CHUNKED, [0]))
    assert wall is not None
    assert "ITL mean p50" in wall.resource
    assert wall.share == pytest.approx(2.0)
    assert Floors(made, Variation(tightness=2.1)).idle_wall(design(made, Kind.CHUNKED, [0])) is None


def test_an_elastic_design_may_use_either_machine_and_a_static_one_may_not() -> None:
    """If wrong, a static design is spared for machines it does not use, or an elastic one refused."""
    made = problem(
        offer("slow", token_s=0.2), offer("fast", token_s=0.01), slo=Slo("tight", (Limit("itl_mean_s", 90.0, 0.05),))
    )
    floors = Floors(made)
    assert floors.idle_wall(design(made, Kind.STATIC, [1, 0])) is not None
    assert floors.idle_wall(design(made, Kind.ELASTIC, [1, 0])) is None
    assert floors.idle_wall(design(made, Kind.STATIC, [0, 1])) is None


def test_a_pool_without_machines_is_an_infinite_wall() -> None:
    """If wrong, an empty pool divides by zero, or passes for enough."""
    made = problem()
    static = design(made, Kind.STATIC, [0, 0])
    wall = Floors(made).wall(static, (3, 0), 1.0)
    assert wall is not None
    assert "no number of machines suffices" in str(wall)
    assert Floors(made).rate_per_s(static, (3, 0)) == 0.0


@pytest.mark.parametrize(
    ("resource", "requests", "machine"),
    [
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13}),
        (Resource.FLOPS, LONG_PROMPTS, {"nic_bytes_per_s": 1e13, "prompt_s_per_token": 1e-6, "prompt_pair_s": 1e-5}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"token_s": 0.0001, "token_s_per_request": 0.1, "nic_bytes_per_s": 1e13}),
        (Resource.HBM_BYTES, LONG_OUTPUTS, {"token_s": 1e-5, "token_context_s": 1e-3, "nic_bytes_per_s": 1e13}),
        (Resource.NETWORK_BYTES, LONG_PROMPTS, {"nic_bytes_per_s": 1e8}),
        (
            Resource.KV_CAPACITY,
            [(100, 200)] * 40,
            {"capacity_tokens": 320, "token_s": 0.1, "prompt_base_s": 0.1, "nic_bytes_per_s": 1e13},
        ),
    ],
)
def test_a_wall_is_near_what_a_simulation_reaches(
    resource: Resource, requests: list[tuple[int, int]], machine: dict[str, float]
) -> None:
    """If wrong, a bound is off by a factor: it refuses what could be, or never refuses anything."""
    made = problem(offer(**machine), source=burst(*requests, rate_per_s=1e6))
    static = design(made, Kind.STATIC, [0, 0])
    result = simulated(made, static, (1, 1))
    assert result.statuses["completed"] == len(requests)
    shares = Floors(made).shares(static, (1, 1), len(requests) / (result.end_s - result.first_arrival_s))
    nearest = max(shares, key=lambda wall: wall.share)
    assert nearest.resource == resource
    assert 0.55 < nearest.share <= 1.0
