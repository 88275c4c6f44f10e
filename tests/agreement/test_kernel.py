"""The compiled kernel against the naive twins, request by request, on random small cases and one of realistic size."""

import math
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agreement.drawn import default_case, published_case, seeded
from agreement.twins import Case, default_input, published_input
from driving import done_rows, drive
from naive import default, published
from naive.default_parts import Counters, Request
from naive.parts import Outcome, Result
from phasesplit.io.catalog import build_cluster
from phasesplit.io.traces import read_trace
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.setup import RunState
from phasesplit.simulator.world import COMPLETED, REFUSED

pytestmark = pytest.mark.slow

TOLERANCE = 1e-9

LEDGER_COUNTS = (
    "preemptions", "evictions", "prefill_to_mixed", "decode_to_mixed", "returns", "repurposed", "one_machine",
)  # fmt: skip
CLOCK_COUNTS = ("layerwise", "serialized", "recomputed")
MACHINE_COUNTS = ("steps", "iterations", "task_iterations")

KINDS = (
    "evictions", "prompts_evicted", "preemptions", "prefill_to_mixed", "decode_to_mixed", "both_to_least_loaded",
    "prompt_queued_static", "tokens_queued_static",
    "returns", "repurposed", "layerwise", "streams_without_room", "serialized", "awaiting_room_waited",
    "awaiting_room_cuts",
    "arrival_cuts", "recomputed", "chunks_continued", "rebuilt",
)  # fmt: skip
"""What the twin counts and each rule needs at least once."""
SEEDS = (1, 15, 21, 38, 49, 207, 211, 252, 1275, 1585, 2426, 2661)
"""Of cases that come to all of it."""
PUBLISHED_KINDS = ("preemptions", "decode_to_mixed", "prefill_to_mixed", "back_from_mixed", "same_instance")
PUBLISHED_SEEDS = (60, 76, 101)


def counts_of(state: RunState) -> dict[str, int]:
    """Return the kernel's counters."""
    counts = {name: int(state.ledger.counters[name][0]) for name in LEDGER_COUNTS}
    counts |= {name: int(state.world.clock[name][0]) for name in CLOCK_COUNTS}
    counts |= {name: int(state.ledger.machines[name].sum()) for name in MACHINE_COUNTS}
    return counts


def close(values_s: Iterable[float]) -> object:
    return pytest.approx(list(values_s), rel=TOLERANCE, abs=TOLERANCE)


def assert_equal_by_default(case: Case, *, trees: bool = False) -> Counters:
    """Compare kernel (with trees as in a large cluster, or not) and twin by default; return the twin's counters."""
    state = drive(case.cluster, case.rules, case.trace, trees=trees)
    twin = default.simulate(*default_input(case))
    rows = done_rows(state)
    assert len(rows) == len(twin.requests)
    for request, row in zip(twin.requests, rows, strict=True):
        assert row["row"] == request.number
        if request.refused:
            assert row["status"] == REFUSED
            continue
        assert row["status"] == COMPLETED
        assert whole_numbers_of(request) == (row["prefill_machine"], row["decode_machine"], row["preemptions"])
        names = ("prefill_start_s", "first_token_s", "kv_ready_s", "decode_start_s", "last_token_s", "gap_max_s")
        assert [float(row[name]) for name in names] == close(times_of(request)), f"request {request.number}"
    assert counts_of(state) == {name: getattr(twin.counters, name) for name in counts_of(state)}
    return twin.counters


def whole_numbers_of(request: Request) -> tuple[int, int, int]:
    assert request.assigned is not None
    assert request.decode_machine is not None
    return request.assigned.number, request.decode_machine.number, request.preemptions


def times_of(request: Request) -> tuple[float, ...]:
    return (
        request.prefill_start_s,
        request.emitted_s[0],
        request.kv_ready_s,
        request.decode_start_s,
        request.emitted_s[-1],
        request.gap_max_s,
    )


