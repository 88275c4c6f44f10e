"""The problem that a plan solves: model, machines on offer, traffic, SLO, what to minimise, budgets.

`Measure` is what a plan minimises or keeps within a budget: money, power, energy, greenhouse gases, servers. `Traffic`
draws the requests, at any rate. `Variation` changes the problem, to see what its answer depends on.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import isclose
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel
from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.money import JOULES_PER_KWH, WORLD_GRID_KG_PER_KWH
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.domain.slo import SPLITWISE, Slo
from phasesplit.domain.workload import LengthTable, Workload, resample
from phasesplit.errors import SpecError
from phasesplit.scheduler.rules import Rules

_SECONDS_PER_HOUR = 3600.0


class Measure(StrEnum):
    """A quantity that a cluster takes, each in its unit of `UNITS`."""

    COST = "cost"
    POWER = "power"
    """Provisioned, which is what a data centre runs out of."""
    ENERGY = "energy"
    """Drawn on the mean."""
    CARBON = "carbon"
    """Operational and embodied."""
    MACHINES = "machines"
    """Whole servers."""


UNITS = {
    Measure.COST: "USD/h",
    Measure.POWER: "W",
    Measure.ENERGY: "W",
    Measure.CARBON: "kg CO2e/h",
    Measure.MACHINES: "servers",
}

ADDITIVE = (Measure.COST, Measure.POWER, Measure.MACHINES)
"""What follows from the list of machines alone, without a simulation."""


def of_one(measure: Measure, machine: Machine, grid_kg_per_kwh: float) -> float:
    """Return what one instance on a machine takes; of energy and carbon, what it takes idle.

    Args:
        measure: The quantity.
        machine: The machine, perhaps a slice of a server.
        grid_kg_per_kwh: Carbon intensity of the electricity.
    """
    if measure == Measure.COST:
        return machine.price_usd_per_hour
    if measure == Measure.POWER:
        return machine.provisioned_w
    if measure == Measure.MACHINES:
        return 1 / machine.instances_per_server
    if measure == Measure.ENERGY:
        return machine.idle_w
    embodied = machine.embodied_kg_co2e * _SECONDS_PER_HOUR / machine.lifetime_s
    return embodied + kg_per_hour(machine.idle_w, grid_kg_per_kwh)


def kg_per_hour(power_w: float, grid_kg_per_kwh: float) -> float:
    """Return the greenhouse gases of drawing so much power for an hour."""
    return power_w * _SECONDS_PER_HOUR / JOULES_PER_KWH * grid_kg_per_kwh


Floats = NDArray[np.float64]

_DOUBLINGS = 10
_MOST_TIMES_PLANNED = 4
"""So many times the planned number of requests are drawn at most: a cluster of one machine may hold a thousand times a
low rate, over the hours that a low rate takes."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Traffic:
    """A workload or a recorded trace, the rate it is wanted at, and how long each simulation of it lasts.

    Attributes:
        source: A workload, from which traces are drawn, or a recorded trace, whose pattern of arrivals is kept.
        rate_per_s: Mean rate to plan for, > 0.
        duration_s: Length of each simulated trace, > 0.
        arrivals: Another arrival model than the source's own.
        oracle: Let the scheduler see true output lengths.
    """

    source: Workload | Trace
    rate_per_s: float
    duration_s: float
    arrivals: ArrivalModel | None = None
    oracle: bool = False

    @property
    def name(self) -> str:
        """Name of the source."""
        return self.source.name

    @property
    def lengths(self) -> LengthTable:
        """Joint lengths of prompts and outputs."""
        if isinstance(self.source, Workload):
            return self.source.lengths
        return LengthTable.counted(self.source.prompt_tokens, self.source.output_tokens)

    def trace(self, rate_per_s: float, seed: int, ratio: float = 1.0) -> Trace:
        """Return requests at a rate; a seed gives the same requests at every rate (common random numbers).

        A recorded trace is played over the same share of its pattern, or as many times, at every rate. Seed 0 has its
        own rows in their own order; other seeds keep its arrivals and draw rows again, whole. A drawn trace at a rate
        far above the planned one ends earlier.

        Args:
            rate_per_s: Mean arrival rate, > 0.
            seed: Seed, >= 0.
            ratio: Factor on the ratio of prompt to output tokens, > 0: prompts longer by its root, outputs shorter.
        """
        requests = self.duration_s * self.rate_per_s
        if isinstance(self.source, Workload):
            drawn = self._drawn(rate_per_s, min(self.duration_s, _MOST_TIMES_PLANNED * requests / rate_per_s), seed)
        elif (rounds := round(requests / len(self.source))) and isclose(rounds * len(self.source), requests):
            # Half a mean gap more, and no request more: the last round is whole whatever the rounding.
            drawn = self._drawn(rate_per_s, (requests + 0.5) / rate_per_s, seed).head(rounds * len(self.source))
        else:
            drawn = self._drawn(rate_per_s, requests / rate_per_s, seed)
        return drawn if ratio == 1.0 else _with_ratio(drawn, ratio)

    def _drawn(self, rate_per_s: float, duration_s: float, seed: int) -> Trace:
        """Return requests; where bursts leave a short trace without any, it lasts twice as long, and again."""
        for _ in range(_DOUBLINGS):
            try:
                return self._in(rate_per_s, duration_s, seed)
            except SpecError:
                duration_s *= 2
        return self._in(rate_per_s, duration_s, seed)

    def _in(self, rate_per_s: float, duration_s: float, seed: int) -> Trace:
        source = self.source
        if isinstance(source, Workload):
            return source.trace(rate_per_s, duration_s, seed, arrivals=self.arrivals, oracle=self.oracle)
        drawn = resample(source, rate_per_s, duration_s=duration_s, seed=seed, arrivals=self.arrivals)
        if not seed:
            return drawn
        rows = np.random.default_rng(seed).integers(0, len(source), len(drawn))
        return replace(
            drawn,
            prompt_tokens=source.prompt_tokens[rows],
            output_tokens=source.output_tokens[rows],
            expected_tokens=source.expected_tokens[rows],
            prefix_offsets=None,
            prefix_ids=None,
        )


