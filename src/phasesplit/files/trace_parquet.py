"""Trace files in Parquet: raw columns and prefix blocks."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError
from phasesplit.files.extras import extra_module
from phasesplit.files.trace_formats import TraceFormat, detect_format, match_columns
from phasesplit.files.trace_tables import RawTable, text_column


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
