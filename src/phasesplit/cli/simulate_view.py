"""A result as text in the terminal: what happened, whether it kept the SLO, what it cost, and what it rests on."""

import math
from collections.abc import Callable
from typing import Any

from phasesplit._jit import CACHE_IS_WARM
from phasesplit.domain.latency import Distribution
from phasesplit.domain.money import JOULES_PER_KWH, Bill
from phasesplit.domain.slo import SloVerdict, is_slowdown
from phasesplit.io.results import output_tokens_per_s
from phasesplit.simulator.result import Autoscaling, Result

_WIDEST = 100
_LATENCIES = {
    "ttft_s": "TTFT",
    "itl_s": "ITL, all gaps",
    "itl_mean_s": "TPOT, per request",
    "itl_max_s": "longest gap, per request",
    "e2e_s": "E2E",
    "queue_s": "wait for prefill",
    "transfer_exposed_s": "exposed KV transfer",
    "decode_queue_s": "wait for decode",
}
_SLO_METRICS = _LATENCIES | {
    "ttft_slowdown": "TTFT slowdown",
    "itl_slowdown": "ITL slowdown",
    "e2e_slowdown": "E2E slowdown",
    "goodput_ratio": "goodput ratio",
}
_SECONDS_PER_HOUR = 3600.0


def print_report(result: Result, elapsed_s: float) -> None:
    """Print a result to standard output, as wide as the terminal but at most 100 columns.

    Args:
        result: The result.
        elapsed_s: How long it took to simulate.
    """
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    _print_heading(console, result)
    console.print(_latencies(result))
    _print_slo(console, result)
    console.print(_pools(result))
    _print_counts(console, result)
    if result.autoscaling is not None:
        _print_autoscaling(console, result.autoscaling, result)
    console.print(_bill(result.bill))
    _print_power(console, result.bill)
    _print_origins(console, result)
    compiled = "" if CACHE_IS_WARM else ", compiling included"
    console.print(f"{_plural(result.requests, 'request')} simulated in {_time(elapsed_s)}{compiled}", style="dim")


def _print_heading(console: Any, result: Result) -> None:
    from rich.text import Text

    cluster = result.cluster
    pools = ", ".join(f"{pool.count} {pool.role} x {pool.machine.name}" for pool in cluster.pools)
    console.print(Text.assemble((cluster.model.name, "bold"), " on ", (pools, "bold")))
    span_s = result.last_arrival_s - result.first_arrival_s
    console.print(
        f"{result.trace}: {_plural(result.requests, 'request')} over {_time(span_s)},"
        f" {result.rate_per_s:,.3g} requests/s"
    )
    if result.overload is not None:
        text = str(result.overload)
        console.print(Text(text[0].upper() + text[1:], "bold red"))
    for warning in result.warnings:
        console.print(Text(f"! {warning}", "yellow"))


def _latencies(result: Result) -> Any:
    table = _table("latency", "p50", "p90", "p99", "max", "mean")
    for name, title in _LATENCIES.items():
        values: Distribution = result.metrics[name]
        figures = [values.quantile(p) for p in (0.5, 0.9, 0.99)]
        table.add_row(title, *(_time(figure) for figure in (*figures, values.largest, values.mean)))
    return table


def _print_slo(console: Any, result: Result) -> None:
    from rich.text import Text

    verdict = result.slo
    if verdict is None:
        console.print("SLO: not judged, the model does not fit on the reference machine\n")
        return
    if not verdict.findings:
        return
    only_slowdowns = all(is_slowdown(metric) for metric in verdict.slo.metrics)
    console.print(_slowdowns(verdict) if only_slowdowns else _limits(verdict))
    missed = sum(not finding.holds for finding in verdict.findings)
    reasons = [f"{missed} of {len(verdict.findings)} limits missed"] if missed else []
    if not verdict.complete:
        reasons.append("not every request was served")
    # The table above says what an SLO without a name of its own consists of.
    name = "SLO" if "<" in verdict.slo.name else f"SLO {verdict.slo.name}"
    if reasons:
        console.print(Text(f"{name} broken: {', '.join(reasons)}\n", "bold red"))
    else:
        console.print(Text(f"{name} kept: all {len(verdict.findings)} limits hold\n", "bold green"))


def _slowdowns(verdict: SloVerdict) -> Any:
    from rich.text import Text

    percentiles = sorted({finding.limit.percentile for finding in verdict.findings})
    table = _table("slowdown", *(f"p{p:g}" for p in percentiles))
    for metric in dict.fromkeys(finding.limit.metric for finding in verdict.findings):
        row: list[Any] = [""] * len(percentiles)
        for finding in (each for each in verdict.findings if each.limit.metric == metric):
            sign, mark, style = ("<", "ok", "") if finding.holds else ("≥", "miss", "red")
            text = Text(f"{_number(finding.value)} {sign} {finding.limit.below:g} {mark:>4}", style)
            row[percentiles.index(finding.limit.percentile)] = text
        table.add_row(metric.removesuffix("_slowdown").upper(), *row)
    return table


def _limits(verdict: SloVerdict) -> Any:
    from rich.text import Text

    table = _table("SLO", "", "found", "must be below", "")
    for finding in verdict.findings:
        limit = finding.limit
        shown = _time if limit.metric.endswith("_s") else _number
        mark, style = ("ok", "") if finding.holds else ("miss", "red")
        cells = (f"p{limit.percentile:g}", shown(finding.value), shown(limit.below), mark)
        table.add_row(_SLO_METRICS[limit.metric], *(Text(cell, style) for cell in cells))
    return table


