"""The naive twin by the published rules: small cases worked out by hand, and the published simulator's own results."""

import csv
import gzip
import itertools
import re
import statistics
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naive.parts import Arrival, Knots, Machine, Model, Outcome, Result, Role, interpolate
from naive.published import LINK_BYTES_PER_S, Cluster, simulate
from naive.published_instance import Request

# One millisecond for each token of a prompt, 0.1 s for a decode iteration of any size.
PREFILL_KNOTS = ((0, 0.0), (1000, 1.0))
DECODE_KNOTS = ((1, 0.1), (2, 0.1))
# The transfer of 800 tokens takes one second; whole bytes, so that sums are exact.
MODEL = Model(kv_bytes_per_token=LINK_BYTES_PER_S // 800, weights_bytes=0)


def machine(role: Role, capacity_tokens: int = 100_000) -> Machine:
    return Machine(role, PREFILL_KNOTS, DECODE_KNOTS, capacity_tokens * MODEL.kv_bytes_per_token)


def test_interpolation_extends_the_first_and_the_last_segment() -> None:
    """Decode batches, left of the first knot, and the longest prompts, right of the last, would get other times."""
    knots = ((10, 1.0), (20, 3.0), (30, 4.0))
    assert [interpolate(knots, x) for x in (0, 10, 15, 20, 25, 40)] == [-1.0, 1.0, 2.0, 3.0, 3.5, 5.0]


def test_unsplit_instance_cuts_preempts_and_mixes() -> None:
    """One of the cut of a step, the preemption by a long prompt, or the mixed batch would not follow the rules."""
    arrivals = [Arrival(0.0, 1000, 10), Arrival(1.25, 3000, 3), Arrival(4.55, 500, 2)]
    result = simulate(arrivals, [machine("unsplit")], MODEL)
    builds = [(build.batch, build.iterations, build.waiting) for build in result.builds]
    assert builds == [
        ((("prefill", 0, 1),), 1, ()),
        # Nine iterations are planned; the decode task of request 1 cuts them to three, its prompt is too long to.
        ((("decode", 0, 9),), 9, ()),
        ((("prefill", 1, 1),), 1, (("decode", 0, 1), ("decode", 1, 0))),
        ((("decode", 0, 6), ("decode", 1, 2)), 2, ()),
        ((("decode", 0, 4),), 4, ()),
        ((("decode", 0, 3), ("prefill", 2, 1)), 1, (("decode", 2, 0),)),
        ((("decode", 0, 2), ("decode", 2, 1)), 1, ()),
        ((("decode", 0, 1),), 1, ()),
    ]
    starts_s = [build.time_s for build in result.builds]
    assert starts_s == pytest.approx([0.0, 1.0, 1.3, 4.3, 4.5, 4.6, 4.6 + 1.1 * 0.501, 4.7 + 1.1 * 0.501])
    assert [outcome.ttft_s for outcome in result.outcomes] == pytest.approx([1.0, 3.05, 0.05 + 1.1 * 0.501])
    assert [outcome.e2e_s for outcome in result.outcomes] == pytest.approx([5.3511, 3.25, 0.15 + 1.1 * 0.501])
    assert [outcome.queue_s for outcome in result.outcomes] == pytest.approx([0.0, 0.05, 0.05])
    counters = result.counters
    assert (counters.steps, counters.iterations, counters.preemptions, counters.same_instance) == (8, 11, 1, 3)


@pytest.mark.parametrize(("decode_instance", "queue_s"), [(0, 0.05), (1, 0.75)])
def test_long_prompt_cuts_a_step_only_by_its_token_task(decode_instance: int, queue_s: float) -> None:
    """A prompt above the batch limit would cut a decode step although its own decode task is on another instance."""
    cluster = Cluster([machine("unsplit"), machine("unsplit")], MODEL)
    here = cluster.instances[0]
    running = Request(0, Arrival(0.0, 100, 11), Outcome())
    long = Request(1, Arrival(0.35, 3000, 2), Outcome())
    cluster.agenda.at(running.arrival_s, partial(cluster.submit, running, here, here))
    cluster.agenda.at(long.arrival_s, partial(cluster.submit, long, here, cluster.instances[decode_instance]))
    cluster.agenda.run(100.0)
    # The step of ten tokens runs from 0.1 to 1.1; cut, it ends at 0.4.
    assert long.outcome.queue_s == pytest.approx(queue_s)


def test_transfer_separates_prompt_and_token_phase() -> None:
    """The decode phase would not start exactly when the KV cache has arrived on the decode instance."""
    result = simulate([Arrival(0.5, 800, 4)], [machine("prefill"), machine("decode")], MODEL)
    (outcome,) = result.outcomes
    assert (outcome.prefill_instance, outcome.decode_instance) == (0, 1)
    assert outcome.ttft_s == pytest.approx(0.8)
    assert outcome.second_token_overhead_s == pytest.approx(1.0)
    assert outcome.e2e_s == pytest.approx(2.1)
    assert result.counters.same_instance == 0


def test_transfer_without_room_tries_again_every_second() -> None:
    """A transfer would start before its destination has room, or as soon as it has, and not at the next second."""
    cluster = Cluster([machine("prefill"), machine("decode", 2000)], MODEL)
    destination = cluster.instances[1]
    foreign_bytes = 1500 * MODEL.kv_bytes_per_token
    destination.memory_bytes += foreign_bytes

    def release() -> None:
        destination.memory_bytes -= foreign_bytes

    cluster.agenda.at(2.5, release)
    (outcome,) = cluster.serve([Arrival(0.0, 800, 3)]).outcomes
    # The prompt ends at 0.8; the tries at 0.8 and 1.8 fail, the one at 2.8 succeeds.
    assert outcome.second_token_overhead_s == pytest.approx(3.0)
    assert outcome.e2e_s == pytest.approx(4.0)


def test_token_instance_joins_the_mixed_pool_and_goes_back() -> None:
    """A full prompt queue would not send a prompt to a decode instance, or that instance would stay mixed for ever."""
    arrivals = [Arrival(0.0, 8000, 2), Arrival(1.0, 300, 2), Arrival(2.0, 300, 2)]
    cluster = Cluster([machine("prefill"), machine("decode")], MODEL)
    result = cluster.serve(arrivals)
    assert [(outcome.prefill_instance, outcome.decode_instance) for outcome in result.outcomes] == [
        (0, 1),
        (0, 1),
        (1, 1),
    ]
    assert [outcome.ttft_s for outcome in result.outcomes] == pytest.approx([8.0, 7.3, 0.3])
    assert result.outcomes[2].e2e_s == pytest.approx(0.4)
    counters = result.counters
    assert (counters.decode_to_mixed, counters.prefill_to_mixed, counters.back_from_mixed) == (1, 0, 1)
    assert cluster.mixed_list == []
    assert cluster.decode_list == [cluster.instances[1]]


def test_prompt_instance_joins_the_mixed_pool_when_token_memory_is_short() -> None:
    """Reserved KV above a decode instance's memory would not send the decode phase to a prefill instance."""
    cluster = Cluster([machine("prefill"), machine("prefill"), machine("decode", 1500)], MODEL)
    result = cluster.serve([Arrival(0.0, 1000, 101), Arrival(0.5, 1000, 101)])
    # Both prefill instances: 0 holds the first request; 1 is least loaded on both counts and takes both phases.
    assert [(outcome.prefill_instance, outcome.decode_instance) for outcome in result.outcomes] == [(0, 2), (1, 1)]
    assert (result.counters.prefill_to_mixed, result.counters.back_from_mixed, result.counters.same_instance) == (
        1,
        1,
        1,
    )


def test_waiting_task_without_memory_stays_stuck() -> None:
    """The published program's known dead end (a task that nothing wakes) would be missing from its rules."""
    result = simulate([Arrival(0.0, 1000, 1000)], [machine("unsplit", 1500)], MODEL)
    (outcome,) = result.outcomes
    assert outcome.ttft_s == pytest.approx(1.0)
    assert not outcome.completed


def test_queue_search_does_not_assume_what_a_sorted_queue_would_give() -> None:
    """Insertion would sort a queue that the published program leaves unsorted after counts have grown."""
    cluster = Cluster([machine("unsplit")], MODEL)
    (instance,) = cluster.instances
    tasks = [Request(number, Arrival(number, 1, 2), Outcome()).decode for number in range(4)]
    for task, count in zip(tasks, (0, 3, 0, 1), strict=True):
        task.count = count
    # The search looks at count 3, then at the first 0; the end of the zeros is behind the 3.
    instance.queue = tasks[:3]
    instance.enqueue(tasks[3])
    assert instance.queue == [tasks[0], tasks[3], tasks[1], tasks[2]]


@pytest.mark.parametrize(
    ("output_tokens", "roles", "message"),
    [(1, ["unsplit"], "two output tokens"), (2, ["unsplit", "prefill", "decode"], "unsplit")],
)
def test_input_outside_the_published_rules_is_refused(output_tokens: int, roles: list[Role], message: str) -> None:
    """A case that the published rules do not cover would be given a made-up result."""
    with pytest.raises(ValueError, match=message):
        simulate([Arrival(0.0, 10, output_tokens)], [machine(role) for role in roles], MODEL)


ROLE_LISTS: list[list[Role]] = [
    ["unsplit", "unsplit"],
    ["prefill", "decode"],
    ["decode", "decode", "prefill", "prefill"],
]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 3), st.integers(1, 5000), st.integers(2, 40)), min_size=1, max_size=30),
    roles=st.sampled_from(ROLE_LISTS),
)
def test_everything_completes_and_drains_with_ample_memory(
    rows: list[tuple[float, int, int]], roles: list[Role]
) -> None:
    """A request would be lost or served twice, or memory and pending tokens would not come back."""
    gaps_s, prompts, outputs = zip(*rows, strict=True)
    arrivals = list(itertools.starmap(Arrival, zip(itertools.accumulate(gaps_s), prompts, outputs, strict=True)))
    cluster = Cluster([machine(role, 1_000_000) for role in roles], MODEL)
    result = cluster.serve(arrivals)
    assert all(outcome.completed for outcome in result.outcomes)
    assert result.counters.task_iterations == sum(outputs)
    for instance in cluster.instances:
        present = [instance.batch, instance.queue, instance.waiting_prompts, instance.preempted, instance.present_order]
        assert not any(present)
        assert not instance.present
        assert (instance.memory_bytes, instance.sched_pending_tokens) == (0, 0)
        # token_jsq never charges the scheduler's memory account, but what is freed comes off it all the same.
        if instance.role != "unsplit":
            assert instance.sched_memory_bytes == 0


