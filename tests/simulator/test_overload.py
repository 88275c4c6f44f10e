"""Overload is a backlog that grows: timelines made up for it, and for what looks like it."""

import numpy as np
import pytest

from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.simulator.result import Overload, find_overload

TIME_S = np.linspace(1.0, 200.0, 200)


def found(
    waiting: np.ndarray, running: np.ndarray | float = 10.0, *, kv_share: float = 0.2, rate_per_s: float = 10.0
) -> Overload | None:
    """Return what a timeline of one unsplit pool shows, whose arrivals end with the samples."""
    samples = np.zeros((TIME_S.size, len(POOL_NAMES), 5))
    for field, values in enumerate((4.0, 4.0, running, waiting, kv_share)):
        samples[:, 3, field] = values
    return find_overload(TIME_S, samples, last_arrival_s=200.0, end_s=260.0, rate_per_s=rate_per_s, pools=POOL_NAMES)


def test_growing_queue_is_overload() -> None:
    """A backlog that grows by half of what arrives would pass for a healthy system."""
    overload = found(5.0 * TIME_S)
    assert overload is not None
    assert overload.growth_per_s == pytest.approx(5.0)
    assert overload.backlog == pytest.approx(5.0 * 200 + 10, rel=0.01)
    assert overload.drain_s == pytest.approx(60.0)
    assert overload.binding == "compute of the unsplit pool"


def test_full_memory_binds() -> None:
    """More compute would be advised where memory is what is missing."""
    overload = found(5.0 * TIME_S, kv_share=0.98)
    assert overload is not None
    assert overload.binding == "KV memory of the unsplit pool"


@pytest.mark.parametrize(
    ("waiting", "running"),
    [
        pytest.param(np.full(TIME_S.size, 500.0), 10.0, id="long but steady queue"),
        pytest.param(200 * (TIME_S % 20 < 5), 10.0, id="bursts that are worked off"),
        pytest.param(np.zeros(TIME_S.size), 3.0 * TIME_S, id="filling up, nobody waits"),
        pytest.param(0.05 * TIME_S, 1.0, id="a handful of requests"),
        pytest.param(1_000 - 4 * TIME_S, 10.0, id="queue that shrinks"),
        pytest.param(1_000 + 0.15 * TIME_S, 10.0, id="growth far below the arrivals"),
    ],
)
def test_what_only_looks_like_overload_is_not(waiting: np.ndarray, running: np.ndarray | float) -> None:
    """A cluster that keeps up would be called overloaded."""
    assert found(waiting, running) is None


def test_too_few_samples_say_nothing() -> None:
    """A trend would be read out of a handful of points."""
    samples = np.zeros((4, len(POOL_NAMES), 5))
    samples[:, 3, 3] = [0, 100, 200, 300]
    time_s = np.arange(1.0, 5.0)
    assert find_overload(time_s, samples, last_arrival_s=5.0, end_s=9.0, rate_per_s=10.0, pools=POOL_NAMES) is None
