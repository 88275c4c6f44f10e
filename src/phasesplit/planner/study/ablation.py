"""The ablation from the published study to the default: its steps, the published figures, and what each step changes.

The published simulator and phasesplit's default differ in ten corrections. `AblationStep` puts them in order, and the
study runs with the first ones of them on:

1. `problem_at` returns the problem of a workload and a model with the corrections up to a step.
2. `effective` returns the last step that changes anything for a cluster, so that equal problems run once.
3. The published figures stand here with their sources, and the places where the paper contradicts itself.
4. `why` and `why_bursty` name the corrections that moved a figure; `beside_paper` compares a figure with the
   published one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from phasesplit.domain.arrivals import Poisson
from phasesplit.domain.machine import Machine, networked
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.planner.problem import Offer, Problem, Traffic
from phasesplit.scheduler.rules import Rules, Transfer

A100, H100, CAPPED = "dgx-a100", "dgx-h100", "dgx-h100-capped"
MACHINES = (A100, H100, CAPPED)
"""The study's machines; a problem offers them in this order."""

PAPER_POWER = {A100: 24.8, H100: 44.0, CAPPED: 30.8}
"""Power of a machine as the paper budgets it, relative to one another. Source: notebook of the published simulator."""

_MEASURED_CONTEXT_TOKENS = 512.0
"""Prompt of the requests with which decode times were measured by batch."""
_FREE_LINK = 1e3
"""Factor on network cards at which transfers take no time to speak of."""
_LEAST_PUBLISHED_OUTPUT = 2
_PAIRING_SEED = 0


class AblationStep(IntEnum):
    """What is right at a step, in addition to all that is at the steps before it."""

    PUBLISHED = 0
    """Nothing: the published rules, look-up of times, lengths drawn independently, Poisson arrivals."""
    DECODE = 1
    """A decode iteration takes longer with more requests, as measured; all rules are still the published ones."""
    SCHEDULER = 2
    """The default scheduler: paged KV, true output lengths unseen, no tasks stuck; transfers still take no time."""
    GQA = 3
    """Heads that share KV count once."""
    CONTEXT = 4
    """A decode iteration reads the KV of its whole context, at the bandwidth of the memory."""
    TIMES = 5
    """Context costs what was measured (at a batch of 1), and so do pairs of prompt tokens."""
    MEMORY = 6
    """A tenth of the memory stays free for activations."""
    TRANSFER = 7
    """KV moves over shared network cards, and streaming it slows prefill down."""
    CHUNKED = 8
    """Unsplit machines chunk prompts."""
    JOINT = 9
    """Prompt and output lengths are drawn as the pairs they came in."""
    BURSTY = 10
    """Arrivals are as bursty as the trace's."""

    @property
    def label(self) -> str:
        """How a report calls the correction."""
        return _LABELS[self]


_LABELS = {
    AblationStep.PUBLISHED: "as published",
    AblationStep.DECODE: "decode time grows with the batch",
    AblationStep.SCHEDULER: "default scheduler and KV accounts",
    AblationStep.GQA: "grouped-query attention",
    AblationStep.CONTEXT: "context is read at memory speed",
    AblationStep.TIMES: "context as slow as measured at batch 1",
    AblationStep.MEMORY: "a tenth of memory kept free",
    AblationStep.TRANSFER: "transfers contend and slow prompts",
    AblationStep.CHUNKED: "unsplit machines chunk prompts",
    AblationStep.JOINT: "joint lengths",
    AblationStep.BURSTY: "real burstiness",
}

DEFAULT = AblationStep.JOINT
"""The step at which everything about the system is right, with the paper's Poisson arrivals."""

