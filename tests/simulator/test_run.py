"""The shell around the kernel: custom rules, stretches, what is kept, the timeline, and what is reported."""

import itertools

import numpy as np
import pytest

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.scheduler.rules import Placement, Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import Facts, simulate

SPLIT = (("prefill", 2), ("decode", 3))
ROUND_ROBIN = Rules(prefill_placement=Placement.ROUND_ROBIN, decode_placement=Placement.ROUND_ROBIN)
PUBLISHED_HORIZON_S = 86_400.0


def poisson(
    rate_per_s: float, count: int, *, seed: int = 1, prompt_tokens: int = 100, output_tokens: int = 20
) -> Trace:
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, count))
    prompts = rng.integers(1, 2 * prompt_tokens, count)
    outputs = rng.integers(1, 2 * output_tokens, count)
    return tiny_trace(*zip(arrivals_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True))


def part(trace: Trace, begin: int, end: int) -> Trace:
    """Return a stretch of a trace, with its expectations."""
    return Trace(
        name=trace.name,
        arrival_s=trace.arrival_s[begin:end],
        prompt_tokens=trace.prompt_tokens[begin:end],
        output_tokens=trace.output_tokens[begin:end],
        expected_tokens=trace.expected_tokens[begin:end],
    )


def same_rows(one: Result, other: Result) -> bool:
    assert one.columns is not None
    assert other.columns is not None
    return one.columns.keys() == other.columns.keys() and all(
        np.array_equal(one.columns[name], other.columns[name], equal_nan=one.columns[name].dtype.kind == "f")
        for name in one.columns
    )


def test_custom_rule_equal_to_round_robin_gives_the_same_run() -> None:
    """A custom rule would be asked at other moments, or for other requests, than a built-in one."""
    trace = poisson(20, 300)
    asked: list[Facts] = []

    def turns(facts: Facts) -> tuple[int, int]:
        asked.append(facts)
        number = len(asked) - 1
        return number % 2, 2 + number % 3

    built_in, custom = (
        simulate(tiny_cluster(*SPLIT), trace, ROUND_ROBIN),
        simulate(tiny_cluster(*SPLIT), trace, place=turns),
    )
    assert same_rows(built_in, custom)
    assert [facts.now_s for facts in asked] == trace.arrival_s.tolist()
    assert [facts.prompt_tokens for facts in asked] == trace.prompt_tokens.tolist()
    assert {facts.expected_tokens for facts in asked} == {int(trace.expected_tokens[0])}


def test_custom_rule_sees_the_load_of_the_machines() -> None:
    """A custom rule would choose by loads that are not those of the moment."""
    trace = poisson(20, 200)

    def shortest(facts: Facts) -> tuple[int, int]:
        return int(np.argmin(facts.machines["pending_tokens"][:2])), 2

    result = simulate(tiny_cluster(("prefill", 2), ("decode", 1)), trace, place=shortest)
    assert result.columns is not None
    assert abs(np.mean(result.columns["prefill_machine"]) - 0.5) < 0.15


@pytest.mark.parametrize("chosen", [(0, 5), (-1, 2), (0,), (0, 1, 2)])
def test_custom_rule_that_names_no_machine_is_refused(chosen: tuple[int, ...]) -> None:
    """A wrong machine number would corrupt the ledger instead of being named."""
    with pytest.raises(SpecError, match=r"place\(\), request 0: got .*two machine numbers from 0 to 4"):
        simulate(tiny_cluster(*SPLIT), tiny_trace((0.0, 10, 2)), place=lambda _: chosen)  # type: ignore[arg-type, return-value]


def test_custom_placement_needs_a_function() -> None:
    """The rule `custom` without a function would hang or fail without a word."""
    with pytest.raises(SpecError, match="prefill_placement"):
        simulate(tiny_cluster(), tiny_trace((0.0, 10, 2)), Rules(prefill_placement=Placement.CUSTOM))


