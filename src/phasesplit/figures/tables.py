"""A result's tables: every number of it that a reader may want to look up."""

from collections.abc import Sequence
from dataclasses import fields
from enum import IntEnum

from phasesplit.domain.machine import Machine
from phasesplit.domain.money import Bill
from phasesplit.domain.slo import SloVerdict
from phasesplit.figures import readable
from phasesplit.figures.latency import short_name
from phasesplit.figures.page import Cell, Markup, Value, table
from phasesplit.figures.stages import STAGES, mean_split, slowest_split
from phasesplit.scheduling.rules import Rules
from phasesplit.simulation.result import Result

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

COUNT_NAMES = {
    "iterations": "iterations",
    "preemptions": "preemptions",
    "evictions": "evictions",
    "refilled": "prompts computed again because their KV found no room",
    "prompt_to_mixed": "prefill machines that moved to the mixed pool",
    "token_to_mixed": "decode machines that moved to the mixed pool",
    "returns": "moves back home",
    "repurposed": "machines that changed their home for good",
    "layerwise": "transfers layer by layer",
    "serialized": "transfers after the prompt phase",
    "one_machine": "requests served by one machine in both phases",
}
"""What people call the counts of a result; the others are for developers."""


def latencies(result: Result) -> Markup:
    """Return the percentiles of every metric of the result."""
    rows: list[Sequence[Cell]] = []
    for metric in [name for name in readable.METRIC_NAMES if name in result.metrics] + sorted(
        name for name in result.metrics if name not in readable.METRIC_NAMES
    ):
        found = result.metrics[metric]
        values = [*(found.quantile(q) for q in QUANTILES.values()), found.largest, found.mean]
        cells = [Value(value, readable.measure(metric, value)) for value in values]
        rows.append((readable.metric_name(metric), *cells, Value(found.count, f"{found.count:,}")))
    return table(("", *QUANTILES, "max", "mean", "values"), rows)


def findings(verdict: SloVerdict) -> Markup:
    """Return each limit of the SLO and what the run measured."""
    rows: list[Sequence[Cell]] = []
    slowdowns = all(finding.limit.metric.endswith("_slowdown") for finding in verdict.findings)
    for finding in verdict.findings:
        metric, below = finding.limit.metric, finding.limit.below
        share = finding.value / below
        rows.append(
            (
                f"{short_name(metric) if slowdowns else readable.metric_name(metric)} p{finding.limit.percentile:g}",
                Value(
                    finding.value, readable.against(metric, finding.value, below).split(" of ")[0], not finding.holds
                ),
                Value(below, readable.measure(metric, below)),
                Value(share, readable.percent(share)),
                Value(float("nan"), "holds" if finding.holds else "broken", not finding.holds),
            )
        )
    return table(("slowdown" if slowdowns else "", "value", "must be below", "of the limit", ""), rows)


def stages(result: Result) -> Markup:
    """Return the time in each stage, of the mean request and of the slowest hundredth."""
    splits = [split for split in (mean_split(result), slowest_split(result, stages=len(STAGES))) if split is not None]
    rows: list[Sequence[Cell]] = []
    for index, (name, _) in enumerate(STAGES):
        cells: list[Cell] = []
        for split in splits:
            stage_s, total_s = float(split.stage_s[index]), float(split.stage_s.sum())
            share = stage_s / total_s if total_s else 0.0
            cells += [Value(stage_s, readable.seconds(stage_s)), Value(share, readable.percent(share))]
        rows.append(("exposed transfer" if name == "transfer" else name, *cells))
    columns = [column for split in splits for column in (split.of, "share")]
    return table(("", *columns), rows)


def pools(result: Result) -> Markup:
    """Return the use of each pool."""
    rows: list[Sequence[Cell]] = []
    for pool in result.pools:
        shares = (pool.prompt_share, pool.token_share, pool.mixed_share, 1 - pool.busy_share, pool.kv_share)
        cells = [Value(share, readable.percent(max(share, 0.0))) for share in shares]
        rows.append((pool.name, *cells, Value(pool.mean_batch, readable.number(pool.mean_batch))))
    return table(("", "prefill", "decode", "mixed", "idle", "KV in use", "mean batch"), rows)


