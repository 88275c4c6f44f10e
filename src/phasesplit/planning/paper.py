"""What was published: every figure that the study is compared with, where it is from, and where the paper disagrees."""

from dataclasses import dataclass
from typing import NamedTuple

NOT_AT_HAND = "not at hand"
"""Stands where no published figure is known: nothing is made up."""

TAGS = {
    "P": "the Splitwise paper (ISCA 2024, arXiv 2311.18677)",
    "S": "its published simulator and data",
    "R": "the published simulator run again: 60 s of Poisson arrivals, one seed, rates in steps of 10/s",
    "C": "computed from those",
}
"""What the letter behind a published figure means."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A published figure.

    Attributes:
        number: Its value in the unit of the row that it stands in; NaN where none is known.
        text: As it reads.
        tag: A key of TAGS; "" where none is known.
    """

    number: float
    text: str
    tag: str

    def __str__(self) -> str:
        return f"{self.text} ({self.tag})" if self.tag else self.text


NOTHING = Figure(float("nan"), NOT_AT_HAND, "")

COST_OPTIMAL = Figure(27 * 38.08 + 3 * 38.08, "27P 3T", "P")
"""Cheapest Splitwise-HH for coding at 70 requests/s; the number is its price in USD/h."""

PUBLISHED_RATIOS = {
    "AA / Baseline-A100": Figure(2.15, "2.15x", "P"),
    "HA / Baseline-H100": Figure(1.18, "1.18x", "P"),
    "iso-cost AA / Baseline-H100": Figure(1.4, "1.4x", "P"),
    "HA cost": Figure(-0.10, "-10 %", "P"),
    "iso-cost AA power": Figure(0.25, "+25 %", "P"),
    "iso-throughput HHcap power": Figure(-0.25, "-25 %", "P"),
    "iso-throughput AA cost": Figure(-0.25, "-25 %", "P"),
}
"""What the paper says in prose."""

ROBUSTNESS = {
    "AA": Figure(0.0, "no change", "P"),
    "HH": Figure(0.0, "no change", "P"),
    "HA": Figure(-0.07, "-7 %", "P"),
    "HHcap": Figure(-0.07, "-7 %", "P"),
}
"""Throughput of the conversation workload on the cluster that was sized for coding, against its own cluster."""

RERUN = {
    "A100": Figure(50, "50", "R"),
    "H100": Figure(120, "120", "R"),
    "AA": Figure(120, "120", "R"),
    "HH": Figure(120, "120", "R"),
    "HA": Figure(140, "140", "R"),
    "HHcap": Figure(140, "140", "R"),
}
"""Requests/s that the iso-power clusters hold on the conversation workload, BLOOM-176B."""

RERUN_STEP_PER_S = 10.0
"""Steps of the rates tried in RERUN."""


class Contradiction(NamedTuple):
    """A point at which the paper disagrees with itself.

    Attributes:
        what: What it is about.
        one: What one place says.
        other: What another says.
        here: What the study uses, and what the other would change.
    """

    what: str
    one: str
    other: str
    here: str


CONTRADICTIONS = (
    Contradiction(
        "power of DGX-A100 to DGX-H100",
        "24.8 to 44.0 in the budgets (S): 40 DGX-H100 = 70 DGX-A100",
        "6.5 to 10.2 kW nameplate (S): 40 DGX-H100 = 62 DGX-A100",
        "the budgets' ratio, which makes a DGX-A100 5.75 kW where a DGX-H100 has 10.2; by nameplate every A100 figure"
        " of the iso-power rows would be for 11 % fewer machines",
    ),
    Contradiction(
        "price of DGX-H100 to DGX-A100",
        "38 to 17.6 USD/h in the table (P), 38.08 to 17.68 in the simulator (S): 2.154x, 40 DGX-H100 = 86 DGX-A100",
        "2.35x and 2.5x elsewhere in the text (P): 94 or 100 DGX-A100",
        "2.154x; the paper's own iso-cost clusters have 86 machines",
    ),
    Contradiction(
        "arithmetic of A100 and H100",
        "19.5 and 66.9 TFLOP/s in the table of machines (P), which is FP32",
        "312 and 989 TFLOP/s dense FP16 (vendor), in which the models run",
        "neither: phase times are measured",
    ),
    Contradiction(
        "price of Splitwise-HA",
        "10 % below Baseline-H100 (P)",
        "25P 26T costs 7.3 % less and 35P 8T 3.2 % less, by the paper's own prices (C)",
        "the price computed",
    ),
    Contradiction(
        "power of the iso-cost Splitwise-AA",
        "25 % above Baseline-H100 (P)",
        "86 DGX-A100 take 21 % more by the budgets' ratio, 37 % more by nameplate (C)",
        "both computed",
    ),
    Contradiction(
        "throughput of the iso-cost Splitwise-AA",
        "1.4x Baseline-H100 (P)",
        "the published simulator's 120/s of 70 machines (R), scaled to 86, is 147/s or 1.23x its Baseline-H100 (C)",
        "what the clusters hold",
    ),
)
"""Where the paper disagrees with itself."""
