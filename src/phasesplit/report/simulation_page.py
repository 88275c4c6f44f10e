"""A result as one HTML file: what was simulated, whether it holds, why, and what it costs.

Each panel has a caption of one sentence, made from the result's own figures. Tables hold every number that a reader may
want to look up.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from enum import IntEnum
from html import escape
from pathlib import Path

import numpy as np

from phasesplit._version import __version__
from phasesplit.domain.machine import Machine
from phasesplit.domain.money import Bill
from phasesplit.domain.slo import SloVerdict
from phasesplit.io.compression import write_bytes
from phasesplit.report import readable
from phasesplit.report.page import (
    Cell,
    Drawing,
    Markup,
    Value,
    banner,
    details,
    drawings,
    inline_svg,
    page,
    paragraph,
    section,
    side_by_side,
    table,
    terms,
    tiles,
)
from phasesplit.report.panels import (
    KV_SHARE,
    LATENCY_PANELS,
    MACHINES,
    RUNNING,
    SLO_PANEL,
    STAGES,
    TIMELINE_PANELS,
    USAGE_PANELS,
    WAITING,
    Panel,
    mean_split,
    metric_of,
    pools_seen,
    short_name,
    slowest_split,
)
from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}

COUNT_NAMES = {
    "iterations": "iterations",
    "preemptions": "preemptions",
    "evictions": "evictions",
    "recomputed": "prompts computed again because their KV found no room",
    "prefill_to_mixed": "prefill machines that moved to the mixed pool",
    "decode_to_mixed": "decode machines that moved to the mixed pool",
    "returns": "moves back home",
    "repurposed": "machines that changed their home for good",
    "layerwise": "transfers layer by layer",
    "serialized": "transfers after the prefill phase",
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
        shares = (pool.prefill_share, pool.decode_share, pool.mixed_share, 1 - pool.busy_share, pool.kv_share)
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


def settings_table(settings: Rules) -> Markup:
    """Return all settings of the scheduler."""
    rows: list[Sequence[Cell]] = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        shown = value.name.lower().replace("_", "-") if isinstance(value, IntEnum) else str(value)
        rows.append((field.name, shown, "" if value == field.default else "changed"))
    return table(("setting", "value", ""), rows, "words")


_SHORT_RUN = "The run was too short for samples of the pools."


def _tail(metric: str, what: str) -> Callable[[Result], str]:
    def caption(result: Result) -> str:
        values = metric_of(result, metric)
        if not values.count:
            return f"No value of {readable.metric_name(metric)} is defined in this run."
        if values.count == 1:
            return f"There is one value, {readable.seconds(values.largest)}."
        median, tail = (readable.seconds(values.quantile(q)) for q in (0.5, 0.99))
        return f"Half of {what} within {median}; one in a hundred takes longer than {tail}."

    return caption


def _slo(result: Result) -> str:
    known = [] if result.slo is None else [f for f in result.slo.findings if not np.isnan(f.value)]
    if not known:
        return "There is nothing to compare with limits."
    tightest = max(known, key=lambda finding: finding.value / finding.limit.below)
    limit = tightest.limit
    name = f"{readable.metric_name(limit.metric)} p{limit.percentile:g}"
    taken = readable.percent(tightest.value / limit.below)
    return f"The tightest limit is that on {name}: the run takes up {taken} of it."


def _machines(result: Result) -> str:
    pools = pools_seen(result)
    if not pools:
        return _SHORT_RUN
    machines = result.timeline.samples[:, :, MACHINES]
    if (machines == machines[0]).all():
        return "No machine changed its pool for longer than a sample."
    most = int(machines[:, POOL_NAMES.index("mixed")].max())
    return f"Machines move between pools as load shifts; at most {most} of {result.cluster.machines} were mixed."


def _most(field: int, shown: str, nothing: str) -> Callable[[Result], str]:
    def caption(result: Result) -> str:
        pools = pools_seen(result)
        if not pools:
            return _SHORT_RUN
        values = result.timeline.samples[:, pools, field].max(axis=0)
        if not values.any():
            return nothing
        highest = float(values.max())
        amount = readable.percent(highest) if field == KV_SHARE else f"{highest:,.0f}"
        return shown.format(amount, POOL_NAMES[pools[int(values.argmax())]])

    return caption


def _start(result: Result) -> str:
    split = mean_split(result)
    if split is None:
        return "No request completed."
    stages = split.stage_s[:4]
    longest = int(stages.argmax())
    share = readable.percent(float(stages[longest] / stages.sum())) if stages.sum() else "all"
    name = "exposed transfer" if STAGES[longest][0] == "transfer" else STAGES[longest][0]
    return f"Before the decode phase, the mean request spends {share} of its time in the {name}."


def _whole(result: Result) -> str:
    split = mean_split(result)
    if split is None:
        return "No request completed."
    total_s = float(split.stage_s.sum())
    waits = (
        readable.percent(float(split.stage_s[0] + split.stage_s[2] + split.stage_s[3]) / total_s) if total_s else "none"
    )
    return f"The mean request takes {readable.seconds(total_s)}, {waits} of it waiting or in transfer."


def _batches(result: Result) -> str:
    sizes = np.arange(result.batch_share.shape[1])
    parts = [
        f"{readable.number(float((share * sizes).sum()))} in the {name} pool"
        for name, share in zip(POOL_NAMES, result.batch_share, strict=True)
        if share.any()
    ]
    return f"Averaged over busy time, a batch holds {', '.join(parts)}." if parts else "No machine was ever busy."


def _use(result: Result) -> str:
    busiest = max(result.pools, key=lambda pool: pool.busy_share)
    share = readable.percent(busiest.busy_share)
    return f"The busiest pool is {busiest.name}: its machines compute for {share} of the time."


CAPTIONS: dict[str, Callable[[Result], str]] = {
    "ttft": _tail("ttft_s", "the requests get their first token"),
    "itl": _tail("itl_s", "the tokens follow the one before"),
    "e2e": _tail("e2e_s", "the requests end"),
    "slo": _slo,
    "machines": _machines,
    "running": _most(
        RUNNING, "The most requests running in one pool are {}, in the {} pool.", "No sample saw a request running."
    ),
    "waiting": _most(
        WAITING, "The most requests waiting in one pool are {}, in the {} pool.", "No sample saw a request waiting."
    ),
    "kv": _most(KV_SHARE, "KV memory is fullest at {}, in the {} pool.", "No sample saw KV memory in use."),
    "start": _start,
    "whole": _whole,
    "batches": _batches,
    "use": _use,
}
"""Captions by the name of the panel."""


GLOSSARY = (
    ("prefill", "computes the prompt's tokens and emits the first output token; bound by arithmetic"),
    ("decode", "emits the other output tokens, one an iteration; bound by memory bandwidth"),
    ("TTFT", "time to first token: first token - arrival"),
    ("ITL", "inter-token latency: the gap between two consecutive output tokens of one request"),
    ("E2E", "end to end: last token - arrival"),
    ("p50, p90, p99", "the value that 50, 90 or 99 in a hundred stay at or below"),
    ("slowdown", "a value over that of the same request alone on the reference machine"),
    ("SLO", "service-level objective: limits on percentiles, all of which must hold"),
    ("KV", "keys and values of all tokens so far, which decode reads and which a split cluster transfers"),
    ("exposed transfer", "the part of the KV transfer that is not hidden behind prefill"),
    ("mixed pool", "machines that do both phases for a while, where load spills over"),
    ("unsplit", "machines that do both phases of their requests throughout"),
    (
        "preemption, eviction",
        "a running request leaves the batch: keeping its KV, or losing it and being computed again",
    ),
    ("provisioned power", "what must be reserved for the machines, whatever they draw"),
)
"""Words of the report."""


def write_html(result: Result, path: str | Path) -> None:
    """Write a result as one HTML file that needs no network; the same result gives the same bytes.

    Args:
        result: What a simulation found.
        path: Where to.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, html_report(result).encode())


