"""Profiles of machines whose times are known: formulae with noise, and now and then a spike of the host."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from phasesplit.errors import SpecError
from phasesplit.profiling.adaptive import Bounds, candidates, coarse_grid, held_out, prompts_alone
from phasesplit.profiling.fitting import Shape, Timed, fit_phase_times, non_negative, relative_error
from phasesplit.profiling.profiler import Profiled, ProfileState, profile_machine

BOUNDS = Bounds(longest_tokens=8_192, kv_tokens=16_384, most_prompt_tokens=8_192, most_requests=64)
SPIKE_S = 0.1


def engine_s(shape: Shape) -> float:
    """Return times like those of the embedded engine, with its step behind 6 requests."""
    tokens = shape.batch_tokens
    prefill_s = 0.0113 + 0.00194 * tokens if tokens else 0.0
    decode_s = 0.0048 + 0.00249 * shape.requests if shape.requests <= 6 else 0.0135 + 0.00256 * shape.requests
    attention_s = 9e-7 * shape.pairs + 2e-6 * shape.context
    if shape.phase == "mixed":
        return max(0.0113 + 0.00194 * (tokens + shape.requests), decode_s) + attention_s
    return prefill_s + attention_s if shape.phase == "prefill" else decode_s + attention_s


class Simulated:
    """A machine that takes the time that a formula says, on a clock of its own."""

    def __init__(self, seconds: Callable[[Shape], float], *, noise: float = 0.0, spikes: float = 0.0) -> None:
        self.bounds = BOUNDS
        self.now_s = 0.0
        self.asked: list[Shape] = []
        self.interrupted_at: int | None = None
        self._seconds, self._noise, self._spikes = seconds, noise, spikes
        self._draw = np.random.default_rng(7)

    def run(self, shape: Shape) -> Sequence[float]:
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(shape)
        taken_s = self._seconds(shape) * (1 + self._noise * abs(self._draw.standard_normal()))
        taken_s += SPIKE_S * (self._draw.random() < self._spikes)
        self.now_s += taken_s
        return (taken_s,)

    def profile(
        self,
        budget_s: float = 120.0,
        error: float = 0.03,
        known: Sequence[Timed] = (),
        on_state: Callable[[ProfileState], None] = lambda _: None,
    ) -> Profiled:
        return profile_machine(
            self, error=error, budget_s=budget_s, clock=lambda: self.now_s, known=known, on_state=on_state
        )


def test_known_times_are_found_despite_noise_and_spikes() -> None:
    """Predictions would be wrong by more than they say, on a machine that is exactly as the formulae have it."""
    found = Simulated(engine_s, noise=0.02, spikes=0.02).profile()
    assert found.times is not None
    assert found.errors().count >= 15
    assert found.errors().mean < 0.03
    for shape in held_out(BOUNDS, 40, seed=99):
        true_s = engine_s(shape)
        longest = max((one.shape.batch_tokens for one in found.timed if one.shape.prompts), default=0)
        if shape.batch_tokens <= longest:
            assert abs(relative_error(found.times, Timed(shape=shape, runs_s=(true_s,)))) < 0.15, str(shape)
    assert found.times.prefill_pair_s == pytest.approx(9e-7, rel=0.1)
    assert found.times.decode_context_s == pytest.approx(2e-6, rel=0.15)


def test_spikes_are_rejected_and_counted() -> None:
    """A host that takes the processor away for 100 ms would make an iteration of 8 ms look like one of 20."""
    one = Timed(shape=Shape(requests=1, context_tokens=64), runs_s=(0.008, 0.0081, 0.108, 0.0079, 0.0082, 0.109))
    assert one.rejected == 2
    assert one.median_s == pytest.approx(0.00805)
    assert one.spread_s < 0.0002
    found = Simulated(engine_s, spikes=0.1).profile()
    rejected = sum(iteration.rejected for iteration in found.timed if iteration.median_s < 1.0)
    spikes = sum(run_s - iteration.median_s > SPIKE_S / 2 for iteration in found.timed for run_s in iteration.runs_s)
    assert spikes > 20
    assert rejected >= 0.9 * spikes


def test_runs_that_merely_differ_are_kept() -> None:
    """Rejecting whatever is slow would make every profile too good."""
    runs_s = tuple(0.01 * (1 + 0.1 * step) for step in range(-3, 4))
    assert Timed(shape=Shape(requests=1, context_tokens=1), runs_s=runs_s).rejected == 0


def test_points_are_added_where_the_curve_bends() -> None:
    """A step between 6 and 7 requests would stay a slope from 4 to 16, as wrong as half the step."""
    found = Simulated(engine_s).profile()
    assert found.times is not None
    requests = set(found.times.decode_knots_requests.tolist())
    assert {6.0, 7.0} <= requests
    assert len([count for count in requests if count > 16]) <= 4  # the rest is straight, and two points tell it


def test_it_stops_at_the_error_and_before_the_time() -> None:
    """A profile would burn its whole budget on a machine that it knows already."""
    machine = Simulated(engine_s)
    found = machine.profile(budget_s=600.0)
    assert found.ending == "reached"
    assert machine.now_s < 500.0
    assert found.errors().mean <= 0.03


@pytest.mark.parametrize("budget_s", [10.0, 40.0])
def test_it_stops_when_the_time_is_up(budget_s: float) -> None:
    """A profile of a minute would take ten."""
    machine = Simulated(engine_s, noise=0.05)
    found = machine.profile(budget_s=budget_s, error=0.001)
    assert found.ending == "budget"
    assert found.times is not None
    assert machine.now_s < 1.5 * budget_s
    longest_s = max(engine_s(shape) for shape in machine.asked if shape.phase == "prefill" and not shape.behind_tokens)
    assert longest_s < budget_s / 20


def test_two_lengths_of_prompts_are_timed_however_little_time_there_is() -> None:
    """A profile would end without any phase times, and all of it would have been in vain."""
    machine = Simulated(lambda shape: 20 * engine_s(shape))
    assert machine.profile(budget_s=5.0).times is not None


class Served(Simulated):
    """The same behind an endpoint: context is computed anew for each run, and one gap is seen while all stream."""

    def run(self, shape: Shape) -> Sequence[float]:
        runs_s = super().run(shape)
        if not self.asked[1:]:
            self.now_s += 12.0  # whatever the first request has to wait for
        if shape.requests:
            self.now_s += shape.requests * self._seconds(Shape(prompts=1, prompt_tokens=shape.context_tokens))
            self.now_s += (shape.requests + 16) * runs_s[0]
        return runs_s


@pytest.mark.parametrize("slower", [1, 5, 10])
def test_a_slow_endpoint_is_done_within_the_time(slower: int) -> None:
    """A profile of a minute would take two: the last batch that is begun may take half a minute."""
    machine = Served(lambda shape: slower * engine_s(shape))
    machine.bounds = replace(BOUNDS, has_chunks=False, has_mixed=False, has_free_context=False, least_prompt_tokens=8)
    found = machine.profile(budget_s=60.0, error=0.001)
    assert found.ending == "budget"
    assert found.times is not None
    assert 45.0 < machine.now_s <= 60.0
    longest_s = max(slower * engine_s(one.shape) for one in found.timed if one.shape.prompts == 1)
    assert longest_s > 0.5  # the first request's wait is not taken for the time of a prompt


def test_want_of_time_is_not_called_an_error_of_the_form() -> None:
    """A person would be told that more time would not help, where it would."""

    def varied(shape: Shape) -> float:
        return engine_s(shape) * (1.25 if shape.phase == "mixed" else 1.0)

    assert Simulated(varied).profile(budget_s=600.0).ending == "budget"


def test_an_error_of_the_form_is_said_and_not_hidden() -> None:
    """A machine that the formulae cannot describe would be reported as known within the error asked for."""

    def varied(shape: Shape) -> float:
        return engine_s(shape) * (1.25 if shape.phase == "mixed" else 1.0)

    found = Simulated(varied).profile(budget_s=2_000.0)
    assert found.ending == "form"
    assert found.errors("mixed").mean == pytest.approx(0.2, abs=0.03)
    assert found.errors("decode").mean < 0.03
    assert found.errors().worst_at is not None
    assert found.errors().worst_at.phase == "mixed"


def test_held_out_iterations_do_not_shape_the_fit() -> None:
    """The error would be that of the fit to its own points, which any fit makes small."""
    found = Simulated(engine_s).profile()
    wrong = [replace(one, runs_s=(9.0,)) if one.is_held_out else one for one in found.timed]
    for before, after in zip(
        _columns(fit_phase_times(found.timed, "")), _columns(fit_phase_times(wrong, "")), strict=True
    ):
        np.testing.assert_array_equal(before, after)
    drawn = {shape for shape in held_out(BOUNDS, 24, seed=0) if shape.phase == "mixed"}
    assert all(one.is_held_out for one in found.timed if one.shape in drawn)


def _columns(times: object) -> list[object]:
    names = ("prefill_knots_tokens", "prefill_knots_s", "decode_knots_requests", "decode_knots_s", "prefill_pair_s")
    return [getattr(times, name) for name in names]


def test_an_interrupted_profile_keeps_what_there_is() -> None:
    """Ctrl-C after ten minutes would throw ten minutes away."""
    machine = Simulated(engine_s)
    machine.interrupted_at = 400
    found = machine.profile()
    assert found.ending == "interrupted"
    assert found.times is not None
    assert len(found.timed) > 10
    machine = Simulated(engine_s)
    machine.interrupted_at = 2
    assert machine.profile().times is None


def test_a_resumed_profile_measures_only_what_is_missing() -> None:
    """Going on would begin again, or lose the runs there were."""
    first = Simulated(engine_s, noise=0.02)
    first.interrupted_at = 400
    known = first.profile().timed
    second = Simulated(engine_s, noise=0.02)
    found = second.profile(known=known)
    grid = {*prompts_alone(BOUNDS), *coarse_grid(replace(BOUNDS, most_prompt_tokens=1_000))}
    again = {one.shape for one in known} & grid
    assert again
    assert second.asked[0] not in again
    runs = {one.shape: one.runs_s for one in found.timed}
    assert all(runs[one.shape][: len(one.runs_s)] == one.runs_s for one in known)


def test_progress_tells_what_is_measured() -> None:
    """A minute without a sign of life looks like a hang."""
    states: list[ProfileState] = []
    Simulated(engine_s).profile(on_state=states.append)
    assert [state.elapsed_s for state in states] == sorted(state.elapsed_s for state in states)
    assert states[-1].error < 0.05
    assert states[-1].timed > 20


def test_every_shape_asked_for_is_allowed() -> None:
    """An engine would be asked for more KV than it has, or a prompt longer than its context."""
    for bounds in (
        BOUNDS,
        Bounds(longest_tokens=64, kv_tokens=64, most_prompt_tokens=64, most_requests=2),
        Bounds(
            longest_tokens=2_000,
            kv_tokens=3_000,
            most_prompt_tokens=2_000,
            most_requests=16,
            least_prompt_tokens=8,
            has_chunks=False,
            has_mixed=False,
        ),
    ):
        shapes = [*prompts_alone(bounds), *coarse_grid(bounds), *held_out(bounds, 200, seed=3)]
        assert len(shapes) > 20
        for shape in shapes:
            assert bounds.allow(shape), str(shape)
            assert shape.phase != "prefill" or shape.prompt_tokens >= bounds.least_prompt_tokens
            assert bounds.has_chunks or not shape.behind_tokens
            assert bounds.has_mixed or shape.phase != "mixed"


def test_gaps_are_sorted_by_how_wrong_they_are() -> None:
    """Points would be added where the curve is known."""
    timed = [Timed(shape=shape, runs_s=(engine_s(shape),)) for shape in prompts_alone(BOUNDS)]
    sizes = [1, 4, 6, 7, 8, 16, 32, 64]
    timed += [
        Timed(shape=shape, runs_s=(engine_s(shape),))
        for shape in (Shape(requests=count, context_tokens=64) for count in sizes)
    ]
    found = candidates(timed, BOUNDS)
    scores = [one.error * one.width for one in found]
    assert scores == sorted(scores, reverse=True)
    # Nothing lies between 6 and 7, where the step is; the widest gap beside it is that from 4 to 6.
    assert next(one.shape for one in found if one.shape.requests) == Shape(requests=5, context_tokens=256)
    assert all(candidate.shape not in {one.shape for one in timed} for candidate in found)


def test_too_few_iterations_are_refused() -> None:
    """Two phases would be told from the points of one."""
    timed = [Timed(shape=Shape(prompts=1, prompt_tokens=size), runs_s=(0.1,)) for size in (1, 4)]
    with pytest.raises(SpecError, match=r"numbers of requests timed.*at least two"):
        fit_phase_times(timed, "")


def test_more_work_never_takes_less_time() -> None:
    """Noise between sizes far apart would make a larger batch faster, and every scheduler would prefer it."""
    noisy_s = {1: 0.010, 4: 0.009, 16: 0.012, 64: 0.011}
    timed = [Timed(shape=Shape(prompts=1, prompt_tokens=size), runs_s=(taken,)) for size, taken in noisy_s.items()]
    timed += [Timed(shape=Shape(requests=n, context_tokens=8), runs_s=(taken,)) for n, taken in noisy_s.items()]
    times = fit_phase_times(timed, "")
    for knots_s in (times.prefill_knots_s, times.decode_knots_s):
        assert (np.diff(knots_s) >= 0).all()
    assert times.prefill_pair_s >= 0
    assert times.decode_context_s >= 0


def test_a_full_tile_may_take_less_time_than_one_that_is_not() -> None:
    """Four rows would be told too slow and three too fast, by half the fall between them."""
    taken_s = {1: 0.010, 2: 0.016, 3: 0.020, 4: 0.016, 5: 0.019, 9: 0.018, 10: 0.017}
    timed = [Timed(shape=Shape(prompts=1, prompt_tokens=size), runs_s=(taken,)) for size, taken in taken_s.items()]
    timed += [Timed(shape=Shape(requests=n, context_tokens=8), runs_s=(taken,)) for n, taken in taken_s.items()]
    knots_s = fit_phase_times(timed, "").prefill_knots_s
    np.testing.assert_allclose(knots_s[:4], [0.010, 0.016, 0.020, 0.016], rtol=0.01)
    # From 5 to 9 it is noise, and a last fall would go on below zero.
    assert (np.diff(knots_s[4:]) >= 0).all()


def test_every_number_of_rows_in_tiles_is_timed() -> None:
    """Between knots, a machine that computes rows in tiles is told wrong by as much as a tile costs."""

    def stepped_s(shape: Shape) -> float:
        rows = shape.batch_tokens + shape.requests
        idle_rows = -rows % 6 if rows <= 18 else 0
        return 0.005 + 0.0025 * rows + 0.003 * idle_rows + 9e-7 * shape.pairs + 2e-6 * shape.context

    machine = Simulated(stepped_s)
    machine.bounds = replace(BOUNDS, tiled_rows=18)
    found = machine.profile(budget_s=60.0)
    assert found.times is not None
    assert {*range(1, 19)} <= {*found.times.decode_knots_requests.tolist()} | {
        one.shape.requests for one in found.timed if one.is_held_out
    }
    for rows in range(1, 19):
        shape = Shape(requests=rows, context_tokens=500)
        if float(rows) in found.times.decode_knots_requests:
            true_s = stepped_s(shape)
            assert abs(relative_error(found.times, Timed(shape=shape, runs_s=(true_s,)))) < 0.01, str(shape)


def test_least_squares_under_bounds_are_the_best_there_are() -> None:
    """The fit would stop at a corner that is not the best."""
    draw = np.random.default_rng(5)
    for _ in range(40):
        matrix, target = draw.normal(size=(8, 4)), draw.normal(size=8)
        found = non_negative(matrix, target)
        assert (found >= 0).all()
        best = min(
            float(np.linalg.norm(matrix[:, free] @ solution - target))
            for count in range(5)
            for free in map(list, combinations(range(4), count))
            for solution in [np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]]
            if (solution >= 0).all()
        )
        assert np.linalg.norm(matrix @ found - target) == pytest.approx(best)
