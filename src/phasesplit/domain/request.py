"""A trace: the requests of a workload as columns, and what they look like.

`Trace` holds the columns. `TraceShape` describes them: rate, burstiness, lengths, their correlation, and how much of
the prefixes repeats.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival, one array per column, all of one length.

    Attributes:
        name: What the trace is called in reports.
        arrival_s: float64 (n,), non-decreasing, finite, >= 0; seconds since the start of the trace.
        prompt_tokens: int32 (n,), >= 1.
        output_tokens: int32 (n,), >= 1; the true output length, which no scheduling rule ever sees.
        expected_tokens: int32 (n,), >= 1; the output length that rules see. By default the trace's mean output,
            rounded, for every request; equal to `output_tokens` only when `oracle` says so.
        oracle: Whether `expected_tokens` are the true lengths; a result names it.
        prefix_offsets: int64 (n + 1,) or None; request i owns `prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]`.
        prefix_ids: int64 or None; one id for each block of the prompt, equal ids mean equal prefix blocks.

    Raises:
        SpecError: A column has the wrong length or a value that is not allowed; the first such row is named.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    expected_tokens: NDArray[np.int32]
    oracle: bool = False
    prefix_offsets: NDArray[np.int64] | None = None
    prefix_ids: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        _check_columns(self)

    @classmethod
    def from_columns(
        cls,
        name: str,
        arrival_s: NDArray[np.float64],
        prompt_tokens: NDArray[np.int32],
        output_tokens: NDArray[np.int32],
        *,
        oracle: bool = False,
        prefix_offsets: NDArray[np.int64] | None = None,
        prefix_ids: NDArray[np.int64] | None = None,
    ) -> "Trace":
        """Return a trace whose rules see the mean output length, or the true one with `oracle`.

        Args:
            name: What the trace is called in reports.
            arrival_s: (n,) seconds since the start of the trace, non-decreasing, finite, >= 0.
            prompt_tokens: (n,) >= 1.
            output_tokens: (n,) >= 1.
            oracle: Let the rules see the true output length of each request.
            prefix_offsets: (n + 1,) or None, see the class.
            prefix_ids: Block ids or None, see the class.

        Raises:
            SpecError: A column has the wrong length or a value that is not allowed.
        """
        arrival = np.ascontiguousarray(arrival_s, dtype=np.float64)
        prompt = _whole_tokens(name, "prompt_tokens", prompt_tokens)
        output = _whole_tokens(name, "output_tokens", output_tokens)
        if oracle:
            expected = output.copy()
        else:
            mean = max(1, round(float(output.mean()))) if output.size else 1
            expected = np.full(output.shape, mean, dtype=np.int32)
        return cls(
            name=name,
            arrival_s=arrival,
            prompt_tokens=prompt,
            output_tokens=output,
            expected_tokens=expected,
            oracle=oracle,
            prefix_offsets=prefix_offsets,
            prefix_ids=prefix_ids,
        )

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival; 0 for fewer than two requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate: (n - 1) / duration, 0 where the duration is 0."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else 0.0

    def head(self, count: int) -> "Trace":
        """Return the first `count` requests, expectations unchanged."""
        ids_end = None if self.prefix_offsets is None else int(self.prefix_offsets[: count + 1][-1])
        return Trace(
            name=self.name,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            expected_tokens=self.expected_tokens[:count],
            oracle=self.oracle,
            prefix_offsets=None if self.prefix_offsets is None else self.prefix_offsets[: count + 1],
            prefix_ids=None if self.prefix_ids is None else self.prefix_ids[:ids_end],
        )


def _whole_tokens(name: str, column: str, values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return values as int32; one that a conversion would change is an error, not another length."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):
        tokens = np.ascontiguousarray(given, dtype=np.int32)
    if not np.array_equal(tokens, given):
        row = int(np.argmax(tokens != given))
        raise SpecError.bad(f"trace {name}, request {row}, {column}", given[row].item(), "a whole number below 2**31")
    return tokens


def _check_prefixes(trace: Trace, count: int) -> None:
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    if offsets is None and ids is None:
        return
    if (
        offsets is None
        or ids is None
        or offsets.shape != (count + 1,)
        or int(offsets[0]) != 0
        or int(offsets[-1]) != ids.size
        or bool((np.diff(offsets) < 0).any())
    ):
        raise SpecError(
            f"trace {trace.name}, prefix_offsets: allowed are {count + 1} numbers from 0 up to the number of prefix_ids"
        )


def _check_columns(trace: Trace) -> None:
    count = trace.arrival_s.shape[0]
    for column in ("prompt_tokens", "output_tokens", "expected_tokens"):
        values = getattr(trace, column)
        if values.shape != (count,):
            raise SpecError.bad(f"trace {trace.name}, column {column}", values.shape, f"{count} values")
        if count and int(values.min()) < 1:
            row = int(np.argmax(values < 1))
            raise SpecError.bad(
                f"trace {trace.name}, request {row}, {column}", int(values[row]), "a whole number of at least 1"
            )
    _check_prefixes(trace, count)
    if not count:
        return
    arrival = trace.arrival_s
    if not np.isfinite(arrival).all() or arrival[0] < 0:
        row = int(np.argmax(~np.isfinite(arrival) | (arrival < 0)))
        raise SpecError.bad(f"trace {trace.name}, request {row}, arrival_s", float(arrival[row]), "a finite time >= 0")
    steps = np.diff(arrival)
    if steps.size and float(steps.min()) < 0:
        row = int(np.argmax(steps < 0)) + 1
        raise SpecError.bad(
            f"trace {trace.name}, request {row}, arrival_s",
            float(arrival[row]),
            f"a time not before the previous request's ({float(arrival[row - 1])})",
        )


PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 99, 100)
"""Percentiles at which lengths are described; 100 is the longest."""

WINDOWS_S = (1, 10, 60)
"""Windows over which arrivals are counted."""


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """Arrivals counted in consecutive windows from the first arrival on; a last window that is not whole is left out.

    Attributes:
        window_s: Length of a window.
        windows: How many whole windows there are; the rest is NaN where there is none.
        dispersion: Index of dispersion for counts, Var[N] / E[N]: 1 for Poisson arrivals at any window, and near the
            square of the inter-arrival cv at long windows of a renewal stream.
            Source: Cox and Lewis, The Statistical Analysis of Series of Events (1966); Gusella, IEEE JSAC 9(2), 1991.
        peak_to_mean: Most arrivals of one window over the mean.
        most: Most arrivals of one window.
        empty_share: Share of windows without an arrival.
    """

    window_s: float
    windows: int
    dispersion: float
    peak_to_mean: float
    most: int
    empty_share: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of prompts or outputs.

    Attributes:
        mean: Mean tokens.
        percentiles: Tokens at each of `PERCENTILES`, by percentile; interpolated, then rounded.
    """

    mean: float
    percentiles: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShape:
    """The description of a trace that has at least one request.

    Attributes:
        name: The trace's name.
        requests: How many requests.
        first_arrival_s: Arrival of the first.
        duration_s: From the first to the last arrival.
        rate_per_s: Mean arrival rate, (requests - 1) / duration.
        inter_arrival_cv: Standard deviation of the gaps over their mean: 1 for Poisson; NaN below two gaps.
        windows: Counts over each of `WINDOWS_S`.
        prompt: Prompt lengths.
        output: Output lengths.
        pearson: Correlation of prompt and output length; NaN where one of them never changes.
        spearman: The same of their ranks, ties sharing the mean rank.
        prefix_blocks: How many prefix blocks the prompts have, or None without block ids.
        prefix_seen_share: Share of blocks that an endless cache would have seen before, or None.
    """

    name: str
    requests: int
    first_arrival_s: float
    duration_s: float
    rate_per_s: float
    inter_arrival_cv: float
    windows: tuple[WindowCounts, ...]
    prompt: Lengths
    output: Lengths
    pearson: float
    spearman: float
    prefix_blocks: int | None
    prefix_seen_share: float | None