@pytest.mark.parametrize("cuts", [(1,), (150,), (299,), (100, 100, 101), (0, 300), tuple(range(1, 300, 7))])
def test_stretches_give_what_the_whole_trace_gives(cuts: tuple[int, ...]) -> None:
    """A long trace fed in stretches would be another trace: a request lost, doubled or late at a cut."""
    trace = poisson(20, 300)
    whole = simulate(tiny_cluster(*SPLIT), trace)
    bounds = [0, *cuts, len(trace)]
    stretches = [part(trace, begin, end) for begin, end in itertools.pairwise(bounds)]
    result = simulate(tiny_cluster(*SPLIT), iter(stretches))
    assert same_rows(whole, result)
    assert (result.requests, result.end_s, result.rate_per_s) == (whole.requests, whole.end_s, whole.rate_per_s)
    assert result.counts == whole.counts
    assert result.first_arrival_s == whole.first_arrival_s
    assert result.last_arrival_s == whole.last_arrival_s


def test_stretches_must_go_forward() -> None:
    """Time would go back between two stretches."""
    stretches = [tiny_trace((5.0, 10, 2)), tiny_trace((4.0, 10, 2))]
    with pytest.raises(SpecError, match=r"request 1, arrival_s: got 4\.0"):
        simulate(tiny_cluster(), stretches)


@pytest.mark.parametrize("trace", [tiny_trace(), [], [tiny_trace()]])
def test_trace_without_requests_is_refused(trace: Trace | list[Trace]) -> None:
    """An empty trace would give figures out of nothing."""
    with pytest.raises(SpecError, match="at least one request"):
        simulate(tiny_cluster(), trace)


def test_published_rules_refuse_one_token_outputs_in_any_stretch() -> None:
    """A request that the published rules cannot serve would be served by rules of our own."""
    stretches = [tiny_trace((0.0, 10, 2)), tiny_trace((1.0, 10, 2), (2.0, 10, 1))]
    with pytest.raises(SpecError, match="request 2, output_tokens: got 1"):
        simulate(tiny_cluster(hbm_share=1.0), stretches, Rules.as_published())


def test_quantiles_without_rows_are_as_fine_as_the_bins() -> None:
    """A run too long to keep its rows would report other latencies, or keep rows all the same."""
    trace = poisson(20, 2_000)
    kept, summed = simulate(tiny_cluster(*SPLIT), trace), simulate(tiny_cluster(*SPLIT), trace, keep=False)
    assert summed.columns is None
    assert kept.metrics.keys() == summed.metrics.keys()
    assert (kept.statuses, kept.counts, kept.output_tokens) == (summed.statuses, summed.counts, summed.output_tokens)
    for name, exact in kept.metrics.items():
        binned = summed.metrics[name]
        assert binned.count == exact.count, name
        assert binned.mean == pytest.approx(exact.mean, rel=1e-9, abs=1e-12), name
        assert binned.largest == pytest.approx(exact.largest, rel=1e-12, abs=1e-12), name
        for q in (0.5, 0.9, 0.99):
            near = [exact.quantile(min(max(q + shift, 0), 1)) for shift in (-0.002, 0.002)]
            assert min(near) * 0.984 - 2e-6 <= binned.quantile(q) <= max(near) * 1.016 + 2e-6, (name, q)


def test_every_gap_is_in_the_distribution_of_all_gaps() -> None:
    """The distribution of gaps would miss the longest, or be that of the requests' means."""
    result = simulate(tiny_cluster(*SPLIT), poisson(20, 500))
    gaps = result.metrics["itl_s"]
    assert gaps.count == result.output_tokens - result.statuses["completed"]
    assert gaps.largest == result.metrics["itl_max_s"].largest
    assert gaps.quantile(1.0) <= gaps.largest


def test_overloaded_cluster_is_named_with_what_binds() -> None:
    """A growing backlog would be averaged over in silence, or blamed on the wrong pool."""
    rules = Rules(spill_tokens=1 << 40)  # nothing spills over to the decode machines
    result = simulate(tiny_cluster(("prefill", 1), ("decode", 4), nic_bytes_per_s=1e11), poisson(15, 3_000), rules)
    assert result.overload is not None
    assert result.overload.growth_per_s == pytest.approx(15 - 1 / 0.1, rel=0.25)
    assert result.overload.binding == "compute of the prefill pool"
    assert "backlog grew" in str(result.overload)


