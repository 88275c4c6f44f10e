"""`phasesplit plan`: whether to split, which machines, how many, at what cost, power and carbon."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit.console.options import COMPILING, option
from phasesplit.errors import SpecError
from phasesplit.planner.plan_view import checked_plan_outputs, tell

if TYPE_CHECKING:
    from phasesplit.planner.plan import Plan
    from phasesplit.planner.question import Asked

_WORKLOAD = ("source", "prompt", "output", "format", "columns", "time_unit", "skip_bad", "sort")


def plan(
    file: Annotated[
        str | None, typer.Argument(help="YAML file that asks; options override it.", metavar="[YAML]")
    ] = None,
    model: Annotated[str | None, option("--model", text="Model by name, or its file.", metavar="NAME")] = None,
    machines: Annotated[
        str | None,
        option(
            "--machines",
            text="Machines to choose from, names or files; also dgx-h100/tp4 or dgx-h100@50%.",
            metavar="A,B",
        ),
    ] = None,
    existing: Annotated[
        str | None,
        option(
            "--existing",
            text="Instead: the servers there are. How to divide them, and what rate do they hold?",
            metavar="A=N,B=N",
        ),
    ] = None,
    source: Annotated[
        str | None,
        option("--workload", text="Trace file, - for standard input, or a shipped workload.", metavar="FILE|NAME"),
    ] = None,
    prompt: Annotated[
        str | None,
        option("--prompt-percentiles", text="Instead: prompt tokens, p50=1020,p90=2734.", metavar="PERCENTILES"),
    ] = None,
    output: Annotated[
        str | None, option("--output-percentiles", text="And output tokens.", metavar="PERCENTILES")
    ] = None,
    rate: Annotated[
        float | None,
        option("--rate", text="Mean requests per second; by default the workload's own.", metavar="PER_S"),
    ] = None,
    duration: Annotated[
        float | None,
        option("--duration", text="Seconds of each simulation; by default 10,000 requests, at least 120.", metavar="S"),
    ] = None,
    arrivals: Annotated[
        str | None,
        option("--arrivals", text="Arrival model, as for simulate, instead of the workload's own.", metavar="MODEL"),
    ] = None,
    seeds: Annotated[
        str | None, option("--seeds", text="How many, or which ones: 3 or 0,1,2. All must hold.", metavar="N|LIST")
    ] = None,
    slo: Annotated[
        str | None,
        option(
            "--slo",
            text="What has to hold: splitwise (default), splitwise*1.5, none, or limits such as "
            "'ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%'.",
            metavar="SLO",
        ),
    ] = None,
    minimize: Annotated[
        str | None,
        option("--minimize", text="Default: cost.", metavar="cost|power|energy|carbon|machines"),
    ] = None,
    maximize: Annotated[
        str | None, option("--maximize", text="The rate, --within budgets.", metavar="throughput")
    ] = None,
    within: Annotated[
        list[str] | None,
        option("--within", text="Budgets: cost=1500 (USD/h), power=400kW, carbon, machines.", metavar="MEASURE=MOST"),
    ] = None,
    preset: Annotated[
        str | None,
        option(
            "--preset",
            text="Against a baseline: most throughput at its power or cost, or least cost at its throughput.",
            metavar="iso-power|iso-cost|iso-throughput",
        ),
    ] = None,
    baseline: Annotated[
        str | None, option("--baseline", text="Unsplit servers to compare with: 40:dgx-h100.", metavar="N:MACHINE")
    ] = None,
    tensor_parallel: Annotated[
        str | None,
        option("--tensor-parallel", text="Degrees: auto (default) or 2,4,8.", metavar="auto|LIST"),
    ] = None,
    power_caps: Annotated[
        str | None,
        option(
            "--power-caps",
            text="Caps to look at; auto (default): 70%,50% where power, energy or carbon matter.",
            metavar="auto|none|LIST",
        ),
    ] = None,
    rules: Annotated[
        str | None, option("--rules", text="Scheduling rules to start from.", metavar="default|published")
    ] = None,
    settings: Annotated[
        list[str] | None,
        option(
            "--set", text="A field of the rules, such as transfer=serialized; may be repeated.", metavar="FIELD=VALUE"
        ),
    ] = None,
    reference: Annotated[
        str | None,
        option("--reference", text="Machine that slowdowns compare with; by default dgx-a100.", metavar="MACHINE"),
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
        str | None,
        option("--times", text="Source of phase times.", metavar="auto|roofline|aiconfigurator[:ENGINE]"),
    ] = None,
    grid_intensity: Annotated[
        float | None,
        option("--grid-intensity", text="Carbon of a kWh; by default the world's average.", metavar="KG_PER_KWH"),
    ] = None,
    most_servers: Annotated[
        str | None, option("--most-servers", text="Largest cluster to look at; by default 2,000.", metavar="N")
    ] = None,
    layout: Annotated[
        str | None, option("--format", text="Layout of the trace file instead of telling it.", metavar="NAME")
    ] = None,
    columns: Annotated[
        str | None, option("--columns", text="Names of your columns: arrival=ts,prompt=in,output=out.", metavar="MAP")
    ] = None,
    time_unit: Annotated[
        str | None, option("--time-unit", text="Unit of numeric arrivals with --columns.", metavar="s|ms|us|ns")
    ] = None,
    skip_bad: Annotated[bool, option("--skip-bad", text="Drop and count wrong rows of a trace file.")] = False,
    sort: Annotated[bool, option("--sort", text="Sort the trace file by arrival instead of stopping.")] = False,
    day: Annotated[
        bool,
        option(
            "--day", text="Let the best split and the best unsplit design serve a day under autoscaling policies too."
        ),
    ] = False,
    autoscale: Annotated[
        list[str] | None,
        option(
            "--autoscale",
            text="For the day, a policy of your own as for simulate, beside those fitted; may be repeated.",
            metavar="POLICY",
        ),
    ] = None,
    workers: Annotated[
        int | None, option("--workers", text="Processes that simulate; by default one for each core.", metavar="N")
    ] = None,
    ray: Annotated[
        str | None,
        option("--ray", text="Simulate on a Ray cluster (extra [ray]).", metavar="HOST:PORT|auto|local"),
    ] = None,
    resume: Annotated[
        Path | None,
        option(
            "--resume", text="Journal of simulations: begun, or gone on from after an interruption.", metavar="FILE"
        ),
    ] = None,
    quick: Annotated[bool, option("--quick", text="Leave out what one more buys and where the verdict flips.")] = False,
    as_json: Annotated[bool, option("--json", text="Print the plan as JSON, and nothing else.")] = False,
    write: Annotated[
        Path | None, option("--write", text="Write the winner as a cluster file for simulate.", metavar="YAML")
    ] = None,
    html: Annotated[
        Path | None, option("--html", text="Write the report as one HTML file, figures inside.", metavar="FILE")
    ] = None,
    figure: Annotated[Path | None, option("--figure", text="Draw the plan: .png, .pdf, .svg.", metavar="FILE")] = None,
) -> int:
    """Say whether to split, which machines to take, and how many.

    \b
    Examples:
    phasesplit plan --model llama-3.1-70b --machines dgx-h100,dgx-a100 \\
        --workload azure-conversation --rate 70 --slo splitwise --minimize cost
    phasesplit plan --model llama-3.1-70b --existing dgx-h100=10,dgx-a100=6 \\
        --prompt-percentiles p50=1020,p90=2734 --output-percentiles p50=129,p90=345
    phasesplit plan question.yaml --resume plan.journal --write cluster.yaml
    """  # noqa: D301 - \b is how click is told to keep these lines
    began_s = time.perf_counter()
    from phasesplit.planner.problem_file import read_problem

    of_workload = dict(
        zip(
            _WORKLOAD, (source, prompt, output, layout, columns, time_unit, skip_bad or None, sort or None), strict=True
        )
    )
    of_rules = _settings(rules, settings)
    values = {
        "model": model, "machines": machines, "existing": existing, "rate": rate, "duration": duration,
        "arrivals": arrivals, "seeds": seeds, "slo": slo, "minimize": minimize, "maximize": maximize,
        "within": ",".join(within) if within else None,
        "preset": preset, "baseline": baseline, "tensor_parallel": tensor_parallel, "power_caps": power_caps,
        "reference": reference, "profile": profile, "times": times, "grid_intensity": grid_intensity,
        "most_servers": most_servers, "rules": of_rules or None, "day": autoscale or day or None,
        "workload": {name: value for name, value in of_workload.items() if value is not None} or None,
    }  # fmt: skip
    if workers is not None and workers < 1:
        raise SpecError.bad("--workers", workers, "1 or more")
    if ray is not None:
        from phasesplit.planner.pool.ray_pool import check_address

        check_address(ray, "--ray")
    outputs = checked_plan_outputs([file, source, profile], write=write, html=html, figure=figure, resume=resume)
    asked = read_problem(file, {name: value for name, value in values.items() if value is not None})
    made = _made(
        asked, workers, ray, resume, thorough=not quick, mapped=html is not None or figure is not None, as_json=as_json
    )
    return tell(asked, made, outputs, began_s, as_json=as_json)


def _settings(rules: str | None, settings: list[str] | None) -> dict[str, Any]:
    """Return fields of the rules from --rules and --set."""
    if rules not in (None, "default", "published"):
        raise SpecError.unknown("--rules", rules or "", ("default", "published"))
    found: dict[str, Any] = {} if rules is None else {"published": rules == "published"}
    from phasesplit.io.rule_settings import rules_setting

    return found | dict(rules_setting(text) for text in settings or ())


def _made(
    asked: "Asked",
    workers: int | None,
    ray: str | None,
    resume: Path | None,
    *,
    thorough: bool,
    mapped: bool,
    as_json: bool,
) -> "Plan":
    """Say what is being planned, and return the plan."""
    from phasesplit import _jit
    from phasesplit.planner.plan_view import DayProgress, PlanProgress, opening_line
    from phasesplit.planner.pool.cores import usable_cores
    from phasesplit.planner.provision import make_plan, spend_days

    for note in asked.notes:
        typer.echo(f"phasesplit: {note}", err=True)
    many = workers or usable_cores()
    width = f"Ray at {ray}" if ray else f"{many} worker{'' if many == 1 else 's'}"
    rate_known = asked.baseline is None and asked.problem.objective is not None
    source = Path(asked.source).name if asked.source else "lengths by percentiles"
    typer.echo(opening_line(asked.problem, rate_known, source, width), err=as_json)
    sys.stdout.flush()
    if not _jit.CACHE_IS_WARM:
        typer.echo(COMPILING, err=True)
    with PlanProgress(asked.problem, shown=sys.stderr.isatty()) as progress:
        made = make_plan(
            asked,
            workers=workers,
            ray_address=ray,
            resume=resume,
            thorough=thorough,
            mapped=mapped,
            on_step=progress,
        )
    days = DayProgress(None if ray else many)
    spend_days(made, asked, workers=workers, ray_address=ray, on_ahead=days.begin, on_day=days)
    return made
