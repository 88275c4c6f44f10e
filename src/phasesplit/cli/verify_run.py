"""The two steps of `phasesplit verify`, as the table of errors and the demo take them too: profile, then verify."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.request import Trace
    from phasesplit.files.serve_files import ServedCluster
    from phasesplit.measuring.live import Live
    from phasesplit.measuring.verify import Verification
    from phasesplit.serving.children import Log

PROFILE_TIME, PROFILE_TIME_VLLM = "30s", "120s"
"""How long measuring a machine may take; vLLM is measured from outside, where every point is a request."""


def measure_profile(
    path: Path,
    cluster: "ServedCluster",
    model: Path,
    time: str | None = None,
    *,
    logs: Path | None = None,
    quiet: bool = False,
) -> None:
    """Measure a worker of a cluster on this machine, from a process of its own.

    The embedded engine is measured without a worker. A vLLM machine is started as the cluster's are, alone, and on the
    cores that it will have in the cluster, and is asked as clients ask.

    Args:
        path: Where the profile goes.
        cluster: The cluster.
        model: Path of its model.
        time: How long it may take; None: PROFILE_TIME, or PROFILE_TIME_VLLM.
        logs: Directory for the worker's log, None: it is dropped.
        quiet: Show no progress.

    Raises:
        SpecError: It failed.
    """
    time = time or (PROFILE_TIME if cluster.vllm is None else PROFILE_TIME_VLLM)
    if not quiet:
        typer.echo(f"profiling this machine ({time}) ...", err=True)
    if cluster.vllm is not None:
        asyncio.run(_measure_vllm(path, cluster, model, time, _log(logs)))
        return
    command = _profile("engine", path, time, "--model", str(model), "--kv-memory", str(cluster.kv_bytes))
    # Our own interpreter and constants; the cluster's model and memory are arguments.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # noqa: S603
    _demand_success(done.returncode, done.stderr)


async def _measure_vllm(path: Path, cluster: "ServedCluster", model: Path, time: str, log: "Log") -> None:
    from phasesplit.measuring.cores import CorePlan
    from phasesplit.measuring.live import served
    from phasesplit.measuring.verify import on_cores

    plan, cluster = on_cores(cluster)
    alone = replace(cluster, pools={"unsplit": 1}, port=0, client_keys=())
    ((name, _),) = alone.workers.items()
    place = CorePlan(workers={name: next(iter(plan.workers.values()))}, front=plan.front, core_share=1.0)
    async with served(alone, model, say=_drop_line, log=log) as live:
        with live.placed(place):
            command = _profile(str(live.facts[name]["url"]), path, time, "--sizes", str(model))
            environment = {**os.environ, "PHASESPLIT_API_KEY": cluster.join_key or ""}
            process = await asyncio.create_subprocess_exec(
                *command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
            )
            try:
                _, said = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
    _demand_success(process.returncode or 0, said.decode("utf-8", "replace"))


def _profile(target: str, path: Path, time: str, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "phasesplit", "profile", target, *options, "--budget", time, "--output", str(path),
        "--json",
    ]  # fmt: skip


def _demand_success(code: int, said: str) -> None:
    if code:
        last = (said.strip().splitlines() or ["no reason"])[-1]
        raise SpecError(f"profile: {last.removeprefix('phasesplit: ')}")


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
    from phasesplit.cli.verify_view import VerifyProgress
    from phasesplit.files.profile_files import read_profile_file
    from phasesplit.measuring.verify import verify as run

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
                log=_log(logs),
                afterwards=afterwards,
                tell=progress,
            )
        )


def _log(logs: Path | None) -> "Log":
    """Return what takes the workers' logs: files in a directory, or nothing."""
    if logs is None:
        return _drop
    from phasesplit.files.worker_logs import WorkerLogs

    return WorkerLogs(logs).write


def _drop(_name: str, _line: str) -> None:
    """Take a line of a worker's log, and do nothing with it."""


def _drop_line(_line: str) -> None:
    """Take a line about the cluster, and do nothing with it."""
