"""Small runs worked out by hand, to the nanosecond."""

from dataclasses import replace

import numpy as np
import pytest

from doubles import KV_BYTES_PER_TOKEN, LAYERS, tiny_cluster, tiny_trace
from driving import done_rows, drive
from invariants import check_memory
from phasesplit.domain.cluster import Cluster
from phasesplit.domain.machine import Link, link_from
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

NS = 1e-9
LINK_BYTES_PER_S = 1e9
TOKEN_TRANSFER_S = KV_BYTES_PER_TOKEN / LINK_BYTES_PER_S
HANDSHAKE_S = 0.5e-3
SERIALIZED = Rules(transfer=Transfer.SERIALIZED, block_tokens=1)
LAYERWISE = Rules(transfer=Transfer.LAYERWISE, block_tokens=1, streaming_slowdown=0.0)
ROUND_ROBIN = {"prefill_placement": Placement.ROUND_ROBIN, "decode_placement": Placement.ROUND_ROBIN}


def near(*expected: float) -> object:
    return pytest.approx(list(expected), rel=0, abs=NS)


def column(result: Result, name: str) -> list[float]:
    assert result.columns is not None
    return result.columns[name].tolist()


def run(cluster: Cluster, trace: Trace, rules: Rules) -> Result:
    """Simulate, with every request completed."""
    result = simulate(cluster, trace, rules)
    assert result.statuses == {"completed": len(trace), "refused": 0, "unfinished": 0}
    return result


def test_split_request_with_a_serialized_transfer() -> None:
    """The user's first or second token, or the end of a lone request, would come at another instant."""
    result = run(tiny_cluster(), tiny_trace((2.0, 200, 11)), SERIALIZED)
    prefill_s, transfer_s = 0.2, 200 * TOKEN_TRANSFER_S + HANDSHAKE_S
    assert column(result, "queue_s") == near(0.0)
    assert column(result, "ttft_s") == near(prefill_s)
    assert column(result, "transfer_exposed_s") == near(transfer_s)
    assert column(result, "decode_queue_s") == near(0.0)
    assert column(result, "itl_max_s") == near(transfer_s + 0.1)
    assert column(result, "e2e_s") == near(prefill_s + transfer_s + 10 * 0.1)
    assert column(result, "itl_mean_s") == near((transfer_s + 1.0) / 10)
    assert (column(result, "prefill_machine"), column(result, "decode_machine")) == ([0], [1])
    assert (result.counts["serialized"], result.counts["layerwise"], result.counts["steps"]) == (1, 0, 2)
    assert result.end_s == pytest.approx(2.0 + prefill_s + transfer_s + 1.0, rel=0, abs=NS)


def linked(cluster: Cluster, *links: Link) -> Cluster:
    """Return the cluster with a measured link for the machine of each pool."""
    pools = zip(cluster.pools, links, strict=True)
    return replace(
        cluster, pools=tuple(replace(pool, machine=replace(pool.machine, link=link)) for pool, link in pools)
    )


@pytest.mark.parametrize("place", ["pool", "machine"])
def test_a_measured_link_goes_before_the_network_cards(place: str) -> None:
    """A link within one host would be charged with the costs of a network between servers."""
    link = Link(bytes_per_s=4 * LINK_BYTES_PER_S, latency_s=0.003, per_layer_s=0.002, streaming_slowdown=0.0)
    plain = tiny_cluster()
    of_pools = replace(plain, pools=tuple(replace(pool, link=link) for pool in plain.pools))
    measured = of_pools if place == "pool" else linked(plain, link, link)
    sent_s = 200 * TOKEN_TRANSFER_S / 4
    whole = run(measured, tiny_trace((2.0, 200, 11)), SERIALIZED)
    assert column(whole, "transfer_exposed_s") == near(sent_s + 0.003)
    layers = run(measured, tiny_trace((2.0, 200, 11)), LAYERWISE)
    assert column(layers, "transfer_exposed_s") == near(sent_s / LAYERS + 0.003 + LAYERS * 0.002)


