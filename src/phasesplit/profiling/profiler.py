"""One iteration's shape, how long it took in each run, and which of the runs count.

Phase times fitted to timed iterations of any shape, and where they are wrong.

A machine timed until its phase times are known well enough, or the time for it is up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.profile import PhaseTimes, extended_interp
from phasesplit.errors import SpecError
from phasesplit.profiling.adaptive import (
    NEEDED,
    Bounds,
    candidates,
    coarse_grid,
    held_out,
    prompts_alone,
    requests_together,
    steps,
)

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
        """`prompt`, `token` or `mixed`."""
        return "prompt" if not self.requests else "mixed" if self.prompts else "token"

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
        """Relative standard error of the median; 1 over the number of runs below four, where none can be told.

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
    tokens, prefill_s, pair_s = _fit(
        np.array([one.shape.batch_tokens for one in prompt], np.float64),
        np.array([one.shape.pairs for one in prompt], np.float64),
        np.array([is_knot(one.shape) for one in prompt], np.bool_),
        np.array([one.median_s for one in prompt], np.float64),
        "prompts timed alone",
    )
    requests, decode_s, context_s = _fit(
        np.array([one.shape.requests for one in token], np.float64),
        np.array([one.shape.context for one in token], np.float64),
        np.ones(len(token), np.bool_),
        np.array([one.median_s for one in token], np.float64),
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
    if shape.phase == "token":
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


_LONGEST_RUN_SHARE = 1 / 40
"""Of the budget that one run may take: longer prompts are extrapolated."""
_LONGEST_BATCH_SHARE = 1 / 6
"""Of the budget that one run may take where context is not free: larger batches are extrapolated."""
_COARSE_SHARE = 1 / 2
"""Of the budget after which no more of the coarse grid is begun, except what a fit cannot do without."""
_FEWEST_PROMPTS = 2
"""Lengths of prompts without which there is no fit."""
_CONTEXT_RUNS = 2
"""So many times the longest prompt may have to be computed for a context that is not free."""
_VISIT_SHARE = 1 / 100
"""Of the budget that one visit of a shape takes, within the bounds below."""
_LEAST_VISIT_S, _MOST_VISIT_S = 0.02, 1.0
_LONGEST_VISIT_SHARE = 1 / 20
"""Of the budget after which no more runs of a visit are begun, be they as few as they may."""
_FEWEST_RUNS, _FEWEST_LONG_RUNS, _MOST_RUNS = 3, 2, 40
_COLD_RUN_S = 0.5
"""A first run below this is a warm-up, not counted: caches and clocks settle in it. The first of all never counts."""
_STEP_SHARE = 1 / 2
"""Of such a visit that one of many steps gets."""
_MOST_VISITS = 6
_DOUBT_SHARE = 1 / 6
"""Of the error aimed at that a median may be in doubt by."""


class TimedMachine(Protocol):
    """What is timed.

    Attributes:
        bounds: What it can be asked for.
    """

    bounds: Bounds

    def run(self, shape: Shape) -> Sequence[float]:
        """Compute an iteration once or more, and return the seconds of each run, at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predictions are from measurements, as shares.

    Attributes:
        count: Iterations compared; the rest is NaN and None where there are none.
        mean: Mean of the absolute relative errors.
        worst: Their largest.
        worst_at: Where that is.
    """

    count: int
    mean: float
    worst: float
    worst_at: Shape | None

    @classmethod
    def of(cls, times: PhaseTimes, timed: Sequence[Timed]) -> "Errors":
        """Return the errors of some iterations."""
        found = [abs(relative_error(times, one)) for one in timed]
        if not found:
            return cls(count=0, mean=math.nan, worst=math.nan, worst_at=None)
        worst = int(np.argmax(found))
        return cls(count=len(found), mean=float(np.mean(found)), worst=found[worst], worst_at=timed[worst].shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileState:
    """How far a profile is.

    Attributes:
        elapsed_s: Since it began.
        budget_s: When it stops.
        shape: What is timed now.
        timed: How many different iterations were timed.
        error: Mean error of the held-out ones so far; NaN where there are none yet.
    """

    elapsed_s: float
    budget_s: float
    shape: Shape
    timed: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Profiled:
    """What was measured.

    Attributes:
        timed: Every iteration.
        times: Phase times fitted to those that are not held out; None where there are too few.
        ending: Why it stopped: `reached` (the error that was asked for), `form` (more points and runs would not help:
            the form of the phase times is what is wrong), `budget`, or `interrupted`.
        elapsed_s: Time it took.
    """

    timed: tuple[Timed, ...]
    times: PhaseTimes | None
    ending: str
    elapsed_s: float

    def errors(self, phase: str | None = None) -> Errors:
        """Return the errors of the held-out iterations, of one phase or all."""
        if self.times is None:
            return Errors(count=0, mean=math.nan, worst=math.nan, worst_at=None)
        return Errors.of(
            self.times, [one for one in self.timed if one.is_held_out and phase in (None, one.shape.phase)]
        )


def profile_machine(
    machine: TimedMachine,
    *,
    error: float,
    budget_s: float,
    clock: Callable[[], float],
    seed: int = 0,
    checks: int = 24,
    known: Sequence[Timed] = (),
    source: str = "",
    on_state: Callable[[ProfileState], None] = lambda _: None,
) -> Profiled:
    """Time a machine's iterations: a coarse grid, by turns held-out ones and steps or the widest gaps, doubtful ones.

    Args:
        machine: What is timed.
        error: Mean error of held-out iterations at which it stops, > 0.
        budget_s: Time within which it ends, > 0; longer only where what a fit cannot do without takes longer.
        clock: Tells the time.
        seed: Of the held-out iterations.
        checks: How many of them.
        known: What was timed before.
        source: What reports say of the times.
        on_state: Told before each iteration.
    """
    session = _Session(machine, error, budget_s, clock, known, on_state)
    try:
        ending = session.measure(seed, checks)
    except KeyboardInterrupt:
        ending = "interrupted"
    timed = tuple(session.timed.values())
    try:
        times = fit_phase_times(timed, source)
    except SpecError:
        times = None
    found = Profiled(timed=timed, times=times, ending=ending, elapsed_s=session.elapsed_s)
    if times is not None and (mean_error := found.errors().mean) == mean_error:
        found = replace(
            found, times=replace(times, source=f"{source}, held-out error {mean_error:.1%}", mean_error=mean_error)
        )
    return found


class _Session:
    def __init__(
        self,
        machine: TimedMachine,
        error: float,
        budget_s: float,
        clock: Callable[[], float],
        known: Sequence[Timed],
        on_state: Callable[[ProfileState], None],
    ) -> None:
        self.timed = {one.shape: one for one in known}
        self._machine, self._error, self._budget_s, self._clock = machine, error, budget_s, clock
        self._on_state, self._bounds = on_state, machine.bounds
        self._visit_s = min(max(budget_s * _VISIT_SHARE, _LEAST_VISIT_S), _MOST_VISIT_S)
        self._visits = dict.fromkeys(self.timed, 1)
        self._walls_s: dict[Shape, float] = {}
        self._lacks_time = False
        self._began_s = clock()
        self._checked = math.nan

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def measure(self, seed: int, checks: int) -> str:
        """Time what is worth it, and return why it stopped."""
        self._prompts_alone()
        if not self._bounds.has_free_context:
            self._requests_together()
        for index, shape in enumerate(coarse_grid(self._bounds)):
            has_time = self.elapsed_s < self._budget_s * _COARSE_SHARE
            if shape not in self.timed and (index < NEEDED or (has_time and self._has_time(shape))):
                self._visit(shape)
        unchecked = [shape for shape in held_out(self._bounds, checks, seed) if shape not in self.timed]
        untimed = [shape for shape in steps(self._bounds) if shape not in self.timed and shape not in unchecked]
        was_check = True
        while self.elapsed_s < self._budget_s:
            self._lacks_time = False
            check = next(filter(self._has_time, unchecked), None)
            step = next(filter(self._has_time, untimed), None)
            gap = None if step else self._worst_gap()
            was_check = check is not None and not ((step or gap) and was_check)
            if check is not None and was_check:
                unchecked.remove(check)
                self._visit(check, is_held_out=True)
            elif step is not None:
                untimed.remove(step)
                self._visit(step, share=_STEP_SHARE)
            elif wanted := gap or self._most_doubtful():
                self._visit(wanted)
            elif self._lacks_time:
                break
            else:
                return "form" if self._checked > self._error else "reached"
        return "budget"

    def _requests_together(self) -> None:
        """Time decode iterations of ever more requests up to those that the budget allows."""
        limit_s, most = self._budget_s * _LONGEST_BATCH_SHARE, 2
        for shape in requests_together(self._bounds):
            if shape.requests > most and self._expected_s(shape) > limit_s:
                break
            if shape not in self.timed:
                self._visit(shape)
            most = max(most, shape.requests)
        self._bounds = replace(self._bounds, most_requests=most)

    def _expected_s(self, shape: Shape) -> float:
        """Return how long one run of an iteration takes at most, by those of its phase so far; 0 without any.

        What comes with a run counts too: of an endpoint's decode phases, that is most of it.
        """
        runs_s = [
            wall_s * max(1.0, _growth(one, shape)) for one, wall_s in self._walls_s.items() if one.phase == shape.phase
        ]
        return min(runs_s, default=0.0)

    def _has_time(self, shape: Shape, least_s: float = 0.0) -> bool:
        """Return whether one run of an iteration is expected to end in time, and take note where not.

        Args:
            shape: The iteration.
            least_s: What it takes at least.
        """
        has_time = self.elapsed_s + max(least_s, self._expected_s(shape)) <= self._budget_s
        self._lacks_time = self._lacks_time or not has_time
        return has_time

    def _prompts_alone(self) -> None:
        """Time single prompts up to the longest that the budget allows, which bounds everything else."""
        limit_s = self._budget_s * _LONGEST_RUN_SHARE
        last = Timed(shape=Shape(prompts=1, prompt_tokens=1), runs_s=(0.0,))
        for number, shape in enumerate(prompts_alone(self._bounds)):
            factor = shape.prompt_tokens / last.shape.prompt_tokens
            expected_s = last.median_s * factor
            if expected_s > limit_s and number >= _FEWEST_PROMPTS:
                tokens = int(shape.prompt_tokens * limit_s / expected_s)
                if tokens > 1.5 * last.shape.prompt_tokens:
                    self._visit(replace(shape, prompt_tokens=tokens))
                break
            last = self.timed.get(shape) or self._visit(shape)
        longest = max((shape.batch_tokens for shape in self.timed if shape.phase == "prompt"), default=2)
        self._bounds = replace(self._bounds, most_prompt_tokens=max(longest, 2))
        if not self._bounds.has_free_context:
            most = max(_CONTEXT_RUNS * longest, self._bounds.most_requests)
            self._bounds = replace(self._bounds, kv_tokens=min(self._bounds.kv_tokens, most))

    def _visit(self, shape: Shape, *, is_held_out: bool = False, share: float = 1.0) -> Timed:
        """Run an iteration some times, for a share of a visit's time, and add the runs to what is known of it."""
        visit_s = self._visit_s * share
        self._on_state(
            ProfileState(
                elapsed_s=self.elapsed_s,
                budget_s=self._budget_s,
                shape=shape,
                timed=len(self.timed),
                error=self._checked,
            )
        )
        if not self._walls_s:
            self._run(shape)
        began_s = self._clock()
        runs_s = list(self._run(shape))
        end_s = min(began_s + self._budget_s * _LONGEST_VISIT_SHARE, self._began_s + self._budget_s)
        if runs_s[0] < _COLD_RUN_S and (runs_s[1:] or self._clock() + self._walls_s[shape] <= end_s):
            runs_s = runs_s[1:]
        is_long = self._clock() - began_s >= visit_s
        fewest = _FEWEST_LONG_RUNS if is_long else _FEWEST_RUNS
        while not runs_s or (
            (len(runs_s) < fewest or (len(runs_s) < _MOST_RUNS and self._clock() - began_s < visit_s))
            and self._clock() + self._walls_s[shape] <= end_s
        ):
            runs_s += self._run(shape)
        before = self.timed.get(shape) or Timed(shape=shape, runs_s=(), is_held_out=is_held_out)
        self.timed[shape] = before.with_runs(tuple(runs_s))
        self._visits[shape] = self._visits.get(shape, 0) + 1
        return self.timed[shape]

    def _run(self, shape: Shape) -> Sequence[float]:
        began_s = self._clock()
        runs_s = self._machine.run(shape)
        self._walls_s[shape] = self._clock() - began_s
        return runs_s

    def _fit(self) -> PhaseTimes:
        times = fit_phase_times(list(self.timed.values()), "")
        self._checked = Errors.of(times, [one for one in self.timed.values() if one.is_held_out]).mean
        return times

    def _worst_gap(self) -> Shape | None:
        """Return what closes the worst gap that is wrong by more than the error aimed at, and that time allows."""
        times = self._fit()
        for candidate in candidates(list(self.timed.values()), self._bounds):
            needed_s = max(_FEWEST_LONG_RUNS * predicted_s(times, candidate.shape), self._visit_s)
            is_worth_it = candidate.error > self._error and candidate.shape not in self.timed
            if is_worth_it and self._has_time(candidate.shape, needed_s):
                return candidate.shape
        return None

    def _most_doubtful(self) -> Shape | None:
        """Return the iteration whose median is least sure; while the error is too large, the one that fits worst."""
        times = self._fit()
        often = [
            one
            for one in self.timed.values()
            if self._visits[one.shape] < _MOST_VISITS and self._has_time(one.shape, _FEWEST_LONG_RUNS * one.median_s)
        ]
        worst = max(often, key=lambda one: one.doubt, default=None)
        if worst is not None and worst.doubt > self._error * _DOUBT_SHARE:
            return worst.shape
        if self._checked > self._error:
            worst = max(often, key=lambda one: abs(relative_error(times, one)), default=None)
            if worst is not None and abs(relative_error(times, worst)) > self._error:
                return worst.shape
        return None


def _growth(small: Shape, large: Shape) -> float:
    """Return how many times as much a second iteration computes and holds as a first one of its phase, at most."""
    pairs = (
        (small.batch_tokens, large.batch_tokens),
        (small.kv_tokens, large.kv_tokens),
        (small.requests, large.requests),
    )
    return max(after / before for before, after in pairs if before)