REPORTED = (AblationStep.PUBLISHED, DEFAULT, AblationStep.BURSTY)
"""The steps that have a column of their own."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stock:
    """What the study is made of.

    Attributes:
        models: By name.
        machines: Those of MACHINES, by name.
        workloads: By name.
        right: Measured phase times by model and machine.
        published: The published look-up by model and machine.
    """

    models: Mapping[str, Model]
    machines: Mapping[str, Machine]
    workloads: Mapping[str, Workload]
    right: Mapping[tuple[str, str], PhaseTimes]
    published: Mapping[tuple[str, str], PhaseTimes]


def problem_at(
    stock: Stock,
    ablation_step: AblationStep,
    workload: str,
    model: str,
    *,
    rate_per_s: float,
    duration_s: float,
    seeds: tuple[int, ...],
) -> Problem:
    """Return the problem of a workload and a model at a step.

    Args:
        stock: What the study is made of.
        ablation_step: What is right.
        workload: Its name.
        model: Its name.
        rate_per_s: Rate that a search for the cheapest cluster has to hold.
        duration_s: Length of each simulated trace.
        seeds: Seeds of the traces.
    """
    served = stock.models[model]
    if ablation_step < AblationStep.GQA:
        served = replace(served, kv_heads=served.query_heads)
    source = stock.workloads[workload]
    if ablation_step < AblationStep.JOINT:
        source = replace(source, lengths=independent(source.lengths))
    reference = (
        stock.published[model, A100]
        if ablation_step <= AblationStep.DECODE
        else _times(stock, ablation_step, model, A100)
    )
    return Problem(
        model=served,
        offers=tuple(_offer(stock, ablation_step, model, name) for name in MACHINES),
        traffic=Traffic(
            source=source,
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            arrivals=None if ablation_step >= AblationStep.BURSTY else Poisson(),
        ),
        reference=reference,
        seeds=seeds,
        rules=_rules(ablation_step),
    )


def independent(lengths: LengthTable) -> LengthTable:
    """Return the lengths with outputs paired anew at random, at least two tokens each, as the published study has them.

    The published program stops with an error at an output of one token.
    """
    prompt = np.repeat(lengths.prompt_tokens, lengths.requests)
    output = np.random.default_rng(_PAIRING_SEED).permutation(np.repeat(lengths.output_tokens, lengths.requests))
    return LengthTable.counted(prompt, np.maximum(output, _LEAST_PUBLISHED_OUTPUT))


def paper_w(machine: Machine, h100: Machine) -> float:
    """Return the power the paper budgets for a machine in watts, on the scale on which a DGX-H100 has its nameplate."""
    return h100.provisioned_w * PAPER_POWER[machine.name] / PAPER_POWER[H100]


def _rules(ablation_step: AblationStep) -> Rules:
    if ablation_step <= AblationStep.DECODE:
        return Rules.as_published()
    rules = Rules()
    if ablation_step < AblationStep.MEMORY:
        rules = replace(rules, hbm_share=1.0, kv_headroom=0.0)
    if ablation_step < AblationStep.TRANSFER:
        rules = replace(rules, transfer=Transfer.SERIALIZED)
    return rules


def _offer(stock: Stock, ablation_step: AblationStep, model: str, name: str) -> Offer:
    machine = stock.machines[name]
    machine = replace(machine, provisioned_w=paper_w(machine, stock.machines[H100]))
    if AblationStep.SCHEDULER <= ablation_step < AblationStep.TRANSFER:
        machine = networked(machine, _FREE_LINK)
    return Offer(machine=machine, times=_times(stock, ablation_step, model, name))


def _times(stock: Stock, ablation_step: AblationStep, model: str, name: str) -> PhaseTimes:
    looked_up, right = stock.published[model, name], stock.right[model, name]
    if ablation_step == AblationStep.PUBLISHED:
        return looked_up
    if ablation_step >= AblationStep.TIMES:
        return right
    slope_s = 0.0
    if ablation_step >= AblationStep.CONTEXT:
        slope_s = stock.models[model].kv_bytes_per_token / stock.machines[name].hbm_bytes_per_s
    # With the 512-token prompts of the measurement, a batch takes what was measured at every step.
    knots = right.decode_knots_requests
    context = knots * _MEASURED_CONTEXT_TOKENS
    return replace(
        looked_up,
        source=f"{looked_up.source}, decode times by batch as measured",
        decode_knots_requests=knots,
        decode_knots_s=right.decode_time_s(knots, context) - slope_s * context,
        decode_context_s=slope_s,
        measured_requests=right.measured_requests,
    )


def effective(ablation_step: AblationStep, *, split: bool, grouped: bool) -> AblationStep:
    """Return the last step up to this one that changes anything for such a cluster.

    Args:
        ablation_step: The step.
        split: Whether the cluster is split.
        grouped: Whether the model's heads share KV.
    """
    idle = {AblationStep.CHUNKED} if split else {AblationStep.TRANSFER}
    if not grouped:
        idle.add(AblationStep.GQA)
    while ablation_step in idle:
        ablation_step = AblationStep(ablation_step - 1)
    return ablation_step


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
class PublishedFigure:
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


NOTHING = PublishedFigure(float("nan"), NOT_AT_HAND, "")

COST_OPTIMAL = PublishedFigure(27 * 38.08 + 3 * 38.08, "27P 3T", "P")
"""Cheapest Splitwise-HH for coding at 70 requests/s; the number is its price in USD/h."""

PUBLISHED_RATIOS = {
    "AA / Baseline-A100": PublishedFigure(2.15, "2.15x", "P"),
    "HA / Baseline-H100": PublishedFigure(1.18, "1.18x", "P"),
    "iso-cost AA / Baseline-H100": PublishedFigure(1.4, "1.4x", "P"),
    "HA cost": PublishedFigure(-0.10, "-10 %", "P"),
    "iso-cost AA power": PublishedFigure(0.25, "+25 %", "P"),
    "iso-throughput HHcap power": PublishedFigure(-0.25, "-25 %", "P"),
    "iso-throughput AA cost": PublishedFigure(-0.25, "-25 %", "P"),
}
"""What the paper says in prose."""

ROBUSTNESS = {
    "AA": PublishedFigure(0.0, "no change", "P"),
    "HH": PublishedFigure(0.0, "no change", "P"),
    "HA": PublishedFigure(-0.07, "-7 %", "P"),
    "HHcap": PublishedFigure(-0.07, "-7 %", "P"),
}
"""Throughput of the conversation workload on the cluster that was sized for coding, against its own cluster."""

RERUN = {
    "A100": PublishedFigure(50, "50", "R"),
    "H100": PublishedFigure(120, "120", "R"),
    "AA": PublishedFigure(120, "120", "R"),
    "HH": PublishedFigure(120, "120", "R"),
    "HA": PublishedFigure(140, "140", "R"),
    "HHcap": PublishedFigure(140, "140", "R"),
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


LEAST = 0.03
"""A smaller change is not named: seeds alone move a capacity by as much."""


class Change(NamedTuple):
    """What one correction did.

    Attributes:
        ablation_step: The correction.
        share: Change of the figure against the step before it.
    """

    ablation_step: AblationStep
    share: float


def changes(ablated_steps: Mapping[AblationStep, float]) -> list[Change]:
    """Return what each step changed, in order; steps that are missing count as part of the next one."""
    found = []
    ablation_steps = sorted(ablated_steps)
    for before, ablation_step in pairwise(ablation_steps):
        base = ablated_steps[before]
        share = (
            ablated_steps[ablation_step] / base - 1 if base else (float("inf") if ablated_steps[ablation_step] else 0.0)
        )
        found.append(Change(ablation_step, share))
    return found


def why(ablated_steps: Mapping[AblationStep, float]) -> str:
    """Return the corrections that moved a figure by LEAST or more from the published step up to the default's."""
    system = [one for one in changes(ablated_steps) if one.ablation_step <= DEFAULT]
    return _listed(system) if system else ""


