"""The machines of a plan's two best designs by every source of phase times, since the answer depends on it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from phasesplit.domain.cluster import Pool
from phasesplit.io.catalog import SourceComparison, compare_times, time_sources
from phasesplit.planner.plan import Plan

_TABLES = "aiconfigurator"
_NOT_ASKED = (
    "phase times from aiconfigurator: aiconfigurator-core takes two seconds to start, so only --html, --json or"
    " --times aiconfigurator asks it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSources:
    """What each source has for the model of a plan on one of its machines.

    Attributes:
        machine: Name of the machine.
        used: The source that the plan was made with, a key of `described`.
        described: Source to where its times come from, as reports print it.
        absent: Source to why it has none, in one line.
        rows: The iterations that two sources or more cover; none where only one covers the machine.
    """

    machine: str
    used: str
    described: Mapping[str, str]
    absent: Mapping[str, str]
    rows: tuple[SourceComparison, ...]


def plan_sources(plan: Plan, times: str, *, ask_tables: bool) -> tuple[MachineSources, ...]:
    """Return the sources of the machines of the winner and of the best design of the other kind.

    What the plan was made with stands under its own name: measurements of one's own are what is measured then.

    Args:
        plan: The plan; without a winner there are no machines.
        times: The source of phase times that was asked for, as for `catalog.phase_times`.
        ask_tables: Ask aiconfigurator too where it is installed; the first answer takes about two seconds. It is asked
            in any case where `times` says so.
    """
    asked = times if times.partition(":")[0] == _TABLES else None
    # Where the package is missing, asking for it costs nothing and says how to get it.
    consulted = ask_tables or asked is not None or find_spec("aiconfigurator_core") is None
    tables = (asked or _TABLES) if consulted else None
    unasked = {} if consulted else {_TABLES: _NOT_ASKED}
    return tuple(_machine_sources(plan, pool, tables, unasked) for pool in _pools(plan))


def _pools(plan: Plan) -> Iterator[Pool]:
    """Yield one pool of each machine of the two designs, the winner's first."""
    seen: set[str] = set()
    others = [one for one in (plan.best_split, plan.best_unsplit) if one is not plan.best]
    for entry in (plan.best, *others):
        for pool in entry.cluster.pools if entry is not None and entry.cluster is not None else ():
            if pool.machine.name not in seen:
                seen.add(pool.machine.name)
                yield pool


def _machine_sources(plan: Plan, pool: Pool, tables: str | None, unasked: Mapping[str, str]) -> MachineSources:
    found = time_sources(plan.problem.model, pool.machine, source=tables)
    used = pool.times.source.partition(":")[0]
    times = {**found.times, used: pool.times}
    absent = {name: why for name, why in {**found.absent, **unasked}.items() if name not in times}
    return MachineSources(
        machine=pool.machine.name,
        used=used,
        described={name: one.source for name, one in times.items()},
        absent=absent,
        rows=tuple(compare_times(times)),
    )


def sources_content(sources: tuple[MachineSources, ...]) -> list[dict[str, Any]]:
    """Return the sources as JSON can hold them, every compared iteration included.

    Args:
        sources: What `plan_sources` returns.
    """
    return [
        {
            "machine": one.machine,
            "used": one.used,
            "described": dict(one.described),
            "absent": dict(one.absent),
            "iterations": [
                {"phase": row.phase, "size": row.size, "time_s": dict(row.seconds), "ratio_to_roofline": row.ratios}
                for row in one.rows
            ],
        }
        for one in sources
    ]
