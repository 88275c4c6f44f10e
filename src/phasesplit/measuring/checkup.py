"""Whether this machine can run a cluster: findings, a line each, made by checks that fail one by one."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """What a finding means for the default `phasesplit serve`."""

    OK = "ok"
    NOTE = "note"
    """It runs, slower or smaller than it could."""
    ABSENT = "absent"
    """Something that only some commands use."""
    STOPS = "stops"
    """It does not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was looked at.
        state: What that means.
        says: What is there, or what is missing and why that matters, in one line.
        remedy: What a person can do about it; empty where there is nothing to do.
    """

    name: str
    state: State
    says: str
    remedy: str = ""


Check = Callable[[], Finding]


def examine(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield what each check finds; one that fails itself is a finding as well.

    A machine on which a check breaks is the very machine that somebody asks about, so no error passes.

    Args:
        checks: Names for checks that fail, and the checks.
    """
    for name, check in checks:
        try:
            yield check()
        except Exception as problem:
            reason = " ".join(str(problem).split()) or "no reason given"
            yield Finding(name, State.STOPS, f"cannot be looked at: {type(problem).__name__}: {reason}")


def serves(findings: Sequence[Finding]) -> bool:
    """Return whether the default `phasesplit serve` would work."""
    return all(finding.state is not State.STOPS for finding in findings)


def this_machine() -> list[Finding]:
    """Return all findings about this machine, those of the hardware first."""
    from phasesplit.measuring import checkup_extras, checkup_host, checkup_links, checkup_stores

    return [
        finding
        for checks in (checkup_host.CHECKS, checkup_stores.CHECKS, checkup_links.CHECKS, checkup_extras.checks())
        for finding in examine(checks)
    ]