@pytest.mark.parametrize("sender", [0, 1])
def test_between_two_measured_links_the_smaller_bandwidth_and_the_senders_fixed_times_count(sender: int) -> None:
    """KV would come faster than its receiver takes it, or at costs of a machine that does not send it."""
    fast = Link(bytes_per_s=4 * LINK_BYTES_PER_S, latency_s=0.003, per_layer_s=0.002, streaming_slowdown=0.25)
    slow = Link(bytes_per_s=2 * LINK_BYTES_PER_S, latency_s=0.01, per_layer_s=0.001, streaming_slowdown=0.5)
    links = (fast, slow) if sender == 0 else (slow, fast)
    cluster = linked(tiny_cluster(prefill_s_per_token=2e-3), *links)
    sent_s = 200 * TOKEN_TRANSFER_S / 2
    whole = run(cluster, tiny_trace((2.0, 200, 11)), SERIALIZED)
    assert column(whole, "transfer_exposed_s") == near(sent_s + links[0].latency_s)
    layers = run(cluster, tiny_trace((2.0, 200, 11)), replace(LAYERWISE, streaming_slowdown=None))
    fixed_s = links[0].latency_s + LAYERS * links[0].per_layer_s
    assert column(layers, "transfer_exposed_s") == near(sent_s / LAYERS + fixed_s)
    own_s = 200 * KV_BYTES_PER_TOKEN / links[0].bytes_per_s
    assert column(layers, "ttft_s") == near(0.4 + links[0].streaming_slowdown * own_s)


def layerwise_latency_s(cluster: Cluster) -> float:
    link = link_from(cluster.pools[0].machine)
    return link.latency_s + LAYERS * link.per_layer_s


@pytest.mark.parametrize(
    ("prefill_s_per_token", "left_s"),
    [
        # The link keeps up: the last of four layers is left.
        (2e-3, 200 * TOKEN_TRANSFER_S / LAYERS),
        # It does not: left is the whole transfer less what was sent during the prefill phase.
        (0.4e-3, 200 * TOKEN_TRANSFER_S - 200 * 0.4e-3),
    ],
)
def test_layerwise_transfer_exposes_only_its_rest(prefill_s_per_token: float, left_s: float) -> None:
    """A transfer behind the computation would be exposed as if it began when the prefill phase ends, or not at all."""
    cluster = tiny_cluster(prefill_s_per_token=prefill_s_per_token)
    result = run(cluster, tiny_trace((0.0, 200, 3)), LAYERWISE)
    assert column(result, "ttft_s") == near(200 * prefill_s_per_token)
    assert column(result, "transfer_exposed_s") == near(left_s + layerwise_latency_s(cluster))
    assert result.counts["layerwise"] == 1


def test_streaming_makes_the_prompt_phase_longer() -> None:
    """Overlap would be free: the first token comes as if nothing were sent beside it."""
    rules = Rules(transfer=Transfer.LAYERWISE, streaming_slowdown=0.2)
    result = run(tiny_cluster(prefill_s_per_token=2e-3), tiny_trace((0.0, 200, 3)), rules)
    assert column(result, "ttft_s") == near(0.4 + 0.2 * 200 * TOKEN_TRANSFER_S)
    slow_link = run(tiny_cluster(prefill_s_per_token=0.4e-3), tiny_trace((0.0, 200, 3)), rules)
    assert column(slow_link, "ttft_s") == near(0.08 + 0.2 * 0.08)  # streams for all of the prefill phase


def test_auto_transfer_follows_the_prompts_length() -> None:
    """A short prompt would be sent layer by layer, or a long one only after its prefill phase."""
    rules = Rules(layerwise_from_tokens=100)
    result = run(tiny_cluster(), tiny_trace((0.0, 99, 2), (5.0, 100, 2)), rules)
    assert (result.counts["serialized"], result.counts["layerwise"]) == (1, 1)


def test_transfers_one_behind_the_other_do_not_share() -> None:
    """A transfer that is over would go on to take its part of the card."""
    cluster = tiny_cluster(("prefill", 1), ("decode", 2))
    rules = Rules(transfer=Transfer.SERIALIZED, **ROUND_ROBIN)
    result = run(cluster, tiny_trace((0.0, 100, 2), (0.0, 300, 2)), rules)
    assert column(result, "ttft_s") == near(0.1, 0.4)
    assert column(result, "transfer_exposed_s") == near(
        100 * TOKEN_TRANSFER_S + HANDSHAKE_S, 300 * TOKEN_TRANSFER_S + HANDSHAKE_S
    )


