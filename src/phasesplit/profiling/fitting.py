"""Iterations that were timed, and phase times fitted to them.

`Shape` says what one iteration computes, and `Timed` holds the times of its runs. `fit_phase_times` returns the phase
times that are nearest to them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.profile import PhaseTimes, extended_interp
from phasesplit.errors import SpecError

Floats = NDArray[np.float64]

_SPIKE_DEVIATIONS = 5.0
_SPIKE_SHARE = 0.05
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What an iteration computes.

    Attributes:
        prompts: Prompts in the batch, all alike, >= 0.
        prompt_tokens: Tokens that each of them computes, >= 1 where there are any.
        behind_tokens: Tokens before those, whose KV is there, >= 0.
        requests: Requests in decode, all alike, >= 0.
        context_tokens: Tokens that each of them attends to, >= 1 where there are any.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    behind_tokens: int = 0
    requests: int = 0
    context_tokens: int = 0

    @property
    def phase(self) -> str:
        """`prefill`, `decode` or `mixed`."""
        return "prefill" if not self.requests else "mixed" if self.prompts else "decode"

    @property
    def batch_tokens(self) -> int:
        """Prompt tokens of the batch."""
        return self.prompts * self.prompt_tokens

    @property
    def pairs(self) -> float:
        """Pairs of a prompt token and a token that it attends to, as `domain.profile.PhaseTimes` counts them."""
        return self.prompts * self.prompt_tokens * (self.prompt_tokens / 2 + self.behind_tokens)

    @property
    def context(self) -> int:
        """Tokens that decode attends to, over all its requests."""
        return self.requests * self.context_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV has to have room."""
        return self.prompts * (self.prompt_tokens + self.behind_tokens) + self.context

    def __str__(self) -> str:
        behind = f" behind {self.behind_tokens:,}" if self.behind_tokens else ""
        prompt = f"{self.prompts} x {self.prompt_tokens:,} prompt tokens{behind}" if self.prompts else ""
        token = f"{self.requests} requests at context {self.context_tokens:,}" if self.requests else ""
        return " with ".join(part for part in (prompt, token) if part)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An iteration with the times of its runs.

    The host takes the processor away now and then, for 100 ms at a time. A run longer than the median by more than 5
    robust standard deviations, and by more than 5 %, is such a spike: it is counted and left out. Nothing makes a run
    shorter than it is, so short ones stay.

    Attributes:
        shape: What was computed.
        runs_s: Seconds of every run, spikes among them, at least one.
        is_held_out: Whether it only checks the fit.
    """

    shape: Shape
    runs_s: tuple[float, ...]
    is_held_out: bool = False

    @cached_property
    def kept_s(self) -> Floats:
        """Runs that count, (k,), k >= 1."""
        runs_s = np.array(self.runs_s)
        middle_s = float(np.median(runs_s))
        deviation_s = _NORMAL_MAD * float(np.median(np.abs(runs_s - middle_s)))
        return runs_s[runs_s <= middle_s + max(_SPIKE_DEVIATIONS * deviation_s, _SPIKE_SHARE * middle_s)]

    @cached_property
    def median_s(self) -> float:
        """Median of the runs that count."""
        return float(np.median(self.kept_s))

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles of the runs that count."""
        low_s, high_s = np.quantile(self.kept_s, [0.25, 0.75])
        return float(high_s - low_s) / 2

    @property
    def rejected(self) -> int:
        """Runs that were spikes."""
        return len(self.runs_s) - self.kept_s.size

    @property
    def doubt(self) -> float:
        """Relative standard error of the median; 1 over the number of runs below four, where there is none.

        Source: 1.25 standard deviations over the root of the number, for a normal distribution.
        """
        if self.kept_s.size < 4:
            return 0.05 / self.kept_s.size
        return 1.25 * (self.spread_s / 0.6745) / math.sqrt(self.kept_s.size) / self.median_s

    def with_runs(self, runs_s: tuple[float, ...]) -> "Timed":
        """Return the same with more runs."""
        return replace(self, runs_s=self.runs_s + runs_s)


_MOST_STEPS = 200
_FALL_STEP = 2
"""Rows between sizes that count as neighbours: one between them may be held out."""


def is_knot(shape: Shape) -> bool:
    """Return whether an iteration sets a knot: one prompt alone with nothing behind it, or any decode iteration."""
    return shape.phase == "decode" or (shape.phase == "prefill" and shape.prompts == 1 and not shape.behind_tokens)


