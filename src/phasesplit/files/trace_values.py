"""Columns of a trace file as numbers and times, where a value that is neither is marked and not guessed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_CALENDAR = r"^(19|20|21)[0-9]{2}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?"
_ZONE = r"(Z|[+-][0-9]{2}:?[0-9]{2})$"
_CALENDAR_NS = (0, 4_102_444_800_000_000_000)


def numbers(column: Any) -> NDArray[Any]:
    """Return (n,) int64, or float64 with NaN where a value is not a number.

    Args:
        column: Arrow chunked array of any plain type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_string(column.type):
        try:
            cast = column.cast(pa.int64() if pa.types.is_signed_integer(column.type) else pa.float64())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return np.full(len(column), np.nan)
        return np.asarray(cast.to_numpy())
    for kind in (pa.int64(), pa.float64()):
        try:
            return np.asarray(column.cast(kind).to_numpy())
        except pa.ArrowInvalid:
            continue
    text = pc.ascii_trim_whitespace(column)
    numeric = pc.fill_null(pc.match_substring_regex(text, _NUMBER), fill_value=False)
    parsed = pc.if_else(numeric, text, pa.scalar(None, pa.string())).cast(pa.float64())
    return np.asarray(parsed.to_numpy())


def instants(column: Any, unit_s: float, *, rebased: bool) -> tuple[NDArray[np.float64], bool, NDArray[np.bool_]]:
    """Return times in s, whether they are calendar times (then counted from the first), and the unreadable rows.

    Args:
        column: Arrow chunked array of numbers, text, dates or timestamps.
        unit_s: Seconds of the unit in which numbers are.
        rebased: Whether numbers may be counted from the first, which keeps the digits of large ones.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    is_text = pa.types.is_string(column.type)
    if is_text:
        text = pc.ascii_trim_whitespace(column.slice(0, 1000))
        is_calendar = bool(pc.any(pc.match_substring_regex(text, r"^[0-9]{4}-[0-9]")).as_py())
    else:
        is_calendar = pa.types.is_timestamp(column.type) or pa.types.is_date(column.type)
    if not is_calendar:
        values = numbers(column)
        if rebased and values.dtype == np.int64:
            # As a float64, nanoseconds since 1970 would lose their last digits.
            values = values - values[:1]
        times = values / round(1 / unit_s)
        unreadable = ~np.isfinite(times)
        return np.where(unreadable, 0.0, times), False, unreadable
    stamps = _calendar_text(column) if is_text else column
    null = stamps.is_null().to_numpy()
    nanoseconds = _nanoseconds(stamps)
    unreadable = null | (nanoseconds < _CALENDAR_NS[0]) | (nanoseconds >= _CALENDAR_NS[1])
    readable = np.flatnonzero(~unreadable)
    first = nanoseconds[readable[0]] if readable.size else 0
    return np.where(unreadable, 0, nanoseconds - first) / 1e9, True, unreadable


def _nanoseconds(stamps: Any) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        whole = stamps.cast(pa.timestamp("ns", getattr(stamps.type, "tz", None)))
    except pa.ArrowInvalid:
        # A date beyond the year 2262 does not fit; such a file is refused row by row, so microseconds do.
        coarse = stamps.cast(pa.timestamp("us", getattr(stamps.type, "tz", None)), safe=False).cast(pa.int64())
        inside = pc.min_element_wise(pc.max_element_wise(coarse, -1), _CALENDAR_NS[1] // 1000)
        return np.asarray(pc.fill_null(inside, 0).to_numpy()) * 1000
    return np.asarray(pc.fill_null(whole.cast(pa.int64()), 0).to_numpy())


def _calendar_text(column: Any) -> Any:
    """Return the column as timestamps in ns, null where the text is not a date and time."""
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pc.ascii_trim_whitespace(column)
    some = text.slice(0, 1000)
    zoned = bool(pc.any(pc.match_substring_regex(some, f"{_CALENDAR}{_ZONE}")).as_py())
    kind = pa.timestamp("ns", "UTC" if zoned else None)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        shape = f"{_CALENDAR}{_ZONE if zoned else '$'}"
        shaped = pc.fill_null(pc.match_substring_regex(text, shape), fill_value=False)
        return _cast_where_possible(pc.if_else(shaped, text, pa.scalar(None, pa.string())), kind)


def _cast_where_possible(text: Any, kind: Any) -> Any:
    """Return text cast to a kind, null where that fails; halves the text around each failure."""
    import pyarrow as pa

    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        if len(text) == 1:
            return pa.chunked_array([pa.nulls(1, kind)])
        half = len(text) // 2
        parts = (_cast_where_possible(part, kind) for part in (text.slice(0, half), text.slice(half)))
        return pa.chunked_array([chunk for part in parts for chunk in part.chunks], type=kind)