def test_transfers_that_begin_together_halve_the_rate_until_the_shorter_is_out() -> None:
    """Two flows on one network card would not share it, or the longer one not get it back."""
    cluster = tiny_cluster(("prefill", 1), ("decode", 2))
    rules = Rules(transfer=Transfer.SERIALIZED, **ROUND_ROBIN)
    # A first prompt keeps the machine busy, so that the next two are one batch and end together at 0.01 + 0.4.
    result = run(cluster, tiny_trace((0.0, 10, 1), (0.001, 100, 2), (0.002, 300, 2)), rules)
    assert column(result, "ttft_s")[1:] == near(0.41 - 0.001, 0.41 - 0.002)
    shorter_s = 2 * 100 * TOKEN_TRANSFER_S
    longer_s = shorter_s + (300 - 100) * TOKEN_TRANSFER_S
    assert column(result, "transfer_exposed_s")[1:] == near(shorter_s + HANDSHAKE_S, longer_s + HANDSHAKE_S)


def test_transfers_into_one_machine_share_its_card() -> None:
    """Only the senders' cards would be shared, not the receiver's."""
    cluster = tiny_cluster(("prefill", 2), ("decode", 1))
    rules = Rules(transfer=Transfer.SERIALIZED, **ROUND_ROBIN)
    result = run(cluster, tiny_trace((0.0, 200, 2), (0.0, 200, 2)), rules)
    assert column(result, "prefill_machine") == [0, 1]
    assert column(result, "transfer_exposed_s") == near(*[2 * 200 * TOKEN_TRANSFER_S + HANDSHAKE_S] * 2)


def test_late_flow_slows_one_that_is_under_way() -> None:
    """A flow's end would stay where it was planned although another has joined its card."""
    cluster = tiny_cluster(("prefill", 2), ("decode", 1))
    rules = Rules(transfer=Transfer.SERIALIZED, **ROUND_ROBIN)
    # The first is out to a half (100 of 200 tokens) when the second begins; both then go at half rate.
    result = run(cluster, tiny_trace((0.0, 200, 2), (0.0, 300, 2)), rules)
    first_s = 100 * TOKEN_TRANSFER_S + 2 * 100 * TOKEN_TRANSFER_S
    second_s = 2 * 100 * TOKEN_TRANSFER_S + 200 * TOKEN_TRANSFER_S
    assert column(result, "transfer_exposed_s") == near(first_s + HANDSHAKE_S, second_s + HANDSHAKE_S)


def test_chunks_add_up_to_the_prompt() -> None:
    """A long prompt in chunks would take more or less attention than in one piece, or lose a chunk."""
    cluster = tiny_cluster(("unsplit", 1), prefill_base_s=0.005, prefill_pair_s=1e-6)
    result = run(cluster, tiny_trace((0.0, 5_000, 1)), Rules())
    chunks = [2_048, 2_048, 904]
    assert column(result, "ttft_s") == near(sum(0.005 + 1e-3 * chunk for chunk in chunks) + 1e-6 * 5_000**2 / 2)
    assert result.counts["steps"] == 3


def test_mixed_iteration_takes_the_longer_of_its_parts() -> None:
    """A decode task beside a chunk would be free, or pay for itself twice."""
    cluster = tiny_cluster(("unsplit", 1), decode_s=0.1)
    result = run(cluster, tiny_trace((0.0, 100, 4), (0.15, 50, 1), (0.25, 300, 1)), Rules())
    # 0-0.1 prompt; 0.1-0.2 token; 0.2-0.3 token beside 50 prompt tokens (0.051 < 0.1); 0.3-0.601 beside 300.
    assert column(result, "e2e_s") == near(0.601, 0.15, 0.351)
    assert column(result, "itl_max_s")[0] == pytest.approx(0.301, rel=0, abs=NS)


