"""What a plan is asked: traffic, model, machines on offer, limits, and what to spare."""

from dataclasses import dataclass, field
from typing import NamedTuple

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.money import WORLD_GRID_KG_PER_KWH
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.slo import SPLITWISE, Slo
from phasesplit.planning.objective import Measure
from phasesplit.planning.traffic import Traffic
from phasesplit.scheduling.rules import Rules


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
    """How the question is bent to see what the answer depends on; each a factor on what was asked.

    Attributes:
        ratio: On prompt tokens per output token.
        link: On the bandwidth of network cards, or of a measured link.
        tightness: On every limit of the SLO (above 1: looser).
    """

    ratio: float = 1.0
    link: float = 1.0
    tightness: float = 1.0


AS_ASKED = Variation()
