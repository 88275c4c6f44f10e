"""The simulator predicts a live cluster: same KV memory, link and cores, and what was measured on the idle one."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.io.profiles import read_profile_file
from phasesplit.replay.client import ReplayResult, SeenRequest
from phasesplit.validation.comparison import FRONT, PREFILL, QUEUE, TRANSFER
from phasesplit.validation.core_shares import (
    CorePlan,
    core_plan,
    cores_text,
    cpu_s,
    pinned,
    whole_core_plan,
    with_descendants,
)
from phasesplit.validation.live import Live, LiveRun, in_order
from phasesplit.validation.prediction import NO_OVERHEADS, Overheads, Predictor, as_gateways_expect
from phasesplit.validation.verify import check_kv, idle_overheads, idle_trace, profile_doubts

SIZES = {
    "layers": 4, "hidden": 64, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "parameters": 1e6,
    "active_parameters": 1e6, "weights_bytes": 1e6, "value_bytes": 4, "max_context_tokens": 4096,
}  # fmt: skip
BLOCK_BYTES = 2 * 4 * 4 * 2 * 16 * 32
LINK = {
    "bytes_per_s": 2e9, "latency_s": 2e-4, "per_layer_s": 5e-5, "streaming_slowdown": 0.0, "source": "made up",
}  # fmt: skip


def predictor(tmp_path: Path, pools: dict[str, int], *, kv_blocks: int = 100, **changes: Any) -> Predictor:
    """A cluster with prefill of 1 ms a token, and decode iterations of 10 ms for 1 request and 20 ms for 11."""
    path = tmp_path / "profile.json"
    content = {
        "format": "phasesplit profile", "version": 1, "target": "engine", "taken": "2026-01-01T00:00:00+00:00",
        "versions": {}, "settings": {}, "ending": "reached", "elapsed_s": 1.0, "errors": {}, "iterations": [],
        "interrupted_share": None, "kv": None, "link": LINK, "start_up_s": None, "power": None, "unknown": {},
        "notes": [],
        "machine": {
            "name": "here", "processor": "", "cores": 2, "threads": 1, "features": [], "memory_bytes": 1e9,
            "system": "",
        },
        "model": {"name": "made up", "sizes": SIZES},
        "times": {
            "prefill_knots_tokens": [1.0, 1001.0], "prefill_knots_s": [0.001, 1.001],
            "decode_knots_requests": [1.0, 11.0], "decode_knots_s": [0.01, 0.02], "prefill_pair_s": 0.0,
            "decode_context_s": 0.0, "measured_prompt_tokens": 1001.0, "measured_requests": 11.0,
        },
        **changes,
    }  # fmt: skip
    path.write_bytes(orjson.dumps(content))
    cluster = ServedCluster(pools=pools, kv_bytes=kv_blocks * BLOCK_BYTES + 5)
    return Predictor(cluster, read_profile_file(path), path, threshold_tokens=64)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace.from_columns("made up", np.array(arrivals), np.array(prompts, np.int32), np.array(outputs, np.int32))


SPLIT = {"prefill": 1, "decode": 1}


def test_the_prediction_has_the_blocks_that_a_worker_makes_of_the_same_memory(tmp_path: Path) -> None:
    """Queues for KV would differ for no other reason than another capacity."""
    assert predictor(tmp_path, SPLIT, kv_blocks=100).kv_blocks == 100
    assert predictor(tmp_path, SPLIT, kv_blocks=7).kv_blocks == 7


def test_another_capacity_is_refused_before_anything_is_compared() -> None:
    """Latencies would be compared of which one side waits for memory."""
    live = Live(facts={"prefill-0": {"capacity_blocks": 100}, "decode-0": {"capacity_blocks": 90}})
    with pytest.raises(SpecError, match="decode-0 has 90 blocks, the simulation 100"):
        check_kv(100, live)
    live.facts["decode-0"] = {"capacity_blocks": 100}
    assert check_kv(100, live) == {"prefill-0": 100, "decode-0": 100}


def test_a_request_alone_takes_what_the_profile_says(tmp_path: Path) -> None:
    """Times of the profile, the link or the front end would be lost on the way into the prediction."""
    cluster = predictor(tmp_path, SPLIT)
    plain = cluster.predict(trace_of((0.0, 100, 5)), NO_OVERHEADS).side
    assert plain.ttft_s[0] == pytest.approx(0.1, rel=0.02)
    assert plain.e2e_s[0] == pytest.approx(0.1 + float(plain.stages_s[TRANSFER][0]) + 4 * 0.01, rel=1e-6)
    added = Overheads(stages_s={QUEUE: 0.003, FRONT: 0.004}, iteration_s=0.0007, decode_s=0.0003)
    longer = cluster.predict(trace_of((0.0, 100, 5)), added).side
    assert longer.ttft_s[0] - plain.ttft_s[0] == pytest.approx(0.008)
    assert longer.e2e_s[0] - plain.e2e_s[0] == pytest.approx(0.007 + 5 * 0.001, rel=1e-3)
    assert plain.pairs == [("prefill-0", "decode-0")]


def test_workers_with_half_a_core_are_predicted_to_take_twice_as_long(tmp_path: Path) -> None:
    """Workers that share a core would be predicted as if each had it alone."""
    cluster, trace = predictor(tmp_path, SPLIT), trace_of((0.0, 100, 10))
    whole = cluster.predict(trace, NO_OVERHEADS).side
    half = cluster.predict(trace, NO_OVERHEADS, 0.5).side
    computed_s = [float(side.e2e_s[0] - side.stages_s[TRANSFER][0]) for side in (whole, half)]
    assert computed_s[1] == pytest.approx(2 * computed_s[0], rel=1e-6)


@pytest.mark.parametrize(
    ("workers", "cores", "own", "front", "core_share"),
    [
        (["a"], [4, 6], {"a": {6}}, {4}, 1.0),
        (["a", "b"], [0, 1, 2, 3], {"a": {2}, "b": {3}}, {0, 1}, 1.0),
        (["a", "b"], [4, 6], {"a": {6}, "b": {6}}, {4}, 0.45),
        (["a", "b", "c"], [0, 1, 2], {"a": {1}, "b": {2}, "c": {1}}, {0}, 0.45),
        (["a", "b"], [3], {"a": {3}, "b": {3}}, {3}, 0.3),
    ],
)
def test_nobody_takes_the_time_of_another(
    workers: list[str], cores: list[int], own: dict[str, set[int]], front: set[int], core_share: float
) -> None:
    """Iterations would last longer whenever the gateway, the client or another worker wants the core."""
    plan = core_plan(workers, cores)
    assert (plan.workers, plan.front, plan.core_share) == (own, front, pytest.approx(core_share))
    for core in set().union(*own.values()):
        assert sum(plan.core_share for one in own.values() if core in one) <= 1.0


@pytest.mark.parametrize(
    ("workers", "cores", "own", "front"),
    [
        (["a"], [4, 6], {"a": {6}}, {4}),
        (["a", "b"], [0, 1], {"a": {0}, "b": {1}}, {0, 1}),
        (["a", "b"], [0, 1, 2, 3], {"a": {1}, "b": {2}}, {0, 3}),
        (["a", "b"], list(range(16)), {"a": set(range(1, 8)), "b": set(range(8, 15))}, {0, 15}),
    ],
)
def test_machines_that_cannot_keep_to_a_share_have_whole_cores(
    workers: list[str], cores: list[int], own: dict[str, set[int]], front: set[int]
) -> None:
    """Two vLLM servers on one core would take each other's time, and the prediction would know nothing of it."""
    plan = whole_core_plan(workers, cores)
    assert (plan.workers, plan.front, plan.core_share, plan.has_process_trees) == (own, front, 1.0, True)
    assert plan.cores_each == len(own["a"])


