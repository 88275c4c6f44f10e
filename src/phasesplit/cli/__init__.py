"""The command line: one module for each command, put together here."""

import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from phasesplit._version import __version__
from phasesplit.cli import trace
from phasesplit.cli.replay_decisions import replay_decisions
from phasesplit.cli.simulate import simulate
from phasesplit.doctor import doctor
from phasesplit.errors import InfeasibleError, SpecError, WorkerLostError
from phasesplit.launcher.serve_command import serve
from phasesplit.launcher.top_command import top
from phasesplit.launcher.worker_command import worker
from phasesplit.planner.plan_command import plan
from phasesplit.planner.study.reproduce_command import reproduce
from phasesplit.profiling.profile_command import profile
from phasesplit.replay.replay_command import replay
from phasesplit.validation.verify_command import verify
from phasesplit.vllm.worker.vllm_worker_command import vllm_worker

INFEASIBLE, WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit codes besides 0: an honest negative answer, bad input, and what shells report for the two signals."""

# Imports and compiled code make long-lived objects only; looking through them for garbage is a tenth of the start-up.
_GC_THRESHOLD = 200_000
_NEW_ISSUE = "phasesplit: this is a bug of phasesplit; please report it with the lines above and the command you ran"
# Typer carries a copy of click or uses the installed one, depending on its version; this is that one's base error.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, simulate and run phase-split serving of large language models.",
)
app.command()(plan)
app.command()(profile)
app.command()(reproduce)
app.command()(simulate)
app.command()(replay)
app.command()(verify)
app.command()(replay_decisions)
app.command()(serve)
app.command()(worker)
app.command()(vllm_worker)
app.command()(top)
app.command()(doctor)
app.add_typer(trace.app, name="trace")


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Plan, simulate and run phase-split serving of large language models.

    Example: phasesplit simulate --help
    """


def main() -> None:
    """Run the command line with the arguments of this process, and exit."""
    gc.set_threshold(_GC_THRESHOLD, 20, 100)
    # Its threads would start with numpy, and nothing here is work for them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as problem:
        code = _unwritable(problem)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; what the user must know goes to standard error, in one line.

    Args:
        arguments: What stands behind `phasesplit`.

    Raises:
        Exception: A bug, after a line that asks to report it.
    """
    if not arguments or arguments[0] == "--version":
        if arguments:
            typer.echo(f"phasesplit {__version__}")
            return 0
        arguments = ["--help"]
    try:
        code = app(list(arguments), standalone_mode=False, prog_name="phasesplit")
    except SpecError as problem:
        return _say(problem, WRONG_INPUT)
    except (InfeasibleError, WorkerLostError) as answer:
        return _say(answer, INFEASIBLE)
    except _UsageError as problem:
        if type(problem).__name__ == "NoArgsIsHelpError":
            typer.echo(problem.format_message())  # type: ignore[attr-defined]
            return WRONG_INPUT
        return _say(f"{problem.format_message()} (see --help)", WRONG_INPUT)  # type: ignore[attr-defined]
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as leaving:  # 0: typer has printed what completes; else the reader of standard output has gone
        return _unwritable(BrokenPipeError()) if leaving.code else 0
    except Exception as problem:
        if isinstance(problem, OSError) and problem.filename is None:  # a stream; files are the business of `files`
            return _unwritable(problem)
        sys.excepthook(*sys.exc_info())
        typer.echo(_NEW_ISSUE, err=True)
        raise SystemExit(INFEASIBLE) from None
    if code == INTERRUPTED:
        return _say("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _say(what: object, code: int) -> int:
    typer.echo(f"phasesplit: {' '.join(str(what).split())}", err=True)
    return code


def _unwritable(problem: OSError) -> int:
    """Say why standard output takes no more, unless its reader has gone, and give up on it."""
    # Else the interpreter fails again when it flushes at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(problem, BrokenPipeError):
        return BROKEN_PIPE
    return _say(f"the output cannot be written ({problem.strerror or problem})", WRONG_INPUT)