def _pools(result: Result) -> Any:
    table = _table("share of machine time", "busy", "prefill", "decode", "mixed", "KV used", "mean batch")
    for pool in result.pools:
        shares = (pool.busy_share, pool.prefill_share, pool.decode_share, pool.mixed_share, pool.kv_share)
        table.add_row(pool.name, *(f"{share:.1%}" for share in shares), _number(pool.mean_batch))
    return table


def _print_counts(console: Any, result: Result) -> None:
    counts = result.counts
    moves = {
        "prefill to mixed": counts["prefill_to_mixed"],
        "decode to mixed": counts["decode_to_mixed"],
        "back": counts["returns"],
        "re-purposed": counts["repurposed"],
    }
    if result.cluster.split:
        console.print(f"pool moves: {_listed(moves)}")
    if result.cluster.split and not result.rules.published:
        transfers = {
            "layer-wise": counts["layerwise"],
            "serialized": counts["serialized"],
            "not needed (one machine)": counts["one_machine"],
        }
        console.print(f"KV transfers: {_listed(transfers)}")
    disturbed = {
        "preemptions": counts["preemptions"],
        "evictions": counts["evictions"],
        **{f"requests {status}": count for status, count in result.statuses.items() if status != "completed"},
    }
    console.print(f"disturbances: {_listed(disturbed)}")
    console.print(
        f"throughput: {result.throughput_per_s:,.3g} requests/s, {output_tokens_per_s(result):,.0f} output tokens/s"
    )


def _print_autoscaling(console: Any, found: Autoscaling, result: Result) -> None:
    hours = ", ".join(f"{pool.machine_hours:,.1f} of {pool.name}" for pool in result.pools)
    changes = {"starts": found.starts, "stops": found.stops, "stale signals": found.stale}
    console.print(f"autoscaling {found.policy.name}: {_listed(changes)}; machine-hours: {hours}")
    if found.misses.limits:
        limits = ", ".join(f"{_SLO_METRICS[metric]} < {below:g}" for metric, below in found.misses.limits)
        console.print(
            f"requests that missed the SLO ({limits} each): {found.misses.share:.2%},"
            f" in the worst hour {found.misses.worst_hour_share:.2%}"
        )


def _bill(bill: Bill) -> Any:
    table = _table("", "per hour", "per request", "per million output tokens")
    hours = bill.duration_s / _SECONDS_PER_HOUR

    def row(title: str, unit: Callable[[float], str], hour: float, request: float, tokens: float) -> None:
        table.add_row(title, unit(hour), unit(request), unit(tokens))

    row("cost", _usd, bill.usd_per_hour, bill.usd_per_request, bill.usd_per_million_tokens)
    row("energy", _energy, bill.energy_j / hours, bill.energy_j_per_request, bill.energy_j_per_million_tokens)
    row("carbon", _carbon, bill.kg_co2e / hours, bill.kg_co2e_per_request, bill.kg_co2e_per_million_tokens)
    return table


def _print_power(console: Any, bill: Bill) -> None:
    console.print(
        f"power: {bill.provisioned_w / 1e3:,.4g} kW provisioned, {bill.mean_w / 1e3:,.4g} kW drawn on average;"
        f" {bill.embodied_kg_co2e / max(bill.kg_co2e, 1e-300):.0%} of the carbon is from making the machines"
    )


def _print_origins(console: Any, result: Result) -> None:
    from rich.text import Text

    origins: dict[str, list[str]] = {}
    links: dict[str, list[str]] = {}
    has_transfers = result.cluster.split and not result.rules.published
    for pool in result.cluster.pools:
        origins.setdefault(pool.times.source, []).append(f"{pool.role} pool")
        if (link_source := pool.machine.link_source) is not None and has_transfers:
            links.setdefault(link_source, []).append(f"{pool.role} pool")
    if result.cluster.reference is not None:
        origins.setdefault(result.cluster.reference.source, []).append("reference of slowdowns")
    for source, users in origins.items():
        console.print(Text(f"phase times ({', '.join(users)}): {source}", "dim"))
    for source, users in links.items():
        console.print(Text(f"link ({', '.join(users)}): {source}", "dim"))
    seen = (
        "true output lengths (an oracle)"
        if result.oracle
        else "an expected output length, never the true one (no oracle)"
    )
    console.print(Text(f"rules saw {seen}", "dim"))


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _listed(counts: dict[str, int]) -> str:
    found = [f"{count:,} {name}" for name, count in counts.items() if count]
    return ", ".join(found) or "none"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 1_000:
        return f"{seconds:.3g} s"
    return f"{seconds:,.0f} s"


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _usd(usd: float) -> str:
    return "-" if math.isnan(usd) else f"{usd:,.2f} USD" if usd >= 1 else f"{usd:.3g} USD"


def _energy(joules: float) -> str:
    if math.isnan(joules):
        return "-"
    kwh = joules / JOULES_PER_KWH
    return f"{kwh:,.4g} kWh" if kwh >= 1 else f"{kwh * 1e3:.3g} Wh"


def _carbon(kg: float) -> str:
    if math.isnan(kg):
        return "-"
    return f"{kg:,.4g} kg CO2e" if kg >= 1 else f"{kg * 1e3:.3g} g CO2e"