def test_context_grows_within_a_step_as_iteration_by_iteration() -> None:
    """A step of many iterations in closed form would not be the sum of its iterations."""
    context_s, tokens = 1e-4, 400
    cluster = tiny_cluster(("unsplit", 1), decode_s=0.01, decode_context_s=context_s)
    result = run(cluster, tiny_trace((0.0, 300, tokens)), Rules())
    times_s = [0.01 + context_s * (300 + token) for token in range(1, tokens)]
    assert column(result, "e2e_s") == near(0.3 + sum(times_s))
    assert column(result, "itl_max_s") == near(times_s[-1])
    assert result.counts["steps"] == 2
    assert result.counts["iterations"] == tokens
    gaps = result.metrics["itl_s"]
    assert gaps.count == tokens - 1
    assert gaps.quantile(0.5) == pytest.approx(float(np.quantile(times_s, 0.5)), rel=0.016)
    assert gaps.mean == pytest.approx(sum(times_s) / len(times_s), rel=0.01)


@pytest.mark.parametrize(("arrival_s", "boundary_s"), [(0.3, 0.375), (0.374999, 0.375), (0.375001, 0.5), (4.7, 4.75)])
def test_step_is_cut_behind_the_iteration_in_progress(arrival_s: float, boundary_s: float) -> None:
    """A request that arrives during a step would wait for all of it, or interrupt an iteration."""
    cluster = tiny_cluster(("unsplit", 1), prefill_s_per_token=0.125 / 128, decode_s=0.125)
    result = run(cluster, tiny_trace((0.0, 128, 40), (arrival_s, 128, 1)), Rules())
    assert column(result, "queue_s")[1] == pytest.approx(boundary_s - arrival_s, rel=0, abs=NS)
    assert result.counts["iterations"] == 40


def test_cut_at_the_boundary_between_two_iterations() -> None:
    """An arrival at the very end of an iteration would join one that is over, or wait for two."""
    cluster = tiny_cluster(("unsplit", 1), prefill_s_per_token=0.125 / 128, decode_s=0.125)
    result = run(cluster, tiny_trace((0.0, 128, 40), (0.375, 128, 1)), Rules())
    assert column(result, "queue_s")[1] == 0.125


def test_arrival_at_the_end_of_a_step_joins_the_next() -> None:
    """An arrival at the very instant of a step's end would come behind it, and wait for an iteration of the next."""
    cluster = tiny_cluster(("unsplit", 1), prefill_s_per_token=0.125 / 128, decode_s=0.125)
    # The first two end their prompts at 0.0625 and 0.1875; the first ends, and the second goes on, at 0.3125.
    result = run(cluster, tiny_trace((0.0, 64, 3), (0.0, 64, 40), (0.3125, 64, 1)), Rules())
    assert column(result, "e2e_s")[0] == 0.3125
    assert column(result, "queue_s")[2] == 0.0


@pytest.mark.parametrize("pools", [(("prefill", 1), ("decode", 1)), (("unsplit", 1),), (("mixed", 1),)])
def test_one_token_request_ends_with_its_prompt(pools: tuple[tuple[str, int], ...]) -> None:
    """A request of one output token would be sent to a decode machine, or its gaps be given values."""
    result = run(tiny_cluster(*pools), tiny_trace((0.0, 100, 1), (5.0, 100, 2)), SERIALIZED)
    assert column(result, "ttft_s")[0] == column(result, "e2e_s")[0] == pytest.approx(0.1, rel=0, abs=NS)
    for name in ("itl_mean_s", "itl_max_s", "transfer_exposed_s", "decode_queue_s"):
        values = column(result, name)
        assert np.isnan(values[0]), name
        assert not np.isnan(values[1]), name
    assert result.metrics["itl_s"].count == 1


