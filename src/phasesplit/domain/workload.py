"""Workloads: where traces of any rate and length come from.

- `Workload` draws traces from a joint distribution of prompt and output lengths, and an arrival model.
- A trace at another rate: its rows are drawn again as whole rows; its burstiness is kept or replaced.
- A workload from percentiles of lengths, for a person who has no trace.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel, Poisson, rechunked
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


_BLOCK = 65_536


@dataclass(frozen=True, slots=True, eq=False)
class LengthTable:
    """The joint distribution of prompt and output lengths, as counted pairs.

    Pairs keep what a product of two marginals loses: a long prompt with a short answer stays as rare as it was.

    Attributes:
        prompt_tokens: int32 (p,), >= 1; prompt length of each distinct pair.
        output_tokens: int32 (p,), >= 1; output length of each distinct pair.
        requests: int64 (p,), >= 1; how many requests had the pair.

    Raises:
        SpecError: The columns are empty, of different lengths, or hold a value below 1.
    """

    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    requests: NDArray[np.int64]

    def __post_init__(self) -> None:
        columns = (self.prompt_tokens, self.output_tokens, self.requests)
        if not self.requests.size or any(c.shape != self.requests.shape or int(c.min()) < 1 for c in columns):
            raise SpecError("length table: allowed are three equally long, not empty columns of whole numbers >= 1")

    @classmethod
    def counted(cls, prompt_tokens: NDArray[np.int32], output_tokens: NDArray[np.int32]) -> "LengthTable":
        """Return the table of observed requests.

        Args:
            prompt_tokens: (n,) >= 1.
            output_tokens: (n,) >= 1.
        """
        pairs, requests = np.unique(np.stack([prompt_tokens, output_tokens]), axis=1, return_counts=True)
        return cls(pairs[0].astype(np.int32), pairs[1].astype(np.int32), requests.astype(np.int64))

    @property
    def mean_output_tokens(self) -> float:
        """Mean output length over requests."""
        return float(np.average(self.output_tokens, weights=self.requests))

    def blocks(self, rng: np.random.Generator) -> Iterator[NDArray[np.int32]]:
        """Yield consecutive int32 (2, b) arrays, prompt lengths over output lengths, drawn jointly, without end."""
        pairs = np.stack([self.prompt_tokens, self.output_tokens])
        pair_of_request = np.repeat(np.arange(self.requests.size, dtype=np.int32), self.requests)
        while True:
            yield pairs[:, pair_of_request[rng.integers(0, pair_of_request.size, _BLOCK)]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Workload:
    """What traffic looks like, apart from how much of it there is.

    Attributes:
        name: What the workload is called in reports.
        lengths: Joint prompt and output lengths.
        arrivals: When requests arrive, the shape fitted to the observed arrivals.
        rate_per_s: Mean rate that was observed, > 0.
        duration_s: How long it was observed, > 0.
        source: Where it comes from, and its licence.
    """

    name: str
    lengths: LengthTable
    arrivals: ArrivalModel
    rate_per_s: float
    duration_s: float
    source: str

    @property
    def expected_tokens(self) -> int:
        """The output length that scheduling rules see: the workload's mean output, rounded, >= 1."""
        return max(1, round(self.lengths.mean_output_tokens))

    def trace(
        self,
        rate_per_s: float | None = None,
        duration_s: float | None = None,
        seed: int = 0,
        *,
        arrivals: ArrivalModel | None = None,
        oracle: bool = False,
    ) -> Trace:
        """Return the requests of `duration_s` seconds; the same seed gives the same bytes.

        Lengths and arrivals are drawn from separate streams: another rate or arrival model meets the same lengths.

        Args:
            rate_per_s: Mean arrival rate, > 0; by default the observed one.
            duration_s: Seconds to cover, > 0; by default as long as was observed.
            seed: Seed, >= 0.
            arrivals: Another arrival model than the workload's own.
            oracle: Let scheduling rules see the true output lengths.

        Raises:
            SpecError: A number is not allowed, or no request arrives within the duration.
        """
        rate = self.rate_per_s if rate_per_s is None else rate_per_s
        duration = self.duration_s if duration_s is None else duration_s
        if rate * duration > _MOST_REQUESTS:
            raise SpecError.bad(
                f"workload {self.name}, requests", f"{rate * duration:.3g}", f"at most {_MOST_REQUESTS:.0e} a trace"
            )
        arrival_rng, length_rng = _generators(seed)
        arrival_s = (arrivals or self.arrivals).arrivals(rate, duration, arrival_rng)
        if not arrival_s.size:
            raise SpecError(
                f"workload {self.name}: no request arrives in {duration:g} s at {rate:g} requests/s, ask for longer"
            )
        return self._trace(arrival_s, next(rechunked(self.lengths.blocks(length_rng), arrival_s.size)), oracle=oracle)

    def chunks(
        self,
        rate_per_s: float,
        requests: int,
        seed: int = 0,
        *,
        chunk: int = 1_000_000,
        arrivals: ArrivalModel | None = None,
        oracle: bool = False,
    ) -> Iterator[Trace]:
        """Yield the first `requests` requests as consecutive traces, arrival times running on, in bounded memory.

        All together equal one trace of the same rate and seed: the size of a chunk changes nothing but memory.

        Args:
            rate_per_s: Mean arrival rate, > 0.
            requests: How many requests, >= 1.
            seed: Seed, >= 0.
            chunk: Requests of one trace, >= 1; the last trace may be shorter.
            arrivals: Another arrival model than the workload's own.
            oracle: Let scheduling rules see the true output lengths.

        Raises:
            SpecError: A number is not allowed.
        """
        for where, count in (("requests", requests), ("chunk", chunk)):
            if count < 1:
                raise SpecError.bad(where, count, "a whole number of at least 1")
        arrival_rng, length_rng = _generators(seed)
        times = (arrivals or self.arrivals).chunks(rate_per_s, arrival_rng, chunk)
        lengths = rechunked(self.lengths.blocks(length_rng), chunk)
        for done, arrival_s, pairs in zip(range(0, requests, chunk), times, lengths, strict=False):
            left = requests - done
            yield self._trace(arrival_s[:left], pairs[:, :left], oracle=oracle)

    def _trace(self, arrival_s: NDArray[np.float64], pairs: NDArray[np.int32], *, oracle: bool) -> Trace:
        prompt, output = np.ascontiguousarray(pairs)
        expected = output.copy() if oracle else np.full(output.shape, self.expected_tokens, dtype=np.int32)
        return Trace(
            name=self.name,
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            expected_tokens=expected,
            oracle=oracle,
        )


