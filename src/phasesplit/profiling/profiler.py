"""A machine is timed until its phase times are known well enough, or until the time for it is up.

1. Single prompts of growing length, and for an endpoint batches of growing size, find the bounds of what there is time
   for.
2. A coarse grid over those bounds is timed.
3. By turns, held-out iterations check the fit, and the widest or most wrong gap between knots is closed.
4. When no gap is left, the iterations with the least certain medians are timed again.

`adaptive` chooses the iterations, and `fitting` fits phase times to them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from phasesplit.domain.profile import PhaseTimes
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
from phasesplit.profiling.fitting import Shape, Timed, fit_phase_times, predicted_s, relative_error

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
        clock: Returns the time, in seconds.
        seed: Of the held-out iterations.
        checks: How many of them.
        known: What was timed before.
        source: What reports say of the times.
        on_state: Called before each iteration.
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
        longest = max((shape.batch_tokens for shape in self.timed if shape.phase == "prefill"), default=2)
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
