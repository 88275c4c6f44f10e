"""Requests that missed the SLO, by hour."""

import math

import pytest

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.slo import SPLITWISE, Limit, Slo
from phasesplit.scheduler.autoscaling import Static
from phasesplit.simulator.result import Misses
from phasesplit.simulator.run import simulate

HOUR_S = 3_600.0
TTFT = Slo("ttft", (Limit("ttft_s", 99.0, 0.5), Limit("ttft_s", 50.0, 0.1)))


def misses(*rows: tuple[float, int, int], slo: Slo = TTFT, keep: bool = True, **cluster: int) -> Misses:
    result = simulate(
        tiny_cluster(("unsplit", 1), **cluster),  # type: ignore[arg-type]
        tiny_trace(*rows), autoscale=Static(), slo=slo, keep=keep,
    )  # fmt: skip
    assert result.autoscaling is not None
    return result.autoscaling.misses


@pytest.mark.parametrize("keep", [True, False])
def test_misses_by_hour_of_arrival(keep: bool) -> None:
    """A bad hour would be hidden by the day, requests fall into another hour, or the wrong percentile's limit count."""
    rows = [
        (5.0, 499, 1),
        (6.0, 500, 1),
        (5.0 + HOUR_S, 100, 1),
        (5.0 + 3 * HOUR_S, 600, 1),
        (9.0 + 3 * HOUR_S, 601, 1),
    ]
    found = misses(*rows, keep=keep)
    assert found.limits == (("ttft_s", 0.5),)
    assert found.requests_by_hour.tolist() == [2, 1, 0, 2]
    assert found.missed_by_hour.tolist() == [1, 0, 0, 2]
    assert found.share == pytest.approx(3 / 5)
    assert found.worst_hour_share == 1.0


def test_refused_request_misses_the_slo() -> None:
    """A request that was never served would count as a good one."""
    found = misses((0.0, 10, 1), (1.0, 200, 1), slo=SPLITWISE, capacity_tokens=100)
    assert found.missed_by_hour.tolist() == [1]


def test_limits_for_each_request_count_too() -> None:
    """An SLO that is stated for each request would be ignored."""
    slo = Slo("each", (Limit("itl_s", 99.0, 1e-6),), (("e2e_s", 0.45), ("ttft_s", 9.0)))
    found = misses((0.0, 100, 4), (2.0, 100, 5), slo=slo)
    assert found.limits == (("e2e_s", 0.45), ("ttft_s", 9.0))
    assert found.missed_by_hour.tolist() == [1]


def test_without_limits_nothing_is_judged() -> None:
    """A run without an SLO would be praised for keeping it."""
    found = misses((0.0, 100, 4), slo=Slo("none", ()))
    assert found.limits == ()
    assert math.isnan(found.share)
    assert math.isnan(found.worst_hour_share)