def scaled_lengths(lengths: LengthTable, ratio: float) -> LengthTable:
    """Return lengths with another ratio of prompt to output tokens, as `Traffic.trace` scales them."""
    if ratio == 1.0:
        return lengths
    return LengthTable(
        _scaled(lengths.prompt_tokens, ratio**0.5), _scaled(lengths.output_tokens, ratio**-0.5), lengths.requests
    )


def _with_ratio(trace: Trace, ratio: float) -> Trace:
    return replace(
        trace,
        prompt_tokens=_scaled(trace.prompt_tokens, ratio**0.5),
        output_tokens=_scaled(trace.output_tokens, ratio**-0.5),
        expected_tokens=_scaled(trace.expected_tokens, ratio**-0.5),
        prefix_offsets=None,
        prefix_ids=None,
    )


def _scaled(tokens: NDArray[np.int32], factor: float) -> NDArray[np.int32]:
    scaled: NDArray[np.int32] = np.maximum(np.rint(tokens * factor), 1).astype(np.int32)
    return scaled


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Offer:
    """A type of machine that may be used.

    Attributes:
        machine: The machine, perhaps a slice of a server or one under a power cap.
        times: Phase times of the model on it.
        variant_of: Name of the machine that this is another setting of ("" for a machine as it was asked for).
        existing: How many servers there are (None: as many as wanted).
    """

    machine: Machine
    times: PhaseTimes
    variant_of: str = ""
    existing: int | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Problem:
    """What a plan is asked.

    Attributes:
        model: The model to serve.
        offers: Machines on offer, at least one.
        traffic: The requests.
        slo: What has to hold, on every seed.
        objective: What to minimise; None: find the design with the highest rate within `budgets`.
        budgets: The most that may be taken of each measure, in its unit.
        reference: Phase times that slowdowns compare with; None: no slowdowns.
        seeds: Seeds of the traces; a design holds when it holds on each.
        rules: The scheduler's settings; each design changes what makes it the design it is.
        grid_kg_per_kwh: Carbon intensity of the electricity.
        most_servers: No cluster of more servers is looked at.
    """

    model: Model
    offers: tuple[Offer, ...]
    traffic: Traffic
    slo: Slo = SPLITWISE
    objective: Measure | None = Measure.COST
    budgets: dict[Measure, float] = field(default_factory=dict)
    reference: PhaseTimes | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    rules: Rules = field(default_factory=Rules)
    grid_kg_per_kwh: float = WORLD_GRID_KG_PER_KWH
    most_servers: int = 2_000

    @property
    def machines_exist(self) -> bool:
        """Whether the machines are there already and are to be divided, none bought and none left out."""
        return any(offer.existing is not None for offer in self.offers)


class Variation(NamedTuple):
    """How the question is varied to see what the answer depends on; each a factor on what was asked.

    Attributes:
        ratio: On prompt tokens per output token.
        link: On the bandwidth of network cards, or of a measured link.
        tightness: On every limit of the SLO (above 1: looser).
    """

    ratio: float = 1.0
    link: float = 1.0
    tightness: float = 1.0


AS_ASKED = Variation()