def html_report(result: Result) -> str:
    """Return a result as an HTML page."""
    rules = result.rules
    if rules.published:
        by_rules = "published rules"
    else:
        by_rules = "default rules" if replace(rules, seed=0) == Rules() else "rules as set by hand"
    blocks = [
        *_alarms(result),
        _key_figures(result),
        section("Service-level objective", *_verdict(result)),
        section("Latencies", latencies(result), _panels(LATENCY_PANELS, result)),
        section("The pools over time", _panels(TIMELINE_PANELS, result)),
        section("Where the time goes", _panels(USAGE_PANELS, result), stages(result)),
        section("Pools", pools(result), phase_times(result)),
        section("Money, power, carbon", side_by_side(bill(result.bill), bill_shares(result.bill))),
        section("What the scheduler did", counts(result)),
        section("Rules", paragraph(_rules_line(result)), details("All settings", settings_table(result.rules))),
        section("Words", terms(GLOSSARY)),
    ]
    return page(
        f"{result.cluster.model.name} on {result.cluster.name}",
        f"{readable.load(result)}; {by_rules}; {result.cluster.machines} machines",
        blocks,
        f"phasesplit {__version__}",
    )


def _alarms(result: Result) -> list[Markup]:
    found = []
    if result.overload is not None:
        found.append(
            banner(
                "Overloaded: this cluster did not keep up",
                [readable.sentence(str(result.overload).removeprefix("overloaded: "))],
                alarm=True,
            )
        )
    if result.warnings:
        found.append(
            banner("Before trusting these figures", [readable.sentence(text) for text in result.warnings], alarm=False)
        )
    return found


