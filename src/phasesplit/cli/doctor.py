"""`phasesplit doctor`: what works on this machine, what is missing, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.cli.options import option

if TYPE_CHECKING:
    from phasesplit.measuring.checkup import Finding

_WRONG = 1


def doctor(
    as_json: Annotated[bool, option("--json", text="Print the findings as JSON, and nothing else.")] = False,
) -> int:
    """Say what works on this machine, what is missing and why; nothing is fetched or compiled.

    Exit code 0: `phasesplit serve` would work. 1: it would not.

    Example: phasesplit doctor
    """
    from phasesplit.measuring.checkup import serves, this_machine

    findings = this_machine()
    works = serves(findings)
    typer.echo(_json(findings, works) if as_json else _text(findings, works))
    return 0 if works else _WRONG


def _text(findings: "list[Finding]", works: bool) -> str:
    from phasesplit.measuring.checkup import State

    wide = max(len(finding.name) for finding in findings)
    lines = [
        f"{finding.state:<6}  {finding.name:<{wide}}  {finding.says}"
        + (f"  ->  {finding.remedy}" if finding.remedy else "")
        for finding in findings
    ]
    if works:
        lines += ["", "`phasesplit serve` would work here."]
    else:
        bad = ", ".join(finding.name for finding in findings if finding.state is State.STOPS)
        lines += ["", f"`phasesplit serve` would not work here: {bad}."]
    return "\n".join(lines)


def _json(findings: "list[Finding]", works: bool) -> str:
    import json
    from dataclasses import asdict

    from phasesplit._version import __version__

    return json.dumps(
        {"version": __version__, "serves": works, "findings": [asdict(finding) for finding in findings]}, indent=2
    )