def fit_phase_times(timed: Sequence[Timed], source: str) -> PhaseTimes:
    """Return the phase times with the least sum of squared relative errors.

    f has a knot at every size of a prompt that was timed alone, g at every number of requests; batches of several
    prompts and chunks behind others share the knots and set the pair term, contexts set the context term. No term is
    negative. Knots fall only between neighbouring sizes, where a tile of rows becomes full and takes less time: between
    sizes further apart a fall is noise, and after the last one it would go on for ever. Mixed iterations and held-out
    ones do not count.

    Args:
        timed: Timed iterations; two different prompts alone and two different numbers of requests at least.
        source: What a report says of the times.

    Raises:
        SpecError: There are too few.

    Source: the form is that of `domain.profile.PhaseTimes`; least squares under bounds: `non_negative`.
    """
    used = [one for one in timed if not one.is_held_out]
    prefill, decode = ([one for one in used if one.shape.phase == phase] for phase in ("prefill", "decode"))
    tokens, prefill_s, pair_s = _fit(
        np.array([one.shape.batch_tokens for one in prefill], np.float64),
        np.array([one.shape.pairs for one in prefill], np.float64),
        np.array([is_knot(one.shape) for one in prefill], np.bool_),
        np.array([one.median_s for one in prefill], np.float64),
        "prompts timed alone",
    )
    requests, decode_s, context_s = _fit(
        np.array([one.shape.requests for one in decode], np.float64),
        np.array([one.shape.context for one in decode], np.float64),
        np.ones(len(decode), np.bool_),
        np.array([one.median_s for one in decode], np.float64),
        "numbers of requests timed",
    )
    return PhaseTimes(
        source=source,
        prefill_knots_tokens=tokens,
        prefill_knots_s=prefill_s,
        decode_knots_requests=requests,
        decode_knots_s=decode_s,
        prefill_pair_s=pair_s,
        decode_context_s=context_s,
        measured_prompt_tokens=float(tokens[-1]),
        measured_requests=float(requests[-1]),
        mean_error=float("nan"),
    )


def predicted_s(times: PhaseTimes, shape: Shape) -> float:
    """Return how long an iteration takes, by the formulae of `domain.profile.PhaseTimes`."""
    pair_s = times.prefill_pair_s * shape.pairs
    if shape.phase == "decode":
        return float(times.decode_time_s(shape.requests, shape.context))
    tokens = shape.batch_tokens + shape.requests
    products_s = float(extended_interp(tokens, times.prefill_knots_tokens, times.prefill_knots_s))
    if shape.phase == "mixed":
        products_s = max(products_s, float(times.decode_time_s(shape.requests, 0.0)))
    return products_s + pair_s + times.decode_context_s * shape.context


def relative_error(times: PhaseTimes, one: Timed) -> float:
    """Return (predicted - measured) / measured."""
    return predicted_s(times, one.shape) / one.median_s - 1


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Return x >= 0 with the least |matrix x - target|.

    Args:
        matrix: (n, k), columns of like size.
        target: (n,).

    Source: Lawson and Hanson, Solving Least Squares Problems (1974), chapter 23.
    """
    columns = matrix.shape[1]
    tolerance = 1e-10 * float(np.abs(matrix.T @ target).max(initial=0.0))
    # All parts at once are most often the answer; without those that come out negative they are a start.
    is_free = np.ones(columns, np.bool_)
    solution = _solved(matrix, target, is_free)
    while (solution < 0).any():
        is_free &= solution > 0
        solution = _solved(matrix, target, is_free)
    for _ in range(_MOST_STEPS):
        gain = np.where(is_free, -np.inf, matrix.T @ (target - matrix @ solution))
        best = int(np.argmax(gain))
        if gain[best] <= tolerance:
            break
        is_free[best] = True
        while True:
            trial = _solved(matrix, target, is_free)
            below = is_free & (trial <= 0)
            if not below.any():
                break
            # Go as far towards the trial as no part becomes negative; what reaches 0 is fixed there.
            step = np.min(solution[below] / (solution[below] - trial[below]))
            solution = solution + step * (trial - solution)
            is_free &= solution > 1e-15 * max(1.0, float(solution.max()))
            solution[~is_free] = 0.0
        solution = trial
    return solution


def _solved(matrix: Floats, target: Floats, is_free: NDArray[np.bool_]) -> Floats:
    """Return the least squares over the free columns, 0 in the others."""
    solution = np.zeros(matrix.shape[1])
    solution[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
    return solution


def _fit(
    x: Floats, argument: Floats, sets_knot: NDArray[np.bool_], seconds: Floats, what: str
) -> tuple[Floats, Floats, float]:
    """Return knots, their times, and the slope over the argument."""
    knots = np.unique(x[sets_knot])
    if knots.size < 2:
        raise SpecError.bad(f"profile, {what}", knots.tolist(), "at least two different ones")
    # Each knot is the one before it and a rise of at least 0, except where times may fall: there it begins anew.
    may_fall = np.diff(knots, prepend=-np.inf) <= _FALL_STEP
    may_fall[-1] = False
    stretch = np.cumsum(may_fall)
    units = np.tri(knots.size) * (stretch[:, None] == stretch)
    rises = np.stack([_line(x, knots, unit) for unit in units.T], axis=1)
    scale = float(argument.max()) or 1.0
    weighted = np.concatenate([rises, (argument / scale)[:, None]], axis=1) / seconds[:, None]
    size = np.linalg.norm(weighted, axis=0)
    size[size == 0] = 1.0
    solution = non_negative(weighted / size, np.ones(seconds.size)) / size
    return knots, units @ solution[:-1], float(solution[-1]) / scale


def _line(x: Floats, knots: Floats, values: Floats) -> Floats:
    """Return what `extended_interp` gives before it is cut off at zero: only that is linear in the values."""
    segment = np.searchsorted(knots[1:-1], x, side="right")
    slopes = np.diff(values) / np.diff(knots)
    return values[segment] + slopes[segment] * (x - knots[segment])
