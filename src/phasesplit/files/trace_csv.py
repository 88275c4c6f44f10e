"""Trace files in CSV: raw columns, and the line of each row."""

import csv
import re
from functools import partial
from typing import Any

from phasesplit.errors import SpecError
from phasesplit.files.trace_formats import TraceFormat, detect_format, match_columns
from phasesplit.files.trace_tables import RawTable

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
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    blank = len(content) - len(content.lstrip(b"\r\n"))
    header_end = re.compile(rb"[\r\n]+|$").search(content, blank)
    end = header_end.start() if header_end else len(content)
    names = _header(label, content[blank:end])
    place = f"{label}, header"
    layout = layout or detect_format(place, names)
    positions = match_columns(place, names, layout)
    if not content.isascii():
        # The reader wants valid text even in columns that are not asked for; a replaced byte is still a wrong number.
        content = content[:end] + content[end:].decode("utf-8", "replace").encode()
    wanted = {name: str(at) for name, at in positions.items() if name in layout.columns}
    body = pa.py_buffer(content).slice(header_end.end() if header_end else end)
    ragged: list[Any] = []

    def note(row: Any) -> str:
        ragged.append(row)
        return "skip"

    def read(*, use_threads: bool) -> Any:
        ragged.clear()
        return arrow_csv.read_csv(
            pa.BufferReader(body),
            read_options=arrow_csv.ReadOptions(
                use_threads=use_threads, column_names=[str(at) for at in range(len(names))]
            ),
            parse_options=arrow_csv.ParseOptions(invalid_row_handler=note),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=list(wanted.values()), column_types=dict.fromkeys(wanted.values(), pa.string())
            ),
        )

    if not body.size:
        raise SpecError(f"{label}: a header but no requests")
    try:
        table = read(use_threads=True)
        if ragged:
            # Only the reader without threads says which rows these are.
            table = read(use_threads=False)
    except pa.ArrowInvalid as problem:
        raise SpecError(f"{label}: cannot be read as CSV ({str(problem).splitlines()[0][:200]})") from None
    line = partial(_csv_place, label, content, [row.number for row in ragged])
    if ragged and not skip_bad:
        row = ragged[0]
        where = f"{label}, line {_line(content, row.number + 1)}"
        raise SpecError(f"{where}: has {row.actual_columns} fields, the header {row.expected_columns}")
    return RawTable(
        label=label,
        layout=layout,
        columns={name: table[at] for name, at in wanted.items()},
        place=line,
        broken=len(ragged),
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


def _csv_place(label: str, content: bytes, ragged: list[int], row: int) -> str:
    number = row + 1
    for skipped in sorted(ragged):
        number += skipped <= number
    return f"{label}, line {_line(content, number + 1)}"


def _line(content: bytes, filled: int) -> int:
    """Return the number of the `filled`-th line that is not empty: the reader passes over empty lines uncounted."""
    count = 0
    for number, line in enumerate(content.splitlines(), start=1):
        count += bool(line)
        if count == filled:
            return number
    return filled
