"""What is counted: gaps in bins, and steps in closed form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles import tiny_cluster, tiny_trace
from driving import begin, done_rows, drive
from phasesplit.domain.latency import BINS_PER_OCTAVE, LEAST, OCTAVES, Binned, edges
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.events import iterations_by, prefill_time_s, time_of
from phasesplit.simulator.kernel import count_gaps

BINS = BINS_PER_OCTAVE * OCTAVES


@settings(max_examples=200, deadline=None)
@given(st.floats(LEAST, 1e5))
def test_gap_falls_into_the_bin_that_holds_it(gap_s: float) -> None:
    """The kernel's histogram would have other bins than the distribution that reads it."""
    gaps = np.zeros(BINS, np.int64)
    count_gaps(gaps, gap_s, 3)
    (index,) = np.flatnonzero(gaps)
    assert gaps[index] == 3
    low_s, high_s = edges(BINS)[index : index + 2]
    assert low_s <= gap_s < high_s
    binned = Binned()
    binned.add(np.array([gap_s]))
    assert binned.counts[index] == 1


@pytest.mark.parametrize(("gap_s", "index"), [(0.0, 0), (LEAST / 2, 0), (1e9, BINS - 1)])
def test_gap_outside_the_range_is_counted_at_its_end(gap_s: float, index: int) -> None:
    """A gap too short or too long for the histogram would be lost, or written beside it."""
    gaps = np.zeros(BINS, np.int64)
    count_gaps(gaps, gap_s, 1)
    assert np.flatnonzero(gaps).tolist() == [index]


def machine_in_step(first_s: float, growth_s: float) -> np.ndarray:
    state, _ = begin(tiny_cluster(("unsplit", 1)), Rules(), tiny_trace((0.0, 1, 1)))
    machines = state.ledger.machines
    machines["step_start_s"], machines["step_first_s"], machines["step_growth_s"] = 0.0, first_s, growth_s
    return machines


@settings(max_examples=100, deadline=None)
@given(
    first_s=st.sampled_from([0.001, 0.03, 0.125, 1.7]),
    growth_s=st.sampled_from([0.0, 1e-9, 1e-5, 0.01]),
    share=st.floats(0.001, 0.999),
    iterations=st.integers(1, 5_000),
)
def test_cut_keeps_the_iteration_in_progress(first_s: float, growth_s: float, share: float, iterations: int) -> None:
    """A step would be cut within an iteration, or run one more than the one in progress."""
    machines = machine_in_step(first_s, growth_s)
    begin_s, end_s = time_of(machines, 0, iterations - 1), time_of(machines, 0, iterations)
    now_s = begin_s + share * (end_s - begin_s)
    assert iterations_by(machines, 0, now_s) == iterations


@settings(max_examples=60, deadline=None)
@given(tokens=st.integers(0, 3_000))
def test_prompt_times_are_those_of_the_profile(tokens: int) -> None:
    """The kernel would interpolate otherwise than the profile that reports print."""
    cluster = tiny_cluster(("unsplit", 1), prefill_base_s=0.01)
    state, _ = begin(cluster, Rules(), tiny_trace((0.0, 1, 1)))
    assert prefill_time_s(state.world, 0, tokens) == pytest.approx(float(cluster.pools[0].times.prefill_time_s(tokens)))


def test_gaps_of_a_growing_step_are_counted_where_they_belong() -> None:
    """A step whose iterations grow longer and longer would be counted as if all were of one length."""
    context_s, prompt_tokens, output_tokens = 1e-4, 10, 2_000
    cluster = tiny_cluster(("unsplit", 1), decode_s=0.001, decode_context_s=context_s)
    state = drive(cluster, Rules(), tiny_trace((0.0, prompt_tokens, output_tokens)))
    times_s = 0.001 + context_s * (prompt_tokens + np.arange(1, output_tokens))
    exact = Binned()
    exact.add(times_s)
    assert state.world.gaps.sum() == output_tokens - 1 == exact.counts.sum()
    assert state.ledger.machines["steps"].sum() == 2
    # A gap may be in a bin beside its own, never further: then no quantile is off by more than a bin.
    below = np.cumsum(state.world.gaps)
    true_below = np.cumsum(exact.counts)
    assert (below[1:] >= true_below[:-1]).all()
    assert (below[:-1] <= true_below[1:]).all()
    assert done_rows(state)["gap_max_s"][0] == pytest.approx(times_s[-1])
