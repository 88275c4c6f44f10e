"""What a trace looks like: rate, burstiness, lengths, their dependence, and how much of its prefixes repeats."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.request import Trace

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
