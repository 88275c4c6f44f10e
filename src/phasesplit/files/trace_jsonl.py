"""Trace files in JSON lines: raw columns, prefix blocks, and the line of each row."""

import numpy as np

from phasesplit.errors import SpecError
from phasesplit.files.trace_formats import TraceFormat, detect_format
from phasesplit.files.trace_tables import RawTable, text_column


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
