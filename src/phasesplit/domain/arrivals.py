"""Arrival models: when requests arrive. Each yields times without end, block by block, from a rate and a generator.

`parse_arrivals` reads them as a person writes them: `poisson`, `gamma:cv=2`, `on-off:on=5,off=60`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError

Times = NDArray[np.float64]
Number = TypeVar("Number", np.float64, np.int32)

_BLOCK = 65_536
_DAY_S = 86_400.0
_LARGEST_CV = 30.0


class ArrivalModel(ABC):
    """A stationary (or, for `Diurnal`, periodic) stream of arrivals with a given mean rate, observed from time 0.

    A model draws in blocks of its own size, so the times depend on the seed alone and not on how many are asked for.
    """

    @abstractmethod
    def blocks(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
        """Yield consecutive arrays of arrival times in s, without end, non-decreasing over all of them."""

    def arrivals(self, rate_per_s: float, duration_s: float, rng: np.random.Generator) -> Times:
        """Return the arrival times in [0, duration_s).

        Args:
            rate_per_s: Mean arrival rate, > 0, finite.
            duration_s: Length of the observation, > 0, finite.
            rng: Where randomness comes from.

        Raises:
            SpecError: The rate or the duration is not a positive finite number.
        """
        _check_positive("duration_s", duration_s)
        kept: list[Times] = []
        for block in self._checked_blocks(rate_per_s, rng):
            if block.size and block[-1] >= duration_s:
                kept.append(block[: int(np.searchsorted(block, duration_s))])
                break
            kept.append(block)
        return np.concatenate(kept)

    def first(self, rate_per_s: float, requests: int, rng: np.random.Generator) -> Times:
        """Return the first `requests` arrival times; arguments as for `arrivals`."""
        return next(self.chunks(rate_per_s, rng, max(1, requests)))[:requests]

    def chunks(self, rate_per_s: float, rng: np.random.Generator, chunk: int) -> Iterator[Times]:
        """Yield the same times as `blocks` in arrays of exactly `chunk` times each, without end."""
        yield from rechunked(self._checked_blocks(rate_per_s, rng), chunk)

    def _checked_blocks(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
        _check_positive("rate_per_s", rate_per_s)
        return self.blocks(rate_per_s, rng)


class Renewal(ArrivalModel):
    """Independent gaps of one distribution: its shape is kept at every rate, as if time itself were scaled.

    The first gap is drawn from the equilibrium distribution, the residual of a gap that an observer who comes at a
    random instant finds; else a short observation of a bursty stream would always begin inside a burst.
    Source: Cox, Renewal Theory (1962), section 5.3.
    """

    @abstractmethod
    def unit_gaps(self, count: int, rng: np.random.Generator) -> Times:
        """Return (count,) independent gaps of mean 1."""

    @abstractmethod
    def unit_residual(self, rng: np.random.Generator) -> float:
        """Return one residual of a gap of mean 1, as seen at a random instant."""

    def blocks(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
        """Yield consecutive arrays of arrival times in s, without end."""
        gaps = self.unit_gaps(_BLOCK, rng)
        gaps[0] = self.unit_residual(rng)
        while True:
            times = np.cumsum(gaps)
            yield times / rate_per_s
            gaps = self.unit_gaps(_BLOCK, rng)
            gaps[0] += times[-1]


@dataclass(frozen=True, slots=True)
class Poisson(Renewal):
    """Exponential gaps: arrivals of very many independent users. Coefficient of variation 1."""

    def unit_gaps(self, count: int, rng: np.random.Generator) -> Times:
        """Return (count,) independent exponential gaps of mean 1."""
        return rng.standard_exponential(count)

    def unit_residual(self, rng: np.random.Generator) -> float:
        """Return the residual of a gap: the exponential has no memory."""
        return float(rng.standard_exponential())


@dataclass(frozen=True, slots=True)
class Gamma(Renewal):
    """Gaps of a gamma distribution: shape 1 / cv^2, mean 1.

    Attributes:
        cv: Coefficient of variation of the gaps, in (0, 30]; above 1 is burstier than Poisson.
    """

    cv: float

    def __post_init__(self) -> None:
        _check_cv("gamma", self.cv)

    def unit_gaps(self, count: int, rng: np.random.Generator) -> Times:
        """Return (count,) independent gamma gaps of mean 1."""
        return rng.standard_gamma(1 / self.cv**2, count) * self.cv**2

    def unit_residual(self, rng: np.random.Generator) -> float:
        """Return a uniform part of a length-biased gap; length-biased Gamma(k) is Gamma(k + 1)."""
        return float(rng.random() * rng.standard_gamma(1 / self.cv**2 + 1) * self.cv**2)


@dataclass(frozen=True, slots=True)
class Weibull(Renewal):
    """Gaps of a Weibull distribution with the given coefficient of variation.

    Attributes:
        cv: Coefficient of variation of the gaps, in (0, 30].
    """

    cv: float

    def __post_init__(self) -> None:
        _check_cv("weibull", self.cv)

    @property
    def shape(self) -> float:
        """The shape k at which Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 = 1 + cv^2 (moments of the Weibull distribution)."""
        low, high = 0.1, 200.0
        for _ in range(100):
            middle = math.sqrt(low * high)
            excess = math.lgamma(1 + 2 / middle) - 2 * math.lgamma(1 + 1 / middle) - math.log1p(self.cv**2)
            low, high = (middle, high) if excess > 0 else (low, middle)
        return middle

    def unit_gaps(self, count: int, rng: np.random.Generator) -> Times:
        """Return (count,) independent Weibull gaps of mean 1."""
        shape = self.shape
        return rng.standard_exponential(count) ** (1 / shape) / math.gamma(1 + 1 / shape)

    def unit_residual(self, rng: np.random.Generator) -> float:
        """Return a uniform part of a length-biased gap X, where X^k is Gamma(1 + 1/k)."""
        shape = self.shape
        longer = rng.standard_gamma(1 + 1 / shape) ** (1 / shape) / math.gamma(1 + 1 / shape)
        return float(rng.random() * longer)


@dataclass(frozen=True, slots=True)
class Hyperexponential(Renewal):
    """Gaps that are exponential with one of several means, chosen independently for each gap.

    With two means this is exactly the interrupted Poisson process, an on-off stream that is silent while off; more
    means describe bursts inside bursts. Source: Kuczura, Bell System Technical Journal 52(3), 1973.

    Attributes:
        weights: Probability of each component, > 0; they are divided by their sum.
        means: Mean gap of each component, > 0, in any common unit: only the ratios count.
    """

    weights: tuple[float, ...]
    means: tuple[float, ...]

    def __post_init__(self) -> None:
        values = (*self.weights, *self.means)
        if not self.means or len(self.weights) != len(self.means) or not all(0 < v < math.inf for v in values):
            raise SpecError.bad(
                "arrivals hyperexponential", (self.weights, self.means), "as many positive weights as positive means"
            )

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps: sqrt(2 E[m^2] / E[m]^2 - 1) over the component means m."""
        chance, means = self._components()
        return math.sqrt(2 * float(chance @ means**2) - 1)

    def unit_gaps(self, count: int, rng: np.random.Generator) -> Times:
        """Return (count,) independent hyperexponential gaps of mean 1."""
        chance, means = self._components()
        component = np.searchsorted(np.cumsum(chance)[:-1], rng.random(count), side="right")
        return means[component] * rng.standard_exponential(count)

    def unit_residual(self, rng: np.random.Generator) -> float:
        """Return the residual: exponential with a component's mean, a component counting by the time it fills."""
        chance, means = self._components()
        component = int(np.searchsorted(np.cumsum(chance * means)[:-1], rng.random(), side="right"))
        return float(means[component] * rng.standard_exponential())

    def _components(self) -> tuple[Times, Times]:
        chance = np.array(self.weights) / sum(self.weights)
        means = np.array(self.means)
        return chance, means / float(chance @ means)