def phase_times(result: Result) -> Markup:
    """Return where the phase times of each pool come from, and their error; its link too, where one was measured."""
    rows: list[tuple[Cell, ...]] = [(pool.name, pool.times) for pool in result.pools]
    machines = [pool.machine for pool in result.cluster.pools]
    return origins(("pool", "where its phase times come from"), rows, machines)


def origins(columns: Sequence[str], rows: Sequence[tuple[Cell, ...]], machines: Sequence[Machine]) -> Markup:
    """Return where figures come from, with where links come from as a last column if any of them was measured.

    Args:
        columns: Names of the columns.
        rows: One for each of the machines.
        machines: The machines.
    """
    if any(machine.link is not None for machine in machines):
        columns = (*columns, "where its link comes from")
        links = [machine.link_source or "its network cards" for machine in machines]
        rows = [(*row, link) for row, link in zip(rows, links, strict=True)]
    return table(columns, rows, "words")


def bill(cost: Bill) -> Markup:
    """Return what the cluster costs over the run."""
    rows: list[Sequence[Cell]] = [
        ("price", Value(cost.usd_per_hour, f"{readable.usd(cost.usd_per_hour)} an hour")),
        ("price of the run", Value(cost.usd, readable.usd(cost.usd))),
        ("provisioned power", Value(cost.provisioned_w, readable.with_prefix(cost.provisioned_w, "W"))),
        ("mean power drawn", Value(cost.mean_w, readable.with_prefix(cost.mean_w, "W"))),
        ("energy", Value(cost.energy_j, readable.energy(cost.energy_j))),
        ("carbon of that energy", Value(cost.operational_kg_co2e, readable.carbon(cost.operational_kg_co2e))),
        (
            "carbon of making the machines, this run's share",
            Value(cost.embodied_kg_co2e, readable.carbon(cost.embodied_kg_co2e)),
        ),
    ]
    return table(("", "the run"), rows)


def bill_shares(cost: Bill) -> Markup:
    """Return what a request and a million output tokens cost."""
    rows: list[Sequence[Cell]] = [
        (
            "price",
            Value(cost.usd_per_request, readable.usd(cost.usd_per_request)),
            Value(cost.usd_per_million_tokens, readable.usd(cost.usd_per_million_tokens)),
        ),
        (
            "energy",
            Value(cost.energy_j_per_request, readable.energy(cost.energy_j_per_request)),
            Value(cost.energy_j_per_million_tokens, readable.energy(cost.energy_j_per_million_tokens)),
        ),
        (
            "carbon, both kinds",
            Value(cost.kg_co2e_per_request, readable.carbon(cost.kg_co2e_per_request)),
            Value(cost.kg_co2e_per_million_tokens, readable.carbon(cost.kg_co2e_per_million_tokens)),
        ),
    ]
    return table(("", "a request", "a million output tokens"), rows)


def counts(result: Result) -> Markup:
    """Return how requests ended and what the scheduler did."""
    rows: list[Sequence[Cell]] = [
        (f"requests {status}", Value(count, f"{count:,}")) for status, count in result.statuses.items()
    ]
    rows += [
        (name, Value(result.counts[count], f"{result.counts[count]:,}"))
        for count, name in COUNT_NAMES.items()
        if count in result.counts
    ]
    return table(("", "times"), rows)


def rules(settings: Rules) -> Markup:
    """Return all settings of the scheduler."""
    rows: list[Sequence[Cell]] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        shown = value.name.lower().replace("_", "-") if isinstance(value, IntEnum) else str(value)
        rows.append((field.name, shown, "" if value == field.default else "changed"))
    return table(("setting", "value", ""), rows, "words")