def why_bursty(ablated_steps: Mapping[AblationStep, float]) -> str:
    """Return what real burstiness moved the default's figure by, "" where that is little or was not looked at."""
    return _listed(
        [one for one in changes(ablated_steps) if one.ablation_step > DEFAULT and abs(one.share) >= LEAST], nothing=""
    )


def beside_paper(published: PublishedFigure, ours: float, per_seed: tuple[float, ...] = (), step: float = 0.0) -> str:
    """Return how far the published setting is from the published figure, and what chance alone explains.

    Args:
        published: The published figure.
        ours: The same in setting `published`, in its unit.
        per_seed: The same on each seed alone.
        step: Width of the grid that the published figure was read from; 0 for none.
    """
    if published.number != published.number:
        return ""
    off = ours / published.number - 1
    text = f"published setting {abs(off):.0%} {'above' if off > 0 else 'below'} the published figure".replace("%", " %")
    if step:
        within = abs(ours // step * step - published.number) <= step
        text += f", {'within' if within else 'beyond'} one step of its grid of {step:g}/s"
    if len(per_seed) > 1:
        text += f"; seeds alone give {min(per_seed):.1f} to {max(per_seed):.1f}"
    return text


def signed(share: float) -> str:
    """Return a change in per cent."""
    return "from nothing" if share == float("inf") else f"{100 * share:+.0f} %"


def _listed(
    found: list[Change], nothing: str = f"no correction moves it by {LEAST:.0%} or more".replace("%", " %")
) -> str:
    named = [f"{one.ablation_step.label} {signed(one.share)}" for one in found if abs(one.share) >= LEAST]
    return "; ".join(named) or nothing
