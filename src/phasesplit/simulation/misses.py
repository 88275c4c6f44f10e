"""Which requests missed the SLO, hour by hour: percentiles of a whole day hide when it was missed."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.slo import GOODPUT_RATIO, Slo, is_slowdown
from phasesplit.simulation.records import METRICS, SLOWDOWNS, Metrics, seconds
from phasesplit.simulation.world import COMPLETED

_HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Misses:
    """Requests that missed the SLO.

    A request misses it if one of its own values (TTFT, mean ITL, E2E, ...) reaches the limit that the SLO sets for the
    highest percentile of that metric (p99 of 2 s: 2 s), or one of the SLO's limits for each request; and if it was not
    served. Limits on gaps of all requests together (`itl_s`) are not looked at: a gap has no request of its own.

    Attributes:
        limits: Metric and limit; none where the SLO has no limit on a request's own values.
        requests_by_hour: int64 (h,), requests by the hour of their arrival, counted from the first arrival.
        missed_by_hour: int64 (h,), those of them that missed it.
    """

    limits: tuple[tuple[str, float], ...]
    requests_by_hour: NDArray[np.int64]
    missed_by_hour: NDArray[np.int64]

    @property
    def share(self) -> float:
        """Share of all requests that missed the SLO; NaN without limits."""
        return float(self.missed_by_hour.sum() / self.requests_by_hour.sum()) if self.limits else float("nan")

    @property
    def worst_hour_share(self) -> float:
        """The same for the hour where it is highest."""
        shares = self.missed_by_hour / np.maximum(self.requests_by_hour, 1)
        return float(shares.max()) if self.limits else float("nan")


class MissCounter:
    """Counts misses as requests end.

    Args:
        cluster: The cluster; slowdowns need its reference and are left out without one.
        slo: The SLO.
        start_s: Time of the first arrival.
    """

    def __init__(self, cluster: Cluster, slo: Slo, start_s: float) -> None:
        self._limits = _strictest(slo, slowdowns=cluster.reference is not None)
        self._metrics = Metrics(
            cluster.reference, published=False, slo=Slo("each request", (), self._limits), only=frozenset()
        )
        self._start_s = start_s
        self._counts = np.zeros((2, 0), np.int64)

    def add(self, done: NDArray[np.void]) -> None:
        """Take records of ended requests, DONE (d,)."""
        if not done.size:
            return
        missed = done["status"] != COMPLETED
        if self._limits:
            served = ~missed
            rows = done[served] if missed.any() else done  # copying all of them would take as long as judging them
            missed[served] = self._metrics.columns(rows, seconds(rows))[GOODPUT_RATIO] >= 1
        hours = ((done["arrival_s"] - self._start_s) // _HOUR_S).astype(np.int64)
        size = max(self._counts.shape[1], int(hours.max()) + 1)
        counts = np.stack([np.bincount(hours, minlength=size), np.bincount(hours[missed], minlength=size)])
        counts[:, : self._counts.shape[1]] += self._counts
        self._counts = counts

    def misses(self) -> Misses:
        """Return what has been counted."""
        return Misses(limits=self._limits, requests_by_hour=self._counts[0], missed_by_hour=self._counts[1])


def _strictest(slo: Slo, *, slowdowns: bool) -> tuple[tuple[str, float], ...]:
    """Return metric and limit of each metric that a request has a value of: that of the highest percentile."""
    limits: dict[str, float] = {}
    for limit in sorted(slo.limits, key=lambda limit: limit.percentile):
        limits[limit.metric] = limit.below
    for metric, below in slo.each:
        limits[metric] = min(below, limits.get(metric, below))
    return tuple(
        (metric, below)
        for metric, below in limits.items()
        if metric in (*METRICS, *SLOWDOWNS) and (slowdowns or not is_slowdown(metric))
    )
