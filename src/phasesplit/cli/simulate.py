"""`phasesplit simulate`: what happens when a cluster serves a workload."""

import math
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.console.options import (
    COMPILING,
    ClusterOptions,
    LoadOptions,
    RuleOptions,
    RunProgress,
    TraceFileOptions,
    checked_outputs,
    cluster_and_rules,
    option,
    write_outputs,
)
from phasesplit.console.workload_options import Demand
from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.cluster import Cluster
    from phasesplit.domain.request import Trace
    from phasesplit.domain.slo import Slo
    from phasesplit.scheduler.autoscaling import Policy
    from phasesplit.scheduler.rules import Rules
    from phasesplit.simulator.result import Result


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """What is drawn at random, and who sees it."""

    arrivals: Annotated[
        str | None,
        option(
            "--arrivals",
            text="Arrival model instead of the workload's own: poisson, gamma:cv=2, weibull:cv=2, "
            "on-off:on=5,off=60 or diurnal:amplitude=0.5 (times in s).",
            metavar="MODEL",
        ),
    ] = None
    seed: Annotated[
        int | None, option("--seed", text="Seed of everything drawn at random; by default 0.", metavar="N")
    ] = None
    oracle: Annotated[bool, option("--oracle", text="Let the rules see the true output length of every request.")] = (
        False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgementOptions:
    """How many machines run, and by what the result is judged."""

    autoscale: Annotated[
        str | None,
        option(
            "--autoscale",
            text="Policy that starts and drains machines; --pool then says how many there can be. One of "
            "static:initial=4+2, threshold:high=4000,low=500, joint:target=1000,ratio=2, "
            "schedule:0h=4+2,8h=10+6,20h=4+2; more settings: docs/autoscaling.md.",
            metavar="POLICY",
        ),
    ] = None
    slo: Annotated[
        str,
        option(
            "--slo",
            text="Limits on latencies: splitwise (default), splitwise*1.5, none, or limits such as "
            "'ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%'.",
            metavar="SLO",
        ),
    ] = "splitwise"
    grid_intensity: Annotated[
        float | None,
        option("--grid-intensity", text="Carbon of a kWh; by default the world's average.", metavar="KG_PER_KWH"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFileOptions:
    """Files that are written."""

    requests: Annotated[
        Path | None,
        option("--requests", text="Write a row for each request: .csv, .csv.gz, .parquet.", metavar="FILE"),
    ] = None
    parquet: Annotated[
        Path | None, option("--parquet", text="Write the same rows as Parquet, as well.", metavar="FILE")
    ] = None
    figure: Annotated[Path | None, option("--figure", text="Draw the result: .png, .pdf, .svg.", metavar="FILE")] = None
    html: Annotated[
        Path | None, option("--html", text="Write the report as one HTML file, figures inside.", metavar="FILE")
    ] = None


def simulate(
    *,
    workload: Annotated[
        str, option("--workload", text="Trace file, - for standard input, or a shipped workload.", metavar="FILE|NAME")
    ],
    machines: ClusterOptions,
    load: LoadOptions,
    draws: DrawOptions,
    file: TraceFileOptions,
    by: RuleOptions,
    judged: JudgementOptions,
    as_json: Annotated[bool, option("--json", text="Print the result as JSON, and nothing else.")] = False,
    files: ResultFileOptions,
    summary_only: Annotated[
        bool, option("--summary-only", text="Keep no row per request: memory stays small for any number of them.")
    ] = False,
    quiet: Annotated[bool, option("--quiet", text="Print no report.")] = False,
) -> None:
    """Say what happens when a cluster serves a workload.

    \b
    Examples:
    phasesplit simulate --rules published --model bloom-176b \\
        --pool prefill:25:dgx-h100 --pool decode:15:dgx-h100 \\
        --workload trace.csv --requests out.csv
    phasesplit simulate --model llama2-70b --pool unsplit:40:dgx-h100 \\
        --workload azure-conversation --rate 70 --duration 600 --seed 1 --json
    """  # noqa: D301 - \b makes click keep these lines
    from phasesplit.domain.slo import parse_slo
    from phasesplit.io.policies import parse_policy

    pools = (text.split(":", 2)[-1] for text in machines.pools or ())
    read = (workload, machines.cluster, machines.model, by.profile, by.reference_machine, *pools)
    outputs = checked_outputs(
        read, requests=files.requests, parquet=files.parquet, figure=files.figure, html=files.html
    )
    if summary_only and (files.requests or files.parquet):
        raise SpecError("--summary-only: keeps no rows that --requests or --parquet could write")
    demand = Demand(
        source=workload, load=load, arrivals=draws.arrivals, seed=draws.seed or 0, oracle=draws.oracle, file=file
    )
    slo = parse_slo(judged.slo, "--slo")
    autoscale = None if judged.autoscale is None else parse_policy(judged.autoscale, "--autoscale")
    grid_kg_per_kwh = _grid(judged.grid_intensity)
    cluster, rules = cluster_and_rules(machines, by, seed=draws.seed)
    trace: Trace | Iterable[Trace]
    if summary_only and not demand.is_file:
        trace = demand.stretches()
    else:
        trace, dropped = demand.trace()
        if dropped:
            typer.echo(dropped, err=True)
    result, elapsed_s = _simulated(
        cluster,
        trace,
        rules,
        autoscale=autoscale,
        keep=not summary_only,
        slo=slo,
        grid_kg_per_kwh=grid_kg_per_kwh,
        quiet=quiet,
    )
    write_outputs(result, outputs)
    if as_json:
        import orjson

        from phasesplit.io.results import result_summary

        summary = {**result_summary(result), "elapsed_s": elapsed_s}
        typer.echo(orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode())
    elif not quiet:
        from phasesplit.cli.simulate_view import print_report

        print_report(result, elapsed_s)
        for path in outputs:
            typer.echo(f"wrote {path}")


def _grid(kg_per_kwh: float | None) -> float:
    from phasesplit.domain.money import WORLD_GRID_KG_PER_KWH

    if kg_per_kwh is None:
        return WORLD_GRID_KG_PER_KWH
    if not 0 <= kg_per_kwh <= 10 or math.isnan(kg_per_kwh):
        raise SpecError.bad("--grid-intensity", kg_per_kwh, "0 to 10 kg of CO2 per kWh")
    return kg_per_kwh


def _simulated(
    cluster: "Cluster",
    trace: "Trace | Iterable[Trace]",
    rules: "Rules",
    *,
    autoscale: "Policy | None",
    keep: bool,
    slo: "Slo",
    grid_kg_per_kwh: float,
    quiet: bool,
) -> tuple["Result", float]:
    """Return the result, and how long it took to simulate in seconds."""
    from phasesplit import _jit
    from phasesplit.simulator.run import simulate as simulate_trace

    if not _jit.CACHE_IS_WARM and not quiet:
        typer.echo(COMPILING, err=True)
    with RunProgress(shown=not quiet and sys.stderr.isatty()) as progress:
        began_s = time.perf_counter()
        result = simulate_trace(
            cluster,
            trace,
            rules,
            autoscale=autoscale,
            keep=keep,
            slo=slo,
            grid_kg_per_kwh=grid_kg_per_kwh,
            on_progress=progress,
        )
        return result, time.perf_counter() - began_s
