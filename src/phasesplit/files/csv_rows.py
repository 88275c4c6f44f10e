"""Columns as CSV: every bit of a float, and nothing where a value is undefined."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROWS_AT_ONCE = 65_536
"""Bounds what Python's objects for the values take."""


def csv_bytes(columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a header and a row for each place of the columns; texts must hold no comma and no quote.

    Args:
        columns: Name to values, all of one length.
    """
    count = max((len(column) for column in columns.values()), default=0)
    parts = [f"{','.join(columns)}\n"]
    for start in range(0, count, _ROWS_AT_ONCE):
        fields = (_fields(column[start : start + _ROWS_AT_ONCE]) for column in columns.values())
        parts.extend(f"{','.join(row)}\n" for row in zip(*fields, strict=True))
    return "".join(parts).encode()


def undefined(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a column has no value: NaN, or the number of a machine that a request never came to."""
    if column.dtype.kind == "f":
        return np.asarray(np.isnan(column))
    if column.dtype.kind in "iu":
        return np.asarray(column < 0)
    return np.zeros(column.shape, dtype=bool)


def _fields(column: NDArray[Any]) -> Iterator[str]:
    """Yield each value as text: a float with as many digits as tell it from its neighbours."""
    ending = ".0" if column.dtype.kind == "f" else ""
    for value, is_none in zip(column.tolist(), undefined(column).tolist(), strict=True):
        yield "" if is_none else str(value).removesuffix(ending)
