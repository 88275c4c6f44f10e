"""Phase times fitted to timed iterations of any shape, and where they are wrong."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.profile import PhaseTimes, extended_interp
from phasesplit.errors import SpecError
from phasesplit.measuring.iterations import Shape, Timed

Floats = NDArray[np.float64]

_MOST_STEPS = 200
_FALL_STEP = 2
"""Rows between sizes that count as neighbours: one between them may be held out."""


def is_knot(shape: Shape) -> bool:
    """Return whether an iteration sets a knot: one prompt alone with nothing behind it, or any decode iteration."""
    return shape.phase == "token" or (shape.phase == "prompt" and shape.prompts == 1 and not shape.behind_tokens)


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
    prompt, token = ([one for one in used if one.shape.phase == phase] for phase in ("prompt", "token"))
    tokens, prompt_s, pair_s = _fit(
        np.array([one.shape.batch_tokens for one in prompt], np.float64),
        np.array([one.shape.pairs for one in prompt], np.float64),
        np.array([is_knot(one.shape) for one in prompt], np.bool_),
        np.array([one.median_s for one in prompt], np.float64),
        "prompts timed alone",
    )
    requests, token_s, context_s = _fit(
        np.array([one.shape.requests for one in token], np.float64),
        np.array([one.shape.context for one in token], np.float64),
        np.ones(len(token), np.bool_),
        np.array([one.median_s for one in token], np.float64),
        "numbers of requests timed",
    )
    return PhaseTimes(
        source=source,
        prompt_knots_tokens=tokens,
        prompt_knots_s=prompt_s,
        token_knots_requests=requests,
        token_knots_s=token_s,
        prompt_pair_s=pair_s,
        token_context_s=context_s,
        measured_prompt_tokens=float(tokens[-1]),
        measured_requests=float(requests[-1]),
        mean_error=float("nan"),
    )


def predicted_s(times: PhaseTimes, shape: Shape) -> float:
    """Return how long an iteration takes, by the formulae of `domain.profile.PhaseTimes`."""
    pair_s = times.prompt_pair_s * shape.pairs
    if shape.phase == "token":
        return float(times.token_time_s(shape.requests, shape.context))
    tokens = shape.batch_tokens + shape.requests
    products_s = float(extended_interp(tokens, times.prompt_knots_tokens, times.prompt_knots_s))
    if shape.phase == "mixed":
        products_s = max(products_s, float(times.token_time_s(shape.requests, 0.0)))
    return products_s + pair_s + times.token_context_s * shape.context


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