def describe_trace(trace: Trace) -> TraceShape:
    """Return what a trace looks like; it must have at least one request."""
    ids = trace.prefix_ids
    return TraceShape(
        name=trace.name,
        requests=len(trace),
        first_arrival_s=float(trace.arrival_s[0]),
        duration_s=trace.duration_s,
        rate_per_s=trace.rate_per_s,
        inter_arrival_cv=inter_arrival_cv(trace.arrival_s),
        windows=tuple(count_windows(trace.arrival_s, window_s) for window_s in WINDOWS_S),
        prompt=_lengths(trace.prompt_tokens),
        output=_lengths(trace.output_tokens),
        pearson=_correlation(trace.prompt_tokens, trace.output_tokens),
        spearman=_correlation(_ranks(trace.prompt_tokens), _ranks(trace.output_tokens)),
        prefix_blocks=None if ids is None else int(ids.size),
        prefix_seen_share=None if ids is None or not ids.size else 1 - np.unique(ids).size / ids.size,
    )


def inter_arrival_cv(arrival_s: NDArray[np.float64]) -> float:
    """Return the coefficient of variation of the gaps, std / mean; NaN below two gaps or where all are 0."""
    gaps = np.diff(arrival_s)
    return float(gaps.std() / gaps.mean()) if gaps.size > 1 and gaps.mean() > 0 else float("nan")


def count_windows(arrival_s: NDArray[np.float64], window_s: float) -> WindowCounts:
    """Return how arrivals spread over whole windows; empty windows cost no memory.

    Args:
        arrival_s: (n,) non-decreasing, n >= 1.
        window_s: Length of a window, > 0.
    """
    since_first = arrival_s - arrival_s[0]
    windows = int(since_first[-1] // window_s)
    if not windows:
        return WindowCounts(window_s, 0, float("nan"), float("nan"), 0, float("nan"))
    window = np.floor_divide(since_first, window_s)
    window = window[window < windows]
    bounds = np.flatnonzero(np.diff(window, prepend=-1.0, append=windows))
    counts = np.diff(bounds).astype(np.float64)
    mean = window.size / windows
    variance = float((counts**2).sum()) / windows - mean**2
    most = int(counts.max())
    return WindowCounts(window_s, windows, variance / mean, most / mean, most, 1 - counts.size / windows)


def rate_over_time(arrival_s: NDArray[np.float64], bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (bins + 1,) edges in s and (bins,) mean arrival rates between them; n >= 1 arrivals."""
    first, last = float(arrival_s[0]), float(arrival_s[-1])
    counts, edges = np.histogram(arrival_s, bins=bins, range=(first, max(last, first + 1e-3)))
    return edges, counts / np.diff(edges)


def _lengths(tokens: NDArray[np.int32]) -> Lengths:
    values = np.percentile(tokens, PERCENTILES)
    return Lengths(float(tokens.mean()), {p: round(float(v)) for p, v in zip(PERCENTILES, values, strict=True)})


def _correlation(first: NDArray[np.generic], second: NDArray[np.generic]) -> float:
    x, y = first.astype(np.float64), second.astype(np.float64)
    if x.size < 2 or x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: NDArray[np.int32]) -> NDArray[np.float64]:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean_rank: NDArray[np.float64] = ends - (counts - 1) / 2
    return mean_rank[group]