# The published simulator's own results.

REFERENCE = Path(__file__).parents[2] / "shared" / "data" / "splitwise-sim"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="needs ../shared/data/splitwise-sim")
TOLERANCE_S = 1e-6
INSTANCE_BYTES = 8 * 85_899_345_920
MODELS = {
    "bloom-176b": Model(kv_bytes_per_token=4_014_080, weights_bytes=329e9),
    "llama2-70b": Model(kv_bytes_per_token=2_621_440, weights_bytes=135e9),
}
PROFILES = {"a": "a100-80gb", "h": "h100-80gb", "hcap": "h100-80gb-pcap"}


@cache
def profile_rows() -> list[dict[str, str]]:
    with (REFERENCE / "perf_model.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["tensor_parallel"] == "8"]


@cache
def profile_knots(model: str, profile: str, column: str) -> Knots:
    """Return the median of a time in seconds over all rows with one product of prompt size and batch size."""
    times_s: dict[int, list[float]] = {}
    for row in profile_rows():
        if (row["model"], row["hardware"]) == (model, PROFILES[profile]):
            size = int(row["prompt_size"]) * int(row["batch_size"])
            times_s.setdefault(size, []).append(float(row[column]) / 1000)
    return [(size, statistics.median(times)) for size, times in sorted(times_s.items())]


def pool(model: str, profile: str, role: Role, count: int) -> list[Machine]:
    prefill_knots = profile_knots(model, profile, "prompt_time")
    decode_knots = profile_knots(model, profile, "token_time")
    return [Machine(role, prefill_knots, decode_knots, INSTANCE_BYTES)] * count


def machines_of(model: str, config: str) -> list[Machine]:
    """Return the machines in the published order of their numbers."""
    if baseline := re.fullmatch(r"baseline_([ah])100_(\d+)", config):
        return pool(model, baseline[1], "unsplit", int(baseline[2]))
    split = re.fullmatch(r"([ah])(a|hcap|h)_(\d+)p_(\d+)t", config)
    assert split is not None
    prompt = pool(model, split[1], "prefill", int(split[3]))
    token = pool(model, split[2], "decode", int(split[4]))
    return prompt + token if split[1] == split[2] else token + prompt


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return list(csv.DictReader(file))


@cache
def trace(name: str) -> list[Arrival]:
    return [
        Arrival(float(row["arrival_timestamp"]), int(row["prompt_size"]), int(row["token_size"]))
        for row in rows_of(REFERENCE / f"{name}.csv.gz")
    ]


def published_run(model: str, trace_name: str, config: str) -> Result:
    return simulate(trace(trace_name), machines_of(model, config), MODELS[model])


def assert_equal_to_file(result: Result, path: Path) -> None:
    rows = rows_of(path)
    assert len(rows) == len(result.outcomes)
    for row, outcome in zip(rows, result.outcomes, strict=True):
        expected_s = [float(row[c]) for c in ("ttft_times", "response_times", "queue_times", "nth_token_overheads")]
        times_s = [outcome.ttft_s, outcome.e2e_s, outcome.queue_s, outcome.second_token_overhead_s]
        assert times_s == pytest.approx(expected_s, rel=0, abs=TOLERANCE_S), row["request_ids"]
        instances = (int(row["prompt_instance"]), int(row["token_instance"]))
        assert (outcome.prefill_instance, outcome.decode_instance) == instances, row["request_ids"]


# Two-minute traces at 70 requests/s: (moves token -> mixed, prompt -> mixed, requests with both sides on one instance).
TWO_MINUTES = {
    "bloom-176b__rr_code_70_2min__aa_45p_25t": (76, 0, 11),
    "bloom-176b__rr_code_70_2min__baseline_a100_70": (0, 0, 8502),
    "bloom-176b__rr_code_70_2min__baseline_h100_40": (0, 0, 8502),
    "bloom-176b__rr_code_70_2min__ha_25p_26t": (23, 0, 4),
    "bloom-176b__rr_code_70_2min__hh_25p_15t": (22, 0, 3),
    "bloom-176b__rr_code_70_2min__hh_35p_5t": (0, 0, 0),
    "bloom-176b__rr_code_70_2min__hhcap_25p_21t": (22, 0, 4),
    "bloom-176b__rr_conv_70_2min__aa_45p_25t": (0, 0, 0),
    "bloom-176b__rr_conv_70_2min__baseline_a100_70": (0, 0, 8502),
    "bloom-176b__rr_conv_70_2min__baseline_h100_40": (0, 0, 8502),
    "bloom-176b__rr_conv_70_2min__ha_25p_26t": (0, 0, 0),
    "bloom-176b__rr_conv_70_2min__hh_25p_15t": (0, 0, 0),
    "bloom-176b__rr_conv_70_2min__hh_35p_5t": (0, 6, 4),
    "bloom-176b__rr_conv_70_2min__hhcap_25p_21t": (0, 0, 0),
    "llama2-70b__rr_conv_70_2min__baseline_h100_40": (0, 0, 8502),
    "llama2-70b__rr_conv_70_2min__hh_25p_15t": (0, 0, 0),
}

# The first rows of those traces on far too few machines: rows, machines in order, steps, iterations, preemptions, moves
# token -> mixed, prompt -> mixed, requests with both sides on one instance.
OVERLOAD = {
    "bloom-176b__rr_conv_70_2min_first600__baseline_h100_4": (600, "baseline_h100_4", 889, 3835, 3743, 0, 0, 600),
    "bloom-176b__rr_conv_70_2min_first600__hh_3p_2t": (600, "hh_3p_2t", 874, 4088, 3316, 2, 3, 558),
    "bloom-176b__rr_code_70_2min_first300__hh_2p_1t": (300, "hh_2p_1t", 343, 2516, 1859, 1, 2, 285),
    "bloom-176b__rr_conv_70_2min_first900__aa_4p_2t": (900, "aa_4p_2t", 1313, 5347, 5543, 2, 4, 859),
    "llama2-70b__rr_conv_70_2min_first600__hh_3p_2t": (600, "hh_3p_2t", 852, 3514, 4205, 2, 0, 557),
}


@pytest.mark.shared
@needs_reference
@pytest.mark.parametrize("name", TWO_MINUTES)
def test_published_results_request_by_request(name: str) -> None:
    """The twin would not be the published simulator: a time, an instance or a count of a two-minute run differs."""
    model, trace_name, config = name.split("__")
    result = published_run(model, trace_name, config)
    assert_equal_to_file(result, REFERENCE / "expected" / f"{name}.csv.gz")
    counters = result.counters
    with (REFERENCE / "expected" / "summary.csv").open(newline="") as file:
        rows = {(row["model"], row["trace"], row["config"]): row for row in csv.DictReader(file)}
    row = rows[model, trace_name, config]
    expected = [int(row[c]) for c in ("macro_iterations", "iterations", "task_iterations", "preempted_task_events")]
    assert [counters.steps, counters.iterations, counters.task_iterations, counters.preemptions] == expected
    assert (counters.decode_to_mixed, counters.prefill_to_mixed, counters.same_instance) == TWO_MINUTES[name]
    assert counters.back_from_mixed == counters.decode_to_mixed + counters.prefill_to_mixed


@pytest.mark.shared
@needs_reference
@pytest.mark.parametrize("name", OVERLOAD)
def test_published_overload_results_request_by_request(name: str) -> None:
    """The rules under memory pressure (unsorted queue, order of a batch, counts, skips) would differ somewhere."""
    model, trace_name, _ = name.split("__")
    count, config, *expected = OVERLOAD[name]
    arrivals = trace(trace_name.split("_first")[0])[:count]
    result = simulate(arrivals, machines_of(model, config), MODELS[model])
    assert_equal_to_file(result, REFERENCE / "overload" / f"{name}.csv.gz")
    counters = result.counters
    moves = [counters.decode_to_mixed, counters.prefill_to_mixed]
    assert [counters.steps, counters.iterations, counters.preemptions, *moves, counters.same_instance] == expected


@pytest.mark.shared
@needs_reference
def test_first_builds_of_a_published_baseline() -> None:
    """The first steps of one busy instance (cut, preemption, mixed batch) would differ from the published ones."""
    result = published_run("bloom-176b", "rr_conv_70_2min", "baseline_h100_40")
    builds = [build for build in result.builds if build.instance == 0][:6]
    assert [build.time_s for build in builds] == pytest.approx(
        [0.0113696, 0.1460424, 0.6759511, 1.6689596, 1.7042901, 1.9152037], abs=1e-7
    )
    assert [build.batch for build in builds] == [
        (("prefill", 0, 1),),
        (("decode", 0, 54),),
        (("prefill", 40, 1),),
        (("decode", 0, 39), ("decode", 40, 63)),
        (("decode", 0, 38), ("decode", 40, 62), ("prefill", 120, 1)),
        (("decode", 0, 37), ("decode", 40, 61), ("decode", 120, 161)),
    ]
    assert [build.iteration_s for build in builds] == pytest.approx(
        [0.1346727, 0.0353272, 0.9930085, 0.0353305, 0.2109137, 0.0353337], abs=1e-7
    )
    assert [build.waiting for build in builds] == [
        (),
        (),
        (("decode", 0, 1), ("decode", 40, 0)),
        (),
        (("decode", 120, 0),),
        (),
    ]
