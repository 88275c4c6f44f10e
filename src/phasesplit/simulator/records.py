"""What is kept of requests that ended: a row each, or only sums and binned distributions."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Binned, Distribution, Exact
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.slo import GOODPUT_RATIO, Slo, alone_s, goodput_ratio, is_slowdown
from phasesplit.errors import SpecError
from phasesplit.simulator.world import COMPLETED, DONE

Floats = NDArray[np.float64]

STATUS_NAMES = ("completed", "refused", "unfinished")
"""Names of `world.COMPLETED`, REFUSED and UNFINISHED, by number."""

METRICS = ("ttft_s", "itl_mean_s", "itl_max_s", "e2e_s", "queue_s", "transfer_exposed_s", "decode_queue_s")
"""Columns of seconds that a result holds for each request; NaN where one is undefined."""

SLOWDOWNS = ("ttft_slowdown", "itl_slowdown", "e2e_slowdown")
"""Columns of factors over the reference machine."""


class Records(Protocol):
    """Where ended requests go."""

    count: int
    """Requests taken so far."""

    def add(self, done: NDArray[np.void]) -> None:
        """Take records, DONE (d,), over: the caller does not touch them again."""

    def metrics(self) -> dict[str, Distribution]:
        """Return the distributions over completed requests of the metrics that were asked for."""

    def longest_gap_s(self) -> float:
        """Return the longest gap between tokens of a completed request, 0 where there is none."""


class Metrics:
    """Which metrics are wanted, and how they follow from records.

    Args:
        reference: Phase times that slowdowns compare with; None: no slowdowns.
        published: Compare as the published simulator does.
        slo: Its metrics are always among the wanted ones, and its goodput is computed.
        only: Names of the wanted metrics; None: METRICS, and SLOWDOWNS where there is a reference.

    Raises:
        SpecError: `only` holds a name that is none of a metric.
    """

    def __init__(
        self, reference: PhaseTimes | None, *, published: bool, slo: Slo, only: frozenset[str] | None = None
    ) -> None:
        self._reference = reference
        self._published = published
        self._each = slo.each
        known = {*METRICS, *SLOWDOWNS}
        wanted = known if only is None else only
        for name in wanted - known - {"itl_s", GOODPUT_RATIO}:
            raise SpecError.unknown("simulate(), metrics", name, known)
        self._wanted = [name for name in (*METRICS, *SLOWDOWNS) if name in wanted | slo.metrics]
        if reference is None:
            self._wanted = [name for name in self._wanted if not is_slowdown(name)]
        self._judged = bool(slo.each) and (reference is not None or not slo.needs_reference)

    def columns(self, done: NDArray[np.void], values: dict[str, Floats]) -> dict[str, Floats]:
        """Return the wanted columns of completed requests, (d,) each.

        Args:
            done: DONE (d,).
            values: Their `seconds`.
        """
        named = {*self._wanted, *(metric for metric, _ in self._each)} if self._judged else set(self._wanted)
        if self._reference is not None and any(is_slowdown(name) for name in named):
            values = values | slowdowns(done, values, self._reference, published=self._published)
        columns = {name: values[name] for name in self._wanted}
        if self._judged:
            columns[GOODPUT_RATIO] = goodput_ratio(values, self._each)
        return columns


class KeepAll:
    """Keeps every record, in the order of the trace.

    Args:
        metrics: What is computed of them.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
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
        return {name: Exact(column) for name, column in self._metrics.columns(done, values).items()}

    def longest_gap_s(self) -> float:
        """Return the longest gap between tokens of a completed request, 0 where there is none."""
        return _longest_gap_s(self.rows())


