"""What a plan minimises or keeps within a budget: money, power, energy, greenhouse gases, servers."""

from enum import StrEnum

from phasesplit.domain.machine import Machine
from phasesplit.domain.money import JOULES_PER_KWH

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
