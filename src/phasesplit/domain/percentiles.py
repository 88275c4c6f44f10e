"""A workload from percentiles of its lengths, typed in by a person who has no trace."""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel, Poisson
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.errors import SpecError

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
