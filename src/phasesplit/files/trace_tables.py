"""The raw columns of a trace file, whatever format holds them, with the place of each row in the file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.files.trace_formats import TraceFormat


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
