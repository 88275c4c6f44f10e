"""A day under a plan: what autoscaling policies save on a load that has a shape, and who pays for it in latency."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from phasesplit.domain.arrivals import Diurnal
from phasesplit.domain.request import Trace
from phasesplit.domain.workload import Workload, resample
from phasesplit.planner.designs import Counts, Design, cluster_for, rules_for
from phasesplit.planner.problem import Problem, Traffic
from phasesplit.scheduler.autoscaling import DAY_S, Joint, Policy, Schedule, Static, Threshold
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

AMPLITUDE = 0.5
"""Swing of a day's rate around its mean, where the source has no day of its own. Source: assumed."""
_HOURS = 24
_HIGH, _LOW, _PREFILL_LOW = 1.2, 0.5, 0.1
"""Work per machine, as a multiple of that at the planned rate, above which a threshold grows, and below which it
shrinks. A prefill machine has one or two prompts at a time, so that a look at one moment often sees none: it takes less
to believe that there is too little to do. Source: ours, tried on one plan."""
_COOLDOWN_S = 300.0
"""Time that thresholds leave a role alone after a change. Source: as above."""
_DIGITS = 4


class DayQuestion(NamedTuple):
    """How a cluster does over a day under a policy.

    Attributes:
        design: What the machines do.
        counts: Instances of each slot: the most that a policy may switch on.
        rate_per_s: The planned rate: the day's peak, or the mean of a recorded trace.
        policy: The policy.
        seed: Of the day.
        written: The policy as a person wrote it, "" where it was fitted.
    """

    design: Design
    counts: Counts
    rate_per_s: float
    policy: Policy
    seed: int
    written: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """How a cluster did over a day under a policy.

    Attributes:
        design: The design.
        counts: Its counts: instances of each slot that there are.
        policy: The policy.
        written: The policy as a person wrote it, "" where it was fitted.
        requests: Requests of the day.
        machine_hours: Hours that servers were switched on, all together; an instance on a part counts as that part.
        usd: Money.
        energy_j: Energy.
        kg_co2e: Greenhouse gases.
        changes: Machines started and stopped.
        missed_share: Share of requests that missed the SLO, NaN where it has no limits on single requests.
        worst_hour_share: The same in the worst hour.
        holds: Whether the SLO holds over the whole day.
    """

    design: Design
    counts: Counts
    policy: Policy
    written: str
    requests: int
    machine_hours: float
    usd: float
    energy_j: float
    kg_co2e: float
    changes: int
    missed_share: float
    worst_hour_share: float
    holds: bool


def wave_of(traffic: Traffic) -> Diurnal | None:
    """Return the sine that the rate of a day follows; None where a recorded trace keeps its own pattern."""
    return Diurnal(amplitude=AMPLITUDE) if isinstance(traffic.source, Workload) else None


def mean_of(traffic: Traffic) -> float:
    """Return the mean rate of a day: its peak is the planned rate, or a recorded trace has that as its mean.

    A recorded trace's own peaks were planned for already.
    """
    wave = wave_of(traffic)
    return traffic.rate_per_s if wave is None else traffic.rate_per_s / (1 + wave.amplitude)


def requests_of(traffic: Traffic) -> int:
    """Return about how many requests a day has."""
    return math.ceil(mean_of(traffic) * DAY_S)


def day_of(traffic: Traffic, seed: int) -> Iterator[Trace]:
    """Return the requests of a day in stretches; a recorded trace is played until the day is full."""
    if isinstance(traffic.source, Workload):
        return traffic.source.chunks(
            mean_of(traffic), requests_of(traffic), seed, arrivals=wave_of(traffic), oracle=traffic.oracle
        )
    day = resample(traffic.source, mean_of(traffic), duration_s=DAY_S, seed=seed, arrivals=traffic.arrivals)
    return iter([day])


