"""From the published study to the default, one correction at a time: the problem at each rung of the ladder."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from phasesplit.domain.arrivals import Poisson
from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.variants import networked
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.planning.problem import Offer, Problem
from phasesplit.planning.traffic import Traffic
from phasesplit.scheduling.rules import Rules, Transfer

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


class Rung(IntEnum):
    """What is right at a rung, beside all that is at the rungs before it."""

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
    Rung.PUBLISHED: "as published",
    Rung.DECODE: "decode time grows with the batch",
    Rung.SCHEDULER: "default scheduler and KV accounts",
    Rung.GQA: "grouped-query attention",
    Rung.CONTEXT: "context is read at memory speed",
    Rung.TIMES: "context as slow as measured at batch 1",
    Rung.MEMORY: "a tenth of memory kept free",
    Rung.TRANSFER: "transfers contend and slow prompts",
    Rung.CHUNKED: "unsplit machines chunk prompts",
    Rung.JOINT: "joint lengths",
    Rung.BURSTY: "real burstiness",
}

DEFAULT = Rung.JOINT
"""The rung at which everything about the system is right, with the paper's Poisson arrivals."""

REPORTED = (Rung.PUBLISHED, DEFAULT, Rung.BURSTY)
"""The rungs that have a column of their own."""


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
    stock: Stock, rung: Rung, workload: str, model: str, *, rate_per_s: float, duration_s: float, seeds: tuple[int, ...]
) -> Problem:
    """Return the problem of a workload and a model at a rung.

    Args:
        stock: What the study is made of.
        rung: What is right.
        workload: Its name.
        model: Its name.
        rate_per_s: Rate that a search for the cheapest cluster has to hold.
        duration_s: Length of each simulated trace.
        seeds: Seeds of the traces.
    """
    served = stock.models[model]
    if rung < Rung.GQA:
        served = replace(served, kv_heads=served.query_heads)
    source = stock.workloads[workload]
    if rung < Rung.JOINT:
        source = replace(source, lengths=independent(source.lengths))
    reference = stock.published[model, A100] if rung <= Rung.DECODE else _times(stock, rung, model, A100)
    return Problem(
        model=served,
        offers=tuple(_offer(stock, rung, model, name) for name in MACHINES),
        traffic=Traffic(
            source=source,
            rate_per_s=rate_per_s,
            duration_s=duration_s,
            arrivals=None if rung >= Rung.BURSTY else Poisson(),
        ),
        reference=reference,
        seeds=seeds,
        rules=_rules(rung),
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


def _rules(rung: Rung) -> Rules:
    if rung <= Rung.DECODE:
        return Rules.as_published()
    rules = Rules()
    if rung < Rung.MEMORY:
        rules = replace(rules, hbm_share=1.0, kv_headroom=0.0)
    if rung < Rung.TRANSFER:
        rules = replace(rules, transfer=Transfer.SERIALIZED)
    return rules


def _offer(stock: Stock, rung: Rung, model: str, name: str) -> Offer:
    machine = stock.machines[name]
    machine = replace(machine, provisioned_w=paper_w(machine, stock.machines[H100]))
    if Rung.SCHEDULER <= rung < Rung.TRANSFER:
        machine = networked(machine, _FREE_LINK)
    return Offer(machine=machine, times=_times(stock, rung, model, name))


def _times(stock: Stock, rung: Rung, model: str, name: str) -> PhaseTimes:
    looked_up, right = stock.published[model, name], stock.right[model, name]
    if rung == Rung.PUBLISHED:
        return looked_up
    if rung >= Rung.TIMES:
        return right
    slope_s = 0.0
    if rung >= Rung.CONTEXT:
        slope_s = stock.models[model].kv_bytes_per_token / stock.machines[name].hbm_bytes_per_s
    # With the 512-token prompts of the measurement, a batch takes what was measured at every rung.
    knots = right.token_knots_requests
    context = knots * _MEASURED_CONTEXT_TOKENS
    return replace(
        looked_up,
        source=f"{looked_up.source}, token times by batch as measured",
        token_knots_requests=knots,
        token_knots_s=right.token_time_s(knots, context) - slope_s * context,
        token_context_s=slope_s,
        measured_requests=right.measured_requests,
    )


def effective(rung: Rung, *, split: bool, grouped: bool) -> Rung:
    """Return the last rung up to this one that changes anything for such a cluster.

    Args:
        rung: The rung.
        split: Whether the cluster is split.
        grouped: Whether the model's heads share KV.
    """
    idle = {Rung.CHUNKED} if split else {Rung.TRANSFER}
    if not grouped:
        idle.add(Rung.GQA)
    while rung in idle:
        rung = Rung(rung - 1)
    return rung
