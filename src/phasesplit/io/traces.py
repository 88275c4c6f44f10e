"""Traces from files and into files, in the layouts that published traces use and in our own.

A file is read in these steps:

1. `compression.read_bytes` gives its content, whatever compresses it.
2. Its kind (CSV, JSON lines, Parquet) follows from the content. A reader for the kind gives raw columns, and the line
   of each row.
3. Its layout (`TraceFormat`: names of columns, clock) follows from the columns, unless the caller names it.
4. Each value is parsed as a number or a time. A value that is neither is marked, never guessed.
5. The first wrong value is an error that names its line; or all wrong rows are dropped and counted.
"""

import csv
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.request import Trace
from phasesplit.domain.workload import blocks_of
from phasesplit.errors import SpecError
from phasesplit.io.compression import extra_module, read_bytes
from phasesplit.io.workloads import load_workload, workload_names

_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*", re.ASCII)
_CALENDAR = re.compile(
    r"\s*(?P<stamp>(?:19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}(?:[ T][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,9})?)?)?)"
    r"(?P<zone>Z|[+-][0-9]{2}:?[0-9]{2})?\s*",
    re.ASCII,
)
_CALENDAR_START = re.compile(r"\s*[0-9]{4}-[0-9]", re.ASCII)
_LOOKED_AT = 1000
"""Values by which a column is taken for calendar times, and for times with a zone."""

_FIRST, _BEYOND = np.datetime64("1970-01-01", "s"), np.datetime64("2100-01-01", "s")
_NONE = np.datetime64("NaT", "ns")


def numbers(column: NDArray[Any]) -> NDArray[Any]:
    """Return (n,) int64, or float64 with NaN where a value is not a number.

    Args:
        column: (n,) numbers, times, or objects that are text or None.
    """
    if column.dtype.kind in "iuf":
        return column.astype(np.int64 if column.dtype.kind == "i" else np.float64)
    if column.dtype.kind == "M":
        return np.full(column.shape, np.nan)
    if _is_plain(column):
        for kind in (np.int64, np.float64):
            try:
                return column.astype(kind)
            except (ValueError, OverflowError):
                continue
    return np.array([_number(text) for text in column], dtype=np.float64)


def _is_plain(column: NDArray[Any]) -> bool:
    """Return whether Python reads all texts as other readers do: it takes 1_000, and digits of other scripts."""
    if any(text is None for text in column):
        return False
    together = "".join(column)
    return together.isascii() and "_" not in together


def _number(text: str | None) -> float:
    return float(text) if text is not None and _NUMBER.fullmatch(text) else float("nan")


def instants(
    column: NDArray[Any], unit_s: float, *, rebased: bool
) -> tuple[NDArray[np.float64], bool, NDArray[np.bool_]]:
    """Return times in s, whether they are calendar times (then counted from the first), and the unreadable rows.

    Args:
        column: (n,) numbers, times, or objects that are text or None.
        unit_s: Seconds of the unit in which numbers are.
        rebased: Whether numbers may be counted from the first, which keeps the digits of large ones.
    """
    is_text = column.dtype.kind == "O"
    some = column[:_LOOKED_AT]
    if is_text and any(text is not None and _CALENDAR_START.match(text) for text in some):
        column = _calendar_text(column)
    if column.dtype.kind != "M":
        values = numbers(column)
        if rebased and values.dtype == np.int64:
            # As a float64, nanoseconds since 1970 would lose their last digits.
            values = values - values[:1]
        times = values / round(1 / unit_s)
        unreadable = ~np.isfinite(times)
        return np.where(unreadable, 0.0, times), False, unreadable
    unreadable = ~((column >= _FIRST) & (column < _BEYOND))
    nanoseconds = np.where(unreadable, _FIRST.astype(column.dtype), column).astype("datetime64[ns]").astype(np.int64)
    readable = np.flatnonzero(~unreadable)
    first = nanoseconds[readable[0]] if readable.size else 0
    return np.where(unreadable, 0, nanoseconds - first) / 1e9, True, unreadable


