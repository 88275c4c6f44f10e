"""The published simulator's own results, request by request, by the setting `published`."""

import csv
import gzip
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from phasesplit.domain.request import Trace
from phasesplit.io.catalog import build_cluster
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

pytestmark = pytest.mark.shared

TOLERANCE_S = 1e-6
"""Half of the last of the files' digits is 5e-8; a wrong rule differs by a millisecond or more."""

Pools = list[tuple[str, int, str]]
A100, H100, CAPPED = "dgx-a100", "dgx-h100", "dgx-h100-capped"
POOLS: dict[str, Pools] = {
    "aa_45p_25t": [("prefill", 45, A100), ("decode", 25, A100)],
    "hh_25p_15t": [("prefill", 25, H100), ("decode", 15, H100)],
    "hh_35p_5t": [("prefill", 35, H100), ("decode", 5, H100)],
    "ha_25p_26t": [("decode", 26, A100), ("prefill", 25, H100)],
    "hhcap_25p_21t": [("decode", 21, CAPPED), ("prefill", 25, H100)],
    "baseline_a100_70": [("unsplit", 70, A100)],
    "baseline_h100_40": [("unsplit", 40, H100)],
    "hh_2p_1t": [("prefill", 2, H100), ("decode", 1, H100)],
    "hh_3p_2t": [("prefill", 3, H100), ("decode", 2, H100)],
    "aa_4p_2t": [("prefill", 4, A100), ("decode", 2, A100)],
    "baseline_h100_4": [("unsplit", 4, H100)],
}
"""Machines in the order of the files' instance numbers."""

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
"""Moves token -> mixed and prompt -> mixed, and requests with both phases on one machine."""

OVERLOAD = {
    "bloom-176b__rr_conv_70_2min_first600__baseline_h100_4": (889, 3835, 3743, 0, 0, 600),
    "bloom-176b__rr_conv_70_2min_first600__hh_3p_2t": (874, 4088, 3316, 2, 3, 558),
    "bloom-176b__rr_code_70_2min_first300__hh_2p_1t": (343, 2516, 1859, 1, 2, 285),
    "bloom-176b__rr_conv_70_2min_first900__aa_4p_2t": (1313, 5347, 5543, 2, 4, 859),
    "llama2-70b__rr_conv_70_2min_first600__hh_3p_2t": (852, 3514, 4205, 2, 0, 557),
}
"""Steps, iterations, preemptions, moves token -> mixed, prompt -> mixed, requests with both phases on one machine."""


@cache
def columns(path: Path) -> dict[str, np.ndarray]:
    with gzip.open(path, "rt", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0]}


def published_run(folder: Path, name: str) -> Result:
    model, trace_name, pools = name.split("__")
    trace_name, _, first = trace_name.partition("_first")
    rows = columns(folder / f"{trace_name}.csv.gz")
    count = int(first) if first else None
    trace = Trace.from_columns(
        trace_name,
        rows["arrival_timestamp"][:count],
        rows["prompt_size"][:count].astype(np.int32),
        rows["token_size"][:count].astype(np.int32),
    )
    return simulate(build_cluster(model, POOLS[pools], published=True), trace, Rules.as_published())


def assert_equal_to_file(result: Result, path: Path) -> None:
    expected = columns(path)
    found = result.columns
    assert found is not None
    assert result.statuses["completed"] == expected["ttft_times"].size
    overhead_s = found["transfer_exposed_s"] + found["decode_queue_s"]
    for times_s, column in [
        (found["ttft_s"], "ttft_times"),
        (found["e2e_s"], "response_times"),
        (found["queue_s"], "queue_times"),
        (overhead_s, "nth_token_overheads"),
    ]:
        assert np.abs(times_s - expected[column]).max() < TOLERANCE_S, column
    for ours, column in (("prefill_machine", "prompt_instance"), ("decode_machine", "token_instance")):
        assert (found[ours] == expected[column]).all(), column


@pytest.mark.parametrize("name", TWO_MINUTES)
def test_two_minute_runs(name: str, shared_data: Path) -> None:
    """Figures could not be compared with the paper's: a time, a machine or a count of its simulator differs."""
    folder = shared_data / "splitwise-sim"
    result = published_run(folder, name)
    assert_equal_to_file(result, folder / "expected" / f"{name}.csv.gz")
    with (folder / "expected" / "summary.csv").open(newline="") as file:
        rows = {"__".join((row["model"], row["trace"], row["config"])): row for row in csv.DictReader(file)}
    ours = ("steps", "iterations", "task_iterations", "preemptions")
    theirs = ("macro_iterations", "iterations", "task_iterations", "preempted_task_events")
    assert [result.counts[count] for count in ours] == [int(rows[name][count]) for count in theirs]
    moves = tuple(result.counts[count] for count in ("decode_to_mixed", "prefill_to_mixed", "one_machine"))
    assert moves == TWO_MINUTES[name]
    assert result.counts["returns"] == moves[0] + moves[1]


@pytest.mark.parametrize("name", OVERLOAD)
def test_overloaded_runs(name: str, shared_data: Path) -> None:
    """The published rules would differ where memory and queues are full: order, ageing, skips, the unsorted queue."""
    folder = shared_data / "splitwise-sim"
    result = published_run(folder, name)
    assert_equal_to_file(result, folder / "overload" / f"{name}.csv.gz")
    names = ("steps", "iterations", "preemptions", "decode_to_mixed", "prefill_to_mixed", "one_machine")
    assert tuple(result.counts[count] for count in names) == OVERLOAD[name]


def test_means_of_the_ten_minute_runs(shared_data: Path) -> None:
    """The means and counts of a longer run (of which no request is published) would differ from the published ones."""
    folder = shared_data / "splitwise-sim"
    with (folder / "expected" / "summary.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["trace"].endswith("_2min")]
    assert rows
    for row in rows:
        result = published_run(folder, "__".join((row["model"], row["trace"], row["config"])))
        assert result.counts["steps"] == int(row["macro_iterations"])
        assert result.counts["task_iterations"] == int(row["task_iterations"])
        assert result.counts["preemptions"] == int(row["preempted_task_events"])
        for metric in ("ttft", "e2e", "queue"):
            mean_s = float(row[f"{metric}_mean_s"])
            assert result.metrics[f"{metric}_s"].mean == pytest.approx(mean_s, rel=0, abs=TOLERANCE_S), metric
