"""The designs that a plan compares, and the cluster and rules that a design with its counts stands for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import networked
from phasesplit.planner.problem import AS_ASKED, Measure, Problem, Variation, of_one
from phasesplit.scheduler.rules import Batching, Rules

Counts = tuple[int, ...]
"""Instances of each slot of a design, in order."""


class DesignKind(StrEnum):
    """What the machines of a design do."""

    CHUNKED = "unsplit, chunked prompts"
    """Both phases everywhere, prompts in chunks, in the same iterations as decode: as today's engines do it."""
    WHOLE = "unsplit, whole prompts"
    """Both phases everywhere, prompts first: the baseline of the paper."""
    ELASTIC = "split, elastic"
    """Prefill and decode machines, which move into the mixed pool and back as load spills over."""
    STATIC = "split, static"
    """Prefill and decode machines that stay what they are."""

    @property
    def is_split(self) -> bool:
        """Whether the phases run on different machines."""
        return self in (DesignKind.ELASTIC, DesignKind.STATIC)


@dataclass(frozen=True, slots=True)
class Design:
    """A way to serve, apart from how many machines.

    Attributes:
        kind: What its machines do.
        slots: Role and number of the offer, for each of its pools.
        name: As in reports.
    """

    kind: DesignKind
    slots: tuple[tuple[Role, int], ...]
    name: str


def designs_of(problem: Problem) -> list[Design]:
    """Return the designs over the machines as asked for: unsplit on each, split over each pair."""
    asked = [number for number, offer in enumerate(problem.offers) if not offer.variant_of]
    found = [design(problem, kind, [number]) for kind in _unsplit_kinds(problem) for number in asked]
    for kind in _split_kinds(problem):
        found += [design(problem, kind, [prefill, decode]) for prefill in asked for decode in asked]
    return found


def divisions_of(problem: Problem) -> list[Design]:
    """Return the designs over the machines that there are, each type perhaps in several roles, or left out.

    Placement does not know how fast a machine is, so that a cluster may do better without its slow ones.
    """
    asked = [number for number, offer in enumerate(problem.offers) if not offer.variant_of]
    found = []
    for size in range(len(asked), 0, -1):
        for used in combinations(asked, size):
            unsplit = [(Role.UNSPLIT, number) for number in used]
            split = [(role, number) for role in (Role.PREFILL, Role.DECODE) for number in used]
            found += [_all_of(problem, kind, unsplit) for kind in _unsplit_kinds(problem)]
            found += [_all_of(problem, kind, split) for kind in _split_kinds(problem)]
    return found


def variants_of(problem: Problem, base: Design) -> list[Design]:
    """Return the designs that differ from a base in the setting (slice, power cap) of one of its machines."""
    numbers = [number for _, number in base.slots]
    found = []
    for slot, number in enumerate(numbers):
        name = problem.offers[number].machine.name
        for other, offer in enumerate(problem.offers):
            if offer.variant_of == name:
                found.append(design(problem, base.kind, [*numbers[:slot], other, *numbers[slot + 1 :]]))
    return found


def design(problem: Problem, kind: DesignKind, offers: Sequence[int]) -> Design:
    """Return the design of a kind on one offer (unsplit), or on two: prefill machines, then decode machines."""
    names = [problem.offers[number].machine.name for number in offers]
    roles = (Role.PREFILL, Role.DECODE) if kind.is_split else (Role.UNSPLIT,)
    return Design(kind, tuple(zip(roles, offers, strict=True)), f"{kind}: {' + '.join(names)}")


def _all_of(problem: Problem, kind: DesignKind, slots: list[tuple[Role, int]]) -> Design:
    names = sorted({problem.offers[number].machine.name for _, number in slots})
    return Design(kind, tuple(slots), f"{kind}: {', '.join(names)}")


def _unsplit_kinds(problem: Problem) -> list[DesignKind]:
    return [DesignKind.WHOLE] if problem.rules.published else [DesignKind.CHUNKED, DesignKind.WHOLE]


def _split_kinds(problem: Problem) -> list[DesignKind]:
    return [DesignKind.ELASTIC] if problem.rules.published else [DesignKind.ELASTIC, DesignKind.STATIC]


def servers_of(problem: Problem, design: Design) -> Counts:
    """Return how many instances make one whole server, for each slot."""
    return tuple(problem.offers[number].machine.instances_per_server for _, number in design.slots)


def nameplate(problem: Problem, design: Design, counts: Counts, measure: Measure) -> float:
    """Return what the machines of some counts take of a measure, in its unit, work not counted (see `of_one`)."""
    grid = problem.grid_kg_per_kwh
    return sum(
        count * of_one(measure, problem.offers[number].machine, grid)
        for (_, number), count in zip(design.slots, counts, strict=True)
    )


def counts_text(problem: Problem, design: Design, counts: Counts) -> str:
    """Return counts as a person reads them: "6 prefill dgx-h100 + 4 decode dgx-a100"; slots of none are left out."""
    return " + ".join(
        f"{count} {role} {problem.offers[number].machine.name}"
        for (role, number), count in zip(design.slots, counts, strict=True)
        if count
    )


def rules_for(problem: Problem, kind: DesignKind) -> Rules:
    """Return the scheduler's settings under a kind of design."""
    if problem.rules.published:
        return problem.rules
    unsplit = Batching.CHUNKED if kind == DesignKind.CHUNKED else Batching.WHOLE
    return replace(problem.rules, unsplit_batching=unsplit, elastic=kind != DesignKind.STATIC)


def cluster_for(problem: Problem, design: Design, counts: Counts, variation: Variation = AS_ASKED) -> Cluster:
    """Return the cluster of a design with so many instances in each slot; slots of none are left out.

    Raises:
        SpecError: What is left cannot serve both phases.
    """
    pools = []
    for (role, number), count in zip(design.slots, counts, strict=True):
        if not count:
            continue
        offer = problem.offers[number]
        machine = offer.machine
        if variation.link != 1.0:
            machine = networked(machine, variation.link)
        pools.append(Pool(role=role, count=count, machine=machine, times=offer.times))
    return Cluster(
        name=counts_text(problem, design, counts),
        model=problem.model,
        pools=tuple(pools),
        reference=problem.reference,
    )
