"""A workload: joint prompt and output lengths with an arrival model, from which traces are drawn at any rate."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel, rechunked
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError

_BLOCK = 65_536
_MOST_REQUESTS = 2e8


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