def _key_figures(result: Result) -> Markup:
    def at(metric: str, q: float) -> Value:
        value = metric_of(result, metric).quantile(q)
        return Value(value, readable.measure(metric, value))

    completed = result.statuses["completed"]
    per_million = result.bill.usd_per_million_tokens
    return tiles(
        [
            ("requests completed", Value(completed, f"{completed:,}")),
            ("arrivals a second", Value(result.rate_per_s, readable.number(result.rate_per_s or float("nan")))),
            ("TTFT, median", at("ttft_s", 0.5)),
            ("TTFT, p99", at("ttft_s", 0.99)),
            ("ITL, median", at("itl_s", 0.5)),
            ("ITL, p99", at("itl_s", 0.99)),
            ("a million output tokens", Value(per_million, readable.usd(per_million))),
        ]
    )


def _verdict(result: Result) -> Sequence[Markup]:
    verdict = result.slo
    if verdict is None:
        return [paragraph("Not judged: the model does not fit on the reference machine, so there are no slowdowns.")]
    broken = sum(not finding.holds for finding in verdict.findings)
    limits = readable.counted(len(verdict.findings), "limit")
    left = result.requests - result.statuses["completed"]
    unserved = "" if verdict.complete else f" {readable.counted(left, 'request')} not served."
    verb = "does" if broken == 1 else "do"
    if verdict.holds:
        line = f"Kept: all {limits} of the SLO “{verdict.slo.name}” hold."
    elif broken:
        line = f"Broken: {broken} of {limits} of the SLO “{verdict.slo.name}” {verb} not hold.{unserved}"
    else:
        line = f"Broken:{unserved} All {limits} of the SLO “{verdict.slo.name}” hold for those that were."
    return [
        paragraph(line, "verdict kept" if verdict.holds else "verdict broken"),
        side_by_side(findings(verdict), _panels((SLO_PANEL,), result)),
    ]


def _panels(panels: Sequence[Panel], result: Result) -> Markup:
    return drawings(_drawing(panel, CAPTIONS[panel.name], result) for panel in panels)


def _drawing(panel: Panel, caption: Callable[[Result], str], result: Result) -> Drawing:
    sentence = caption(result)
    svg = inline_svg(panel.name, escape(sentence), lambda axes: panel.draw(axes, result))
    return Drawing(Markup(svg), sentence)


def _rules_line(result: Result) -> str:
    if result.rules.published:
        return "The rules of the simulator published with the paper, its defects included."
    seen = (
        "knew the true output length of every request" if result.oracle else "saw expected, never true output lengths"
    )
    return f"The scheduler {seen}."
