"""`phasesplit verify`: a cluster runs a trace, the simulator predicts it, and both are compared."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from phasesplit.cli.demand import Demand
from phasesplit.cli.options import Clip, Count, Duration, Rate, option
from phasesplit.cli.replay import clipped, span
from phasesplit.cli.verify_run import PROFILE_TIME, PROFILE_TIME_VLLM, measure_profile, verified
from phasesplit.cli.worker import seconds_of
from phasesplit.errors import SpecError


def verify(
    cluster: Annotated[str, typer.Argument(help="Cluster file, as `phasesplit serve` takes it.", metavar="YAML")],
    workload: Annotated[
        str, typer.Argument(help="Trace file, - for standard input, or a shipped workload.", metavar="TRACE")
    ],
    rate: Rate = None,
    duration: Duration = None,
    count: Count = None,
    clip: Clip = None,
    seed: Annotated[int, option("--seed", text="Of arrivals and prompts; by default 0.", metavar="N")] = 0,
    profile: Annotated[
        Path | None,
        option(
            "--profile",
            text="What `phasesplit profile` wrote of this machine and model; by default it is measured first.",
            metavar="FILE.json",
        ),
    ] = None,
    profile_time: Annotated[
        str | None,
        option(
            "--profile-time",
            text=f"How long that may take; by default {PROFILE_TIME}, of vLLM {PROFILE_TIME_VLLM}.",
            metavar="TIME",
        ),
    ] = None,
    keep_profile: Annotated[
        Path | None, option("--keep-profile", text="Keep what was measured, for --profile.", metavar="FILE.json")
    ] = None,
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
    from phasesplit.files.profile_files import ENDING, read_profile_file
    from phasesplit.files.results import check_output, written_whole
    from phasesplit.files.serve_files import load_served_cluster
    from phasesplit.measuring.verify import on_cores

    demand = Demand(source=workload, rate_per_s=rate, duration_s=duration, count=count, seed=seed, place="TRACE")
    if html is not None:
        check_output(html, (".html",), "--html")
    if keep_profile is not None:
        check_output(keep_profile, (ENDING,), "--keep-profile")
        if profile is not None:
            raise SpecError("--keep-profile: --profile names one, nothing is measured")
    if profile_time is not None:
        seconds_of(profile_time, "--profile-time")
    limits = None if clip is None else span("--clip", clip)
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
            asked, model, [trace], path, adds_overheads=not without_front_end, seed=seed, logs=logs, quiet=as_json
        )
    if html is not None:
        from phasesplit.figures.verify_report import write_verify_html
        from phasesplit.measuring.verify_record import verification_record

        with written_whole(html) as part:
            write_verify_html([verification_record(found)], part)
    if as_json:
        import orjson

        from phasesplit.measuring.verify_record import verification_record

        typer.echo(orjson.dumps(verification_record(found), option=orjson.OPT_INDENT_2).decode())
    else:
        from phasesplit.cli.verify_view import print_verification

        print_verification(found)
        if html is not None:
            typer.echo(f"wrote {html}")
    return 0


def _say(line: str) -> None:
    typer.echo(line, err=True)
