"""A seed is the same requests at every rate; a ratio changes lengths and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from doubles import tiny_trace
from phasesplit.domain.arrivals import Gamma
from phasesplit.domain.workload import LengthTable
from phasesplit.planner.problem import Traffic, scaled_lengths
from planner.problems import LENGTHS, workload

RECORDED = tiny_trace(*((index / 2, 10 + index, 1 + index % 7) for index in range(40)))


@pytest.mark.parametrize("source", [workload(), RECORDED], ids=["workload", "recorded"])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_seed_gives_the_same_requests_at_every_rate(source: object, seed: int) -> None:
    """If wrong, two rates are compared on different requests, and chance decides which holds."""
    traffic = Traffic(source=source, rate_per_s=3.0, duration_s=60.0)
    slow, fast = traffic.trace(2.0, seed), traffic.trace(7.0, seed)
    assert len(slow) <= len(fast)
    np.testing.assert_array_equal(slow.prompt_tokens, fast.prompt_tokens[: len(slow)])
    np.testing.assert_array_equal(slow.output_tokens, fast.output_tokens[: len(slow)])
    # And in the same pattern: time is scaled.
    np.testing.assert_allclose(slow.arrival_s * 2.0, fast.arrival_s[: len(slow)] * 7.0)
    assert fast.arrival_s[-1] < 60.0


@pytest.mark.parametrize("source", [workload(), RECORDED], ids=["workload", "recorded"])
def test_seeds_differ_and_repeat(source: object) -> None:
    """If wrong, several seeds are one, or a plan cannot be made again."""
    traffic = Traffic(source=source, rate_per_s=3.0, duration_s=60.0)
    first, again, other = traffic.trace(3.0, 1), traffic.trace(3.0, 1), traffic.trace(3.0, 2)
    np.testing.assert_array_equal(first.arrival_s, again.arrival_s)
    np.testing.assert_array_equal(first.prompt_tokens, again.prompt_tokens)
    assert not np.array_equal(first.prompt_tokens, other.prompt_tokens[: len(first)])


def test_seed_0_of_a_recorded_trace_is_the_trace() -> None:
    """If wrong, a recorded trace is never simulated as it was recorded."""
    drawn = Traffic(source=RECORDED, rate_per_s=2.0, duration_s=100.0).trace(RECORDED.rate_per_s, 0)
    np.testing.assert_array_equal(drawn.prompt_tokens[:40], RECORDED.prompt_tokens)
    np.testing.assert_allclose(drawn.arrival_s[:40], RECORDED.arrival_s)


def test_recorded_rows_stay_whole() -> None:
    """If wrong, a long prompt gets the answer of a short one."""
    drawn = Traffic(source=RECORDED, rate_per_s=2.0, duration_s=100.0).trace(2.0, 3)
    pairs = set(zip(RECORDED.prompt_tokens.tolist(), RECORDED.output_tokens.tolist(), strict=True))
    assert set(zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)) <= pairs


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
def test_a_ratio_bends_lengths_and_nothing_else(ratio: float) -> None:
    """If wrong, the sensitivity to prompts also shows another rate, or other work than it says."""
    traffic = Traffic(source=workload(), rate_per_s=3.0, duration_s=2_000.0)
    plain, varied = traffic.trace(3.0, 1), traffic.trace(3.0, 1, ratio)
    np.testing.assert_array_equal(plain.arrival_s, varied.arrival_s)
    np.testing.assert_allclose(varied.prompt_tokens, plain.prompt_tokens * ratio**0.5, atol=0.5)
    np.testing.assert_allclose(varied.output_tokens, np.maximum(plain.output_tokens / ratio**0.5, 1), atol=0.5)
    # The bounds see the same lengths as the simulation.
    table = scaled_lengths(LENGTHS, ratio)
    seen = set(zip(varied.prompt_tokens.tolist(), varied.output_tokens.tolist(), strict=True))
    assert seen == set(zip(table.prompt_tokens.tolist(), table.output_tokens.tolist(), strict=True))
    assert np.average(table.prompt_tokens, weights=table.requests) == pytest.approx(
        varied.prompt_tokens.mean(), rel=0.05
    )


def test_a_length_and_an_arrival_model_are_heeded() -> None:
    """If wrong, half a trace is a whole one, or bursts are left out."""
    traffic = Traffic(source=workload(), rate_per_s=50.0, duration_s=100.0)
    whole, half = traffic.trace(50.0, 1), replace(traffic, duration_s=50.0).trace(50.0, 1)
    np.testing.assert_array_equal(half.arrival_s, whole.arrival_s[: len(half)])
    assert half.arrival_s[-1] < 50.0 < whole.arrival_s[len(half)]
    bursty = Traffic(source=workload(), rate_per_s=50.0, duration_s=100.0, arrivals=Gamma(4.0)).trace(50.0, 1)
    gaps = np.diff(bursty.arrival_s)
    assert gaps.std() / gaps.mean() > 2.5


def test_lengths_of_a_recorded_trace_are_its_own() -> None:
    """If wrong, the bounds are those of other requests."""
    table = Traffic(source=RECORDED, rate_per_s=2.0, duration_s=100.0).lengths
    assert isinstance(table, LengthTable)
    assert table.requests.sum() == 40
    assert np.average(table.prompt_tokens, weights=table.requests) == pytest.approx(RECORDED.prompt_tokens.mean())


def test_a_recorded_trace_is_played_whole_at_every_rate() -> None:
    """If wrong, a plan is made for the quiet head of a trace, or capacity for another part than the plan."""
    traffic = Traffic(source=RECORDED, rate_per_s=2.0, duration_s=len(RECORDED) / 2.0)
    for rate_per_s in (0.5, 2.0, 7.0):
        drawn = traffic.trace(rate_per_s, 0)
        assert len(drawn) == len(RECORDED)
        np.testing.assert_array_equal(drawn.prompt_tokens, RECORDED.prompt_tokens)
    twice = replace(traffic, duration_s=2 * traffic.duration_s)
    assert len(twice.trace(3.0, 0)) == 2 * len(RECORDED)


def test_far_above_the_planned_rate_no_more_is_drawn_than_can_be_waited_for() -> None:
    """If wrong, the capacity of a plan for one request an hour asks for millions of requests a probe."""
    traffic = Traffic(source=workload(), rate_per_s=0.01, duration_s=1e5)
    assert 3_000 < len(traffic.trace(50.0, 0)) < 5_000
    assert len(traffic.trace(0.01, 0)) == pytest.approx(1_000, rel=0.2)