def _calendar_text(column: NDArray[Any]) -> NDArray[Any]:
    """Return texts as datetime64[ns] in UTC, NaT where one is not a date and time."""
    found = [None if text is None else _CALENDAR.fullmatch(text) for text in column]
    zoned = any(match is not None and match["zone"] for match in found[:_LOOKED_AT])
    usable = [match if match is not None and bool(match["zone"]) == zoned else None for match in found]
    stamps = _parsed(["NaT" if match is None else match["stamp"] for match in usable])
    if not zoned:
        return stamps
    zones = ["Z" if match is None else match["zone"] for match in usable]
    ahead = {zone: np.timedelta64(_ahead(zone), "ns") for zone in set(zones)}
    return np.asarray(stamps - np.array([ahead[zone] for zone in zones]))


def _parsed(texts: Sequence[str]) -> NDArray[Any]:
    """Return dates and times, NaT where the calendar has none such; halves the texts around each failure."""
    try:
        return np.array(texts, dtype="datetime64[ns]")
    except ValueError:
        if len(texts) == 1:
            return np.array([_NONE])
        half = len(texts) // 2
        return np.concatenate([_parsed(texts[:half]), _parsed(texts[half:])])


def _ahead(zone: str) -> timedelta:
    """Return how far a zone's clock is ahead of UTC."""
    if zone == "Z":
        return timedelta(0)
    ahead = timedelta(hours=int(zone[1:3]), minutes=int(zone[-2:]))
    return -ahead if zone[0] == "-" else ahead