def test_request_longer_than_memory_is_refused_and_counted() -> None:
    """A request that no machine can finish would block the queue for ever, or vanish from the counts."""
    cluster = tiny_cluster(("unsplit", 1), capacity_tokens=160)
    result = simulate(cluster, tiny_trace((0.0, 150, 10), (1.0, 100, 10), (2.0, 10, 150)))
    assert result.statuses == {"completed": 1, "refused": 2, "unfinished": 0}
    assert column(result, "status") == ["refused", "completed", "refused"]
    assert np.isnan(column(result, "e2e_s")[0])
    assert column(result, "prefill_machine") == [-1, 0, -1]
    assert result.prompt_tokens == 100
    assert any("2 of the requests were refused" in warning for warning in result.warnings)
    assert result.slo is not None
    assert not result.slo.holds


def test_request_longer_than_the_models_context_is_refused() -> None:
    """A request that the model cannot take would be served as if it could."""
    cluster = tiny_cluster(("unsplit", 1))
    cluster = replace(cluster, model=replace(cluster.model, max_context_tokens=127))
    result = simulate(cluster, tiny_trace((0.0, 100, 27), (1.0, 101, 27)), Rules(block_tokens=16))
    assert column(result, "status") == ["completed", "refused"]


def test_gap_limits_hold_where_there_are_no_gaps() -> None:
    """A trace of one-token requests would break limits on gaps that it cannot have."""
    result = simulate(tiny_cluster(("unsplit", 1)), tiny_trace((0.0, 10, 1), (5.0, 10, 1)))
    assert result.slo is not None
    assert all(finding.holds for finding in result.slo.findings if finding.limit.metric == "itl_slowdown")


def test_machines_that_wait_for_each_others_memory_are_resolved() -> None:
    """Two machines, each full of KV that waits for room on the other, would wait for ever."""
    cluster = tiny_cluster(("mixed", 2), capacity_tokens=110)
    trace = tiny_trace((0.0, 100, 4), (0.0, 100, 4))
    chosen = iter([(0, 1), (1, 0)])
    result = simulate(cluster, trace, Rules(block_tokens=1, transfer=Transfer.SERIALIZED), place=lambda _: next(chosen))
    assert result.statuses["completed"] == 2
    assert result.counts["recomputed"] == 1
    assert any("computed again" in warning for warning in result.warnings)


def test_running_out_of_memory_evicts_and_recomputes() -> None:
    """A request whose KV was evicted would go on as if it were there, or its recomputation cost nothing."""
    cluster = tiny_cluster(("unsplit", 1), capacity_tokens=230)
    rules = Rules(block_tokens=1, kv_headroom=0.0)
    result = run(cluster, tiny_trace((0.0, 100, 21), (0.0, 100, 41)), rules)
    assert result.counts["evictions"] == 1
    # Both decode until 230 tokens are full; the second's come back as a prompt of 100 and what it has emitted.
    assert column(result, "preemptions") == [0, 1]
    assert 0.4 < column(result, "itl_max_s")[1] < 1.2
    assert column(result, "itl_max_s")[0] < 0.2


def test_whole_prompts_of_one_batch_end_together() -> None:
    """Prompts that are computed in one batch would each pay for themselves alone."""
    cluster = tiny_cluster(("unsplit", 1))
    rules = Rules(unsplit_batching=Batching.WHOLE)
    result = run(cluster, tiny_trace((0.0, 10, 1), (0.001, 100, 1), (0.002, 200, 1)), rules)
    assert column(result, "ttft_s") == near(0.01, 0.31 - 0.001, 0.31 - 0.002)


def test_preemption_delays_the_next_token_of_the_preempted() -> None:
    """The gap that a preemption makes would be missing from the request's longest gap."""
    cluster = tiny_cluster(("unsplit", 1))
    rules = Rules(unsplit_batching=Batching.WHOLE)
    result = run(cluster, tiny_trace((0.0, 100, 5), (0.15, 3_000, 1)), rules)
    assert column(result, "itl_max_s")[0] == pytest.approx(3.0 + 0.1, rel=0, abs=NS)
    assert column(result, "preemptions") == [1, 0]
    assert result.metrics["itl_s"].largest == pytest.approx(3.1, rel=0, abs=NS)


