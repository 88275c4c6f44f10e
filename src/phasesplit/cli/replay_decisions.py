"""`phasesplit replay-decisions`: make the calls of a decision log again, and say whether they come out the same."""

from typing import Annotated

import typer

DIFFERENT = 1
"""Exit code where a call comes out otherwise."""

_MOST_SHOWN = 400


def replay_decisions(
    log: Annotated[str, typer.Argument(help="Decision log that the gateway has written (.gz as well).")],
) -> None:
    """Make the scheduling decisions of a log again, from the same facts, and compare.

    Example: phasesplit replay-decisions decisions.jsonl
    """
    from phasesplit.gateway.decisions import replay
    from phasesplit.io.decision_log import read_decisions

    found = replay(read_decisions(log), log)
    kinds = f"{found.placements:,} placements, {found.moves:,} moves by load"
    typer.echo(f"{found.decisions:,} decisions, {found.equal:,} equal ({kinds})")
    if found.cut:
        typer.echo("the last line is cut off and left out")
    if found.difference is not None:
        different = found.difference
        typer.echo(f"line {different.line}, {different.call}")
        typer.echo(f"  logged: {_short(different.logged)}")
        typer.echo(f"  now:    {_short(different.now)}")
        raise typer.Exit(DIFFERENT)


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