def _generators(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    if seed < 0:
        raise SpecError.bad("seed", seed, "a whole number of at least 0")
    arrival, length = np.random.SeedSequence(seed).spawn(2)
    return np.random.default_rng(arrival), np.random.default_rng(length)


PAIRS = 4_096
"""Equally likely pairs of lengths in the table of such a workload; a power of two."""

LARGEST_REACH = 4.0
"""Lengths end at the latest this factor below the lowest and above the highest percentile given."""

_MOST_TOKENS = 10_000_000
_EXAMPLE = "p50=1020,p90=2734,p99=4142"


Percentiles = Mapping[int, float] | Mapping[float, float]
"""Percentile, 0 to 100, to a length in tokens."""


def workload_from_percentiles(
    prompt: Percentiles,
    output: Percentiles,
    rate_per_s: float,
    *,
    arrivals: ArrivalModel | None = None,
    duration_s: float = 600.0,
    name: str = "percentiles",
) -> Workload:
    """Return a workload whose lengths have the given percentiles; the same ones give the same workload.

    Prompt and output lengths are independent, because percentiles do not say how they depend on each other. A trace
    with long answers to short prompts differs from it. The pairs are a Hammersley set, which spreads evenly over both.

    Args:
        prompt: Percentile (0 to 100) to prompt tokens, at least one.
        output: Percentile to output tokens, at least one.
        rate_per_s: Mean arrival rate, > 0.
        arrivals: When requests arrive, by default `Poisson()`.
        duration_s: Seconds that a trace covers by default, > 0.
        name: As in reports.

    Raises:
        SpecError: A percentile is outside 0 to 100, a length below 1, or a higher percentile has a smaller length.

    Source: Hammersley 1960 (the pairs); the rest is ours.
    """
    steps = np.arange(PAIRS)
    shares = (steps + 0.5) / PAIRS, (_bits_reversed(steps) + 0.5) / PAIRS
    lengths = [
        np.maximum(np.rint(quantiles(known, share, f"workload {name}, {what}")), 1).astype(np.int32)
        for known, share, what in zip((prompt, output), shares, ("prompt", "output"), strict=True)
    ]
    return Workload(
        name=name,
        lengths=LengthTable.counted(*lengths),
        arrivals=arrivals or Poisson(),
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        source=f"percentiles: prompt {percentiles_text(prompt)}; output {percentiles_text(output)}; independent",
    )


def quantiles(percentiles: Percentiles, shares: NDArray[np.float64], where: str) -> NDArray[np.float64]:
    """Return the lengths below which these shares of requests lie.

    Between two percentiles the logarithm of the length is linear. Below the lowest and above the highest the line of
    the neighbouring pair goes on, to LARGEST_REACH of that percentile's length at most; a single percentile is the
    length of every request.

    Args:
        percentiles: Percentile (0 to 100) to length, at least one.
        shares: Any shape, 0 to 1.
        where: How the person knows the place they came from, for the message.

    Raises:
        SpecError: As `workload_from_percentiles`.
    """
    _check(percentiles, where)
    known = np.array(sorted(percentiles.items()), np.float64)
    places, logs = known[:, 0] / 100, np.log(known[:, 1])
    found = np.interp(shares, places, logs)
    if len(known) > 1:
        slopes = np.diff(logs) / np.diff(places)
        reach = math.log(LARGEST_REACH)
        found -= np.minimum(np.maximum(places[0] - shares, 0) * slopes[0], reach)
        found += np.minimum(np.maximum(shares - places[-1], 0) * slopes[-1], reach)
    return np.exp(found)


def percentiles_text(percentiles: Percentiles) -> str:
    """Return percentiles as on a command line: `p50=1020,p90=2734`."""
    return ",".join(f"p{percentile:g}={tokens:g}" for percentile, tokens in sorted(percentiles.items()))


def _check(percentiles: Percentiles, where: str) -> None:
    if not percentiles:
        raise SpecError.bad(where, "nothing", f"at least one percentile, such as {_EXAMPLE}")
    least = 1.0
    for percentile, tokens in sorted(percentiles.items()):
        if not 0 <= percentile <= 100:
            raise SpecError.bad(where, f"p{percentile:g}", "a percentile from 0 to 100")
        if not 1 <= tokens <= _MOST_TOKENS:
            raise SpecError.bad(f"{where}, p{percentile:g}", tokens, f"1 to {_MOST_TOKENS:,} tokens")
        if tokens < least:
            raise SpecError.bad(
                f"{where}, p{percentile:g}", tokens, f"at least the lower percentile's {least:g} tokens"
            )
        least = tokens


def _bits_reversed(steps: NDArray[np.int64]) -> NDArray[np.int64]:
    bits = PAIRS.bit_length() - 1
    reverse = np.zeros_like(steps)
    for bit in range(bits):
        reverse |= ((steps >> bit) & 1) << (bits - 1 - bit)
    return reverse