def policies_for(problem: Problem, design: Design, counts: Counts, at_peak: Result) -> list[Policy]:
    """Return policies fitted to a cluster that was sized for the peak: nothing, thresholds, joint, and schedule.

    At the planned rate all machines serve, so that what each of them has to do then is what the others are held to.
    The schedule needs to know the day, and is left out where its shape is that of a recorded trace.

    Args:
        problem: The problem; its rate is the day's peak.
        design: The design.
        counts: Its counts.
        at_peak: A simulation of them at the planned rate, with every row kept.
    """
    traffic = problem.traffic
    most = by_role(design, counts)
    units = _units(problem, design)
    prompts, outputs = _pending_tokens(traffic, at_peak)
    # The tokens of both phases wait at unsplit machines, where outputs are by far the most.
    first_tokens = prompts / most[0] if design.kind.is_split else (prompts + outputs) / most[0]
    low = _PREFILL_LOW if design.kind.is_split else _LOW
    decode_tokens = outputs / most[-1]
    outputs_per_s = traffic.rate_per_s * traffic.lengths.mean_output_tokens
    found: list[Policy] = [
        Static(),
        Threshold(
            high_tokens=_rounded(_HIGH * first_tokens),
            low_tokens=_rounded(low * first_tokens),
            decode_high_tokens=_rounded(_HIGH * decode_tokens) if design.kind.is_split else None,
            decode_low_tokens=_rounded(_LOW * decode_tokens) if design.kind.is_split else None,
            cooldown_s=_COOLDOWN_S,
            step=max(units),  # whole servers: nobody rents less
            least=min(max(units), *most),
        ),
        Joint(target_tokens_per_s=_rounded(outputs_per_s / most[-1])),
    ]
    wave = wave_of(traffic)
    if wave is not None:
        found.append(Schedule(entries=tuple(_hourly(wave, most, units))))
    return found


def by_role(design: Design, counts: Counts) -> tuple[int, ...]:
    """Return the instances of each role, in the order in which policies name them; slots of one role are added up."""
    sums: dict[str, int] = {}
    for (role, _), count in zip(design.slots, counts, strict=True):
        sums[role] = sums.get(role, 0) + count
    return tuple(sums.values())


def simulate_day(problem: Problem, question: DayQuestion) -> Day:
    """Return how a day goes; with the problem bound to it, what workers answer with."""
    cluster = cluster_for(problem, question.design, question.counts)
    result = simulate(
        cluster,
        day_of(replace(problem.traffic, rate_per_s=question.rate_per_s), question.seed),
        rules_for(problem, question.design.kind),
        keep=False,
        slo=problem.slo,
        grid_kg_per_kwh=problem.grid_kg_per_kwh,
        metrics=problem.slo.metrics,
        autoscale=question.policy,
    )
    done = result.autoscaling
    assert done is not None and result.slo is not None  # noqa: S101, PT018 - a policy was given, and a problem has limits
    return Day(
        design=question.design,
        counts=question.counts,
        policy=question.policy,
        written=question.written,
        requests=result.requests,
        machine_hours=sum(
            use.machine_hours / pool.machine.instances_per_server
            for use, pool in zip(result.pools, cluster.pools, strict=True)
        ),
        usd=result.bill.usd,
        energy_j=result.bill.energy_j,
        kg_co2e=result.bill.kg_co2e,
        changes=done.starts + done.stops,
        missed_share=done.misses.share,
        worst_hour_share=done.misses.worst_hour_share,
        holds=result.slo.holds and result.overload is None,
    )


def _pending_tokens(traffic: Traffic, result: Result) -> tuple[float, float]:
    """Return the mean prompt tokens and expected output tokens that are pending at any moment, as a policy sees them.

    Source: Little, Operations Research 9 (1961): rate x time in the system, each request weighted by its tokens.
    """
    columns = result.columns
    assert columns is not None  # noqa: S101 - the caller keeps rows
    prompt_token_s = float(np.nanmean(columns["prompt_tokens"] * columns["ttft_s"]))
    output_token_s = result.metrics["e2e_s"].mean * traffic.lengths.mean_output_tokens
    return traffic.rate_per_s * prompt_token_s, traffic.rate_per_s * output_token_s


def _rounded(value: float) -> float:
    """Return a setting as short as a person would write it."""
    return float(f"{value:.{_DIGITS}g}")


def _units(problem: Problem, design: Design) -> tuple[int, ...]:
    """Return the instances of one server for each role: the most where its machines differ in that."""
    units: dict[str, int] = {}
    for role, number in design.slots:
        units[role] = max(problem.offers[number].machine.instances_per_server, units.get(role, 1))
    return tuple(units.values())


def _hourly(wave: Diurnal, most: tuple[int, ...], units: tuple[int, ...]) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the counts of each hour that differ from those before: in proportion to the hour's highest rate."""
    before: tuple[int, ...] = ()
    for hour in range(_HOURS):
        # Within an hour a sine is highest at an end, or at its peak.
        edges_s = [hour * 3600.0, (hour + 1) * 3600.0]
        peak_s = wave.peak_s % wave.period_s
        at_s = [*edges_s, *([peak_s] if edges_s[0] <= peak_s <= edges_s[1] else [])]
        highest = max(1 + wave.amplitude * math.cos(2 * math.pi * (one - wave.peak_s) / wave.period_s) for one in at_s)
        share = highest / (1 + wave.amplitude)
        counts = tuple(
            min(max(math.ceil(count * share / unit - 1e-9), 1) * unit, count)
            for count, unit in zip(most, units, strict=True)
        )
        if counts != before:
            yield edges_s[0], counts
        before = counts
