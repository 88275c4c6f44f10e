"""Whether a cluster kept up with its arrivals: a growing backlog is named, never averaged over in silence."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

GROWTH_SHARE = 0.02
"""A backlog that grows by more than this share of the arrivals is overload."""
GROWTH_RATIO = 1.15
"""Nor is it overload unless the requests in the system grow by this factor over the second half of the arrivals."""
WAITING_SHARE = 0.05
"""Nor unless more than this share of them waits: a system that is still filling up has more and more running."""
LEAST_BACKLOG = 20
"""Fewer requests in the system than this are not called a backlog, whatever their trend."""
FULL = 0.95
"""A pool that is busy, or whose KV memory is used, for more than this share binds."""
_LEAST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A backlog that grew while requests arrived.

    Attributes:
        growth_per_s: Requests by which it grew each second, over the second half of the arrivals.
        backlog: Requests in the system when the last one arrived.
        drain_s: Time from the last arrival to the end of the run.
        binding: The resource that binds, as a phrase ("compute of the prefill pool").
    """

    growth_per_s: float
    backlog: float
    drain_s: float
    binding: str

    def __str__(self) -> str:
        return (
            f"overloaded: the backlog grew by {self.growth_per_s:.3g} requests/s to {self.backlog:,.0f} when arrivals"
            f" ended and took {self.drain_s:.0f} s to drain; {self.binding} binds"
        )


def find_overload(
    time_s: Floats, samples: Floats, *, last_arrival_s: float, end_s: float, rate_per_s: float, pools: tuple[str, ...]
) -> Overload | None:
    """Return the overload that a timeline shows, None where the cluster kept up.

    The backlog's trend is the least-squares slope of the requests in the system over the second half of the arrivals;
    bursts that are worked off leave no trend.

    Args:
        time_s: (s,) times of the samples.
        samples: (s, pools, 5) fields of `world.SAMPLE_FIELDS`.
        last_arrival_s: Time of the last arrival.
        end_s: End of the run.
        rate_per_s: Mean arrival rate.
        pools: Names of the pools, in order.
    """
    during = time_s <= last_arrival_s
    if during.sum() < _LEAST_SAMPLES:
        return None
    time_s, samples = time_s[during], samples[during]
    waiting = samples[:, :, 3].sum(axis=1)
    present = samples[:, :, 2].sum(axis=1) + waiting
    half = time_s.size // 2
    centred = time_s[half:] - time_s[half:].mean()
    growth_per_s = float((centred * present[half:]).sum() / (centred**2).sum())
    middle = float(present[half:].mean())
    grown = growth_per_s * float(time_s[-1] - time_s[half])
    at_least = max(LEAST_BACKLOG, (GROWTH_RATIO - 1) * (middle - grown / 2))
    waits = float(waiting[half:].mean()) > WAITING_SHARE * middle
    if grown < at_least or growth_per_s < GROWTH_SHARE * rate_per_s or not waits:
        return None
    backlog = middle + grown / 2
    return Overload(
        growth_per_s=growth_per_s,
        backlog=backlog,
        drain_s=end_s - last_arrival_s,
        binding=_binding(samples[half:].mean(axis=0), pools),
    )


def _binding(means: Floats, pools: tuple[str, ...]) -> str:
    """Name the pool that is fullest: its KV memory where that is full, else its compute."""
    present = [pool for pool in range(len(pools)) if means[pool, 0] > 0]
    kv = max(present, key=lambda pool: means[pool, 4])
    if means[kv, 4] > FULL - 0.05:
        return f"KV memory of the {pools[kv]} pool"
    busy = max(present, key=lambda pool: (means[pool, 3] / means[pool, 0], means[pool, 1] / means[pool, 0]))
    return f"compute of the {pools[busy]} pool"
