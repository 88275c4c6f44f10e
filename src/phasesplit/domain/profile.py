"""Phase times: how long one iteration of one model takes on one machine, and their fit to measurements.

`PhaseTimes` holds piecewise-linear times of prefill, decode and mixed iterations. `profile_times` makes them from
`Measurements`, and `published_times` as the published simulator looks times up.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.errors import SpecError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PhaseTimes:
    """Times of prefill, decode and mixed iterations.

    With B prompt tokens in the batch, prompt i of it computing c_i tokens behind h_i tokens already in its KV cache,
    n requests in decode and S tokens of context over those n requests:

    - prefill iteration: f(B) + prefill_pair_s x sum(c_i x c_i / 2 + c_i x h_i)
    - decode iteration:  g(n) + decode_context_s x S
    - mixed iteration:  max(f(B + n), g(n)) + the prompt's pair term + decode_context_s x S

    where f interpolates (`prefill_knots_tokens`, `prefill_knots_s`) and g (`decode_knots_requests`,
    `decode_knots_s`), both linearly, with their first and last segments extended beyond the ends and never below
    zero. The matrix products of a
    mixed iteration run once over all its tokens (hence f(B + n)), attention apart for each phase (hence the sums).
    In an iteration of the published rules the pair and context terms are 0 and the mixed time is 1.1 x f(B + n).

    Attributes:
        source: Where the times come from, as a report prints it ("measured: ...", "roofline: ...").
        prefill_knots_tokens: float64 (p,), increasing, p >= 2.
        prefill_knots_s: float64 (p,).
        decode_knots_requests: float64 (t,), increasing, t >= 2.
        decode_knots_s: float64 (t,), at zero context.
        prefill_pair_s: Seconds for each pair of a prompt token and a token that it attends to, >= 0.
        decode_context_s: Seconds for each token of context that a decode iteration reads, >= 0.
        measured_prompt_tokens: Largest B inside the data that the times rest on (beyond it they are extrapolated).
        measured_requests: Largest n inside that data.
        mean_error: Mean relative error against the measurements it was fitted to; NaN where there are none.
    """

    source: str
    prefill_knots_tokens: NDArray[np.float64]
    prefill_knots_s: NDArray[np.float64]
    decode_knots_requests: NDArray[np.float64]
    decode_knots_s: NDArray[np.float64]
    prefill_pair_s: float
    decode_context_s: float
    measured_prompt_tokens: float
    measured_requests: float
    mean_error: float

    def prefill_time_s(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the time of an iteration that computes one whole prompt of so many tokens, alone."""
        tokens = np.asarray(prompt_tokens, dtype=np.float64)
        return (
            extended_interp(tokens, self.prefill_knots_tokens, self.prefill_knots_s)
            + self.prefill_pair_s * tokens**2 / 2
        )

    def decode_time_s(self, requests: ArrayLike, context_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the time of a decode iteration over so many requests with so many tokens of context in all."""
        count = np.asarray(requests, dtype=np.float64)
        base = extended_interp(count, self.decode_knots_requests, self.decode_knots_s)
        return base + self.decode_context_s * np.asarray(context_tokens, dtype=np.float64)

    def scaled(self, prefill_factor: float, decode_factor: float) -> "PhaseTimes":
        """Return the times of the same machine made slower or faster in each phase (a power cap, a lower clock).

        Args:
            prefill_factor: Factor on prefill times, > 0.
            decode_factor: Factor on decode times, > 0.
        """
        if prefill_factor == 1.0 and decode_factor == 1.0:
            return self
        return replace(
            self,
            source=f"{self.source}; prefill times x {prefill_factor:g}, decode times x {decode_factor:g}, assumed",
            prefill_knots_s=self.prefill_knots_s * prefill_factor,
            decode_knots_s=self.decode_knots_s * decode_factor,
            prefill_pair_s=self.prefill_pair_s * prefill_factor,
            decode_context_s=self.decode_context_s * decode_factor,
        )


def extended_interp(x: ArrayLike, knots_x: NDArray[np.float64], knots_y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return piecewise-linear interpolation with the first and last segments extended, never below zero.

    Args:
        x: Where to look up, any shape.
        knots_x: (k,) increasing, k >= 2.
        knots_y: (k,).
    """
    at = np.asarray(x, dtype=np.float64)
    segment = np.searchsorted(knots_x[1:-1], at, side="right")
    slopes = np.diff(knots_y) / np.diff(knots_x)
    return np.maximum(knots_y[segment] + slopes[segment] * (at - knots_x[segment]), 0.0)


Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurements:
    """Timed runs of one model on one machine, one array element each, all of one length.

    Attributes:
        source: Where they come from, as a report prints it.
        prompt_tokens: float64 (n,), tokens of each prompt of the batch, >= 1.
        batch_requests: float64 (n,), equal prompts in the batch, >= 1.
        output_tokens: float64 (n,), tokens generated for each prompt, >= 1.
        prefill_s: float64 (n,), time of the prefill iteration over the whole batch, > 0.
        decode_s: float64 (n,), mean time of one decode iteration, > 0.
        runs: float64 (n,), how many runs each element stands for (a median of 5 runs: 5), > 0.
    """

    source: str
    prompt_tokens: Floats
    batch_requests: Floats
    output_tokens: Floats
    prefill_s: Floats
    decode_s: Floats
    runs: Floats

    @property
    def batch_tokens(self) -> Floats:
        """Prompt tokens of the whole batch."""
        return self.prompt_tokens * self.batch_requests

    @property
    def mean_context_tokens(self) -> Floats:
        """Context of the whole batch, averaged over its decode iterations: batch x (prompt + output / 2)."""
        return self.batch_requests * (self.prompt_tokens + self.output_tokens / 2)

    def select(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> "Measurements":
        """Return the elements that a mask or an index array picks."""
        return Measurements(
            source=self.source,
            prompt_tokens=self.prompt_tokens[keep],
            batch_requests=self.batch_requests[keep],
            output_tokens=self.output_tokens[keep],
            prefill_s=self.prefill_s[keep],
            decode_s=self.decode_s[keep],
            runs=self.runs[keep],
        )


def profile_times(measurements: Measurements) -> PhaseTimes:
    """Return the phase times that follow the measurements, with the effects of batch and context kept apart.

    - `prefill_pair_s`: several prompts of together B tokens have fewer attention pairs than one prompt of B tokens;
      least squares through the origin on the difference of their times, not below 0.
    - f(B): the time less its pair term; single prompts where B was measured with one, since the scheduler runs a
      prompt above its limit of batched tokens alone, otherwise batches of equal B.
    - `decode_context_s`: median slope (Theil-Sen) of batch-1 decode times over mean context, not below 0. It was
      measured at batch 1 only; that context costs the same in larger batches is taken as given.
    - g(n): the decode time less its context term, from the runs with the prompt and output sizes most used.

    f and g are made non-decreasing by weighted isotonic regression: more work never takes less time, and where a
    measurement says so it is noise (Llama2-70B on H100 took 58 ms for 128 tokens, 52 ms for 256, +- 6 ms).

    Args:
        measurements: At least two different batch sizes in tokens, and two in requests.

    Raises:
        SpecError: There are too few different points to interpolate between.

    Source: piecewise-linear performance model, Splitwise section V; the split into batch, pair and context terms: ours.
    """
    pair_s = _prefill_pair_s(measurements)
    prefill_x, prefill_y, prefill_weight = _prefill_knots(measurements, pair_s)
    context_s = _decode_context_s(measurements)
    decode_x, decode_y, decode_weight = _decode_knots(measurements, context_s)
    for what, knots in (("batch sizes in prompt tokens", prefill_x), ("batch sizes in requests", decode_x)):
        if knots.size < 2:
            raise SpecError.bad(f"profile {measurements.source}, {what}", knots.tolist(), "at least two different ones")
    times = PhaseTimes(
        source=measurements.source,
        prefill_knots_tokens=prefill_x,
        prefill_knots_s=_non_decreasing(prefill_y, prefill_weight),
        decode_knots_requests=decode_x,
        decode_knots_s=_non_decreasing(decode_y, decode_weight),
        prefill_pair_s=pair_s,
        decode_context_s=context_s,
        measured_prompt_tokens=float(prefill_x[-1]),
        measured_requests=float(decode_x[-1]),
        mean_error=float("nan"),
    )
    errors = np.abs(np.concatenate(relative_errors(times, measurements)))
    mean_error = float(np.average(errors, weights=np.tile(measurements.runs, 2)))
    return replace(times, source=f"measured: {measurements.source}, mean error {mean_error:.1%}", mean_error=mean_error)


def relative_errors(times: PhaseTimes, measurements: Measurements) -> tuple[Floats, Floats]:
    """Return (predicted - measured) / measured of the prefill and of the decode times, each float64 (n,)."""
    pairs = measurements.batch_requests * measurements.prompt_tokens**2 / 2
    whole = times.prefill_time_s(measurements.batch_tokens)
    predicted = whole + times.prefill_pair_s * (pairs - measurements.batch_tokens**2 / 2)
    decode_s = times.decode_time_s(measurements.batch_requests, measurements.mean_context_tokens)
    return predicted / measurements.prefill_s - 1, decode_s / measurements.decode_s - 1


def published_times(source: str, knots_tokens: Floats, prefill_s: Floats, decode_s: Floats) -> PhaseTimes:
    """Return the phase times of the published simulator: both phases looked up by prompt size x batch size.

    A decode iteration over n requests is looked up at n, left of all knots, so its time hardly depends on n: a defect
    that is kept here, since only with it do the published results come out. Nothing is smoothed.

    Args:
        source: Where the medians come from, as a report prints it.
        knots_tokens: (k,) prompt size x batch size, increasing, k >= 2.
        prefill_s: (k,) median prefill time over all runs of that size.
        decode_s: (k,) median decode time over all runs of that size.

    Source: the published simulator's performance model, "db" setting.
    """
    return PhaseTimes(
        source=f"published look-up: {source}",
        prefill_knots_tokens=knots_tokens,
        prefill_knots_s=prefill_s,
        decode_knots_requests=knots_tokens,
        decode_knots_s=decode_s,
        prefill_pair_s=0.0,
        decode_context_s=0.0,
        measured_prompt_tokens=float(knots_tokens[-1]),
        measured_requests=float(knots_tokens[-1]),
        mean_error=float("nan"),
    )


def _median_by(keys: Floats, values: Floats, weights: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the distinct keys, increasing, with the median of their values and their total weight."""
    distinct, group = np.unique(keys, return_inverse=True)
    medians = np.array([np.median(values[group == index]) for index in range(distinct.size)])
    total = np.bincount(group, weights=weights).astype(np.float64)
    return distinct, medians, total


def _prefill_pair_s(measurements: Measurements) -> float:
    single = measurements.batch_requests == 1
    alone_x, alone_s, _ = _median_by(
        measurements.batch_tokens[single], measurements.prefill_s[single], measurements.runs[single]
    )
    batched = measurements.select(~single & np.isin(measurements.batch_tokens, alone_x))
    if not batched.runs.size:
        return 0.0
    tokens = batched.batch_tokens
    more_pairs = (tokens**2 - batched.batch_requests * batched.prompt_tokens**2) / 2
    more_s = alone_s[np.searchsorted(alone_x, tokens)] - batched.prefill_s
    fitted = np.sum(batched.runs * more_pairs * more_s) / np.sum(batched.runs * more_pairs**2)
    return max(float(fitted), 0.0)


def _prefill_knots(measurements: Measurements, pair_s: float) -> tuple[Floats, Floats, Floats]:
    single = measurements.batch_requests == 1
    keep = single | ~np.isin(measurements.batch_tokens, measurements.batch_tokens[single])
    used = measurements.select(keep)
    pairs = used.batch_requests * used.prompt_tokens**2 / 2
    return _median_by(used.batch_tokens, used.prefill_s - pair_s * pairs, used.runs)


def _decode_context_s(measurements: Measurements) -> float:
    single = measurements.select(measurements.batch_requests == 1)
    context, seconds, _ = _median_by(single.mean_context_tokens, single.decode_s, single.runs)
    if context.size < 2:
        return 0.0
    first, second = np.triu_indices(context.size, k=1)
    slopes = (seconds[second] - seconds[first]) / (context[second] - context[first])
    return max(float(np.median(slopes)), 0.0)


def _decode_knots(measurements: Measurements, context_s: float) -> tuple[Floats, Floats, Floats]:
    shapes = np.stack([measurements.prompt_tokens, measurements.output_tokens], axis=1)
    distinct, group = np.unique(shapes, axis=0, return_inverse=True)
    sweeps = np.array([np.unique(measurements.batch_requests[group == index]).size for index in range(len(distinct))])
    used = measurements.select(group == int(np.argmax(sweeps)))
    return _median_by(used.batch_requests, used.decode_s - context_s * used.mean_context_tokens, used.runs)


def _non_decreasing(values: Floats, weights: Floats) -> Floats:
    """Return the closest non-decreasing values in weighted least squares (pool adjacent violators)."""
    means: list[float] = []
    totals: list[float] = []
    counts: list[int] = []
    for value, weight in zip(values, weights, strict=True):
        mean, total, count = float(value), float(weight), 1
        while means and means[-1] > mean:
            previous = totals.pop()
            mean = (means.pop() * previous + mean * total) / (previous + total)
            total += previous
            count += counts.pop()
        means.append(mean)
        totals.append(total)
        counts.append(count)
    return np.repeat(np.array(means), counts)
