"""Predicted against measured: stages cut at the same instants on both sides, errors, and what explains them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.latency import Exact
from phasesplit.simulator.run import simulate
from phasesplit.validation.comparison import (
    DECODE,
    FIRST,
    FRONT,
    PREFILL,
    QUEUE,
    STAGES,
    TRANSFER,
    WAIT,
    ComparedFigure,
    Side,
    compare,
    measured_stages,
    queue_in_prefill,
    simulated_stages,
)
from phasesplit.validation.live import pool_moves


def record(**changes: Any) -> dict[str, Any]:
    """A request that spent 1, 2, 3, 4 and 5 s in the stages."""
    return {
        "outcome": "completed", "output_tokens": 6, "prompt_tokens": 9, "prefill_machine": "prefill-0",
        "decode_machine": "decode-0", "prefill_started_s": 1.0, "first_token_s": 3.0, "kv_ready_s": 6.0,
        "second_token_s": 10.0, "last_token_s": 15.0, "attempts": 1, **changes,
    }  # fmt: skip


def stages_of(e2e_s: float, **changes: Any) -> dict[str, float]:
    found = measured_stages([record(**changes)], np.array([e2e_s]))
    return {name: float(values[0]) for name, values in found.items()}


def test_measured_stages_lie_between_the_reported_instants() -> None:
    """A stage would begin or end at another instant than the page says."""
    assert stages_of(15.5) == {QUEUE: 1.0, PREFILL: 2.0, TRANSFER: 3.0, WAIT: 4.0, DECODE: 5.0, FRONT: 0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_ready_s": 2.0},  # the KV was there before the first token was told
        {"kv_ready_s": 11.0},  # the report came after the second token
        {"kv_ready_s": None},
        {"prefill_started_s": 3.5},
        {"prefill_started_s": None},
        {"output_tokens": 1, "second_token_s": None, "kv_ready_s": None, "last_token_s": 3.0},
        {"output_tokens": 2, "last_token_s": 10.0},
        {"decode_machine": "prefill-0"},
    ],
)
def test_measured_stages_add_up_to_what_the_client_saw(changes: dict[str, Any]) -> None:
    """Time would be lost or counted twice, or a late report would make a stage negative."""
    last_s = changes.get("last_token_s", 15.0)
    found = stages_of(last_s + 0.25, **changes)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(last_s + 0.25)


def test_where_nobody_tells_when_a_prompt_phase_begins_the_queue_is_in_it_on_both_sides() -> None:
    """All of a prefill phase would be taken for queue, and the prediction's stages for wrong."""
    measured = stages_of(15.0, prefill_started_s=None)
    assert (measured[QUEUE], measured[PREFILL]) == (0.0, 3.0)
    predicted = queue_in_prefill(measured_stages([record()], np.array([15.0])))
    assert {name: float(values[0]) for name, values in predicted.items()} == measured


def test_the_first_token_is_never_moved_by_late_reports() -> None:
    """A report that comes early or late would change the TTFT, which the tokens alone say."""
    for kv_ready_s in (2.0, 6.0, 11.0):
        found = stages_of(15.0, kv_ready_s=kv_ready_s)
        assert found[QUEUE] + found[PREFILL] == 3.0


def test_one_machine_for_both_phases_has_no_transfer() -> None:
    """An unsplit cluster would show a transfer that nobody made."""
    found = stages_of(15.0, decode_machine="prefill-0", kv_ready_s=None)
    assert (found[TRANSFER], found[WAIT]) == (0.0, 7.0)


def test_a_request_that_failed_has_no_stages() -> None:
    """The time until a failure would be averaged with the time of answers."""
    found = measured_stages([record(outcome="failed"), None], np.array([np.nan, np.nan]))
    assert all(np.isnan(found[name]).all() for name in STAGES)


def test_simulated_stages_add_up_and_hold_the_overheads() -> None:
    """The two sides would be cut differently, or what is added to the prediction would be lost or counted twice."""
    columns = simulate(tiny_cluster(), tiny_trace((0.0, 100, 5), (0.0, 50, 1), (0.1, 200, 9))).columns
    assert columns is not None
    overheads_s = {QUEUE: 0.001, PREFILL: 0.002, FRONT: 0.004}
    found = simulated_stages(columns, overheads_s)
    assert sum(found.values()) == pytest.approx(columns["e2e_s"] + 0.007)
    assert sum(found[name] for name in FIRST) == pytest.approx(columns["ttft_s"] + 0.007)
    assert min(float(values.min()) for values in found.values()) >= 0


def test_a_simulated_request_alone_waits_for_one_iteration() -> None:
    """`wait` would mean another thing in the simulation (idle) than in the cluster (until the second token)."""
    columns = {
        "output_tokens": np.array([5]), "queue_s": np.array([0.0]), "ttft_s": np.array([1.0]),
        "transfer_exposed_s": np.array([0.5]), "decode_queue_s": np.array([0.25]), "e2e_s": np.array([5.75]),
    }  # fmt: skip
    found = simulated_stages(columns, {})
    assert [float(found[name][0]) for name in STAGES] == [0.0, 1.0, 0.5, 1.25, 3.0, 0.0]


