"""`phasesplit simulate`: what happens when a cluster serves a workload."""

import math
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.console.options import (
    COMPILING,
    Count,
    Duration,
    Rate,
    RunProgress,
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


def simulate(
    workload: Annotated[
        str, option("--workload", text="Trace file, - for standard input, or a shipped workload.", metavar="FILE|NAME")
    ],
    model: Annotated[str | None, option("--model", text="Model by name, or its file.", metavar="NAME")] = None,
    pool: Annotated[
        list[str] | None,
        option(
            "--pool",
            text="Machines of one role (prefill, decode, mixed or unsplit); may be repeated.",
            metavar="ROLE:COUNT:MACHINE",
        ),
    ] = None,
    cluster: Annotated[
        str | None, option("--cluster", text="Cluster file instead of --model and --pool.", metavar="YAML")
    ] = None,
    rate: Rate = None,
    duration: Duration = None,
    count: Count = None,
    arrivals: Annotated[
        str | None,
        option(
            "--arrivals",
            text="Arrival model instead of the workload's own: poisson, gamma:cv=2, weibull:cv=2, "
            "on-off:on=5,off=60 or diurnal:amplitude=0.5 (times in s).",
            metavar="MODEL",
        ),
    ] = None,
    seed: Annotated[
        int | None, option("--seed", text="Seed of everything drawn at random; by default 0.", metavar="N")
    ] = None,
    oracle: Annotated[
        bool, option("--oracle", text="Let the rules see the true output length of every request.")
    ] = False,
    layout: Annotated[
        str | None, option("--format", text="Layout of the trace file instead of telling it.", metavar="NAME")
    ] = None,
    columns: Annotated[
        str | None, option("--columns", text="Names of your columns: arrival=ts,prompt=in,output=out.", metavar="MAP")
    ] = None,
    time_unit: Annotated[
        str | None, option("--time-unit", text="Unit of numeric arrivals with --columns.", metavar="s|ms|us|ns")
    ] = None,
    skip_bad: Annotated[
        bool, option("--skip-bad", text="Drop and count wrong rows of a trace file instead of stopping.")
    ] = False,
    sort: Annotated[bool, option("--sort", text="Sort the trace file by arrival instead of stopping.")] = False,
    rules: Annotated[
        str | None, option("--rules", text="Scheduling rules to start from.", metavar="default|published")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            text="A field of the rules, such as transfer=serialized or decode-placement=two-choices; may be repeated.",
            metavar="FIELD=VALUE",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        option(
            "--profile",
            text="Phase times you measured: what `phasesplit profile` wrote, or a table laid out as perf_model.csv.",
            metavar="JSON|CSV",
        ),
    ] = None,
    times: Annotated[
        str,
        option(
            "--times",
            text="Where phase times come from; by default measured where there are measurements, else the roofline.",
            metavar="measured|roofline|aiconfigurator[:ENGINE[:VERSION]]",
        ),
    ] = "auto",
    reference: Annotated[
        str, option("--reference", text="Machine that slowdowns compare with; by default dgx-a100.", metavar="MACHINE")
    ] = "dgx-a100",
    autoscale: Annotated[
        str | None,
        option(
            "--autoscale",
            text="Policy that starts and drains machines; --pool then says how many there can be. One of "
            "static:initial=4+2, threshold:high=4000,low=500, joint:target=1000,ratio=2, "
            "schedule:0h=4+2,8h=10+6,20h=4+2; more settings: docs/autoscaling.md.",
            metavar="POLICY",
        ),
    ] = None,
    slo: Annotated[
        str,
        option(
            "--slo",
            text="Limits on latencies: splitwise (default), splitwise*1.5, none, or limits such as "
            "'ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%'.",
            metavar="SLO",
        ),
    ] = "splitwise",
    grid_intensity: Annotated[
        float | None,
        option("--grid-intensity", text="Carbon of a kWh; by default the world's average.", metavar="KG_PER_KWH"),
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print the result as JSON, and nothing else.")] = False,
    requests: Annotated[
        Path | None,
        option("--requests", text="Write a row for each request: .csv, .csv.gz, .parquet.", metavar="FILE"),
    ] = None,
    parquet: Annotated[
        Path | None, option("--parquet", text="Write the same rows as Parquet, as well.", metavar="FILE")
    ] = None,
    figure: Annotated[
        Path | None, option("--figure", text="Draw the result: .png, .pdf, .svg.", metavar="FILE")
    ] = None,
    html: Annotated[
        Path | None, option("--html", text="Write the report as one HTML file, figures inside.", metavar="FILE")
    ] = None,
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

    read = (workload, cluster, model, profile, reference, *(text.split(":", 2)[-1] for text in pool or ()))
    outputs = checked_outputs(read, requests=requests, parquet=parquet, figure=figure, html=html)
    if summary_only and (requests or parquet):
        raise SpecError("--summary-only: keeps no rows that --requests or --parquet could write")
    demand = Demand(
        source=workload,
        rate_per_s=rate,
        duration_s=duration,
        count=count,
        arrivals=arrivals,
        seed=seed or 0,
        oracle=oracle,
        layout=layout,
        columns=columns,
        time_unit=time_unit,
        skip_bad=skip_bad,
        sort=sort,
    )
    judged_by = parse_slo(slo, "--slo")
    scaled_by = None if autoscale is None else parse_policy(autoscale, "--autoscale")
    grid_kg_per_kwh = _grid(grid_intensity)
    served_by, by_rules = cluster_and_rules(
        cluster,
        model,
        pool,
        rules,
        [*([] if seed is None else [f"seed={seed}"]), *(settings or [])],
        profile=profile,
        reference=reference,
        times=times,
    )
    trace: Trace | Iterable[Trace]
    if summary_only and not demand.is_file:
        trace = demand.stretches()
    else:
        trace, dropped = demand.trace()
        if dropped:
            typer.echo(dropped, err=True)
    result, elapsed_s = _simulated(
        served_by,
        trace,
        by_rules,
        autoscale=scaled_by,
        keep=not summary_only,
        slo=judged_by,
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
