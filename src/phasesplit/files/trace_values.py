"""Columns of a trace file as numbers and times, where a value that is neither is marked and not guessed."""

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