def test_full_memory_is_named_as_what_binds() -> None:
    """A cluster short of KV memory would be told to buy compute."""
    cluster = tiny_cluster(("unsplit", 1), capacity_tokens=5_000, prefill_s_per_token=1e-5)
    result = simulate(cluster, poisson(40, 4_000))
    assert result.overload is not None
    assert result.overload.binding == "KV memory of the unsplit pool"


def bursts() -> Trace:
    """60 requests at once every 20 s, which take some 8 s."""
    return tiny_trace(*((20.0 * burst, 100, 20) for burst in range(20) for _ in range(60)))


def filling_up() -> Trace:
    """Requests that stay longer than the trace lasts: more and more of them run, none waits."""
    return tiny_trace(*((0.5 * number, 10, 3_000) for number in range(300)))


@pytest.mark.parametrize("trace", [poisson(5, 2_000), bursts(), filling_up()], ids=["stable", "bursty", "filling up"])
def test_cluster_that_keeps_up_is_not_called_overloaded(trace: Trace) -> None:
    """A burst that is worked off, or a system that is filling up, would be taken for overload."""
    result = simulate(tiny_cluster(("prefill", 1), ("decode", 1), nic_bytes_per_s=1e11), trace)
    assert result.overload is None


@pytest.mark.parametrize("start_s", [0.0, 1_000.0])
@pytest.mark.parametrize("drain", [False, True])
def test_timeline_samples_are_taken_when_it_says(start_s: float, drain: bool) -> None:
    """A sample's time would not be the time at which its figures held, also after every second one has been dropped."""
    # One request alone (busy for 10.1 s), a pause, and with `drain` a last request that outlives the arrivals by far.
    rows = [(start_s, 100, 101), (start_s + 40.0, 100, 3_001 if drain else 11)]
    result = simulate(tiny_cluster(("unsplit", 1)), tiny_trace(*rows))
    time_s, busy = result.timeline.time_s, result.timeline.samples[:, 3, 1]
    assert (np.diff(time_s) > 0).all()
    assert np.diff(time_s) == pytest.approx(np.full(time_s.size - 1, time_s[1] - time_s[0]))
    assert time_s[0] > start_s
    assert time_s[-1] <= result.end_s + 1e-6
    assert result.end_s - time_s[-1] <= (time_s[1] - time_s[0]) * (1 + 1e-6)
    ends_s = start_s + 40.1 + (300.0 if drain else 1.0)
    expected = ((time_s > start_s) & (time_s < start_s + 10.1)) | ((time_s > start_s + 40.0) & (time_s < ends_s))
    clear = np.abs(time_s[:, None] - np.array([start_s + 10.1, start_s + 40.0, ends_s])).min(axis=1) > 1e-6
    assert busy[clear].tolist() == expected[clear].astype(float).tolist()


def test_published_run_ends_at_the_published_horizon() -> None:
    """A request that is stuck by the published rules would hang the run, or be counted as served."""
    cluster = tiny_cluster(("prefill", 2), ("decode", 1), capacity_tokens=1_000, hbm_share=1.0)
    # The KV of both prompts fills the decode machine, where the whole output of neither finds room beside it.
    chosen = iter([(0, 2), (1, 2)])
    trace = tiny_trace((0.0, 450, 300), (0.0, 450, 300))
    result = simulate(cluster, trace, Rules.as_published(), place=lambda _: next(chosen))
    assert result.statuses == {"completed": 0, "refused": 0, "unfinished": 2}
    assert result.columns is not None
    assert result.columns["status"].tolist() == ["unfinished"] * 2
    assert np.isnan(result.columns["e2e_s"]).all()
    assert not np.isnan(result.columns["ttft_s"]).any()
    assert result.end_s <= PUBLISHED_HORIZON_S
    assert any("never finished" in warning for warning in result.warnings)


