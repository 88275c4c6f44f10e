"""A verification in the terminal: the two steps of `phasesplit verify`, their progress, and the result in tables.

`measure_profile` and `verified` are the steps. The table of errors and the demo call them as well.
"""

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from phasesplit.errors import SpecError
from phasesplit.validation.core_shares import cores_text

if TYPE_CHECKING:
    from phasesplit.domain.request import Trace
    from phasesplit.io.cluster_file import ServedCluster
    from phasesplit.launcher.supervisor import Log
    from phasesplit.validation.comparison import ComparedFigure
    from phasesplit.validation.live import Live
    from phasesplit.validation.verify import Verification


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
    _require_success(done.returncode, done.stderr)


async def _measure_vllm(path: Path, cluster: "ServedCluster", model: Path, time: str, log: "Log") -> None:
    from phasesplit.validation.core_shares import CorePlan
    from phasesplit.validation.live import served
    from phasesplit.validation.verify import on_cores

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
    _require_success(process.returncode or 0, said.decode("utf-8", "replace"))


def _profile(target: str, path: Path, time: str, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "phasesplit", "profile", target, *options, "--budget", time, "--output", str(path),
        "--json",
    ]  # fmt: skip


def _require_success(code: int, said: str) -> None:
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
    from phasesplit.io.profiles import read_profile_file
    from phasesplit.validation.verify import verify as run

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
                on_progress=progress,
            )
        )


def _log(logs: Path | None) -> "Log":
    """Return what takes the workers' logs: files in a directory, or nothing."""
    if logs is None:
        return _drop
    from phasesplit.io.decision_log import WorkerLogs

    return WorkerLogs(logs).write


def _drop(_name: str, _line: str) -> None:
    """Take a line of a worker's log, and do nothing with it."""


def _drop_line(_line: str) -> None:
    """Take a line about the cluster, and do nothing with it."""


_MOST_MISPLACED = 5
_EVERY_S = 5.0
"""Where standard error is no terminal, a line this often."""


class VerifyProgress:
    """Shows what is done and how far it is; to be closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._status: Any = None
        self._said, self._said_s = "", -math.inf

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that so many of all requests are done."""
        if not self._shown:
            return
        if self._status is None:
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            self._status = console.status("") if console.is_terminal else console
            if console.is_terminal:
                self._status.start()
        text = f"{what} ..." if total <= 1 else f"{what}: {done:,} of {total:,} requests"
        if hasattr(self._status, "update"):
            self._status.update(text)
        elif what != self._said or time.monotonic() - self._said_s > _EVERY_S:
            self._status.print(text)
            self._said, self._said_s = what, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self._status, "stop"):
            self._status.stop()


def print_verification(found: "Verification") -> None:
    """Print predicted next to measured, what explains the difference, and what both rest on."""
    from rich.console import Console

    comparison = found.comparison
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in basis(found):
        say(line)
    console.print(_table("latency", comparison.latencies, has_goals=True))
    console.print(_table("mean time in each stage", comparison.stages))
    console.print(_table("throughput, utilisation, moves", comparison.totals))
    for explanation in comparison.explanations:
        say(str(explanation))
    for line in placements(found):
        say(line)
    missed = comparison.missed
    if missed:
        say(f"Beyond the goal: {', '.join(f'{one.name} ({one.error:+.0%})' for one in missed)}")
    else:
        say("All goals met.")
    for text in found.warnings:
        say(f"Beware: {text}")
    for text, count in found.errors.items():
        say(f"{count} failed: {text}")


def basis(found: "Verification") -> list[str]:
    """Return what prediction and measurement rest on, a line each."""
    trace, kv_blocks = found.trace, set(found.kv_blocks.values())
    pools = " + ".join(f"{count} {role}" for role, count in found.cluster.pools.items())
    each = " or ".join(f"{blocks:,}" for blocks in sorted(kv_blocks))
    lines = [
        f"{found.cluster.name} ({pools}) with {trace.name}: {len(trace):,} requests in {trace.duration_s:.0f} s, "
        f"{trace.rate_per_s:.2f}/s",
        f"times: {found.profile}",
        f"KV memory: {each} blocks of {found.block_tokens} tokens a worker, the same on both sides",
        f"cores: {', '.join(f'{name} on {cores_text(cores)}' for name, cores in found.plan.workers.items())}; on "
        f"{cores_text(found.plan.front)} the gateway ({found.gateway_share:.0%} of a core) and the "
        f"client ({found.client_share:.0%})",
    ]
    share = found.plan.core_share
    if share < 1:
        lines.append(
            f"each worker has {share:.0%} of its core: iterations take {1 / share:.2f} times as long, on both sides"
        )
    overheads = found.overheads
    parts = ", ".join(f"{1e3 * value:.1f} ms in {stage}" for stage, value in overheads.stages_s.items())
    parts += f" a request; {1e3 * overheads.iteration_s:.2f} ms an iteration, {1e3 * overheads.decode_s:.2f} ms a token"
    added = "added to the prediction" if found.adds_overheads else "not in the prediction"
    return [*lines, f"front end, measured on the idle cluster: {parts} ({added})"]


def placements(found: "Verification") -> list[str]:
    """Return how many placement decisions differ, and the first of them."""
    comparison = found.comparison
    if not comparison.misplaced:
        return ["Placement: every request went to the predicted machines."]
    count = len(comparison.misplaced)
    lines = [f"Placement: {count:,} of {comparison.requests:,} requests went elsewhere than predicted."]
    lines += [
        f"  request {one.row}: predicted {' -> '.join(one.predicted)}, measured {' -> '.join(one.measured)}"
        for one in comparison.misplaced[:_MOST_MISPLACED]
    ]
    return lines


def shown(figure: "ComparedFigure", value: float) -> str:
    """Return a value in the unit that people read."""
    if math.isnan(value):
        return "-"
    if figure.unit == "s":
        return f"{1e3 * value:,.1f} ms"
    if figure.unit == "share":
        return f"{value:.0%}"
    return f"{value:,.2f}/s" if figure.unit == "per_s" else f"{value:,.0f}"


def shown_error(figure: "ComparedFigure") -> str:
    """Return the error: of times and rates relative, of shares and counts the difference."""
    if figure.unit == "share":
        return f"{100 * (figure.predicted - figure.measured):+.0f} points"
    if figure.unit == "count":
        return f"{figure.predicted - figure.measured:+.0f}"
    return "-" if math.isnan(figure.error) else f"{figure.error:+.1%}"


def _table(title: str, figures: "Sequence[ComparedFigure]", *, has_goals: bool = False) -> Any:
    from rich.table import Table

    table = Table(title, "predicted", "measured", "error", *(["goal"] if has_goals else []))
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in figures:
        cells = [shown(figure, figure.predicted), shown(figure, figure.measured), shown_error(figure)]
        if has_goals and figure.goal is not None:
            cells.append(f"{figure.goal:.0%} {'met' if figure.is_met else 'missed'}")
        table.add_row(figure.name, *cells)
    return table