def side(
    stages_s: Mapping[str, float], *, pairs: list[tuple[str, str] | None] | None = None, itl_s: float = 0.1
) -> Side:
    """Four equal requests, the last of which may have failed."""
    each = {name: np.full(4, stages_s.get(name, 0.0)) for name in STAGES}
    e2e_s = np.sum(list(each.values()), axis=0)
    return Side(
        ttft_s=np.sum([each[name] for name in FIRST], axis=0),
        e2e_s=e2e_s,
        itl=Exact(np.full(8, itl_s)),
        stages_s=each,
        pairs=pairs or [("prefill-0", "decode-0")] * 4,
        wall_s=10.0,
        output_tokens=20,
        busy={"prefill-0": 0.5, "prefill-1": 0.0, "decode-0": 0.5},
        moves={"returns": 0},
    )


def test_the_stage_that_differs_most_in_the_same_direction_explains() -> None:
    """A reader would be sent to a stage that makes the prediction better rather than worse."""
    predicted = side({QUEUE: 1.0, PREFILL: 2.0, DECODE: 5.0})
    measured = side({QUEUE: 1.5, PREFILL: 1.0, DECODE: 8.0})
    first, whole = compare(predicted, measured).explanations
    assert (first.metric, first.stage, first.stage_s) == ("TTFT", PREFILL, 1.0)
    assert (whole.metric, whole.stage, whole.stage_s) == ("E2E", DECODE, -3.0)
    assert whole.difference_s == pytest.approx(-2.5)


def test_means_that_agree_need_no_explanation() -> None:
    """Noise would be explained."""
    assert [one.stage for one in compare(side({DECODE: 5.0}), side({DECODE: 5.04})).explanations] == [None, None]


def test_errors_are_relative_to_what_was_measured() -> None:
    """A prediction twice too long would be called 50 % off."""
    figure = ComparedFigure(name="x", unit="s", predicted=2.0, measured=1.0, goal=0.2)
    assert (figure.error, figure.is_met) == (1.0, False)
    latencies = {one.name: one for one in compare(side({PREFILL: 1.0}), side({PREFILL: 1.04}, itl_s=0.2)).latencies}
    assert latencies["TTFT p50"].is_met
    assert latencies["ITL p99"].error == -0.5
    assert not latencies["ITL p99"].is_met


def test_requests_that_failed_on_one_side_are_compared_on_neither() -> None:
    """Percentiles of different requests would be compared."""
    predicted, measured = side({PREFILL: 1.0}), side({PREFILL: 1.0})
    predicted.ttft_s[3] = predicted.e2e_s[3] = 50.0
    measured.e2e_s[3] = measured.ttft_s[3] = np.nan
    found = compare(predicted, measured)
    assert (found.requests, found.compared) == (4, 3)
    assert {one.name: one for one in found.latencies}["E2E p99"].predicted == 1.0


def test_misplaced_requests_are_listed_with_both_pairs() -> None:
    """A wrong placement would go unseen, or a failed request count as one."""
    usual, other = ("prefill-0", "decode-0"), ("prefill-1", "decode-0")
    predicted = side({PREFILL: 1.0}, pairs=[usual, usual, usual, usual])
    measured = side({PREFILL: 1.0}, pairs=[usual, other, None, usual])
    assert [(one.row, one.predicted, one.measured) for one in compare(predicted, measured).misplaced] == [
        (1, usual, other)
    ]


def test_moves_are_counted_by_kind_from_a_line_on() -> None:
    """Moves of the warm-up would count, or a change of home be taken for a return."""
    lines: list[dict[str, Any]] = [
        {"kind": "phasesplit decisions"},
        {"call": "enlist", "args": ["prefill-0", 0, 0, 9], "moved": [[0, 0, 0]]},
        {"call": "enlist", "args": ["decode-0", 1, 1, 9], "moved": [[1, 1, 1]]},
        {"call": "place", "args": [], "moved": [[1, 2, 1]]},
        {"call": "look_home", "args": [1, 0.0], "moved": [[1, 1, 1]]},
        {"call": "place", "args": [], "moved": [[0, 2, 0]]},
        {"call": "place", "args": []},
        {"call": "look_home", "args": [0, 1.0], "moved": [[0, 1, 1]]},
    ]
    assert pool_moves(lines) == {"prefill_to_mixed": 1, "decode_to_mixed": 1, "returns": 1, "repurposed": 1}
    assert pool_moves(lines, 5) == {"prefill_to_mixed": 1, "decode_to_mixed": 0, "returns": 0, "repurposed": 1}


def test_machines_that_are_alike_are_compared_under_the_names_that_fit() -> None:
    """Two idle machines taken in another order would count as wrong placements of half of all requests."""
    first, second = ("unsplit-0", "unsplit-0"), ("unsplit-1", "unsplit-1")
    predicted = replace(side({}, pairs=[first, second, first, second]), busy={"unsplit-0": 0.1, "unsplit-1": 0.2})
    measured = replace(side({}, pairs=[second, first, second, second]), busy={"unsplit-0": 0.2, "unsplit-1": 0.1})
    found = compare(predicted, measured)
    assert [one.row for one in found.misplaced] == [3]
    busy = {one.name: (one.predicted, one.measured) for one in found.totals if one.unit == "share"}
    assert busy == {"unsplit-0 busy": (0.2, 0.2), "unsplit-1 busy": (0.1, 0.1)}


def test_machines_of_another_home_keep_their_names() -> None:
    """A prompt that went to a decode machine would look as predicted."""
    usual, spilled = ("prefill-0", "decode-0"), ("decode-0", "decode-0")
    names = {"prefill-0": 0.1, "decode-0": 0.2}
    predicted = replace(side({}, pairs=[usual] * 4), busy=names)
    measured = replace(side({}, pairs=[spilled] * 4), busy=names)
    assert len(compare(predicted, measured).misplaced) == 4
