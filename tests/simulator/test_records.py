"""What is computed of ended requests: only what is asked for, and what an SLO needs."""

from dataclasses import replace

import numpy as np
import pytest

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.slo import parse_slo
from phasesplit.errors import SpecError
from phasesplit.simulator.run import simulate

TRACE = tiny_trace((0.0, 1_000, 1), (0.0, 2_000, 11), (5.0, 500, 6), (5.1, 3_000, 21))
GOODPUT = parse_slo("goodput(ttft<2.5s,e2e<3.9s)>=50%")


@pytest.mark.parametrize("keep", [True, False])
def test_fewer_metrics_are_the_same_metrics(keep: bool) -> None:
    """A search that asks for its SLO's metrics alone would see other values than a full run."""
    slo = parse_slo("ttft_p90<2s,itl_p99<200ms,e2e_slowdown_p50<9")
    every = simulate(tiny_cluster(), TRACE, slo=slo, keep=keep)
    few = simulate(tiny_cluster(), TRACE, slo=slo, keep=keep, metrics=frozenset({"itl_mean_s"}))
    assert set(few.metrics) == {"ttft_s", "itl_s", "itl_mean_s", "e2e_slowdown"}
    for name, values in few.metrics.items():
        assert values.quantile(0.9) == every.metrics[name].quantile(0.9)
        assert (values.mean, values.largest) == (every.metrics[name].mean, every.metrics[name].largest)
    assert few.slo is not None
    assert every.slo is not None
    assert few.slo.findings == every.slo.findings


@pytest.mark.parametrize("keep", [True, False])
def test_an_absolute_limit_needs_no_reference(keep: bool) -> None:
    """A model that does not fit on the reference machine could not be held to limits in seconds."""
    cluster = replace(tiny_cluster(), reference=None)
    result = simulate(cluster, TRACE, slo=GOODPUT, keep=keep)
    assert result.slo is not None
    assert result.slo.holds
    assert simulate(cluster, TRACE, keep=keep).slo is None
    assert simulate(cluster, TRACE, slo=parse_slo("goodput(ttft_slowdown<2)>=1%"), keep=keep).slo is None


def test_goodput_of_a_run_follows_from_its_rows() -> None:
    """The share of good requests in a result would not be that of its own rows."""
    result = simulate(tiny_cluster(), TRACE, slo=GOODPUT)
    assert result.columns is not None
    shares = np.maximum(result.columns["ttft_s"] / 2.5, result.columns["e2e_s"] / 3.9)
    assert 0 < (shares < 1).mean() < 1
    ratio = result.metrics["goodput_ratio"]
    assert (ratio.count, ratio.largest, ratio.mean) == pytest.approx((4, shares.max(), shares.mean()))
    assert "goodput_ratio" not in simulate(tiny_cluster(), TRACE).metrics


def test_a_metric_that_is_none_is_refused() -> None:
    """A misspelt metric would be missing from the result without a word."""
    with pytest.raises(SpecError, match="did you mean ttft_s"):
        simulate(tiny_cluster(), TRACE, metrics=frozenset({"ttft"}))


def test_rows_are_a_data_frame() -> None:
    """A person who works in pandas would see other values, or no rows, without a word."""
    result = simulate(tiny_cluster(), TRACE)
    assert result.columns is not None
    frame = result.to_pandas()
    assert list(frame.columns) == list(result.columns)
    assert len(frame) == len(TRACE)
    for name, values in result.columns.items():
        np.testing.assert_array_equal(frame[name].to_numpy(), values)
    with pytest.raises(ValueError, match="keep=True"):
        simulate(tiny_cluster(), TRACE, keep=False).to_pandas()
