"""The requests that a plan is made for: traces at any rate, and the moments that floors need."""

from dataclasses import dataclass, replace
from math import isclose

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel
from phasesplit.domain.request import Trace
from phasesplit.domain.resampling import resample
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.errors import SpecError

Floats = NDArray[np.float64]

_DOUBLINGS = 10
_MOST_TIMES_PLANNED = 4
"""So many times the planned number of requests are drawn at most: a cluster of one machine may hold a thousand times a
low rate, over the hours that a low rate takes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Traffic:
    """A workload or a recorded trace, the rate it is wanted at, and how long each simulation of it lasts.

    Attributes:
        source: A workload, from which traces are drawn, or a recorded trace, whose pattern of arrivals is kept.
        rate_per_s: Mean rate to plan for, > 0.
        duration_s: Length of each simulated trace, > 0.
        arrivals: Another arrival model than the source's own.
        oracle: Let the scheduler see true output lengths.
    """

    source: Workload | Trace
    rate_per_s: float
    duration_s: float
    arrivals: ArrivalModel | None = None
    oracle: bool = False

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def lengths(self) -> LengthTable:
        """Joint lengths of prompts and outputs."""
        if isinstance(self.source, Workload):
            return self.source.lengths
        return LengthTable.counted(self.source.prompt_tokens, self.source.output_tokens)

    def trace(self, rate_per_s: float, seed: int, ratio: float = 1.0) -> Trace:
        """Return requests at a rate; a seed gives the same requests at every rate (common random numbers).

        A recorded trace is played over the same share of its pattern, or as many times, at every rate. Seed 0 has its
        own rows in their own order; other seeds keep its arrivals and draw rows again, whole. A drawn trace at a rate
        far above the planned one ends earlier.

        Args:
            rate_per_s: Mean arrival rate, > 0.
            seed: Seed, >= 0.
            ratio: Factor on the ratio of prompt to output tokens, > 0: prompts longer by its root, outputs shorter.
        """
        requests = self.duration_s * self.rate_per_s
        if isinstance(self.source, Workload):
            drawn = self._drawn(rate_per_s, min(self.duration_s, _MOST_TIMES_PLANNED * requests / rate_per_s), seed)
        elif (rounds := round(requests / len(self.source))) and isclose(rounds * len(self.source), requests):
            # Half a mean gap more, and no request more: the last round is whole whatever the rounding.
            drawn = self._drawn(rate_per_s, (requests + 0.5) / rate_per_s, seed).head(rounds * len(self.source))
        else:
            drawn = self._drawn(rate_per_s, requests / rate_per_s, seed)
        return drawn if ratio == 1.0 else _with_ratio(drawn, ratio)

    def _drawn(self, rate_per_s: float, duration_s: float, seed: int) -> Trace:
        """Return requests; where bursts leave a short trace without any, it lasts twice as long, and again."""
        for _ in range(_DOUBLINGS):
            try:
                return self._in(rate_per_s, duration_s, seed)
            except SpecError:
                duration_s *= 2
        return self._in(rate_per_s, duration_s, seed)

    def _in(self, rate_per_s: float, duration_s: float, seed: int) -> Trace:
        source = self.source
        if isinstance(source, Workload):
            return source.trace(rate_per_s, duration_s, seed, arrivals=self.arrivals, oracle=self.oracle)
        drawn = resample(source, rate_per_s, duration_s=duration_s, seed=seed, arrivals=self.arrivals)
        if not seed:
            return drawn
        rows = np.random.default_rng(seed).integers(0, len(source), len(drawn))
        return replace(
            drawn,
            prompt_tokens=source.prompt_tokens[rows],
            output_tokens=source.output_tokens[rows],
            expected_tokens=source.expected_tokens[rows],
            prefix_offsets=None,
            prefix_ids=None,
        )


def scaled_lengths(lengths: LengthTable, ratio: float) -> LengthTable:
    """Return lengths with another ratio of prompt to output tokens, as `Traffic.trace` scales them."""
    if ratio == 1.0:
        return lengths
    return LengthTable(
        _scaled(lengths.prompt_tokens, ratio**0.5), _scaled(lengths.output_tokens, ratio**-0.5), lengths.requests
    )


def _with_ratio(trace: Trace, ratio: float) -> Trace:
    return replace(
        trace,
        prompt_tokens=_scaled(trace.prompt_tokens, ratio**0.5),
        output_tokens=_scaled(trace.output_tokens, ratio**-0.5),
        expected_tokens=_scaled(trace.expected_tokens, ratio**-0.5),
        prefix_offsets=None,
        prefix_ids=None,
    )


def _scaled(tokens: NDArray[np.int32], factor: float) -> NDArray[np.int32]:
    scaled: NDArray[np.int32] = np.maximum(np.rint(tokens * factor), 1).astype(np.int32)
    return scaled
