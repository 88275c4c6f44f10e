"""Latencies of requests: what each is, and distributions of them, exact or binned.

TTFT = first token instant - arrival. ITL = the gap between consecutive output tokens of one request. TPOT = (last -
first token) / (output tokens - 1), undefined at one token. E2E = last token instant - arrival.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS_PER_OCTAVE = 64
"""Bins of a `Binned` distribution in each factor of two: at most 1.6 % wide."""
OCTAVES = 40
_USUAL = (0.5, 0.9, 0.95, 0.99)
LEAST = 2.0**-20
"""Lower edge of the first bin: about a microsecond, where the values are seconds."""


class Distribution(Protocol):
    """How a quantity is distributed over requests or tokens."""

    @property
    def count(self) -> int:
        """Number of values."""

    @property
    def mean(self) -> float:
        """Mean of the values, NaN for none."""

    @property
    def largest(self) -> float:
        """Largest value, NaN for none."""

    @property
    def exact(self) -> bool:
        """Whether quantiles are exact, or only as fine as bins of at most 1.6 %."""

    def quantile(self, q: float) -> float:
        """Return the quantile q in [0, 1], interpolated linearly; NaN where there is no value."""

    def curve(self, points: int = 400) -> tuple[Floats, Floats]:
        """Return values and cumulative shares of the distribution function."""


class Exact:
    """A distribution that keeps every value; NaN values (undefined for a request) are left out.

    Args:
        values: float64 (n,), taken over and reordered.
    """

    exact = True

    def __init__(self, values: Floats) -> None:
        undefined = np.isnan(values)
        self._values = values[~undefined] if undefined.any() else values.copy()
        self.count = int(self._values.size)
        self.mean = float(self._values.mean()) if self.count else float("nan")
        self.largest = float(self._values.max()) if self.count else float("nan")
        # Most callers ask for the usual percentiles only; putting those in place is far cheaper than sorting.
        self._placed = {row for q in _USUAL for row in self._rows(q)} if self.count else set()
        if self.count:
            self._values.partition(sorted(self._placed))

    def quantile(self, q: float) -> float:
        """Return the quantile q in [0, 1], interpolated linearly between neighbours; NaN where there is no value."""
        if not self.count:
            return float("nan")
        left, right = self._rows(q)
        if left not in self._placed or right not in self._placed:
            self._sort()
        low, high = float(self._values[left]), float(self._values[right])
        return low + (high - low) * (q * (self.count - 1) - left)

    def curve(self, points: int = 400) -> tuple[Floats, Floats]:
        """Return values and cumulative shares of the distribution function, at most so many points."""
        self._sort()
        rows = np.unique(np.linspace(0, max(self.count - 1, 0), min(points, max(self.count, 1))).astype(np.int64))
        return self._values[rows[: self.count]], (rows[: self.count] + 1) / max(self.count, 1)

    def _rows(self, q: float) -> tuple[int, int]:
        left = min(int(q * (self.count - 1)), self.count - 1)
        return left, min(left + 1, self.count - 1)

    def _sort(self) -> None:
        if len(self._placed) < self.count:
            self._values.sort()
            self._placed = set(range(self.count))


class Binned:
    """A distribution kept as counts in logarithmic bins; constant size, whatever it has seen."""

    exact = False

    def __init__(self, counts: NDArray[np.int64] | None = None, total: float = 0.0, largest: float = 0.0) -> None:
        self.counts = np.zeros(BINS_PER_OCTAVE * OCTAVES, np.int64) if counts is None else counts
        self._total = total
        self._largest = largest
        self._below = 0

    def add(self, values: Floats) -> None:
        """Count values >= 0; NaN ones (undefined for a request) are left out, zeros are kept apart from the bins."""
        known = values[~np.isnan(values)]
        zeros = known < LEAST
        self._below += int(zeros.sum())
        mantissa, exponent = np.frexp(known[~zeros] / LEAST)
        index = (exponent - 1) * BINS_PER_OCTAVE + ((2 * mantissa - 1) * BINS_PER_OCTAVE).astype(np.int64)
        self.counts += np.bincount(np.minimum(index, self.counts.size - 1), minlength=self.counts.size)
        self._total += float(known.sum())
        if known.size:
            self._largest = max(self._largest, float(known.max()))

    @property
    def count(self) -> int:
        """Number of values."""
        return int(self.counts.sum()) + self._below

    @property
    def mean(self) -> float:
        """Mean of the values, NaN for none."""
        return self._total / self.count if self.count else float("nan")

    @property
    def largest(self) -> float:
        """Largest value, NaN for none."""
        return self._largest if self.count else float("nan")

    def quantile(self, q: float) -> float:
        """Return the quantile q in [0, 1], interpolated linearly within its bin; NaN where there is no value."""
        if not self.count:
            return float("nan")
        rank = q * self.count - self._below
        if rank <= 0:
            return 0.0 if self._below else float(edges(self.counts.size)[np.argmax(self.counts > 0)])
        cumulative = np.cumsum(self.counts)
        index = min(int(np.searchsorted(cumulative, rank)), self.counts.size - 1)
        low, high = edges(self.counts.size)[index : index + 2]
        inside = (rank - (cumulative[index] - self.counts[index])) / max(int(self.counts[index]), 1)
        return float(min(low + (high - low) * inside, self._largest))

    def curve(self, points: int = 400) -> tuple[Floats, Floats]:
        """Return values and cumulative shares of the distribution function, at most so many points."""
        used = np.flatnonzero(self.counts)
        if not used.size:
            return np.zeros(0), np.zeros(0)
        every = max(1, -(-int(used[-1] + 1 - used[0]) // points))
        span = slice(int(used[0]), int(used[-1]) + every, every)
        shares = (np.cumsum(self.counts)[span] + self._below) / self.count
        return edges(self.counts.size)[1:][span], shares


def edges(bins: int) -> Floats:
    """Return the bins + 1 edges of `Binned`."""
    octave, part = np.divmod(np.arange(bins + 1), BINS_PER_OCTAVE)
    found: Floats = LEAST * 2.0**octave * (1 + part / BINS_PER_OCTAVE)
    return found
