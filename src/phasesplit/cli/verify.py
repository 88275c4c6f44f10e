"""`phasesplit verify`: a cluster runs a trace, the simulator predicts it, and the two are held against each other."""

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.cli.demand import Demand
from phasesplit.cli.options import Clip, Count, Duration, Rate, option
from phasesplit.cli.replay import clipped, span
from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.request import Trace
    from phasesplit.files.serve_files import ServedCluster
    from phasesplit.measuring.live import Live
    from phasesplit.measuring.verify import Verification

PROFILE_TIME = "30s"


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
            text="What `phasesplit profile engine` wrote of this machine and model; by default it is measured first.",
            metavar="FILE.json",
        ),
    ] = None,
    profile_time: Annotated[
        str, option("--profile-time", text=f"How long that may take; by default {PROFILE_TIME}.", metavar="TIME")
    ] = PROFILE_TIME,
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

    Each worker gets a core of its own as far as there are cores. Nothing else should run on this machine meanwhile.

    Example: phasesplit verify cluster.yaml azure-conversation --rate 2 --duration 60 --clip 512:64 --html report.html
    """
    from phasesplit.engine.fetch import model_path
    from phasesplit.files.profile_files import ENDING, read_profile_file
    from phasesplit.files.results import check_output, written_whole
    from phasesplit.files.serve_files import load_served_cluster

    demand = Demand(source=workload, rate_per_s=rate, duration_s=duration, count=count, seed=seed, place="TRACE")
    if html is not None:
        check_output(html, (".html",), "--html")
    if keep_profile is not None:
        check_output(keep_profile, (ENDING,), "--keep-profile")
        if profile is not None:
            raise SpecError("--keep-profile: --profile names one, nothing is measured")
    limits = None if clip is None else span("--clip", clip)
    asked = load_served_cluster(cluster)
    if asked.vllm is not None:
        raise SpecError(
            f"{cluster}, engine: got vllm, allowed is embedded: vLLM's threads cannot be held to a core yet"
        )
    before = None if profile is None else read_profile_file(profile)
    trace, dropped = demand.trace()
    trace = clipped(trace, limits)
    if dropped:
        typer.echo(dropped, err=True)
    model = model_path(asked.model, _say)
    with tempfile.TemporaryDirectory(prefix="phasesplit-") as scratch:
        path = profile or Path(scratch) / f"profile{ENDING}"
        if before is None:
            measure_profile(path, asked, model, profile_time, quiet=as_json)
            before = read_profile_file(path)
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


def verified(
    cluster: "ServedCluster",
    model: Path,
    traces: "Sequence[Trace]",
    profile: Path,
    *,
    adds_overheads: bool = True,
    seed: int = 0,
    logs: Path | None = None,
    quiet: bool = False,
    afterwards: "Callable[[Live], Awaitable[None]] | None" = None,
) -> "list[Verification]":
    """Return predicted against measured for each trace, with progress on standard error.

    Args:
        cluster: What to run; its gateway takes any free port.
        model: Path of its model.
        traces: The requests.
        profile: What iterations take.
        adds_overheads: Whether the front end's own time is added to the prediction.
        seed: Of the prompts.
        logs: Directory for the workers' logs, None: they are dropped.
        quiet: Show no progress.
        afterwards: Called with the cluster once all traces are through.
    """
    from dataclasses import replace

    from phasesplit.cli.verify_view import VerifyProgress
    from phasesplit.files.profile_files import read_profile_file
    from phasesplit.measuring.verify import verify as run

    log: Callable[[str, str], None] = _drop
    if logs is not None:
        from phasesplit.files.worker_logs import WorkerLogs

        log = WorkerLogs(logs).write
    with VerifyProgress(shown=not quiet) as progress:
        return asyncio.run(
            run(
                replace(cluster, port=0, client_keys=()),
                model,
                traces,
                read_profile_file(profile),
                profile,
                adds_overheads=adds_overheads,
                seed=seed,
                log=log,
                afterwards=afterwards,
                tell=progress,
            )
        )


def measure_profile(path: Path, cluster: "ServedCluster", model: Path, time: str, *, quiet: bool = False) -> None:
    """Measure this machine with the cluster's model and KV memory, in a process of its own.

    Args:
        path: Where the profile goes.
        cluster: The cluster.
        model: Path of its model.
        time: How long it may take.
        quiet: Show no progress.

    Raises:
        SpecError: It failed.
    """
    command = [
        sys.executable, "-m", "phasesplit", "profile", "engine", "--model", str(model), "--kv-memory",
        str(cluster.kv_bytes), "--budget", time, "--output", str(path), "--json",
    ]  # fmt: skip
    if not quiet:
        _say(f"profiling this machine ({time}) ...")
    # Our own interpreter and constants; the cluster's model and memory are arguments.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise SpecError(f"profile: {last.removeprefix('phasesplit: ')}")


def _drop(_name: str, _line: str) -> None:
    """Take a line of a worker's log, and do nothing with it."""


def _say(line: str) -> None:
    typer.echo(line, err=True)
