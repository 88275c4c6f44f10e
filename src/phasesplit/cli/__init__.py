"""The command line: one module for each command, imported when that command runs.

A worker must start fast, `--help` too, and `doctor` must run where packages are missing. None of them imports what the
other commands need.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from phasesplit._version import __version__
from phasesplit.console.options import with_groups
from phasesplit.errors import InfeasibleError, SpecError, WorkerLostError

INFEASIBLE, WRONG_INPUT, INTERRUPTED, BROKEN_PIPE = 1, 2, 130, 141
"""Exit codes besides 0: an honest negative answer, bad input, and what shells report for the two signals."""

# Imports and compiled code make long-lived objects only; looking through them for garbage is a tenth of the start-up.
_GC_THRESHOLD = 200_000
_NEW_ISSUE = "phasesplit: this is a bug of phasesplit; please report it with the lines above and the command you ran"
# Typer carries a copy of click or uses the installed one, depending on its version; this is that one's base error.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]

COMMANDS = {
    "plan": ("planner.plan_command:plan", "Say whether to split, which machines to take, and how many"),
    "profile": ("profiling.profile_command:profile", "Measure how long prefill and decode iterations take"),
    "reproduce": ("planner.study.reproduce_command:reproduce", "Run the provisioning study of the Splitwise paper"),
    "simulate": ("cli.simulate:simulate", "Say what happens when a cluster serves a workload"),
    "replay": ("replay.replay_command:replay", "Send a trace to an endpoint, and measure TTFT, ITL and E2E"),
    "verify": ("validation.verify_command:verify", "Compare a live cluster with its simulation"),
    "replay-decisions": ("cli.replay_decisions:replay_decisions", "Make the decisions of a log again, and compare"),
    "serve": ("launcher.serve_command:serve", "Serve a model with prefill and decode in processes of their own"),
    "worker": ("launcher.worker_command:worker", "Run one worker, and let it join a gateway"),
    "vllm-worker": ("vllm.worker.vllm_worker_command:vllm_worker", "Run vLLM's API server as a worker of a gateway"),
    "top": ("launcher.top_command:top", "Show machines, queues and latencies of a cluster that serves"),
    "doctor": ("doctor:doctor", "Say what works on this machine, what is missing and why"),
    "trace": ("cli.trace:app", "Look at a trace, convert it, or give it another rate"),
}
"""Where each command is, below `phasesplit`, and what the list of commands says of it."""


class LazyCommands(Mapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            module, _, function = COMMANDS[name][0].partition(":")
            found = getattr(importlib.import_module(f"phasesplit.{module}"), function)
            if isinstance(found, typer.Typer):
                command: Any = typer.main.get_group(found)
            else:
                alone = typer.Typer(add_completion=False, rich_markup_mode=None)
                alone.command()(with_groups(found))
                command = typer.main.get_command(alone)
            command.name = name
            self._imported[name] = command
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class CommandLine(typer.core.TyperGroup):
    """The group of all commands, which lists them without importing them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the signature is that of click
        """Return the names of all commands."""
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - the signature is that of click
        """Write what each command does."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


app = typer.Typer(
    cls=CommandLine,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, simulate and run phase-split serving of large language models.",
)


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
