"""Results in files."""

import gzip
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from phasesplit.domain.request import Trace
from phasesplit.domain.slo import SPLITWISE, Slo
from phasesplit.errors import SpecError
from phasesplit.io.catalog import build_cluster
from phasesplit.io.results import REQUEST_ENDINGS, check_output, result_summary, write_requests, written_whole
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate
from refusals import assert_refused


def simulated(*, keep: bool = True, slo: Slo = SPLITWISE) -> Result:
    """Return a small run in which one request has one token, and one is longer than any machine's memory."""
    cluster = build_cluster("bloom-176b", [("prefill", 1, "dgx-h100"), ("decode", 1, "dgx-h100")])
    trace = Trace.from_columns(
        "four",
        np.array([0.1, 1 / 3, 0.5, 7.0]),
        np.array([100, 2_000, 50_000_000, 30], np.int32),
        np.array([20, 30, 10, 1], np.int32),
    )
    return simulate(cluster, trace, keep=keep, slo=slo)


@pytest.fixture(scope="module")
def result() -> Result:
    return simulated()


def test_csv_keeps_every_bit_and_leaves_undefined_values_empty(result: Result, tmp_path: Path) -> None:
    """A reader would get rounded times, or `nan` and -1 where there is no value."""
    path = tmp_path / "rows.csv"
    write_requests(result, path)
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert result.columns is not None
    assert lines[0] == list(result.columns)
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    assert [row["status"] for row in rows] == ["completed", "completed", "refused", "completed"]
    for name, column in result.columns.items():
        for row, value in zip(rows, column.tolist(), strict=True):
            if isinstance(value, float):
                assert row[name] == "" if math.isnan(value) else float(row[name]) == value
    assert rows[3]["itl_mean_s"] == rows[3]["transfer_exposed_s"] == ""
    assert rows[2]["ttft_s"] == ""
    assert not {"-1", "nan"} & {value for row in rows for value in row.values()}


def test_parquet_and_compressed_csv_hold_the_same(result: Result, tmp_path: Path) -> None:
    """The three kinds of files would disagree, or undefined values would be NaN instead of null."""
    for name in ("rows.csv", "rows.csv.gz", "rows.parquet"):
        write_requests(result, tmp_path / name)
    plain = (tmp_path / "rows.csv").read_bytes()
    assert gzip.decompress((tmp_path / "rows.csv.gz").read_bytes()) == plain
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table.to_pylist() == csv.read_csv(tmp_path / "rows.csv").to_pylist()
    assert table["itl_mean_s"].null_count == 2
    assert result.columns is not None
    assert table["e2e_s"].drop_null().to_numpy().tolist() == [
        value for value in result.columns["e2e_s"].tolist() if not math.isnan(value)
    ]


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.parquet"])
def test_the_same_result_gives_the_same_bytes(result: Result, tmp_path: Path, name: str) -> None:
    """Two equal runs could not be told equal by their files."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write_requests(result, tmp_path / "a" / name)
    write_requests(simulated(), tmp_path / "b" / name)
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_rows_that_were_not_kept_cannot_be_written(tmp_path: Path) -> None:
    """An empty file would look like a run without requests."""
    with pytest.raises(SpecError, match="kept no rows"):
        write_requests(simulated(keep=False), tmp_path / "rows.csv")


def test_summary_is_json_with_the_run_s_figures(result: Result) -> None:
    """A script would read NaN, an enum's number, or figures other than the result's."""
    shown = json.loads(orjson.dumps(result_summary(result)))
    assert shown["model"] == "bloom-176b"
    assert [(pool["role"], pool["count"]) for pool in shown["cluster"]["pools"]] == [("prefill", 1), ("decode", 1)]
    assert shown["rules"]["transfer"] == "auto"
    assert shown["statuses"] == {"completed": 3, "refused": 1, "unfinished": 0}
    assert shown["metrics"]["ttft_s"]["p90"] == result.metrics["ttft_s"].quantile(0.9)
    assert shown["metrics"]["ttft_s"]["exact"] is True
    assert shown["output_tokens_per_s"] == pytest.approx(51 / shown["duration_s"])
    assert shown["slo"]["complete"] is False
    assert shown["slo"]["holds"] is False
    assert len(shown["slo"]["findings"]) == 9
    assert shown["overload"] is None
    assert shown["bill"]["usd_per_request"] == pytest.approx(shown["bill"]["usd"] / 3)
    assert shown["batch_sizes"]["decode"]["max"] >= 1
    assert len(shown["warnings"]) == 1


def test_batch_sizes_are_weighted_by_time(result: Result) -> None:
    """The median batch would be that of iterations, or be off by one."""
    share = np.zeros_like(result.batch_share)
    share[1, [1, 4, 9]] = 0.2, 0.65, 0.15
    shown = result_summary(replace(result, batch_share=share))["batch_sizes"]
    assert shown == {"decode": {"p50": 4, "p90": 9, "max": 9}}


def test_summary_without_slo_says_so() -> None:
    """A run that nobody judged would be reported as kept."""
    assert result_summary(simulated(slo=Slo("none", ())))["slo"] is None


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("rows.txt", [".csv"]),
        (".csv", [".csv"]),
        ("folder.csv", ["this is a folder"]),
        ("none/rows.csv", ["a folder that exists"]),
    ],
)
def test_outputs_are_checked_before_the_work(tmp_path: Path, name: str, named: list[str]) -> None:
    """An hour's simulation would end in an output that cannot be written."""
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(SpecError) as caught:
        check_output(tmp_path / name, REQUEST_ENDINGS, "--requests")
    assert_refused(caught.value, *named)


def test_a_device_is_no_output() -> None:
    """Renaming a file over /dev/null would replace the device."""
    with pytest.raises(SpecError, match="a plain file"):
        check_output("/dev/null", ("ull",), "--requests")


def test_a_failing_writer_leaves_what_was_there(tmp_path: Path) -> None:
    """A file would be left half-written, or an earlier result be lost."""
    path = tmp_path / "rows.csv"
    path.write_text("before")

    def write_half(problem: BaseException) -> None:
        with written_whole(path) as part:
            part.write_text("half")
            raise problem

    with pytest.raises(SpecError) as caught:
        write_half(OSError(28, "No space left on device"))
    assert_refused(caught.value, "cannot be written", "No space left")
    with pytest.raises(KeyboardInterrupt):
        write_half(KeyboardInterrupt())
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["rows.csv"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    """Writing to a link would replace the link and leave the file it names as it was."""
    target, link = tmp_path / "target.csv", tmp_path / "link.csv"
    target.write_text("before")
    link.symlink_to(target)
    with written_whole(link) as part:
        part.write_text("after")
    assert link.is_symlink()
    assert target.read_text() == "after"
