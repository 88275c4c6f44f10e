"""Small published-rules runs that need no reference data; `small/generate.py` writes them with the naive twin."""

import csv
from pathlib import Path

import numpy as np
import pytest

from doubles import KV_BYTES_PER_TOKEN, tiny_cluster, tiny_trace
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.run import simulate

FOLDER = Path(__file__).parent / "small"
LINK_BYTES_PER_S = 200 * 2**30
TOLERANCE_S = 1e-8
CASES: dict[str, tuple[tuple[tuple[str, int], ...], int]] = {
    "split": ((("prefill", 2), ("decode", 2)), 12_000),
    "decode_first": ((("decode", 1), ("prefill", 3)), 30_000),
    "full_decode_machine": ((("prefill", 3), ("decode", 1)), 6_000),
    "unsplit": ((("unsplit", 2),), 20_000),
}


def golden(name: str) -> dict[str, np.ndarray]:
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {column: np.array([float(row[column]) for row in rows]) for column in rows[0]}


def counts(name: str) -> dict[str, int]:
    with (FOLDER / "counts.csv").open(newline="", encoding="utf-8") as file:
        row = next(row for row in csv.DictReader(file) if row["name"] == name)
    return {column: int(value) for column, value in row.items() if column != "name"}


@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_the_golden_run_request_by_request(name: str) -> None:
    """The published rules would be followed otherwise than a simulator written apart from the kernel follows them."""
    pools, capacity_tokens = CASES[name]
    expected = golden(name)
    cluster = tiny_cluster(
        *pools, capacity_tokens=capacity_tokens, hbm_share=1.0, prefill_s_per_token=1e-4, decode_s=0.05
    )
    tokens = (expected["prompt_tokens"].astype(int).tolist(), expected["output_tokens"].astype(int).tolist())
    trace = tiny_trace(*zip(expected["arrival_s"].tolist(), *tokens, strict=True))
    result = simulate(cluster, trace, Rules.as_published())
    assert result.statuses["completed"] == len(trace)
    assert result.columns is not None
    overhead_s = result.columns["transfer_exposed_s"] + result.columns["decode_queue_s"]
    published = {
        "second_token_overhead_s": overhead_s,
        "prefill_instance": result.columns["prefill_machine"],
        "decode_instance": result.columns["decode_machine"],
    }
    assert set(published) <= set(expected)
    for column, found in {**result.columns, **published}.items():
        if column in expected:
            assert found == pytest.approx(expected[column], rel=0, abs=TOLERANCE_S), column
    wanted = counts(name)
    assert {column: result.counts[column] for column in wanted if column in result.counts} == {
        column: value for column, value in wanted.items() if column in result.counts
    }
    assert result.counts["returns"] == wanted["back_from_mixed"]
    assert result.counts["one_machine"] == wanted["same_instance"]


def test_golden_runs_contain_what_they_are_meant_to_prove() -> None:
    """The golden files would be so easy that kernels with other rules give them too."""
    sums = {column: sum(counts(name)[column] for name in CASES) for column in counts("split")}
    assert sums["preemptions"] > 300
    assert sums["decode_to_mixed"] >= 1
    assert sums["prefill_to_mixed"] >= 5
    assert 0 < sum(counts(name)["same_instance"] for name in CASES if name != "unsplit") < 300
    retried = 0
    for name in CASES:
        rows = golden(name)
        transfer_s = rows["prompt_tokens"] * KV_BYTES_PER_TOKEN / LINK_BYTES_PER_S
        moved = rows["prefill_instance"] != rows["decode_instance"]
        retried += int((moved & (rows["second_token_overhead_s"] - transfer_s > 0.999)).sum())
    assert retried >= 5
