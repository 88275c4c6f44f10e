"""Workloads from percentiles typed in: what lengths they have, and what is refused."""

import numpy as np
import pytest
from numpy.typing import NDArray

from phasesplit.domain.arrivals import parse_arrivals
from phasesplit.domain.workload import (
    LARGEST_REACH,
    PAIRS,
    Workload,
    percentiles_text,
    quantiles,
    workload_from_percentiles,
)
from phasesplit.errors import SpecError
from refusals import assert_refused

PROMPT = {50: 1020.0, 90: 2734.0, 99: 4142.0}
OUTPUT = {50: 129.0, 90: 425.0, 99: 601.0}


def workload() -> Workload:
    return workload_from_percentiles(PROMPT, OUTPUT, 70.0)


def all_lengths(found: Workload) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    table = found.lengths
    return np.repeat(table.prompt_tokens, table.requests), np.repeat(table.output_tokens, table.requests)


def test_lengths_have_the_percentiles() -> None:
    """Traffic would be shorter or longer than the person said."""
    prompt, output = all_lengths(workload())
    assert prompt.size == PAIRS
    assert np.percentile(prompt, [50, 90, 99]) == pytest.approx(list(PROMPT.values()), rel=0.01)
    assert np.percentile(output, [50, 90, 99]) == pytest.approx(list(OUTPUT.values()), rel=0.01)


def test_lengths_are_independent() -> None:
    """Long prompts would come with long or with short answers although nobody said so."""
    prompt, output = all_lengths(workload())
    assert abs(float(np.corrcoef(prompt, output)[0, 1])) < 0.01
    upper = output[prompt > np.median(prompt)]
    assert np.percentile(upper, [50, 90]) == pytest.approx([129, 425], rel=0.03)


def test_a_trace_has_the_rate_and_is_the_same_twice() -> None:
    """The rate would be lost, or two runs meet different traffic."""
    first, second = (workload_from_percentiles(PROMPT, OUTPUT, 70.0).trace(seed=3) for _ in range(2))
    assert len(first) == pytest.approx(70 * 600, rel=0.02)
    assert first.prompt_tokens.tobytes() == second.prompt_tokens.tobytes()
    assert np.percentile(first.output_tokens, 90) == pytest.approx(425, rel=0.02)


def test_the_arrival_model_is_the_one_asked_for() -> None:
    """Bursts that the person asked for would be smoothed away."""
    bursty = workload_from_percentiles(PROMPT, OUTPUT, 70.0, arrivals=parse_arrivals("gamma:cv=3"))
    gaps = np.diff(bursty.trace(seed=1).arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.1)
    plain = np.diff(workload().trace(seed=1).arrival_s)
    assert plain.std() / plain.mean() == pytest.approx(1, rel=0.03)


def test_between_percentiles_the_logarithm_is_linear() -> None:
    """Lengths between two percentiles would pile up at one of them."""
    found = quantiles({50: 100, 90: 400}, np.array([0.5, 0.7, 0.9]), "here")
    assert found == pytest.approx([100, 200, 400])


def test_beyond_the_percentiles_lengths_are_bounded() -> None:
    """A steep pair of percentiles would promise prompts of a length that nobody saw."""
    gentle = quantiles({50: 100, 90: 200}, np.array([0.0, 1.0]), "here")
    assert gentle == pytest.approx([100 / 2**1.25, 200 * 2**0.25])
    steep = quantiles({98: 100, 99: 2_000}, np.array([0.0, 0.5, 1.0]), "here")
    assert steep == pytest.approx([100 / LARGEST_REACH, 100 / LARGEST_REACH, 2_000 * LARGEST_REACH])
    ends = quantiles({0: 10, 100: 30}, np.array([0.0, 1.0]), "here")
    assert ends == pytest.approx([10, 30])


def test_one_percentile_is_every_length() -> None:
    """A single number would be taken for a distribution that nobody described."""
    prompt, output = all_lengths(workload_from_percentiles({50: 1_000}, {50: 1}, 1.0))
    assert set(prompt.tolist()) == {1_000}
    assert set(output.tolist()) == {1}


def test_percentiles_are_written_in_order() -> None:
    """Reports would not show the percentiles as they were typed."""
    assert percentiles_text({90: 2734, 50: 1020}) == "p50=1020,p90=2734"
    assert "p90=425" in workload().source


@pytest.mark.parametrize(
    ("percentiles", "named"),
    [
        ({101: 10}, ["'p101'", "0 to 100"]),
        ({-1: 10}, ["a percentile from 0 to 100"]),
        ({50: 0}, ["p50", "0", "1 to 10,000,000 tokens"]),
        ({50: -3}, ["p50", "got -3"]),
        ({50: float("inf")}, ["p50", "inf"]),
        ({50: float("nan")}, ["p50", "nan"]),
        ({50: 100, 90: 99}, ["p90", "99", "100 tokens"]),
    ],
)
def test_wrong_percentiles_are_one_line(percentiles: dict[float, float], named: list[str]) -> None:
    """A mistyped percentile would give other traffic, or a traceback."""
    with pytest.raises(SpecError) as caught:
        quantiles(percentiles, np.array([0.5]), "--prompt")
    assert_refused(caught.value, "--prompt", *named)


def test_no_percentile_is_refused() -> None:
    """An empty mapping would end in a traceback."""
    with pytest.raises(SpecError) as caught:
        workload_from_percentiles({}, OUTPUT, 1.0)
    assert_refused(caught.value, "at least one percentile")