TIME_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit that a column of arrival times can be in."""

_ROLES = ("arrival", "prompt", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """The layout of a trace file.

    Attributes:
        name: What the layout is called on the command line.
        arrival: Column of the arrival times.
        prompt: Column of the prompt lengths.
        output: Column of the output lengths.
        prefix: Column with the list of prefix block ids, or None.
        time_unit: Unit of arrival times given as numbers, a key of `TIME_UNITS_S`.
        rebased: Whether numbers are counted from the first arrival; calendar times always are.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    prefix: str | None = None
    time_unit: str = "s"
    rebased: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that a file of this layout must have: arrival, prompt, output."""
        return self.arrival, self.prompt, self.output


FORMATS = {
    layout.name: layout
    for layout in (
        TraceFormat(
            name="phasesplit", arrival="arrival_s", prompt="prompt_tokens", output="output_tokens", prefix="prefix_ids"
        ),
        # Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md.
        TraceFormat(name="azure", arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"),
        # kvcache-ai/Mooncake, FAST25-release/traces: JSON lines, one id for each 512-token block of the prompt.
        TraceFormat(
            name="mooncake",
            arrival="timestamp",
            prompt="input_length",
            output="output_length",
            prefix="hash_ids",
            time_unit="ms",
        ),
        # HPMLL/BurstGPT, README.md, Schema: seconds since midnight of the first day, so a later file starts far off 0.
        TraceFormat(
            name="burstgpt", arrival="Timestamp", prompt="Request tokens", output="Response tokens", rebased=True
        ),
        # Mutinifni/splitwise-sim, generate_trace.py.
        TraceFormat(name="splitwise-sim", arrival="arrival_timestamp", prompt="prompt_size", output="token_size"),
        # microsoft/vidur, data/processed_traces.
        TraceFormat(name="vidur", arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens"),
    )
}
"""The known layouts by name."""


def mapped_format(columns: str, time_unit: str = "s") -> TraceFormat:
    """Return the layout that a column map such as `arrival=ts,prompt=in,output=out` describes; numbers are rebased.

    Raises:
        SpecError: The map does not name each of arrival, prompt and output once.
    """
    pairs = [part.partition("=")[::2] for part in columns.split(",")]
    names = {role.strip(): column.strip() for role, column in pairs}
    if sorted(names) != sorted(_ROLES) or len(pairs) != len(_ROLES) or not all(names.values()):
        raise SpecError.bad("--columns", columns, "arrival=NAME,prompt=NAME,output=NAME")
    if time_unit not in TIME_UNITS_S:
        raise SpecError.unknown("--time-unit", time_unit, TIME_UNITS_S)
    return TraceFormat(name="mapped", time_unit=time_unit, rebased=True, **names)


def known_format(name: str) -> TraceFormat:
    """Return the layout of a name.

    Raises:
        SpecError: No layout has that name.
    """
    if name not in FORMATS:
        raise SpecError.unknown("--format", name, FORMATS)
    return FORMATS[name]


def detect_format(place: str, found: Sequence[str]) -> TraceFormat:
    """Return the known layout whose columns a file has, letter case aside.

    Args:
        place: File and line of the header, for the message.
        found: The file's column names.

    Raises:
        SpecError: The columns fit no known layout; the nearest layout's missing column is named.
    """
    lower = {name.strip().lower() for name in found}
    present = {layout.name: sum(column.lower() in lower for column in layout.columns) for layout in FORMATS.values()}
    nearest = FORMATS[max(present, key=lambda name: present[name])]
    if present[nearest.name] == len(_ROLES):
        return nearest
    if present[nearest.name] < len(_ROLES) - 1:
        layouts = "; ".join(",".join(layout.columns) for layout in FORMATS.values())
        raise SpecError.bad(
            place, _shortened(found), f"the columns of a known trace ({layouts}), or name yours with --columns"
        )
    match_columns(place, found, nearest)
    return nearest


def match_columns(place: str, found: Sequence[str], layout: TraceFormat) -> dict[str, int]:
    """Return the position in a file of each column that a layout needs (and of its prefix column, if there).

    Raises:
        SpecError: A column is missing, or stands there twice; the nearest name found is given.
    """
    lower = [name.strip().lower() for name in found]
    for column in layout.columns:
        if lower.count(column.lower()) > 1:
            raise SpecError.bad(place, _shortened(found), f"one column {column}, not several")
        if column.lower() not in lower:
            near = get_close_matches(column.lower(), lower, n=1, cutoff=0.5)
            hint = f" (nearest is {found[lower.index(near[0])].strip()!r})" if near else ""
            raise SpecError(f"{place}: column {column!r} is missing{hint}; found are {_shortened(found)}")
    wanted = (*layout.columns, *(() if layout.prefix is None else (layout.prefix,)))
    return {column: lower.index(column.lower()) for column in wanted if column.lower() in lower}


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(name.strip() for name in names)
    return text if len(text) <= 120 else f"{text[:117]}..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTable:
    """Columns of a trace file before anything in them is believed.

    Attributes:
        label: What the file is called in messages.
        layout: The file's layout.
        columns: Values by column name of the layout: numbers, datetime64 in UTC, or objects that are text or None.
        place: Row number -> "FILE, line 5".
        broken: How many rows were dropped because they cannot be split into fields.
        prefix_offsets: int64 (n + 1,) or None, as in a trace.
        prefix_ids: int64 or None, as in a trace.
    """

    label: str
    layout: TraceFormat
    columns: dict[str, NDArray[Any]]
    place: Callable[[int], str]
    broken: int = 0
    prefix_offsets: NDArray[np.int64] | None = None
    prefix_ids: NDArray[np.int64] | None = None


def text_column(texts: Sequence[str | None]) -> NDArray[Any]:
    """Return (n,) texts as objects: one long text does not widen the others."""
    return np.array(texts, dtype=object)


_LONGEST_HEADER_BYTES = 10_000


def csv_table(label: str, content: bytes, layout: TraceFormat | None, *, skip_bad: bool) -> RawTable:
    """Return the raw columns of a file's content in CSV.

    Args:
        label: What the file is called in messages.
        content: The decompressed content, not blank, without a byte order mark.
        layout: Its layout, or None to tell it from the columns.
        skip_bad: Drop and count rows that have another number of fields than the header.

    Raises:
        SpecError: It is not CSV text, lacks a column or rows, or a row is broken and not skipped.
    """
    blank = len(content) - len(content.lstrip(b"\r\n"))
    header_end = re.compile(rb"[\r\n]|$").search(content, blank)
    end = header_end.start() if header_end else len(content)
    names = _header(label, content[blank:end])
    place = f"{label}, header"
    layout = layout or detect_format(place, names)
    positions = match_columns(place, names, layout)
    arrival, prompt, output = (positions[name] for name in layout.columns)
    # A byte that is no text may be in a column that is not asked for; replaced, it is still a wrong number.
    rows = csv.reader(io.StringIO(content[end:].decode("utf-8", "replace"), newline=None))
    before = len(content[:end].splitlines()) - 1
    texts: tuple[list[str], list[str], list[str]] = ([], [], [])
    lines: list[int] = []
    line, broken = 1, 0
    try:
        for row in rows:
            if len(row) == len(names):
                texts[0].append(row[arrival])
                texts[1].append(row[prompt])
                texts[2].append(row[output])
                lines.append(line)
            elif row:
                if not skip_bad:
                    where = f"{label}, line {before + line}"
                    raise SpecError(f"{where}: has {len(row)} fields, the header {len(names)}")
                broken += 1
            line = rows.line_num + 1
    except csv.Error as problem:
        raise SpecError(f"{label}: cannot be read as CSV (line {before + line}: {problem})") from None
    if not lines and not broken:
        raise SpecError(f"{label}: a header but no requests")
    numbered = np.array(lines, dtype=np.int64) + before
    return RawTable(
        label=label,
        layout=layout,
        columns={name: text_column(column) for name, column in zip(layout.columns, texts, strict=True)},
        place=lambda row: f"{label}, line {numbered[row]}",
        broken=broken,
    )


def _header(label: str, line: bytes) -> list[str]:
    not_text = SpecError(
        f"{label}: not a trace; allowed are CSV with a header, JSON lines and Parquet, as they are or in gzip or zstd"
    )
    if len(line) > _LONGEST_HEADER_BYTES or b"\0" in line:
        raise not_text
    try:
        return next(csv.reader([line.decode("utf-8")], strict=True))
    except (UnicodeDecodeError, csv.Error, StopIteration):
        raise not_text from None


def json_table(label: str, content: bytes, layout: TraceFormat | None, *, skip_bad: bool) -> RawTable:
    """Return the raw columns of a file's content in JSON lines.

    Args:
        label: What the file is called in messages.
        content: The decompressed content, not blank.
        layout: Its layout, or None to tell it from the columns.
        skip_bad: Drop and count rows that are not a JSON object, or whose block ids are not whole numbers.

    Raises:
        SpecError: A key is missing, or a line is broken and not skipped.
    """
    import orjson

    lines: list[int] = []
    texts: list[tuple[str, ...]] = []
    lengths: list[int] = []
    ids: list[int] = []
    broken = 0
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"{label}, line {number}"
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            row = None
        blocks = row.get(layout.prefix, []) if layout and layout.prefix and isinstance(row, dict) else []
        if not isinstance(row, dict) or not _are_ids(blocks):
            if not skip_bad:
                shown = line[:60].decode("utf-8", "replace") if not isinstance(row, dict) else str(blocks)[:60]
                raise SpecError.bad(place, shown, "one JSON object a line, block ids being whole numbers")
            broken += 1
            continue
        if layout is None:
            layout = detect_format(place, list(row))
            blocks = row.get(layout.prefix, []) if layout.prefix else []
            if not _are_ids(blocks):
                raise SpecError.bad(f"{place}, {layout.prefix}", str(blocks)[:60], "a list of whole numbers")
        texts.append(tuple(_json_text(row.get(column)) for column in layout.columns))
        lines.append(number)
        lengths.append(len(blocks))
        ids.extend(blocks)
    if layout is None:
        raise SpecError(f"{label}: no line holds a JSON object")
    columns = zip(*texts, strict=True) if texts else ((), (), ())
    return RawTable(
        label=label,
        layout=layout,
        columns={name: text_column(column) for name, column in zip(layout.columns, columns, strict=True)},
        place=lambda row: f"{label}, line {lines[row]}",
        broken=broken,
        prefix_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) if ids else None,
        prefix_ids=np.array(ids, dtype=np.int64) if ids else None,
    )


def _are_ids(blocks: object) -> bool:
    return isinstance(blocks, list) and all(type(block) is int and 0 <= block < 2**63 for block in blocks)


def _json_text(value: object) -> str:
    import orjson

    if value is None:
        return ""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def parquet_table(label: str, content: bytes, layout: TraceFormat | None) -> RawTable:
    """Return the raw columns of a file's content in Parquet.

    Args:
        label: What the file is called in messages.
        content: The decompressed content.
        layout: Its layout, or None to tell it from the columns.

    Raises:
        SpecError: The file is damaged, lacks a column, or its prefix column does not hold lists of whole numbers.
    """
    pa: Any = extra_module("pyarrow", "parquet", label)
    parquet: Any = extra_module("pyarrow.parquet", "parquet", label)
    try:
        file = parquet.ParquetFile(pa.BufferReader(content))
        names = file.schema_arrow.names
        layout = layout or detect_format(f"{label}, schema", names)
        positions = match_columns(f"{label}, schema", names, layout)
        table = file.read(columns=[names[at] for at in positions.values()])
        prefixes = table[names[positions[layout.prefix]]] if layout.prefix in positions else None
        columns = {name: _values(table[names[positions[name]]]) for name in layout.columns}
    except (pa.ArrowException, OSError) as problem:
        raise SpecError(f"{label}: the Parquet file is damaged ({str(problem).splitlines()[0][:200]})") from None
    offsets, ids = _prefix_columns(label, prefixes)
    return RawTable(
        label=label,
        layout=layout,
        columns=columns,
        place=lambda row: f"{label}, row {row + 1}",
        prefix_offsets=offsets,
        prefix_ids=ids,
    )


def _values(column: Any) -> NDArray[Any]:
    """Return numbers, dates and times as they are (missing: NaN, NaT), and all else as text (missing: None)."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif pa.types.is_dictionary(kind):
        column = column.cast(pa.string())
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_timestamp, pa.types.is_date)
    if any(test(kind) for test in tests):
        return np.asarray(column.to_numpy())
    return text_column([value if value is None else str(value) for value in column.to_pylist()])


