"""Trace files in CSV: raw columns, and the line of each row."""

import csv
import io
import re

import numpy as np

from phasesplit.errors import SpecError
from phasesplit.files.trace_formats import TraceFormat, detect_format, match_columns
from phasesplit.files.trace_tables import RawTable, text_column

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
