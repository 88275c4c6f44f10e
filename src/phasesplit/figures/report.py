"""A result as one HTML file: what was simulated, whether it holds, why, and what it costs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

from phasesplit._version import __version__
from phasesplit.figures import readable, tables
from phasesplit.figures.captions import CAPTIONS
from phasesplit.figures.page import (
    Drawing,
    Markup,
    Value,
    banner,
    beside,
    details,
    drawings,
    page,
    paragraph,
    section,
    terms,
    tiles,
)
from phasesplit.figures.panels import LATENCY_PANELS, SLO_PANEL, TIMELINE_PANELS, USAGE_PANELS, Panel, metric_of
from phasesplit.figures.svg import inline_svg
from phasesplit.files.compression import write_bytes
from phasesplit.scheduling.rules import Rules
from phasesplit.simulation.result import Result

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
        section("Latencies", tables.latencies(result), _panels(LATENCY_PANELS, result)),
        section("The pools over time", _panels(TIMELINE_PANELS, result)),
        section("Where the time goes", _panels(USAGE_PANELS, result), tables.stages(result)),
        section("Pools", tables.pools(result), tables.phase_times(result)),
        section("Money, power, carbon", beside(tables.bill(result.bill), tables.bill_shares(result.bill))),
        section("What the scheduler did", tables.counts(result)),
        section("Rules", paragraph(_rules_line(result)), details("All settings", tables.rules(result.rules))),
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
        beside(tables.findings(verdict), _panels((SLO_PANEL,), result)),
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
