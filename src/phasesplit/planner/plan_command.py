"""`phasesplit plan`: whether to split, which machines, how many, at what cost, power and carbon."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit.console.options import COMPILING, RuleOptions, TraceFileOptions, option
from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.planner.plan import Plan
    from phasesplit.planner.question import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineChoice:
    """The model, and the machines that a plan may use."""

    model: Annotated[str | None, option("--model", text="Model by name, or its file.", metavar="NAME")] = None
    machines: Annotated[
        str | None,
        option(
            "--machines",
            text="Machines to choose from, names or files; also dgx-h100/tp4 or dgx-h100@50%.",
            metavar="A,B",
        ),
    ] = None
    existing: Annotated[
        str | None,
        option(
            "--existing",
            text="Instead: the servers there are. How to divide them, and what rate do they hold?",
            metavar="A=N,B=N",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """The requests that a plan must serve."""

    source: Annotated[
        str | None,
        option("--workload", text="Trace file, - for standard input, or a shipped workload.", metavar="FILE|NAME"),
    ] = None
    prompt: Annotated[
        str | None,
        option("--prompt-percentiles", text="Instead: prompt tokens, p50=1020,p90=2734.", metavar="PERCENTILES"),
    ] = None
    output: Annotated[str | None, option("--output-percentiles", text="And output tokens.", metavar="PERCENTILES")] = (
        None
    )
    rate: Annotated[
        float | None,
        option("--rate", text="Mean requests per second; by default the workload's own.", metavar="PER_S"),
    ] = None
    duration: Annotated[
        float | None,
        option("--duration", text="Seconds of each simulation; by default 10,000 requests, at least 120.", metavar="S"),
    ] = None
    arrivals: Annotated[
        str | None,
        option("--arrivals", text="Arrival model, as for simulate, instead of the workload's own.", metavar="MODEL"),
    ] = None
    seeds: Annotated[
        str | None, option("--seeds", text="How many, or which ones: 3 or 0,1,2. All must hold.", metavar="N|LIST")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOptions:
    """What has to hold, and what is best."""

    slo: Annotated[
        str | None,
        option(
            "--slo",
            text="What has to hold: splitwise (default), splitwise*1.5, none, or limits such as "
            "'ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%'.",
            metavar="SLO",
        ),
    ] = None
    minimize: Annotated[
        str | None,
        option("--minimize", text="Default: cost.", metavar="cost|power|energy|carbon|machines"),
    ] = None
    maximize: Annotated[str | None, option("--maximize", text="The rate, --within budgets.", metavar="throughput")] = (
        None
    )
    within: Annotated[
        list[str] | None,
        option("--within", text="Budgets: cost=1500 (USD/h), power=400kW, carbon, machines.", metavar="MEASURE=MOST"),
    ] = None
    preset: Annotated[
        str | None,
        option(
            "--preset",
            text="Against a baseline: most throughput at its power or cost, or least cost at its throughput.",
            metavar="iso-power|iso-cost|iso-throughput",
        ),
    ] = None
    baseline: Annotated[
        str | None, option("--baseline", text="Unsplit servers to compare with: 40:dgx-h100.", metavar="N:MACHINE")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Which variants of machines are looked at, and how far."""

    tensor_parallel: Annotated[
        str | None,
        option("--tensor-parallel", text="Degrees: auto (default) or 2,4,8.", metavar="auto|LIST"),
    ] = None
    power_caps: Annotated[
        str | None,
        option(
            "--power-caps",
            text="Caps to look at; auto (default): 70%,50% where power, energy or carbon matter.",
            metavar="auto|none|LIST",
        ),
    ] = None
    grid_intensity: Annotated[
        float | None,
        option("--grid-intensity", text="Carbon of a kWh; by default the world's average.", metavar="KG_PER_KWH"),
    ] = None
    most_servers: Annotated[
        str | None, option("--most-servers", text="Largest cluster to look at; by default 2,000.", metavar="N")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DayOptions:
    """Whether designs serve a day, too."""

    day: Annotated[
        bool,
        option(
            "--day", text="Let the best split and the best unsplit design serve a day under autoscaling policies too."
        ),
    ] = False
    autoscale: Annotated[
        list[str] | None,
        option(
            "--autoscale",
            text="For the day, a policy of your own as for simulate, next to those fitted; may be repeated.",
            metavar="POLICY",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortOptions:
    """Where simulations run, and how many."""

    workers: Annotated[
        int | None, option("--workers", text="Processes that simulate; by default one for each core.", metavar="N")
    ] = None
    ray: Annotated[
        str | None,
        option("--ray", text="Simulate on a Ray cluster (extra [ray]).", metavar="HOST:PORT|auto|local"),
    ] = None
    resume: Annotated[
        Path | None,
        option(
            "--resume", text="Journal of simulations: begun, or gone on from after an interruption.", metavar="FILE"
        ),
    ] = None
    quick: Annotated[bool, option("--quick", text="Leave out what one more buys and where the verdict flips.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFileOptions:
    """Files that are written."""

    write: Annotated[
        Path | None, option("--write", text="Write the winner as a cluster file for simulate.", metavar="YAML")
    ] = None
    html: Annotated[
        Path | None, option("--html", text="Write the report as one HTML file, figures inside.", metavar="FILE")
    ] = None
    figure: Annotated[Path | None, option("--figure", text="Draw the plan: .png, .pdf, .svg.", metavar="FILE")] = None


def plan(
    *,
    file: Annotated[
        str | None, typer.Argument(help="YAML file that asks; options override it.", metavar="[YAML]")
    ] = None,
    choice: MachineChoice,
    workload: PlannedWorkload,
    objective: ObjectiveOptions,
    search: SearchOptions,
    by: RuleOptions,
    trace_file: TraceFileOptions,
    days: DayOptions,
    effort: EffortOptions,
    as_json: Annotated[bool, option("--json", text="Print the plan as JSON, and nothing else.")] = False,
    files: PlanFileOptions,
) -> int:
    """Say whether to split, which machines to take, and how many.

    \b
    Examples:
    phasesplit plan --model llama-3.1-70b --machines dgx-h100,dgx-a100 \\
        --workload azure-conversation --rate 70 --slo splitwise --minimize cost
    phasesplit plan --model llama-3.1-70b --existing dgx-h100=10,dgx-a100=6 \\
        --prompt-percentiles p50=1020,p90=2734 --output-percentiles p50=129,p90=345
    phasesplit plan question.yaml --resume plan.journal --write cluster.yaml
    """  # noqa: D301 - \b is how click keeps these lines
    began_s = time.perf_counter()
    from phasesplit.planner.plan_view import checked_plan_outputs, output_plan
    from phasesplit.planner.problem_file import read_problem

    asked_workload = {
        "source": workload.source, "prompt": workload.prompt, "output": workload.output,
        "format": trace_file.layout, "columns": trace_file.columns, "time_unit": trace_file.time_unit,
        "skip_bad": trace_file.skip_bad or None, "sort": trace_file.sort or None,
    }  # fmt: skip
    values = {
        "model": choice.model, "machines": choice.machines, "existing": choice.existing,
        "workload": _given(asked_workload), "rate": workload.rate, "duration": workload.duration,
        "arrivals": workload.arrivals, "seeds": workload.seeds,
        "slo": objective.slo, "minimize": objective.minimize, "maximize": objective.maximize,
        "within": ",".join(objective.within) if objective.within else None,
        "preset": objective.preset, "baseline": objective.baseline,
        "tensor_parallel": search.tensor_parallel, "power_caps": search.power_caps,
        "grid_intensity": search.grid_intensity, "most_servers": search.most_servers,
        "rules": _settings(by), "reference": by.reference, "profile": by.profile, "times": by.times,
        "day": days.autoscale or days.day or None,
    }  # fmt: skip
    if effort.workers is not None and effort.workers < 1:
        raise SpecError.bad("--workers", effort.workers, "1 or more")
    if effort.ray is not None:
        from phasesplit.planner.pool.ray_pool import check_address

        check_address(effort.ray, "--ray")
    outputs = checked_plan_outputs(
        [file, workload.source, by.profile],
        write=files.write,
        html=files.html,
        figure=files.figure,
        resume=effort.resume,
    )
    asked = read_problem(file, _given(values) or {})
    has_figures = files.html is not None or files.figure is not None
    made = _made(asked, effort, mapped=has_figures, as_json=as_json)
    return output_plan(asked, made, outputs, began_s, as_json=as_json)


def _given(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values that are not None; None where there are none."""
    return {name: value for name, value in values.items() if value is not None} or None


def _settings(by: RuleOptions) -> dict[str, Any] | None:
    """Return fields of the rules from --rules and --set; None where there are none."""
    from phasesplit.io.rule_settings import rules_setting

    by.check_rules()
    found: dict[str, Any] = {} if by.rules is None else {"published": by.rules == "published"}
    return found | dict(rules_setting(text) for text in by.settings or ()) or None


def _made(
    asked: "Asked",
    effort: EffortOptions,
    *,
    mapped: bool,
    as_json: bool,
) -> "Plan":
    """Say what is being planned, and return the plan."""
    from phasesplit import _jit
    from phasesplit.planner.plan_view import DayProgress, PlanProgress, opening_line
    from phasesplit.planner.pool.cores import usable_cores
    from phasesplit.planner.provision import make_plan, simulate_days

    for note in asked.notes:
        typer.echo(f"phasesplit: {note}", err=True)
    many = effort.workers or usable_cores()
    width = f"Ray at {effort.ray}" if effort.ray else f"{many} worker{'' if many == 1 else 's'}"
    rate_known = asked.baseline is None and asked.problem.objective is not None
    source = Path(asked.source).name if asked.source else "lengths by percentiles"
    typer.echo(opening_line(asked.problem, rate_known, source, width), err=as_json)
    sys.stdout.flush()
    if not _jit.CACHE_IS_WARM:
        typer.echo(COMPILING, err=True)
    with PlanProgress(asked.problem, shown=sys.stderr.isatty()) as progress:
        made = make_plan(
            asked,
            workers=effort.workers,
            ray_address=effort.ray,
            resume=effort.resume,
            thorough=not effort.quick,
            mapped=mapped,
            on_step=progress,
        )
    days = DayProgress(None if effort.ray else many)
    simulate_days(made, asked, workers=effort.workers, ray_address=effort.ray, on_ahead=days.begin, on_day=days)
    return made
