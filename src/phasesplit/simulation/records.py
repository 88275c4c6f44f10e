"""What is kept of requests that ended: a row each, or only sums and binned distributions."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Binned, Distribution, Exact
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.slo import alone_s
from phasesplit.simulation.world import COMPLETED, DONE

Floats = NDArray[np.float64]

STATUS_NAMES = ("completed", "refused", "unfinished")
"""Names of `world.COMPLETED`, REFUSED and UNFINISHED, by number."""

METRICS = ("ttft_s", "tbt_mean_s", "tbt_max_s", "e2e_s", "queue_s", "transfer_exposed_s", "token_queue_s")
"""Columns of seconds that a result holds for each request; NaN where one is undefined."""


class Records(Protocol):
    """Where ended requests go."""

    count: int
    """Requests taken so far."""

    def add(self, done: NDArray[np.void]) -> None:
        """Take records, DONE (d,), over: the caller does not touch them again."""

    def metrics(self) -> dict[str, Distribution]:
        """Return the distributions over completed requests: METRICS, and slowdowns where there is a reference."""


class KeepAll:
    """Keeps every record, in the order of the trace.

    Args:
        reference: Phase times that slowdowns compare with; None: no slowdowns.
        published: Compare as the published simulator does.
    """

    def __init__(self, reference: PhaseTimes | None, *, published: bool) -> None:
        self._reference = reference
        self._published = published
        self._parts: list[NDArray[np.void]] = []
        self._rows = np.zeros(0, DONE)
        self._seconds: dict[str, Floats] = {}
        self.count = 0

    def add(self, done: NDArray[np.void]) -> None:
        """Take records, DONE (d,)."""
        self._parts.append(done)
        self.count += done.size

    def rows(self) -> NDArray[np.void]:
        """Return all records, DONE (n,), in the order of the trace."""
        if self._rows.size != self.count:
            found = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
            # Whole records are moved as plain numbers, which is several times faster than field by field.
            words = found.view(np.int64).reshape(found.size, -1)
            self._rows = words[_order(found["row"])].reshape(-1).view(DONE)
            self._parts = [self._rows]
            self._seconds = seconds(self._rows)
        return self._rows

    def seconds(self) -> dict[str, Floats]:
        """Return METRICS of all records, (n,) each."""
        self.rows()
        return self._seconds

    def metrics(self) -> dict[str, Distribution]:
        """Return exact distributions over completed requests."""
        done = self.rows()
        values = self._seconds
        completed = done["status"] == COMPLETED
        if not completed.all():
            done = done[completed]
            values = {name: column[completed] for name, column in values.items()}
        if self._reference is not None:
            values = values | slowdowns(done, values, self._reference, published=self._published)
        return {name: Exact(column) for name, column in values.items()}


def _order(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each row of the trace stands in `rows`; rows that never came to be recorded are left out."""
    if rows.size != int(rows.max(initial=-1)) + 1:
        return np.argsort(rows)
    order = np.empty_like(rows)
    order[rows] = np.arange(rows.size)
    return order


class KeepSums:
    """Keeps distributions in bins, and nothing of a single request; arguments as for `KeepAll`."""

    def __init__(self, reference: PhaseTimes | None, *, published: bool) -> None:
        self.count = 0
        self.status_counts = np.zeros(len(STATUS_NAMES), np.int64)
        self.tokens = np.zeros(2, np.int64)
        self._binned: dict[str, Binned] = {}
        self._reference = reference
        self._published = published

    def add(self, done: NDArray[np.void]) -> None:
        """Take records, DONE (d,)."""
        self.count += done.size
        self.status_counts += np.bincount(done["status"], minlength=len(STATUS_NAMES))
        done = done[done["status"] == COMPLETED]
        self.tokens += [int(done["prompt_tokens"].sum()), int(done["output_tokens"].sum())]
        values = seconds(done)
        if self._reference is not None:
            values |= slowdowns(done, values, self._reference, published=self._published)
        for name, column in values.items():
            self._binned.setdefault(name, Binned()).add(column)

    def metrics(self) -> dict[str, Distribution]:
        """Return binned distributions over completed requests."""
        return dict(self._binned)


def seconds(done: NDArray[np.void]) -> dict[str, Floats]:
    """Return METRICS of records, (d,) each, in seconds; NaN where one is undefined.

    Undefined are the TBTs of one output token, and everything of a phase that a request never came to.
    """
    gaps = (done["output_tokens"] - 1).astype(np.float64)
    several = gaps > 0
    tbt_mean_s = (done["last_token_s"] - done["first_token_s"]) / np.where(several, gaps, np.nan)
    values = {
        "ttft_s": done["first_token_s"] - done["arrival_s"],
        "tbt_mean_s": tbt_mean_s,
        "tbt_max_s": np.where(several, done["gap_max_s"], np.nan),
        "e2e_s": done["last_token_s"] - done["arrival_s"],
        "queue_s": done["prompt_start_s"] - done["arrival_s"],
        "transfer_exposed_s": np.where(several, done["kv_ready_s"] - done["first_token_s"], np.nan),
        "token_queue_s": np.where(several, done["token_start_s"] - done["kv_ready_s"], np.nan),
    }
    if (done["status"] != COMPLETED).any():
        _undefine(done, values)
    return values


def _undefine(done: NDArray[np.void], values: dict[str, Floats]) -> None:
    """Set to NaN what a refused or unfinished request has no value for: an instant of -1 was never reached."""
    unfinished = done["status"] != COMPLETED
    for name in ("tbt_mean_s", "tbt_max_s", "e2e_s"):
        values[name] = np.where(unfinished, np.nan, values[name])
    for name, instant in {
        "ttft_s": "first_token_s",
        "queue_s": "prompt_start_s",
        "transfer_exposed_s": "kv_ready_s",
        "token_queue_s": "token_start_s",
    }.items():
        values[name] = np.where(done[instant] < 0, np.nan, values[name])


def slowdowns(
    done: NDArray[np.void], values: dict[str, Floats], reference: PhaseTimes, *, published: bool
) -> dict[str, Floats]:
    """Return the three slowdowns of completed requests over the same request alone on the reference machine, (d,) each.

    The published simulator's TBT divides by all output tokens, the first included.
    """
    ttft_s, tbt_s, e2e_s = alone_s(reference, done["prompt_tokens"], done["output_tokens"], published=published)
    tbt = values["tbt_mean_s"]
    if published:
        tbt = (values["e2e_s"] - values["ttft_s"]) / done["output_tokens"]
    return {
        "ttft_slowdown": values["ttft_s"] / ttft_s,
        "tbt_slowdown": tbt / tbt_s,
        "e2e_slowdown": values["e2e_s"] / e2e_s,
    }