def test_token_phase_waits_for_room_on_its_machine() -> None:
    """A transfer would begin although its destination is full, or not begin when room is made."""
    cluster = tiny_cluster(("prefill", 2), ("decode", 1), capacity_tokens=300)
    chosen = iter([(0, 2), (1, 2)])
    rules = Rules(transfer=Transfer.SERIALIZED, block_tokens=1, kv_headroom=0.0)
    result = simulate(cluster, tiny_trace((0.0, 200, 5), (0.0, 200, 5)), rules, place=lambda _: next(chosen))
    transfer_s = 200 * TOKEN_TRANSFER_S + HANDSHAKE_S
    first_end_s = 0.2 + transfer_s + 4 * 0.1
    assert column(result, "e2e_s") == near(first_end_s, first_end_s + transfer_s + 4 * 0.1)
    assert column(result, "transfer_exposed_s") == near(transfer_s, first_end_s - 0.2 + transfer_s)
    assert result.counts["recomputed"] == 0


def test_landing_waits_for_those_who_are_about_to_run() -> None:
    """KV would be dropped and computed again although a request that is ready here will end and free room for it."""
    cluster = tiny_cluster(("mixed", 2), capacity_tokens=400)
    rules = Rules(transfer=Transfer.SERIALIZED, block_tokens=1, kv_headroom=0.0)
    # Machine 0 computes a prompt of 200 for itself beside the last token of one of 50; the KV of 250 from machine 1
    # waits for room meanwhile, and gets it when the 200 have ended.
    trace = tiny_trace((0.0, 50, 3), (0.0, 250, 3), (0.12, 200, 5))
    chosen = iter([(0, 0), (1, 0), (0, 0)])
    result = simulate(cluster, trace, rules, place=lambda _: next(chosen))
    assert result.statuses["completed"] == 3
    assert result.counts["recomputed"] == 0


def test_landing_waits_for_memory_that_is_about_to_leave() -> None:
    """KV would be dropped and computed again although other KV is leaving, which frees the room it needs."""
    cluster = tiny_cluster(("mixed", 3), capacity_tokens=300)
    chosen = iter([(0, 1), (2, 0)])
    rules = Rules(transfer=Transfer.SERIALIZED, block_tokens=1, kv_headroom=0.0)
    result = simulate(cluster, tiny_trace((0.0, 200, 3), (0.0, 150, 3)), rules, place=lambda _: next(chosen))
    assert result.counts["recomputed"] == 0
    # The 200 leave machine 0 from 0.2 on; then the 150 may come.
    first_ready_s = 0.2 + 200 * TOKEN_TRANSFER_S + HANDSHAKE_S
    second_ready_s = first_ready_s + 150 * TOKEN_TRANSFER_S + HANDSHAKE_S
    assert column(result, "transfer_exposed_s") == near(first_ready_s - 0.2, second_ready_s - 0.15)


def test_landing_cuts_a_step_that_would_grow_into_its_room() -> None:
    """A step under way would go on to fill the room that has been promised to KV on its way here."""
    cluster = tiny_cluster(("prefill", 1), ("decode", 1), capacity_tokens=300)
    rows = tiny_trace((0.0, 100, 150), (1.0, 100, 150))
    unsuspected = replace(rows, expected_tokens=np.ones(2, np.int32))
    rules = Rules(block_tokens=1, kv_headroom=0.0, transfer=Transfer.SERIALIZED)
    state = drive(cluster, rules, unsuspected, budget=1, after=lambda now: check_memory(now.ledger))
    # The first would have grown to 250 in one step; the second's 101 blocks are held from 1.1 on all the same.
    assert done_rows(state)["kv_ready_s"][1] == pytest.approx(1.1 + 100 * TOKEN_TRANSFER_S + HANDSHAKE_S, rel=0, abs=NS)
    assert state.ledger.counters["evictions"][0] > 0


def test_gaps_are_as_many_as_tokens_follow_others() -> None:
    """The distribution over all gaps would count a token twice or not at all when steps are cut and requests join."""
    rows = [(0.03 * number, 20 + 13 * number % 90, 1 + 7 * number % 40) for number in range(60)]
    state = drive(tiny_cluster(("prefill", 1), ("decode", 2)), Rules(), tiny_trace(*rows))
    assert int(state.world.gaps.sum()) == int((done_rows(state)["output_tokens"] - 1).sum())
