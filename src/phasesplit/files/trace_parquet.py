"""Trace files in Parquet: raw columns and prefix blocks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError
from phasesplit.files.trace_formats import TraceFormat, detect_format, match_columns
from phasesplit.files.trace_tables import RawTable


def parquet_table(label: str, content: bytes, layout: TraceFormat | None) -> RawTable:
    """Return the raw columns of a file's content in Parquet.

    Args:
        label: What the file is called in messages.
        content: The decompressed content.
        layout: Its layout, or None to tell it from the columns.

    Raises:
        SpecError: The file is damaged, lacks a column, or its prefix column does not hold lists of whole numbers.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(pa.BufferReader(content))
        names = file.schema_arrow.names
        layout = layout or detect_format(f"{label}, schema", names)
        positions = match_columns(f"{label}, schema", names, layout)
        table = file.read(columns=[names[at] for at in positions.values()])
        columns = {name: _plain_type(table[names[at]]) for name, at in positions.items()}
    except (pa.ArrowException, OSError) as problem:
        raise SpecError(f"{label}: the Parquet file is damaged ({str(problem).splitlines()[0][:200]})") from None
    offsets, ids = _prefix_columns(label, columns.pop(layout.prefix, None) if layout.prefix else None)
    return RawTable(
        label=label,
        layout=layout,
        columns=columns,
        place=lambda row: f"{label}, row {row + 1}",
        prefix_offsets=offsets,
        prefix_ids=ids,
    )


def _plain_type(column: Any) -> Any:
    """Return numbers, times and lists as they are, and every other type as text."""
    import pyarrow as pa

    kind = column.type
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_temporal, pa.types.is_nested)
    return column if any(test(kind) for test in tests) else column.cast(pa.string())


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
