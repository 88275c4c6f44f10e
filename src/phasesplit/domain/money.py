"""What a cluster costs: money, power, energy and greenhouse gases."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.machine import Machine
from phasesplit.errors import SpecError

Floats = NDArray[np.float64]

WORLD_GRID_KG_PER_KWH = 0.445
"""CO2 of a kilowatt-hour from the grid, world average of 2024. Source: IEA, Electricity 2025 (445 g/kWh)."""

JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600.0
_BUSY_TOLERANCE_S = 1e-6


def usd_per_hour(cluster: Cluster, counts: Sequence[float] | None = None) -> float:
    """Return the price of a cluster.

    Args:
        cluster: The cluster.
        counts: Machines of each pool that are paid for, on the mean over time; None: all.
    """
    return sum(
        count * pool.machine.price_usd_per_hour
        for pool, count in zip(cluster.pools, _counts(cluster, counts), strict=True)
    )


def provisioned_w(cluster: Cluster) -> float:
    """Return the power that must be provisioned for the whole cluster."""
    return sum(pool.count * pool.machine.provisioned_w for pool in cluster.pools)


def energy_j(
    machine: Machine, *, duration_s: ArrayLike, prefill_s: ArrayLike, mixed_s: ArrayLike, decode_s: ArrayLike
) -> Floats:
    """Return the energy that machines of one type draw.

    Args:
        machine: Their type.
        duration_s: How long they are switched on, one time for all or one element a machine, >= 0; when not busy they
            idle.
        prefill_s: Time in prefill iterations, any shape, one element a machine, >= 0.
        mixed_s: Time in mixed iterations, which draw as much as prefill iterations.
        decode_s: Time in decode iterations.

    Raises:
        SpecError: A machine is busy for longer than the duration.
    """
    computing_s = np.asarray(prefill_s, dtype=np.float64) + np.asarray(mixed_s, dtype=np.float64)
    streaming_s = np.asarray(decode_s, dtype=np.float64)
    on_s = np.asarray(duration_s, dtype=np.float64)
    idle_s = on_s - computing_s - streaming_s
    if np.any(idle_s < -_BUSY_TOLERANCE_S * np.maximum(on_s, 1.0)):
        raise SpecError.bad(f"machine {machine.name}, duration_s", duration_s, "at least the time it is busy")
    return np.maximum(idle_s, 0.0) * machine.idle_w + computing_s * machine.prefill_w + streaming_s * machine.decode_w


def operational_kg_co2e(energy: float, grid_kg_per_kwh: float = WORLD_GRID_KG_PER_KWH) -> float:
    """Return the greenhouse gases of so many joules from a grid of that carbon intensity."""
    return energy / JOULES_PER_KWH * grid_kg_per_kwh


def embodied_kg_co2e(cluster: Cluster, duration_s: float, counts: Sequence[float] | None = None) -> float:
    """Return the share of making the cluster's machines that falls to so much of their service life.

    Args:
        cluster: The cluster.
        duration_s: The time.
        counts: Machines of each pool that are switched on, on the mean over that time; None: all.
    """
    return sum(
        count * pool.machine.embodied_kg_co2e * duration_s / pool.machine.lifetime_s
        for pool, count in zip(cluster.pools, _counts(cluster, counts), strict=True)
    )


def _counts(cluster: Cluster, counts: Sequence[float] | None) -> Sequence[float]:
    return [pool.count for pool in cluster.pools] if counts is None else counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a cluster costs over a run.

    Attributes:
        duration_s: How long the run lasts.
        requests: Requests it served.
        output_tokens: Tokens it generated.
        usd_per_hour: Price of the machines switched on, on the mean over the run.
        provisioned_w: Power that must be provisioned: for all machines, on or off.
        energy_j: Energy drawn.
        operational_kg_co2e: Greenhouse gases of that energy.
        embodied_kg_co2e: Share of the greenhouse gases of making the machines, for the time that they are switched on.
    """

    duration_s: float
    requests: int
    output_tokens: int
    usd_per_hour: float
    provisioned_w: float
    energy_j: float
    operational_kg_co2e: float
    embodied_kg_co2e: float

    @property
    def usd(self) -> float:
        """Price of the run."""
        return self.usd_per_hour * self.duration_s / _SECONDS_PER_HOUR

    @property
    def kg_co2e(self) -> float:
        """Greenhouse gases, operational and embodied."""
        return self.operational_kg_co2e + self.embodied_kg_co2e

    @property
    def mean_w(self) -> float:
        """Mean power drawn; NaN for a run of no length."""
        return self.energy_j / self.duration_s if self.duration_s else float("nan")

    @property
    def usd_per_request(self) -> float:
        """Price of one request; this and the other shares are NaN where nothing was served."""
        return self._per_request(self.usd)

    @property
    def energy_j_per_request(self) -> float:
        """Energy of one request."""
        return self._per_request(self.energy_j)

    @property
    def kg_co2e_per_request(self) -> float:
        """Greenhouse gases of one request."""
        return self._per_request(self.kg_co2e)

    @property
    def usd_per_million_tokens(self) -> float:
        """Price of a million output tokens."""
        return self._per_million_tokens(self.usd)

    @property
    def energy_j_per_million_tokens(self) -> float:
        """Energy of a million output tokens."""
        return self._per_million_tokens(self.energy_j)

    @property
    def kg_co2e_per_million_tokens(self) -> float:
        """Greenhouse gases of a million output tokens."""
        return self._per_million_tokens(self.kg_co2e)

    def _per_request(self, amount: float) -> float:
        return amount / self.requests if self.requests else float("nan")

    def _per_million_tokens(self, amount: float) -> float:
        return amount / self.output_tokens * 1e6 if self.output_tokens else float("nan")


