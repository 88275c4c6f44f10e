"""Phase times as a function: interpolation, extension, terms, factors."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasesplit.domain.profile import PhaseTimes, extended_interp


def _times() -> PhaseTimes:
    return PhaseTimes(
        source="test",
        prefill_knots_tokens=np.array([100.0, 200.0, 400.0]),
        prefill_knots_s=np.array([1.0, 1.5, 4.0]),
        decode_knots_requests=np.array([1.0, 2.0, 4.0]),
        decode_knots_s=np.array([0.1, 0.1, 0.3]),
        prefill_pair_s=1e-6,
        decode_context_s=1e-5,
        measured_prompt_tokens=400.0,
        measured_requests=4.0,
        mean_error=0.0,
    )


@given(st.lists(st.floats(0, 1e4), min_size=2, max_size=6, unique=True), st.floats(0, 1))
def test_inside_the_knots_it_is_plain_interpolation(heights: list[float], share: float) -> None:
    """Between knots the time would not lie on the straight line."""
    knots_x = np.arange(len(heights), dtype=np.float64)
    at = share * (len(heights) - 1)
    expected = np.interp(at, knots_x, np.array(heights))
    assert float(extended_interp(at, knots_x, np.array(heights))) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_first_and_last_segment_go_on_beyond_the_ends() -> None:
    """Times outside the measured range would be flat, and a large batch free."""
    times = _times()
    base = times.prefill_time_s([50, 800]) - 1e-6 * np.array([50.0, 800.0]) ** 2 / 2
    assert base == pytest.approx([0.75, 9.0])
    assert float(times.decode_time_s(8, 0)) == pytest.approx(0.7)


def test_never_below_zero() -> None:
    """A falling last segment would give negative times."""
    assert float(extended_interp(10, np.array([0.0, 1.0]), np.array([2.0, 1.0]))) == 0.0


def test_context_and_pairs_add_up() -> None:
    """Context or attention pairs would not cost what their coefficients say."""
    times = _times()
    assert float(times.decode_time_s(2, 3000)) == pytest.approx(0.1 + 0.03)
    assert float(times.prefill_time_s(200)) == pytest.approx(1.5 + 1e-6 * 200**2 / 2)


def test_factors_scale_each_phase_alone() -> None:
    """A power cap would slow the wrong phase, or only a part of the right one."""
    times, scaled = _times(), _times().scaled(1.3, 2.0)
    tokens, requests, context = np.array([50, 150, 900]), np.array([1, 3, 9]), np.array([10, 1000, 9000])
    assert scaled.prefill_time_s(tokens) == pytest.approx(1.3 * times.prefill_time_s(tokens))
    assert scaled.decode_time_s(requests, context) == pytest.approx(2.0 * times.decode_time_s(requests, context))
    assert "1.3" in scaled.source
    assert times.scaled(1.0, 1.0) is times
