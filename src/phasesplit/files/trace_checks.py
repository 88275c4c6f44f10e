"""From raw columns to a trace: each value parsed and checked, the first wrong one named, or all wrong rows dropped."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError
from phasesplit.files.trace_formats import TIME_UNITS_S
from phasesplit.files.trace_tables import RawTable
from phasesplit.files.trace_values import instants, numbers

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