def _prefix_columns(label: str, column: Any) -> tuple[NDArray[np.int64] | None, NDArray[np.int64] | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if column is None:
        return None, None
    try:
        lists = column.combine_chunks().cast(pa.list_(pa.int64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SpecError.bad(f"{label}, schema, prefix_ids", str(column.type), "a list of whole numbers") from None
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    ids = pc.fill_null(pc.list_flatten(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), ids


LARGEST_TOKENS = 16_777_216
"""The longest prompt or output that is believed: 2**24 tokens, far above any model's context."""

LONGEST_SPAN_S = 10 * 365.25 * 86_400.0
"""The longest trace that is believed: ten years."""


Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class CheckedColumns:
    """Columns in which every value is allowed.

    Attributes:
        rows: int64 (n,); the row of the raw table behind each request.
        arrival_s: float64 (n,), non-decreasing.
        prompt_tokens: int32 (n,).
        output_tokens: int32 (n,).
        dropped: How many rows were dropped for each kind of wrong value.
    """

    rows: NDArray[np.int64]
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    dropped: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Complaint:
    column: str
    kind: str
    allowed: str
    wrong: Mask


def checked_columns(raw: RawTable, *, skip_bad: bool, sort: bool) -> CheckedColumns:
    """Return the columns of a raw table with every value checked.

    Args:
        raw: The raw table.
        skip_bad: Drop and count rows with a value that is not allowed, instead of raising.
        sort: Sort rows by arrival (equal times keep their order), instead of raising when they are not.

    Raises:
        SpecError: A value is not allowed (the first row is named), no row is left, or the rows are not sorted.
    """
    layout = raw.layout
    prompt = numbers(raw.columns[layout.prompt])
    output = numbers(raw.columns[layout.output])
    arrival, calendar, unreadable = instants(
        raw.columns[layout.arrival], TIME_UNITS_S[layout.time_unit], rebased=layout.rebased
    )
    complaints = [
        _Complaint(layout.arrival, "an unreadable time", _TIME_ALLOWED, unreadable),
        *_length_complaints(layout.prompt, prompt),
        *_length_complaints(layout.output, output, is_output=True),
    ]
    readable = np.flatnonzero(~unreadable)
    start = arrival[readable].min() if sort and readable.size else arrival[readable[0]] if readable.size else 0.0
    rebased = calendar or layout.rebased
    if rebased:
        with np.errstate(over="ignore"):
            arrival = arrival - start
    else:
        complaints.append(_Complaint(layout.arrival, "a negative time", "a time of at least 0", arrival < 0))
    far = f"at most ten years after the start (numbers are in {layout.time_unit})"
    complaints.append(_Complaint(layout.arrival, "a time too far off", far, np.abs(arrival) > LONGEST_SPAN_S))
    keep = ~np.logical_or.reduce([complaint.wrong for complaint in complaints])
    dropped: dict[str, int] = {}
    if not keep.all():
        if not skip_bad:
            raise _first_error(raw, complaints, int(np.argmin(keep)))
        counted = np.zeros(keep.shape, dtype=bool)
        for complaint in complaints:
            fresh = complaint.wrong & ~counted
            counted |= complaint.wrong
            if fresh.any():
                dropped[f"{complaint.kind} in {complaint.column}"] = int(fresh.sum())
    rows = np.flatnonzero(keep)
    if not rows.size:
        raise SpecError(
            f"{raw.label}: no request in it" + (f" after dropping {keep.size} bad rows" if keep.size else "")
        )
    rows = _in_order(raw, arrival, rows, sort=sort)
    return CheckedColumns(
        rows=rows,
        # Dropped rows may have been the first: time is counted from the first request that is kept.
        arrival_s=arrival[rows] - (arrival[rows[0]] if rebased else 0.0),
        prompt_tokens=prompt[rows].astype(np.int32),
        output_tokens=output[rows].astype(np.int32),
        dropped=dropped,
    )


_TIME_ALLOWED = "a finite number, or a date and time from 1970 to 2099 as in 2023-11-16 18:17:03.9799600"


def _length_complaints(column: str, values: NDArray[Any], *, is_output: bool = False) -> list[_Complaint]:
    allowed = f"a whole number of tokens from 1 to {LARGEST_TOKENS:,}"
    zero = values == 0
    with np.errstate(invalid="ignore"):
        wrong = ~((values >= 1) & (values <= LARGEST_TOKENS) & (values == np.floor(values)))
    none = "zero tokens"
    hint = f"{allowed} (a row without output is a failed call, not a request; --skip-bad drops such rows)"
    return [
        _Complaint(column, none, hint if is_output else allowed, zero),
        _Complaint(column, "not a usable length", allowed, wrong & ~zero),
    ]


def _first_error(raw: RawTable, complaints: list[_Complaint], row: int) -> SpecError:
    complaint = next(complaint for complaint in complaints if complaint.wrong[row])
    return SpecError.bad(f"{raw.place(row)}, {complaint.column}", _shown(raw, complaint.column, row), complaint.allowed)


def _shown(raw: RawTable, column: str, row: int) -> object:
    """Return a value as messages have it."""
    value = raw.columns[column][row]
    value = value if raw.columns[column].dtype.kind == "M" else getattr(value, "item", lambda: value)()
    return value if isinstance(value, int | float | None) else str(value)[:60]


def _in_order(raw: RawTable, arrival: NDArray[np.float64], rows: NDArray[np.int64], *, sort: bool) -> NDArray[np.int64]:
    steps = np.diff(arrival[rows])
    if not steps.size or float(steps.min()) >= 0:
        return rows
    if sort:
        return rows[np.argsort(arrival[rows], kind="stable")]
    at = int(np.argmax(steps < 0)) + 1
    raise SpecError.bad(
        f"{raw.place(int(rows[at]))}, {raw.layout.arrival}",
        _shown(raw, raw.layout.arrival, int(rows[at])),
        "a time not before the previous row's (--sort sorts the rows)",
    )


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

    The content says whether a file is CSV, JSON lines or Parquet, and gzip or Zstandard. The column names say which
    layout it has. Calendar times are counted from the first arrival, and so are BurstGPT's and mapped columns; all
    other numbers are kept as they are.

    Args:
        path: A file, or `-` for standard input.
        format: Name of the layout, a key of `FORMATS`; by default the one that has the columns.
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
