"""The highest rate that a design holds within budgets, or with the machines that there are."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import product

from phasesplit.domain.cluster import Role
from phasesplit.errors import SpecError
from phasesplit.planning.capacity import TOLERANCE, Capacity, capacity
from phasesplit.planning.designs import Counts, Design, servers_of
from phasesplit.planning.floors import Floors
from phasesplit.planning.objective import ADDITIVE, Measure, of_one
from phasesplit.planning.probe import Answer, Question
from phasesplit.planning.problem import AS_ASKED, Problem, Variation
from phasesplit.planning.search import Found, Stopped

_MOST_CELLS = 200_000
_ROUNDING = 1e-9


@dataclass(slots=True, eq=False, kw_only=True)
class Stretch:
    """One search for the counts of a design that hold the highest rate.

    Attributes:
        problem: The problem; its budgets, or the machines that exist, bound the counts.
        floors: Its bounds, under the same variation.
        design: The design.
        seeds: Seeds that must all hold.
        variation: How the problem is bent.
        found: What is known so far.
        best: Capacity of the best counts so far; None before there are any.
    """

    problem: Problem
    floors: Floors
    design: Design
    seeds: tuple[int, ...]
    variation: Variation = AS_ASKED
    found: Found = field(init=False)
    best: Capacity | None = field(init=False, default=None)
    _least_per_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.found = Found(design=self.design, complete=False)

    def cut(self, cutoff: float) -> None:
        """Look only for more than a rate, given as minus that rate; before the search has begun."""
        self._least_per_s = -cutoff

    def run(self) -> Generator[Sequence[Question], Sequence[Answer], Found]:
        """Search; in what is found, `value` is minus the rate, so that less is better as everywhere."""
        try:
            yield from self._search()
            self.found.complete = True
        except Stopped:
            pass
        return self.found

    def _search(self) -> Generator[Sequence[Question], Sequence[Answer], None]:
        self.found.wall = self.floors.idle_wall(self.design)
        if self.found.wall is not None:
            return
        ceilings = {counts: self.floors.rate_per_s(self.design, counts) for counts in self.cells()}
        rate = self._least_per_s
        # What could hold most goes first; a cell is left as soon as it does not beat the best so far.
        for counts in sorted(ceilings, key=lambda cell: (-ceilings[cell], cell)):
            if ceilings[counts] <= rate * (1 + TOLERANCE):
                break
            one = yield from capacity(
                self.floors,
                self.design,
                counts,
                self.seeds,
                variation=self.variation,
                at_least=rate * (1 + TOLERANCE),
            )
            self.found.probes += one.probes
            if one.rate_per_s > rate:
                rate, self.best = one.rate_per_s, one
                self.found.counts, self.found.value, self.found.answers = counts, -rate, one.answers

    def cells(self) -> list[Counts]:
        """Return the counts to which no machine can be added."""
        return divisions(self.problem, self.design) if self.problem.machines_exist else self._maximal()

    def _maximal(self) -> list[Counts]:
        """Return the counts within the budgets that may hold most: those from which no slot can grow alone.

        Where what is drawn has a budget, any counts may: machines that idle take from what others could draw.
        """
        units = [
            {
                measure: of_one(measure, self.problem.offers[number].machine, self.problem.grid_kg_per_kwh)
                for measure in Measure
            }
            for _, number in self.design.slots
        ]
        steps = servers_of(self.problem, self.design)
        budgets = {**self.problem.budgets}
        budgets[Measure.MACHINES] = min(budgets.get(Measure.MACHINES, float("inf")), self.problem.most_servers)

        def room(counts: Counts, slot: int) -> int:
            left = min(
                (most - sum(count * unit[measure] for count, unit in zip(counts, units, strict=True)))
                / units[slot][measure]
                for measure, most in budgets.items()
                if units[slot][measure] > 0
            )
            return int((left + _ROUNDING) // steps[slot]) * steps[slot]

        last = len(units) - 1
        zero = (0,) * len(units)
        firsts = [range(step, room(zero, slot) + 1, step) for slot, step in enumerate(steps[:last])]
        drawn = any(measure not in ADDITIVE for measure in budgets)
        cells = []
        for first in product(*firsts):
            most = room((*first, 0), last)
            least = steps[last] if drawn else max(most, steps[last])
            cells += [(*first, count) for count in range(least, most + 1, steps[last])]
            if len(cells) > _MOST_CELLS:
                raise SpecError(f"budgets: they leave more than {_MOST_CELLS:,} clusters to look at, give tighter ones")
        if drawn:
            return cells
        return [cell for cell in cells if all(room(cell, slot) < steps[slot] for slot in range(len(units)))]


def divisions(problem: Problem, design: Design) -> list[Counts]:
    """Return every way to give all machines that exist a role of the design.

    Raises:
        SpecError: There are too many ways to look at.
    """
    by_offer: dict[int, list[int]] = {}
    for slot, (_, number) in enumerate(design.slots):
        by_offer.setdefault(number, []).append(slot)
    shares: list[list[tuple[tuple[int, int], ...]]] = []
    ways = 1
    for number, slots in by_offer.items():
        step = problem.offers[number].machine.instances_per_server
        total = problem.offers[number].existing or 0
        options: list[tuple[tuple[int, int], ...]] = [((slots[0], total * step),)]
        if len(slots) > 1:
            options = [((slots[0], first * step), (slots[1], (total - first) * step)) for first in range(total + 1)]
        ways *= len(options)
        shares.append(options)
    if ways > _MOST_CELLS:
        raise SpecError(f"machines: {ways:,} ways to divide them, at most {_MOST_CELLS:,} are looked at")
    cells = []
    for chosen in product(*shares):
        counts = [0] * len(design.slots)
        for share in chosen:
            for slot, count in share:
                counts[slot] = count
        roles = {role for (role, _), count in zip(design.slots, counts, strict=True) if count}
        if Role.UNSPLIT in roles or roles == {Role.PREFILL, Role.DECODE}:
            cells.append(tuple(counts))
    return cells
