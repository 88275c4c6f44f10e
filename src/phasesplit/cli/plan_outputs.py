"""What `phasesplit plan` prints and writes once there is a plan: files all checked before, and all written or none."""

import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from phasesplit.errors import InfeasibleError, SpecError, WorkerLostError

if TYPE_CHECKING:
    from phasesplit.files.asking import Asked
    from phasesplit.files.plan_sources import MachineSources
    from phasesplit.planning.plan import Plan
    from phasesplit.simulation.result import Result

_INTERRUPTED = 130
_ENDINGS = {"write": (".yaml", ".yml"), "html": (".html",), "figure": (".png", ".pdf", ".svg"), "resume": ("",)}


def checked_plan_outputs(read: Sequence[str | None], **named: Path | None) -> dict[str, Path]:
    """Return the files to write by option, all checked before any work is done.

    Args:
        read: Files that are read, which no output may replace.
        named: Path by option: write, html, figure, resume; None where it was not given.

    Raises:
        SpecError: One cannot be written, or two options name one file.
    """
    from phasesplit.files.results import check_output

    taken = {Path(one).resolve() for one in read if one}
    outputs = {}
    for name, path in named.items():
        if path is None:
            continue
        check_output(path, _ENDINGS[name], f"--{name}")
        if path.resolve() in taken:
            raise SpecError.bad(f"--{name}", str(path), "a file that nothing else names")
        taken.add(path.resolve())
        outputs[name] = path
    outputs.pop("resume", None)  # the journal writes itself
    return outputs


def tell(asked: "Asked", made: "Plan", outputs: dict[str, Path], began_s: float, *, as_json: bool) -> int:
    """Print a plan, write its files, and return the exit code.

    Raises:
        InfeasibleError: Nothing keeps the SLO.
        WorkerLostError: Workers were lost on the way; what was known by then is printed.
    """
    from phasesplit.files.plan_sources import plan_sources
    from phasesplit.files.plans import plan_summary, winner_result
    from phasesplit.planning.misses import nearest_miss

    finished = made.complete and made.best is not None
    result = winner_result(made) if (as_json or outputs) and finished else None
    sources = plan_sources(made, asked.times, patient=as_json or "html" in outputs)
    if finished:
        _write(asked, made, result, sources, outputs)
    elapsed_s = time.perf_counter() - began_s
    if as_json:
        import orjson

        typer.echo(orjson.dumps(plan_summary(made, elapsed_s, result, sources), option=orjson.OPT_INDENT_2).decode())
    else:
        from phasesplit.cli.plan_view import print_plan

        if asked.baseline is not None:
            typer.echo(f"the baseline holds {made.problem.traffic.rate_per_s:,.4g} requests/s, which all are sized for")
        print_plan(made, elapsed_s, sources)
        for path in outputs.values() if finished else ():
            typer.echo(f"wrote {path}")
        if finished and "write" in outputs and asked.source and asked.source != "-":
            typer.echo(f"simulate it: {simulation_command(asked, made, outputs['write'])}")
        if finished and "write" in outputs and (command := serving_command(outputs["write"])):
            typer.echo(f"serve it: {command}")
    if outputs and not finished:
        why = "no design keeps the SLO" if made.complete else "the plan is not complete"
        typer.echo(f"phasesplit: not written, as {why}: {', '.join(map(str, outputs.values()))}", err=True)
    if made.lost:
        raise WorkerLostError(made.lost)
    if not (made.complete and made.days_complete):
        return _INTERRUPTED
    if made.best is None:
        raise InfeasibleError(nearest_miss(made))
    return 0


def _write(
    asked: "Asked",
    made: "Plan",
    result: "Result | None",
    sources: "tuple[MachineSources, ...]",
    outputs: dict[str, Path],
) -> None:
    """Write all files, or none of them."""
    if not outputs:
        return
    from phasesplit.files.plans import cluster_spec
    from phasesplit.files.results import written_whole
    from phasesplit.files.specs import write_cluster

    with ExitStack() as files:
        parts = {name: files.enter_context(written_whole(path)) for name, path in outputs.items()}
        if "write" in parts:
            write_cluster(cluster_spec(made, asked), parts["write"])
        if "html" in parts or "figure" in parts:
            from phasesplit import figures

            if "html" in parts:
                figures.write_plan_html(made, result, parts["html"], sources=sources)
            if "figure" in parts:
                figures.write_plan_figure(made, result, parts["figure"])


def serving_command(cluster: Path) -> str | None:
    """Return the command that serves a cluster file, None where its machines are no workers of this host."""
    from phasesplit.engine.fetch import is_named
    from phasesplit.files.serve_files import load_served_cluster

    try:
        served = load_served_cluster(cluster)
    except SpecError:
        return None
    path = [] if is_named(served.model) else ["--model", "PATH"]
    return shlex.join(["phasesplit", "serve", str(cluster), *path])


def simulation_command(asked: "Asked", made: "Plan", cluster: Path) -> str:
    """Return the command that simulates the winner as the plan did, on its first seed."""
    assert made.best is not None  # noqa: S101 - asked by the caller
    problem = made.problem
    words = ["phasesplit", "simulate", "--cluster", str(cluster), "--workload", asked.source]
    words += ["--rate", repr(made.best.rate_per_s), "--duration", repr(problem.traffic.duration_s)]
    words += ["--seed", str(problem.seeds[0]), *asked.options]
    if problem.rules.seed != problem.seeds[0]:
        words += ["--set", f"seed={problem.rules.seed}"]  # the rules' own draws, which --seed sets as well
    return shlex.join(words)