def bill(
    cluster: Cluster,
    *,
    duration_s: float,
    prefill_s: Floats,
    mixed_s: Floats,
    decode_s: Floats,
    requests: int,
    output_tokens: int,
    grid_kg_per_kwh: float = WORLD_GRID_KG_PER_KWH,
    on_s: Floats | None = None,
) -> Bill:
    """Return what a run of a cluster costs.

    Args:
        cluster: The cluster.
        duration_s: How long the run lasts.
        prefill_s: float64 (cluster.machines,), time that each machine spends in prefill iterations.
        mixed_s: The same for mixed iterations.
        decode_s: The same for decode iterations.
        requests: Requests served.
        output_tokens: Tokens generated.
        grid_kg_per_kwh: Carbon intensity of the electricity.
        on_s: float64 (cluster.machines,), time that each machine is switched on; None: all of the duration. A machine
            that is off costs and draws nothing.

    Raises:
        SpecError: A machine is busy for longer than it is switched on.
    """
    on_s = np.full(cluster.machines, duration_s) if on_s is None else on_s
    counts = []
    drawn_j = 0.0
    first = 0
    for pool in cluster.pools:
        own = slice(first, first + pool.count)
        # A sum of shares: machines that are always on count as exactly one each.
        counts.append(float((on_s[own] / duration_s).sum()) if duration_s else pool.count)
        drawn_j += float(
            energy_j(
                pool.machine,
                duration_s=on_s[own],
                prefill_s=prefill_s[own],
                mixed_s=mixed_s[own],
                decode_s=decode_s[own],
            ).sum()
        )
        first += pool.count
    return Bill(
        duration_s=duration_s,
        requests=requests,
        output_tokens=output_tokens,
        usd_per_hour=usd_per_hour(cluster, counts),
        provisioned_w=provisioned_w(cluster),
        energy_j=drawn_j,
        operational_kg_co2e=operational_kg_co2e(drawn_j, grid_kg_per_kwh),
        embodied_kg_co2e=embodied_kg_co2e(cluster, duration_s, counts),
    )
