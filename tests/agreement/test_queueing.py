"""The kernel against queueing theory, where the cluster is simple enough for theory to know the answer."""

import math
from dataclasses import replace

import numpy as np
import pytest

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import Batching, Placement, Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

SEEDS = range(8)
REQUESTS = 20_000
ONE_BY_ONE = Rules(unsplit_batching=Batching.WHOLE, batch_requests=1)
T_99_9 = 5.41
"""Student's t at 99.9 % (two-sided) with seven degrees of freedom, one less than there are seeds."""


def poisson_trace(rate_per_s: float, prompts: tuple[int, ...], seed: int, *, output_tokens: int = 1) -> Trace:
    """Return Poisson arrivals whose prompts are drawn from a few lengths, all as likely."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, REQUESTS))
    tokens = rng.choice(prompts, REQUESTS)
    return tiny_trace(*zip(arrivals_s.tolist(), tokens.tolist(), [output_tokens] * REQUESTS, strict=True))


def runs(machines: int, rate_per_s: float, prompts: tuple[int, ...], rules: Rules = ONE_BY_ONE) -> list[Result]:
    cluster = tiny_cluster(("unsplit", machines))
    return [simulate(cluster, poisson_trace(rate_per_s, prompts, seed), replace(rules, seed=seed)) for seed in SEEDS]


def assert_mean_is(expected: float, means: list[float]) -> None:
    """Raise unless the runs' mean differs from the expected one by no more than chance explains."""
    error = np.std(means, ddof=1) / math.sqrt(len(means))
    assert abs(np.mean(means) - expected) < T_99_9 * error, (expected, np.mean(means), error)
    assert T_99_9 * error < 0.15 * expected, "the interval is too wide to say anything"


def busy_share(result: Result) -> float:
    return result.pools[0].busy_share


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.8])
def test_waiting_with_equal_prompts_is_that_of_m_d_1(utilisation: float) -> None:
    """Requests would wait longer or shorter than a single server with constant service times makes them wait."""
    service_s = 0.1
    results = runs(1, utilisation / service_s, (100,))
    assert_mean_is(utilisation * service_s / (2 * (1 - utilisation)), [r.metrics["queue_s"].mean for r in results])
    assert_mean_is(utilisation, [busy_share(r) for r in results])


@pytest.mark.parametrize("prompts", [(50, 150), (20, 20, 20, 340), (10, 40, 90, 160, 200)])
def test_waiting_with_mixed_prompts_is_that_of_m_g_1(prompts: tuple[int, ...]) -> None:
    """The spread of service times would not make requests wait as Pollaczek and Khinchine say."""
    service_s = np.array(prompts) * 1e-3
    rate_per_s = 0.6 / service_s.mean()
    wait_s = rate_per_s * (service_s**2).mean() / (2 * (1 - 0.6))
    assert_mean_is(wait_s, [r.metrics["queue_s"].mean for r in runs(1, rate_per_s, prompts)])


def test_random_placement_makes_each_machine_an_m_d_1() -> None:
    """Random placement would not split the arrivals into independent streams."""
    results = runs(4, 4 * 0.7 / 0.1, (100,), replace(ONE_BY_ONE, prefill_placement=Placement.RANDOM))
    assert_mean_is(0.7 * 0.1 / (2 * 0.3), [r.metrics["queue_s"].mean for r in results])


def erlang_c(servers: int, utilisation: float) -> float:
    """Return the probability of waiting in an M/M/c queue. Source: Erlang's C formula."""
    load = servers * utilisation
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - utilisation)
    return last / (sum(terms) + last)


def test_shortest_queue_lies_between_one_shared_queue_and_separate_ones() -> None:
    """Joining the shortest queue would be better than any rule can be, or no better than chance."""
    utilisation, service_s, servers = 0.7, 0.1, 4
    waits_s = [r.metrics["queue_s"].mean for r in runs(servers, servers * utilisation / service_s, (100,))]
    shared_s = erlang_c(servers, utilisation) * service_s / (servers * (1 - utilisation))
    # With constant service times a shared queue waits half as long as with exponential ones, or a bit more.
    assert 0.5 * shared_s < np.mean(waits_s) < utilisation * service_s / (2 * (1 - utilisation)) / 2


@pytest.mark.parametrize("pools", [(("unsplit", 2),), (("prefill", 1), ("decode", 1))])
def test_little_holds_for_requests_in_the_system(pools: tuple[tuple[str, int], ...]) -> None:
    """Requests in the system, arrival rate and time in the system would contradict one another (L = lambda x W)."""
    rate_per_s = 5.0
    trace = poisson_trace(rate_per_s, (50, 150), 1, output_tokens=15)
    result = simulate(tiny_cluster(*pools, nic_bytes_per_s=1e12), trace, Rules())
    assert result.columns is not None
    ends_s = trace.arrival_s + result.columns["e2e_s"]
    time_s = result.timeline.time_s
    time_s = time_s[time_s <= result.last_arrival_s]
    present = np.searchsorted(trace.arrival_s, time_s, "right") - np.searchsorted(np.sort(ends_s), time_s, "right")
    sampled = result.timeline.samples[: time_s.size, :, 2:4].sum(axis=(1, 2))
    # The timeline counts who runs or waits; only those whose KV is on its way are in neither.
    assert (sampled <= present).all()
    assert sampled.mean() > 0.97 * present.mean()
    assert present.mean() == pytest.approx(result.rate_per_s * result.metrics["e2e_s"].mean, rel=0.1)


def test_utilisation_of_a_split_cluster_is_what_its_work_takes() -> None:
    """Machines would be busy for more or less time than the requests' work takes."""
    trace = poisson_trace(4.0, (50, 150), 2, output_tokens=1)
    result = simulate(tiny_cluster(("prefill", 2), ("decode", 1)), trace, Rules())
    work_s = float(trace.prompt_tokens.sum()) * 1e-3
    assert result.pools[0].prefill_share * 2 * (result.end_s - result.first_arrival_s) == pytest.approx(
        work_s, rel=1e-9
    )
    assert result.pools[1].busy_share == 0
