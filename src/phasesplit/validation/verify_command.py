"""`phasesplit verify`: a cluster runs a trace, the simulator predicts it, and both are compared.

`verification_record` is the result as JSON has it.
"""

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from phasesplit.console.options import ReplayOptions, option
from phasesplit.console.workload_options import Demand
from phasesplit.domain.latency import Distribution
from phasesplit.errors import SpecError
from phasesplit.launcher.worker_command import seconds_of
from phasesplit.replay.replay_command import clipped, span
from phasesplit.validation.comparison import ComparedFigure
from phasesplit.validation.core_shares import cores_text
from phasesplit.validation.verify import Verification
from phasesplit.validation.verify_view import PROFILE_TIME, PROFILE_TIME_VLLM, measure_profile, verified


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The profile that a prediction starts from."""

    profile: Annotated[
        Path | None,
        option(
            "--profile",
            text="What `phasesplit profile` wrote of this machine and model; by default it is measured first.",
            metavar="FILE.json",
        ),
    ] = None
    profile_time: Annotated[
        str | None,
        option(
            "--profile-time",
            text=f"How long that may take; by default {PROFILE_TIME}, of vLLM {PROFILE_TIME_VLLM}.",
            metavar="TIME",
        ),
    ] = None
    keep_profile: Annotated[
        Path | None, option("--keep-profile", text="Keep what was measured, for --profile.", metavar="FILE.json")
    ] = None


def verify(
    *,
    cluster: Annotated[str, typer.Argument(help="Cluster file, as `phasesplit serve` takes it.", metavar="YAML")],
    workload: Annotated[
        str, typer.Argument(help="Trace file, - for standard input, or a shipped workload.", metavar="TRACE")
    ],
    load: ReplayOptions,
    profiled: ProfileOptions,
    without_front_end: Annotated[
        bool,
        option("--without-front-end", text="Predict by the profile alone; the front end's own time is only shown."),
    ] = False,
    logs: Annotated[
        Path | None, option("--logs", text="Directory for the workers' logs; by default dropped.", metavar="DIR")
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print the result as JSON, and nothing else.")] = False,
    html: Annotated[
        Path | None, option("--html", text="Write a report that needs no network.", metavar="FILE.html")
    ] = None,
) -> int:
    """Run a cluster, replay a trace against it, simulate the same, and show how far apart the two are.

    Each worker gets cores of its own as far as there are any. Nothing else should run on this machine meanwhile.

    Example: phasesplit verify cluster.yaml azure-conversation --rate 2 --duration 60 --clip 512:64 --html report.html
    """
    from phasesplit.engine.fetch import model_path
    from phasesplit.io.cluster_file import load_served_cluster
    from phasesplit.io.profiles import ENDING, read_profile_file
    from phasesplit.io.results import check_output, written_whole
    from phasesplit.validation.verify import on_cores

    demand = Demand(source=workload, load=load, seed=load.seed, place="TRACE")
    profile, profile_time, keep_profile = profiled.profile, profiled.profile_time, profiled.keep_profile
    if html is not None:
        check_output(html, (".html",), "--html")
    if keep_profile is not None:
        check_output(keep_profile, (ENDING,), "--keep-profile")
        if profile is not None:
            raise SpecError("--keep-profile: --profile names one, nothing is measured")
    if profile_time is not None:
        seconds_of(profile_time, "--profile-time")
    limits = None if load.clip is None else span("--clip", load.clip)
    asked = load_served_cluster(cluster)
    on_cores(asked)
    if profile is not None:
        read_profile_file(profile)
    trace, dropped = demand.trace()
    trace = clipped(trace, limits)
    if dropped:
        typer.echo(dropped, err=True)
    model = model_path(asked.model, _say)
    with tempfile.TemporaryDirectory(prefix="phasesplit-") as scratch:
        path = profile or Path(scratch) / f"profile{ENDING}"
        if profile is None:
            measure_profile(path, asked, model, profile_time, logs=logs, quiet=as_json)
            if keep_profile is not None:
                with written_whole(keep_profile) as part:
                    part.write_bytes(path.read_bytes())
        (found,) = verified(
            asked, model, [trace], path, adds_overheads=not without_front_end, seed=load.seed, logs=logs, quiet=as_json
        )
    if html is not None:
        from phasesplit.validation.verify_page import write_verify_html

        with written_whole(html) as part:
            write_verify_html([verification_record(found)], part)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(verification_record(found), option=orjson.OPT_INDENT_2).decode())
    else:
        from phasesplit.validation.verify_view import print_verification

        print_verification(found)
        if html is not None:
            typer.echo(f"wrote {html}")
    return 0


def _say(line: str) -> None:
    typer.echo(line, err=True)


_SHARES = [share / 100 for share in range(100)] + [0.995, 0.999, 1.0]
"""Of the distributions that are kept."""


def verification_record(found: Verification) -> dict[str, Any]:
    """Return a verification as JSON has it: values in base units, errors as shares, None where there is no value."""
    comparison, trace = found.comparison, found.trace
    return {
        "cluster": {"name": found.cluster.name, "pools": dict(found.cluster.pools), "model": found.cluster.model},
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "duration_s": trace.duration_s,
            "rate_per_s": trace.rate_per_s,
        },
        "profile": found.profile,
        "kv_blocks": dict(found.kv_blocks),
        "block_tokens": found.block_tokens,
        "cores": {name: cores_text(cores) for name, cores in found.plan.workers.items()},
        "front_cores": cores_text(found.plan.front),
        "core_share": found.plan.core_share,
        "front_end": {
            "added": found.adds_overheads,
            "iteration_s": found.overheads.iteration_s,
            "decode_s": found.overheads.decode_s,
            **{f"{stage.replace(' ', '_')}_s": value for stage, value in found.overheads.stages_s.items()},
        },
        "compared": comparison.compared,
        "distributions": {
            "shares": _SHARES,
            **{metric: _quantiles(*pair) for metric, pair in comparison.distributions.items()},
        },
        "latencies": [_figure(figure) for figure in comparison.latencies],
        "stages": [_figure(figure) for figure in comparison.stages],
        "totals": [_figure(figure) for figure in comparison.totals],
        "explanations": [
            {
                "metric": one.metric,
                "text": str(one),
                "difference_s": _number(one.difference_s),
                "stage": one.stage,
                "stage_difference_s": _number(one.stage_s),
            }
            for one in comparison.explanations
        ],
        "placements": {
            "differ": len(comparison.misplaced),
            "first": [
                {"request": one.row, "predicted": one.predicted, "measured": one.measured}
                for one in comparison.misplaced[:10]
            ],
        },
        "errors": dict(found.errors),
        "gateway_share": found.gateway_share,
        "client_share": found.client_share,
        "others_share": found.others_share,
        "core_wait_share": dict(found.waited),
        "warnings": list(found.warnings),
    }


def _quantiles(predicted: Distribution, measured: Distribution) -> dict[str, list[float | None]]:
    return {
        side: [_number(one.quantile(share)) for share in _SHARES]
        for side, one in (("predicted", predicted), ("measured", measured))
    }


def _figure(figure: ComparedFigure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "predicted": _number(figure.predicted),
        "measured": _number(figure.measured),
        "error": _number(figure.error),
        "goal": figure.goal,
        "met": figure.is_met,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
