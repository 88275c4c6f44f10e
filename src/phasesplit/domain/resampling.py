"""A trace at another rate: its rows drawn again as whole rows, its burstiness kept or replaced."""

import math

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError

_MOST_REQUESTS = 2e8


def window_of(trace: Trace, start_s: float = 0.0, end_s: float = math.inf) -> Trace:
    """Return the requests that arrive in [start_s, end_s) after the first, their arrivals counted from start_s.

    Raises:
        SpecError: The window is not one, or holds no request.
    """
    since_first = trace.arrival_s - trace.arrival_s[:1]
    rows = np.flatnonzero((since_first >= start_s) & (since_first < end_s))
    if not rows.size or not 0 <= start_s < end_s:
        raise SpecError.bad(
            f"trace {trace.name}, window",
            f"{start_s:g} to {end_s:g} s",
            f"a part of 0 to {trace.duration_s:g} s with requests",
        )
    return _rows(trace, rows, since_first[rows] - start_s)


def resample(
    trace: Trace,
    rate_per_s: float,
    *,
    duration_s: float | None = None,
    seed: int = 0,
    arrivals: ArrivalModel | None = None,
) -> Trace:
    """Return a trace of another mean rate that has the same joint lengths; the same seed gives the same bytes.

    Without `arrivals` the pattern is kept: time is scaled, so every ratio of gaps stays as it was, and the pattern
    starts anew where the duration asks for more. A request keeps its own arrival in the first round; later rounds
    draw whole rows with replacement. With `arrivals` all rows are drawn, at the model's times.

    Args:
        trace: At least two requests at different times.
        rate_per_s: Mean arrival rate wanted, > 0.
        duration_s: Length wanted, > 0; by default as long as the trace (with `arrivals`) or its requests last.
        seed: Seed, >= 0.
        arrivals: Model of the arrivals, or None to keep the pattern.

    Raises:
        SpecError: A number is not allowed, the trace has no rate, or no request arrives.
    """
    for where, value in (("rate", rate_per_s), ("duration", 1.0 if duration_s is None else duration_s)):
        if not 0 < value < math.inf:
            raise SpecError.bad(where, value, "a positive finite number")
    if seed < 0:
        raise SpecError.bad("seed", seed, "a whole number of at least 0")
    if trace.duration_s == 0:
        raise SpecError(f"trace {trace.name}: requests at two different times are needed to tell its rate")
    wanted = rate_per_s * (trace.duration_s if duration_s is None else duration_s)
    if wanted > _MOST_REQUESTS:
        raise SpecError.bad("rate * duration", f"{wanted:.3g} requests", f"at most {_MOST_REQUESTS:.0e}")
    arrival_rng, row_rng = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
    if arrivals is None:
        times, rows = _kept_pattern(trace, rate_per_s, duration_s, row_rng)
    else:
        times = arrivals.arrivals(rate_per_s, trace.duration_s if duration_s is None else duration_s, arrival_rng)
        rows = row_rng.integers(0, len(trace), times.size)
    if not times.size:
        raise SpecError(f"trace {trace.name}: no request arrives in that time, ask for longer or for a higher rate")
    return _rows(trace, rows, times)


def blocks_of(
    offsets: NDArray[np.int64], ids: NDArray[np.int64], rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the prefix columns of some rows, in their order.

    Args:
        offsets: (n + 1,) `Trace.prefix_offsets`.
        ids: `Trace.prefix_ids`.
        rows: (m,) row numbers in [0, n).
    """
    lengths = np.diff(offsets)[rows]
    taken = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    shift = np.repeat(offsets[:-1][rows] - taken[:-1], lengths)
    return taken, ids[np.arange(int(taken[-1])) + shift]


def _kept_pattern(
    trace: Trace, rate_per_s: float, duration_s: float | None, rng: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scaled arrival times and the row behind each; the gap between two rounds is the mean gap."""
    once = (trace.arrival_s - trace.arrival_s[0]) * (trace.rate_per_s / rate_per_s)
    rows = np.arange(len(trace))
    if duration_s is None:
        return once, rows
    round_s = len(trace) / rate_per_s
    rounds = math.ceil(duration_s / round_s)
    times = (once + round_s * np.arange(rounds)[:, None]).reshape(-1)
    again = rng.integers(0, len(trace), times.size - rows.size)
    kept = int(np.searchsorted(times, duration_s))
    return times[:kept], np.concatenate([rows, again])[:kept]


def _rows(trace: Trace, rows: NDArray[np.int64], arrival_s: NDArray[np.float64]) -> Trace:
    """Return the trace of some rows at given times, expectations and prefix blocks with them."""
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    if offsets is not None and ids is not None:
        offsets, ids = blocks_of(offsets, ids, rows)
    return Trace(
        name=trace.name,
        arrival_s=arrival_s,
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        expected_tokens=trace.expected_tokens[rows],
        oracle=trace.oracle,
        prefix_offsets=offsets,
        prefix_ids=ids,
    )