def assert_equal_by_published_rules(case: Case) -> Result:
    """Compare kernel and twin under the published rules; return what the twin found."""
    state = drive(case.cluster, case.rules, case.trace)
    twin = published.simulate(*published_input(case))
    left = {int(row["row"]): row for row in state.ledger.requests if row["row"] >= 0}
    ended = {int(row["row"]): row for row in done_rows(state)}
    assert sorted(left | ended) == list(range(len(twin.outcomes)))
    for number, outcome in enumerate(twin.outcomes):
        assert outcome.completed == (number in ended), f"request {number}"
        row = ended[number] if outcome.completed else left[number]
        machine = row["prefill_machine"] if outcome.completed else row["assigned_machine"]
        pair = (outcome.prefill_instance, outcome.decode_instance)
        assert pair == (machine, row["decode_machine"]), f"request {number}"
        assert published_times(row, completed=outcome.completed) == close(outcome_times(outcome)), f"request {number}"
    counters = state.ledger.counters[0]
    expected = twin.counters
    assert {name: int(state.ledger.machines[name].sum()) for name in MACHINE_COUNTS} == {
        name: getattr(expected, name) for name in MACHINE_COUNTS
    }
    assert [int(counters[name]) for name in LEDGER_COUNTS] == [
        expected.preemptions,
        0,
        expected.prefill_to_mixed,
        expected.decode_to_mixed,
        expected.back_from_mixed,
        0,
        expected.same_instance,
    ]
    return twin


def published_times(row: Any, *, completed: bool) -> list[float]:
    """Return TTFT, E2E, queue and second-token overhead from a record or a slot; -1 for what never came."""
    names = ("arrival_s", "prefill_start_s", "first_token_s", "decode_start_s", "last_token_s")
    arrival_s, prefill_start_s, first_s, decode_start_s, last_s = (float(row[name]) for name in names)
    return [
        first_s - arrival_s if first_s >= 0 else -1.0,
        last_s - arrival_s if completed else -1.0,
        prefill_start_s - arrival_s if prefill_start_s >= 0 else -1.0,
        decode_start_s - first_s if decode_start_s >= 0 else -1.0,
    ]


def outcome_times(outcome: Outcome) -> list[float]:
    times_s = (outcome.ttft_s, outcome.e2e_s, outcome.queue_s, outcome.second_token_overhead_s)
    return [-1.0 if math.isnan(time_s) else time_s for time_s in times_s]


@settings(max_examples=800, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_default_rules_on_random_cases(random: Random) -> None:
    """The kernel would not do what the rules say: a time, a machine or a count of a small case differs."""
    assert_equal_by_default(default_case(random), trees=random.random() < 0.5)


def test_default_rules_on_cases_that_come_to_everything() -> None:
    """The kernel would differ in something rare; or agreement would be empty, as it happens in none of the cases."""
    all_counters = [assert_equal_by_default(default_case(seeded(seed))) for seed in SEEDS]
    assert [kind for kind in KINDS if not any(getattr(counters, kind) for counters in all_counters)] == []


@settings(max_examples=300, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_published_rules_on_random_cases(random: Random) -> None:
    """The kernel would not be the published simulator: a time, an instance or a count of a small case differs."""
    assert_equal_by_published_rules(published_case(random))


def test_published_rules_on_cases_that_come_to_everything() -> None:
    """The kernel would differ in something rare; or agreement would be empty, as it happens in none of the cases."""
    results = [assert_equal_by_published_rules(published_case(seeded(seed))) for seed in PUBLISHED_SEEDS]
    all_counters = [result.counters for result in results]
    assert [kind for kind in PUBLISHED_KINDS if not any(getattr(each, kind) for each in all_counters)] == []
    assert any(not outcome.completed for result in results for outcome in result.outcomes)


@pytest.mark.shared
@pytest.mark.parametrize(
    "pools",
    [[("prefill", 2, "dgx-h100"), ("decode", 1, "dgx-h100")], [("unsplit", 3, "dgx-h100")]],
    ids=["split", "unsplit"],
)
def test_default_rules_on_a_published_trace(pools: list[tuple[str, int, str]], shared_data: Path) -> None:
    """The kernel would differ from the rules at a realistic size, where batches are large and steps long."""
    trace, _ = read_trace(shared_data / "splitwise-sim" / "rr_conv_70_2min.csv.gz")
    cluster = build_cluster("bloom-176b", pools)
    assert_equal_by_default(Case(cluster, trace.head(400), Rules()))
