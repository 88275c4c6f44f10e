"""Traces from files and into files, in the layouts that published traces use and in our own."""

from dataclasses import dataclass
from pathlib import Path

from phasesplit.domain.request import Trace
from phasesplit.domain.resampling import blocks_of
from phasesplit.errors import SpecError
from phasesplit.files.compression import read_bytes
from phasesplit.files.trace_checks import checked_columns
from phasesplit.files.trace_csv import csv_table
from phasesplit.files.trace_formats import TraceFormat, known_format, mapped_format
from phasesplit.files.trace_jsonl import json_table
from phasesplit.files.trace_parquet import parquet_table
from phasesplit.files.trace_tables import RawTable
from phasesplit.files.workloads import load_workload, workload_names

_PARQUET = b"PAR1"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SkipCount:
    """How many rows of a file became requests, and how many were dropped and why.

    Attributes:
        kept: Rows that became requests.
        dropped: Rows dropped, by kind ("zero tokens in Response tokens"); empty when none were.
    """

    kept: int
    dropped: dict[str, int]

    def __str__(self) -> str:
        total = sum(self.dropped.values())
        if not total:
            return f"{self.kept:,} rows, none dropped"
        kinds = ", ".join(f"{count:,} with {kind}" for kind, count in self.dropped.items())
        return f"dropped {total:,} of {self.kept + total:,} rows: {kinds}"


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,  # noqa: A002 - the word that the command line has
    columns: str | None = None,
    time_unit: str | None = None,
    skip_bad: bool = False,
    sort: bool = False,
    oracle: bool = False,
    name: str | None = None,
) -> tuple[Trace, SkipCount]:
    """Return the trace in a file, and how many of its rows were kept and dropped.

    CSV, JSON lines and Parquet are told apart by content, as are gzip and Zstandard; the layout is told from the
    column names. Calendar times are counted from the first arrival, and so are BurstGPT's and mapped columns; all
    other numbers are kept as they are.

    Args:
        path: A file, or `-` for standard input.
        format: Name of the layout, a key of `FORMATS`; by default told from the columns.
        columns: Instead of a layout, a map such as `arrival=ts,prompt=in,output=out`.
        time_unit: Unit of numeric arrival times with `columns`: s (the default), ms, us or ns.
        skip_bad: Drop and count rows that are not allowed, instead of refusing the file.
        sort: Sort rows by arrival, instead of refusing a file that is not sorted.
        oracle: Let scheduling rules see the true output lengths.
        name: What to call the trace; by default the file's name without its endings.

    Raises:
        SpecError: The file cannot be read, or a row is not allowed; line, field and value are named.
    """
    if columns is not None and format is not None:
        raise SpecError.bad("--columns and --format", f"{columns}, {format}", "one of the two")
    if columns is None and time_unit is not None:
        raise SpecError.bad("--time-unit", time_unit, "only together with --columns")
    layout = mapped_format(columns, time_unit or "s") if columns is not None else None
    if format is not None:
        layout = known_format(format)
    label, content = read_bytes(path)
    raw = _raw_table(label, content, layout, skip_bad=skip_bad)
    good = checked_columns(raw, skip_bad=skip_bad, sort=sort)
    offsets, ids = raw.prefix_offsets, raw.prefix_ids
    if offsets is not None and ids is not None:
        offsets, ids = blocks_of(offsets, ids, good.rows)
    trace = Trace.from_columns(
        name or ("stdin" if str(path) == "-" else Path(path).name.split(".")[0]),
        good.arrival_s,
        good.prompt_tokens,
        good.output_tokens,
        oracle=oracle,
        prefix_offsets=offsets,
        prefix_ids=ids,
    )
    broken = {"another number of fields or broken text": raw.broken} if raw.broken else {}
    return trace, SkipCount(len(trace), {**broken, **good.dropped})


def read_trace_or_workload(path: str, *, seed: int = 0, **options: object) -> tuple[Trace, SkipCount]:
    """Return the trace in a file, or one drawn from a shipped workload at its observed rate and duration.

    Args:
        path: A file, `-`, or one of `workload_names()`; a file of that name wins.
        seed: Seed for a workload.
        options: As for `read_trace`; none applies to a workload.

    Raises:
        SpecError: Neither a file nor a workload has the name, or as for `read_trace`.
    """
    if path != "-" and not Path(path).exists():
        if path in workload_names():
            trace = load_workload(path).trace(seed=seed)
            return trace, SkipCount(len(trace), {})
        if not set(path) & set("./\\"):
            raise SpecError(
                f"{path}: no such file, and no workload of that name; workloads are {', '.join(workload_names())}"
            )
    return read_trace(path, **options)  # type: ignore[arg-type]


def _raw_table(label: str, content: bytes, layout: TraceFormat | None, *, skip_bad: bool) -> RawTable:
    if content.startswith(_PARQUET):
        return parquet_table(label, content, layout)
    content = content.removeprefix(_BOM)
    if not content.strip():
        raise SpecError(f"{label}: the file is empty")
    if content.lstrip()[:1] == b"{":
        return json_table(label, content, layout, skip_bad=skip_bad)
    return csv_table(label, content, layout, skip_bad=skip_bad)