@dataclass(frozen=True, slots=True)
class OnOff(ArrivalModel):
    """Poisson arrivals at a high rate while on and a low one while off; both periods are exponential, in seconds.

    The rate while on is rate_per_s * (on_s + off_s) / (on_s + off_share * off_s). The periods do not scale with the
    rate. Source: the two-state Markov-modulated Poisson process (Fischer and Meier-Hellstern, Performance Evaluation
    18, 1993).

    Attributes:
        on_s: Mean length of an on period, > 0.
        off_s: Mean length of an off period, > 0.
        off_share: Rate while off as a share of the rate while on, in [0, 1].
    """

    on_s: float
    off_s: float
    off_share: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("arrivals on-off, on", self.on_s)
        _check_positive("arrivals on-off, off", self.off_s)
        if not 0 <= self.off_share <= 1:
            raise SpecError.bad("arrivals on-off, off-share", self.off_share, "a share from 0 to 1")

    def blocks(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
        """Yield consecutive arrays of arrival times in s, without end."""
        cycle_s = self.on_s + self.off_s
        on_rate = rate_per_s * cycle_s / (self.on_s + self.off_share * self.off_s)
        cycles = min(_BLOCK, max(1, math.ceil(_BLOCK / (rate_per_s * cycle_s))))
        is_on = np.arange(2 * cycles) % 2 == int(rng.random() >= self.on_s / cycle_s)
        means = np.where(is_on, self.on_s, self.off_s)
        rates = np.where(is_on, on_rate, on_rate * self.off_share)
        begin = 0.0
        while True:
            lengths = means * rng.standard_exponential(means.size)
            ends = begin + np.cumsum(lengths)
            counts = rng.poisson(rates * lengths)
            times = np.repeat(ends, counts) - np.repeat(lengths, counts) * rng.random(int(counts.sum()))
            times.sort()
            yield times
            begin = float(ends[-1])


@dataclass(frozen=True, slots=True)
class Diurnal(ArrivalModel):
    """Poisson arrivals whose rate follows a sine over the day: rate * (1 + amplitude * cos(2 pi (t - peak) / period)).

    Drawn by thinning a Poisson stream at the peak rate. Source: Lewis and Shedler, Naval Research Logistics 26, 1979.

    Attributes:
        amplitude: Swing around the mean rate as a share of it, in [0, 1].
        peak_s: Time of the first peak, finite; by default 14 h.
        period_s: Length of a day, > 0.
    """

    amplitude: float = 0.5
    peak_s: float = 14 * 3_600.0
    period_s: float = _DAY_S

    def __post_init__(self) -> None:
        _check_positive("arrivals diurnal, period", self.period_s)
        if not 0 <= self.amplitude <= 1:
            raise SpecError.bad("arrivals diurnal, amplitude", self.amplitude, "a share from 0 to 1")
        if not math.isfinite(self.peak_s):
            raise SpecError.bad("arrivals diurnal, peak", self.peak_s, "a finite time in s")

    def blocks(self, rate_per_s: float, rng: np.random.Generator) -> Iterator[Times]:
        """Yield consecutive arrays of arrival times in s, without end."""
        highest = 1 + self.amplitude
        begin = 0.0
        while True:
            times = begin + np.cumsum(rng.standard_exponential(_BLOCK)) / (rate_per_s * highest)
            wave = 1 + self.amplitude * np.cos(2 * math.pi * (times - self.peak_s) / self.period_s)
            yield times[rng.random(_BLOCK) * highest < wave]
            begin = float(times[-1])


def rechunked(blocks: Iterator[NDArray[Number]], size: int) -> Iterator[NDArray[Number]]:
    """Yield what endless blocks hold, in their order, in arrays whose last axis has exactly `size` >= 1 entries."""
    held: list[NDArray[Number]] = []
    count = 0
    for block in blocks:
        held.append(block)
        count += block.shape[-1]
        if count >= size:
            joined = np.concatenate(held, axis=-1)
            whole = count - count % size
            yield from (joined[..., start : start + size] for start in range(0, whole, size))
            held, count = [joined[..., whole:]], count - whole


def _check_positive(where: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SpecError.bad(where, value, "a positive finite number")


def _check_cv(model: str, cv: float) -> None:
    if not 0 < cv <= _LARGEST_CV:
        raise SpecError.bad(f"arrivals {model}, cv", cv, f"a number above 0 and at most {_LARGEST_CV:g}")


_MODELS: dict[str, tuple[Callable[..., ArrivalModel], dict[str, str], str]] = {
    "poisson": (Poisson, {}, "poisson"),
    "gamma": (Gamma, {"cv": "cv"}, "gamma:cv=2"),
    "weibull": (Weibull, {"cv": "cv"}, "weibull:cv=2"),
    "on-off": (OnOff, {"on": "on_s", "off": "off_s", "off-share": "off_share"}, "on-off:on=5,off=60"),
    "diurnal": (
        Diurnal,
        {"amplitude": "amplitude", "peak": "peak_s", "period": "period_s"},
        "diurnal:amplitude=0.5",
    ),
}
"""Name to model, its settings on the command line by field, and an example for messages."""


def parse_arrivals(text: str, where: str = "arrivals") -> ArrivalModel:
    """Return the arrival model that a text names; times are in seconds.

    Args:
        text: A name, then perhaps `:` and settings `name=number` with commas between them.
        where: How the person knows the place the text came from, for the message.

    Raises:
        SpecError: The model or a setting is unknown, missing or not a number that the model allows.
    """
    name, _, rest = text.strip().partition(":")
    if name not in _MODELS:
        raise SpecError.unknown(where, name, _MODELS)
    build, settings, example = _MODELS[name]
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key.strip() not in settings:
            raise SpecError.bad(where, part, f"settings as in {example}")
        try:
            values[settings[key.strip()]] = float(number)
        except ValueError:
            raise SpecError.bad(f"{where}, {key.strip()}", number, "a number") from None
    try:
        return build(**values)
    except TypeError:
        raise SpecError.bad(where, text, f"all settings, as in {example}") from None