def test_more_machines_than_cores_are_refused_where_each_needs_one() -> None:
    """They would be measured, and found to be many times slower than predicted."""
    with pytest.raises(SpecError, match="3 vLLM machines on 2 cores"):
        whole_core_plan(["a", "b", "c"], [0, 1])


@pytest.mark.parametrize(("cores", "text"), [({1}, "1"), ({0, 1, 2, 3}, "0-3"), ({0, 4, 5}, "0,4-5")])
def test_cores_are_written_short(cores: set[int], text: str) -> None:
    """A report of a large host would be full of numbers."""
    assert cores_text(cores) == text


def test_what_a_worker_has_started_counts_as_the_worker() -> None:
    """A vLLM machine computes in processes that it starts: it would seem idle, and could not be put on a core."""
    code = (
        "import subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', "
        "'import time; end = time.process_time() + 0.3\\nwhile time.process_time() < end: pass\\n"
        "print(1, flush=True); time.sleep(60)']); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as worker:
        try:
            assert worker.stdout is not None
            worker.stdout.readline()
            pids = with_descendants(worker.pid)
            assert len(pids) == 2
            assert cpu_s(worker.pid) >= 0.3
            core = max(os.sched_getaffinity(0))
            with pinned(
                CorePlan(workers={"a": frozenset({core})}, front=frozenset({core}), core_share=1.0),
                {"a": worker.pid},
                [],
            ):
                assert [os.sched_getaffinity(pid) for pid in pids] == [{core}, {core}]
        finally:
            for pid in reversed(with_descendants(worker.pid)):
                os.kill(pid, signal.SIGKILL)


def test_the_front_goes_where_it_may_again(tmp_path: Path) -> None:
    """A second cluster, or a worker started again, would be squeezed onto the gateway's core."""
    before = os.sched_getaffinity(0)
    plan = core_plan(["a"], sorted(before))
    with subprocess.Popen(["sleep", "60"]) as worker:  # noqa: S607 - any program
        try:
            with pinned(plan, {"a": worker.pid}, [os.getpid()]):
                assert os.sched_getaffinity(worker.pid) == plan.workers["a"]
                assert os.sched_getaffinity(0) == plan.front
        finally:
            worker.kill()
    assert os.sched_getaffinity(0) == before


def test_transfers_take_as_long_as_over_the_link_that_was_measured(tmp_path: Path) -> None:
    """The simulator would charge shared memory with the costs of a network between servers."""
    exposed_s = float(
        predictor(tmp_path, SPLIT).predict(trace_of((0.0, 100, 5)), NO_OVERHEADS).side.stages_s[TRANSFER][0]
    )
    last_layer_s = 100 * BLOCK_BYTES / 32 / 4 / LINK["bytes_per_s"]
    assert exposed_s == pytest.approx(LINK["latency_s"] + 4 * LINK["per_layer_s"] + last_layer_s, rel=1e-6)


def test_a_split_cluster_needs_a_link(tmp_path: Path) -> None:
    """Transfers would be predicted from nothing."""
    with pytest.raises(SpecError, match="has no link"):
        predictor(tmp_path, SPLIT, link=None)
    assert predictor(tmp_path, {"unsplit": 1}, link=None).names == ["unsplit-0"]


def test_rules_expect_what_a_gateway_would() -> None:
    """Placement would differ because the simulation knows the mean output before the first request has ended."""
    expected = as_gateways_expect(trace_of((0.0, 9, 500), (0.0, 9, 50), (0.0, 9, 500))).expected_tokens.tolist()
    assert expected == [128, 50, 152]
    warm = as_gateways_expect(trace_of((0.0, 9, 500)), earlier=[18] * 10).expected_tokens.tolist()
    assert warm == [73]


def test_records_find_their_requests_again() -> None:
    """A request's stages would be held against another one's prediction."""
    trace = trace_of((0.0, 10, 5), (1.0, 20, 5), (1.0, 30, 5), (2.0, 20, 5))
    records = [{"arrival_unix_s": at_s, "prompt_tokens": tokens} for at_s, tokens in ((9.0, 20), (8.0, 20), (7.9, 30))]
    found = in_order(trace, records)
    assert [None if one is None else one["arrival_unix_s"] for one in found] == [None, 8.0, 7.9, 9.0]


def idle_run(times_s: dict[str, float], batch_s: float) -> LiveRun:
    """What came of `idle_trace`: requests alone took these stages, those that came at once these iterations."""
    records, seen = [], []
    for row in range(14):
        step_s = times_s["step"] if row < 6 else batch_s
        started_s, first_s = times_s["queue"], times_s["queue"] + times_s["prompt"]
        last_s = first_s + 15 * step_s
        records.append({
            "outcome": "completed", "prefill_machine": "prefill-0", "decode_machine": "decode-0", "attempts": 1,
            "prefill_started_s": started_s, "first_token_s": first_s, "kv_ready_s": first_s,
            "second_token_s": first_s + step_s, "last_token_s": last_s, "output_tokens": 16,
        })  # fmt: skip
        seen.append(SeenRequest(row, 0.0, 0.0, [(first_s + times_s["client"], 1), (last_s, 15)], 16, last_s))
    return LiveRun(
        replay=ReplayResult(seen, np.zeros(0), 1.0), records=records, moves={}, busy_s={}, waited_s={}, others_share=0.0
    )


def test_the_front_end_is_what_short_requests_take_longer_than_their_iterations(tmp_path: Path) -> None:
    """What messages and sending take would be lost, counted twice, or charged to the wrong stage."""
    times = predictor(tmp_path, SPLIT).times
    trace = idle_trace(times, 4096)
    assert (len(trace), int(trace.prompt_tokens[0]), int(trace.output_tokens[0])) == (14, 32, 16)
    assert float(trace.arrival_s[6]) == float(trace.arrival_s[13]) > float(trace.arrival_s[5])
    # A decode iteration of one request takes 10 ms, of eight 17 ms; a prompt of 32 tokens takes 32 ms.
    run = idle_run({"queue": 0.002, "prompt": 0.037, "step": 0.011, "client": 0.003}, batch_s=0.0201)
    found = idle_overheads(run, times, trace)
    assert found.decode_s == pytest.approx(0.0003, abs=1e-5)
    assert found.iteration_s == pytest.approx(0.0007, abs=1e-5)
    assert found.stages_s[QUEUE] == pytest.approx(0.002)
    assert found.stages_s[PREFILL] == pytest.approx(0.037 - 0.032 - 0.001)
    assert found.stages_s[FRONT] == pytest.approx(0.003)


def test_what_a_profile_from_outside_has_in_its_prompts_is_not_in_the_queue_too(tmp_path: Path) -> None:
    """The way to the server would count twice, and every TTFT of a vLLM machine would be predicted too long."""
    times = predictor(tmp_path, SPLIT).times
    run = idle_run({"queue": 0.005, "prompt": 0.029, "step": 0.01, "client": 0.0}, batch_s=0.017)
    found = idle_overheads(run, times, idle_trace(times, 4096))
    assert found.stages_s[QUEUE] + found.stages_s[PREFILL] == pytest.approx(0.034 - 0.032)


def test_a_cluster_faster_than_its_profile_has_no_negative_front_end(tmp_path: Path) -> None:
    """A profile that is too slow would be corrected in secret."""
    times = predictor(tmp_path, SPLIT).times
    run = idle_run({"queue": 0.0, "prompt": 0.02, "step": 0.005, "client": 0.0}, batch_s=0.01)
    found = idle_overheads(run, times, idle_trace(times, 4096))
    assert (found.iteration_s, found.decode_s, found.first_s) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(("mean", "expected"), [(0.1, False), (0.317, True), (None, False)])
def test_a_profile_that_does_not_hold_is_doubted(tmp_path: Path, mean: float | None, expected: bool) -> None:
    """A person would take a host that was busy while it was profiled for a prediction that is wrong."""
    predictor(tmp_path, {"unsplit": 1}, errors={"all": {"count": 11, "mean": mean, "worst": 1.0, "worst_at": "there"}})
    doubts = profile_doubts(read_profile_file(tmp_path / "profile.json"))
    assert bool(doubts) == expected
    assert not expected or "the profile is 32% off" in doubts[0]


def test_a_profile_that_was_not_checked_is_not_doubted(tmp_path: Path) -> None:
    """A short profile that keeps nothing apart would stop the comparison with an error."""
    predictor(tmp_path, {"unsplit": 1})
    assert profile_doubts(read_profile_file(tmp_path / "profile.json")) == []