def _order(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each row of the trace stands in `rows`; rows that never came to be recorded are left out."""
    if rows.size != int(rows.max(initial=-1)) + 1:
        return np.argsort(rows)
    order = np.empty_like(rows)
    order[rows] = np.arange(rows.size)
    return order


class KeepSums:
    """Keeps distributions in bins, and nothing of a single request; arguments as for `KeepAll`."""

    def __init__(self, metrics: Metrics) -> None:
        self.count = 0
        self.status_counts = np.zeros(len(STATUS_NAMES), np.int64)
        self.tokens = np.zeros(2, np.int64)
        self._binned: dict[str, Binned] = {}
        self._metrics = metrics
        self._longest_gap_s = 0.0

    def add(self, done: NDArray[np.void]) -> None:
        """Take records, DONE (d,)."""
        self.count += done.size
        self.status_counts += np.bincount(done["status"], minlength=len(STATUS_NAMES))
        done = done[done["status"] == COMPLETED]
        self.tokens += [int(done["prompt_tokens"].sum()), int(done["output_tokens"].sum())]
        self._longest_gap_s = max(self._longest_gap_s, _longest_gap_s(done))
        for name, column in self._metrics.columns(done, seconds(done)).items():
            self._binned.setdefault(name, Binned()).add(column)

    def metrics(self) -> dict[str, Distribution]:
        """Return binned distributions over completed requests."""
        return dict(self._binned)

    def longest_gap_s(self) -> float:
        """Return the longest gap between tokens of a completed request, 0 where there is none."""
        return self._longest_gap_s


def _longest_gap_s(done: NDArray[np.void]) -> float:
    with_gaps = (done["status"] == COMPLETED) & (done["output_tokens"] > 1)
    return float(done["gap_max_s"].max(where=with_gaps, initial=0.0))


def seconds(done: NDArray[np.void]) -> dict[str, Floats]:
    """Return METRICS of records, (d,) each, in seconds; NaN where one is undefined.

    Undefined are the ITLs of one output token, and everything of a phase that a request never came to.
    """
    gaps = (done["output_tokens"] - 1).astype(np.float64)
    several = gaps > 0
    itl_mean_s = (done["last_token_s"] - done["first_token_s"]) / np.where(several, gaps, np.nan)
    values = {
        "ttft_s": done["first_token_s"] - done["arrival_s"],
        "itl_mean_s": itl_mean_s,
        "itl_max_s": np.where(several, done["gap_max_s"], np.nan),
        "e2e_s": done["last_token_s"] - done["arrival_s"],
        "queue_s": done["prefill_start_s"] - done["arrival_s"],
        "transfer_exposed_s": np.where(several, done["kv_ready_s"] - done["first_token_s"], np.nan),
        "decode_queue_s": np.where(several, done["decode_start_s"] - done["kv_ready_s"], np.nan),
    }
    if (done["status"] != COMPLETED).any():
        _undefine(done, values)
    return values


def _undefine(done: NDArray[np.void], values: dict[str, Floats]) -> None:
    """Set to NaN what a refused or unfinished request has no value for: an instant of -1 was never reached."""
    unfinished = done["status"] != COMPLETED
    for name in ("itl_mean_s", "itl_max_s", "e2e_s"):
        values[name] = np.where(unfinished, np.nan, values[name])
    for name, instant in {
        "ttft_s": "first_token_s",
        "queue_s": "prefill_start_s",
        "transfer_exposed_s": "kv_ready_s",
        "decode_queue_s": "decode_start_s",
    }.items():
        values[name] = np.where(done[instant] < 0, np.nan, values[name])


def slowdowns(
    done: NDArray[np.void], values: dict[str, Floats], reference: PhaseTimes, *, published: bool
) -> dict[str, Floats]:
    """Return the three slowdowns of completed requests over the same request alone on the reference machine, (d,) each.

    The published simulator's ITL divides by all output tokens, the first included.
    """
    ttft_s, itl_s, e2e_s = alone_s(reference, done["prompt_tokens"], done["output_tokens"], published=published)
    itl = values["itl_mean_s"]
    if published:
        itl = (values["e2e_s"] - values["ttft_s"]) / done["output_tokens"]
    return {
        "ttft_slowdown": values["ttft_s"] / ttft_s,
        "itl_slowdown": itl / itl_s,
        "e2e_slowdown": values["e2e_s"] / e2e_s,
    }