def test_published_retries_go_on_until_the_horizon() -> None:
    """A transfer whose destination stays full would be given up, or tried again beyond the end of the run."""
    cluster = tiny_cluster(("prefill", 3), ("decode", 1), capacity_tokens=1_000, hbm_share=1.0)
    chosen = iter([(0, 3), (1, 3), (2, 3)])
    trace = tiny_trace((0.0, 450, 300), (0.0, 450, 300), (0.0, 450, 300))
    result = simulate(cluster, trace, Rules.as_published(), place=lambda _: next(chosen))
    assert result.statuses["unfinished"] == 3
    assert PUBLISHED_HORIZON_S - 1 < result.end_s <= PUBLISHED_HORIZON_S
    assert result.counts["events"] > PUBLISHED_HORIZON_S


@pytest.mark.parametrize("pools", [SPLIT, (("unsplit", 2),), (("prefill", 1), ("decode", 1), ("mixed", 1))])
def test_shares_of_time_and_energy_are_whole(pools: tuple[tuple[str, int], ...]) -> None:
    """A machine would be busy for more than all of its time, or its energy be more than its power allows."""
    cluster = tiny_cluster(*pools, capacity_tokens=2_000)
    result = simulate(cluster, poisson(12, 600))
    for pool in result.pools:
        assert min(pool.prefill_share, pool.decode_share, pool.mixed_share) >= 0
        assert pool.busy_share <= 1 + 1e-9
        assert 0 <= pool.kv_share <= 1
    assert sum(pool.busy_share for pool in result.pools) > 0
    assert result.batch_share.sum(axis=1)[result.batch_share.any(axis=1)] == pytest.approx(1.0)
    duration_s = result.end_s - result.first_arrival_s
    assert result.bill.duration_s == pytest.approx(duration_s)
    assert 100 * cluster.machines * duration_s <= result.bill.energy_j <= 300 * cluster.machines * duration_s


def test_shares_are_those_of_a_run_by_hand() -> None:
    """Prompt, token and mixed time would be booked under one another's names."""
    result = simulate(tiny_cluster(("prefill", 1), ("decode", 1), nic_bytes_per_s=1e15), tiny_trace((0.0, 400, 7)))
    prompt, token = result.pools
    assert prompt.prefill_share == pytest.approx(0.4, rel=0.02)
    assert token.decode_share == pytest.approx(0.6, rel=0.02)
    assert (prompt.decode_share, prompt.mixed_share, token.prefill_share, token.mixed_share) == (0, 0, 0, 0)
    assert (prompt.mean_batch, token.mean_batch) == (1.0, 1.0)


def test_progress_is_told() -> None:
    """A long run would look as if it hung."""
    told: list[tuple[int, float]] = []
    simulate(tiny_cluster(), tiny_trace((0.0, 10, 2), (1.0, 10, 2)), on_progress=lambda *now: told.append(now))
    assert all(0 <= ended <= 2 and time_s >= 0 for ended, time_s in told)


def test_oracle_is_named() -> None:
    """Figures got with true output lengths would pass for those of a real scheduler."""
    rows = [(0.0, 10, 2), (1.0, 10, 20)]
    assert not simulate(tiny_cluster(), tiny_trace(*rows)).oracle
    result = simulate(tiny_cluster(), tiny_trace(*rows, oracle=True))
    assert result.oracle
    assert any("oracle" in warning for warning in result.warnings)


def test_slowdown_of_a_lone_request_is_one() -> None:
    """The reference of slowdowns would not be the same request alone."""
    cluster = tiny_cluster(("unsplit", 1), prefill_pair_s=1e-6, decode_context_s=1e-5)
    result = simulate(cluster, tiny_trace((0.0, 500, 30)))
    for name in ("ttft_slowdown", "itl_slowdown", "e2e_slowdown"):
        assert result.metrics[name].mean == pytest.approx(1.0, rel=1e-9), name
