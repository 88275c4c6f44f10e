"""Searches over the counts of a design: `CountSearch` for the cheapest at a rate, `RateSearch` for the highest rate.

A search is a generator: it yields questions, is sent their answers, and returns what it found. It does not know where
simulations run. Thrown `Stopped`, it returns the best so far. `CountSearch` takes four steps:

1. It asks the lower bounds for counts to start from, and stops if no number of machines can keep the SLO.
2. It adds machines in growing steps until some counts keep the SLO.
3. It takes machines out of each slot as long as the rest keep it.
4. It tries all counts that could still be better: each of them if they are few, else along the border.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from math import ceil

from phasesplit.domain.cluster import Role
from phasesplit.errors import SpecError
from phasesplit.planner.capacity import TOLERANCE, Capacity, capacity
from phasesplit.planner.designs import Counts, Design, DesignKind, nameplate, servers_of
from phasesplit.planner.lower_bounds import Bottleneck, LowerBounds
from phasesplit.planner.probe import Answer, Question, value_of
from phasesplit.planner.problem import ADDITIVE, AS_ASKED, Measure, Problem, Variation, kg_per_hour, of_one

Asking = Generator[Sequence[Question], Sequence[Answer], "Found"]
"""A search: yields questions, takes their answers in the same order, returns what it found."""

EXACT_CELLS = 24
"""Up to so many candidates a search tries them in order of their objective and assumes nothing; beyond, it takes for
granted that more machines never break an SLO that fewer keep, and leaves what is better by less than RESOLUTION. Of a
measure that is drawn it takes for granted as well that machines which are not needed only draw more, and that serving
itself draws at least LEAST_WORK of the least seen."""
RESOLUTION = 0.01
LEAST_WORK = 0.95
_GROWTH = 1.2
"""Factor between two steps up from the lower bounds."""
_MOST_STEPS = 60
"""From one machine on, so many steps reach beyond any cluster that may be looked at."""
_ROUNDING = 1e-9
_ENERGY_SLACK = 0.95
"""On the bound of a drawn measure: a run's mean is over its own arrivals, whose rate is not quite the asked one."""


class Stopped(Exception):  # noqa: N818 - not an error: it asks a search to return what it has
    """Thrown into a search that has to end early."""


@dataclass(slots=True, kw_only=True)
class Found:
    """What a search for one design found.

    Attributes:
        design: The design.
        counts: Instances of each slot; empty where nothing keeps the SLO.
        value: The objective's value, in its unit; infinite where nothing keeps the SLO.
        answers: Of the seeds, for the counts found.
        bottleneck: What forbids the design, or bound the nearest miss.
        miss: The nearest miss: its counts and its answer on the seed that broke it.
        probes: How many questions were asked.
        complete: Whether the search came to its end.
        least: The counts that the bounds ask for, if each machine does what its role says.
    """

    design: Design
    counts: Counts = ()
    value: float = float("inf")
    answers: tuple[Answer, ...] = ()
    bottleneck: Bottleneck | None = None
    miss: tuple[Counts, Answer] | None = None
    probes: int = 0
    complete: bool = True
    least: Counts = ()

    @property
    def holds(self) -> bool:
        """Whether counts were found that keep the SLO."""
        return bool(self.counts)


@dataclass(slots=True, eq=False, kw_only=True)
class CountSearch:
    """One search for the cheapest counts of a design.

    Attributes:
        problem: The problem.
        lower_bounds: Its bounds, under the same variation.
        design: The design.
        rate_per_s: The rate to keep the SLO at.
        measure: What to minimise.
        variation: How the problem is varied.
        seeds: Seeds that must all hold.
        width: How many counts are worth asking about at once; it changes when questions are asked, not what is found.
        found: What is known so far.
    """

    problem: Problem
    lower_bounds: LowerBounds
    design: Design
    rate_per_s: float
    measure: Measure
    variation: Variation
    seeds: tuple[int, ...]
    width: int = 1
    found: Found = field(init=False)
    _answers: dict[Counts, list[Answer]] = field(init=False, default_factory=dict)
    _judged: dict[Counts, bool] = field(init=False, default_factory=dict)
    _cutoff: float = field(init=False, default=float("inf"))
    _work: float = field(init=False, default=float("inf"))

    def __post_init__(self) -> None:
        self.found = Found(design=self.design, complete=False)

    def cut(self, cutoff: float) -> None:
        """Look only for what is better than a cutoff; before the search has begun."""
        self.found.value = self._cutoff = cutoff

    def run(self) -> Asking:
        """Search."""
        try:
            yield from self._search()
            self.found.complete = True
        except Stopped:
            pass
        if not self.found.holds:
            self.found.value = float("inf")
        return self.found

    def taken(self, counts: Counts, measure: Measure | None = None) -> float:
        """Return what the machines of some counts take of a measure, work not counted."""
        return nameplate(self.problem, self.design, counts, measure or self.measure)

    def bound(self, counts: Counts) -> float:
        """Return what the objective cannot be below with these counts."""
        taken = self.taken(counts)
        if self.measure in ADDITIVE:
            return taken
        work_w = self.lower_bounds.work_w(self.design) * self.rate_per_s
        work = work_w if self.measure == Measure.ENERGY else kg_per_hour(work_w, self.problem.grid_kg_per_kwh)
        return _ENERGY_SLACK * (taken + work)

    def _search(self) -> Generator[Sequence[Question], Sequence[Answer], None]:
        start = self.lower_bounds.least(self.design, self.rate_per_s)
        self.found.least = start
        self.found.bottleneck = self.lower_bounds.idle_bottleneck(self.design)
        if self.found.bottleneck is not None:
            return
        if not self._within(start):
            if self.design.kind != DesignKind.ELASTIC:
                self.found.bottleneck = self._over_budget(start)
                return
            start = tuple(self._step(slot) for slot in range(len(start)))
        yield from self._climb(start)
        if not self.found.holds and self._cutoff == float("inf") and not self.problem.budgets:
            return
        for slot in range(len(start) if self.found.holds else 0):
            yield from self._lower(slot)
        cells = self._cells()
        if len(cells) <= EXACT_CELLS:
            yield from self._in_order(cells)
        else:
            yield from self._along_border(cells)

    def _climb(self, start: Counts) -> Generator[Sequence[Question], Sequence[Answer], None]:
        """Find some counts that hold: from the lower bounds up in growing steps, then back down by bisection."""
        steps: list[Counts] = [start]
        while len(steps) < _MOST_STEPS:
            grown = tuple(
                self._stepped(slot, max(ceil(count * _GROWTH), count + 1)) for slot, count in enumerate(steps[-1])
            )
            if not self._within(grown):
                break
            steps.append(grown)
        low, high, index, stride = -1, len(steps), 0, 1
        while index < high:
            if (yield from self._holds(steps[index])):
                high = index
                break
            low = index
            if index == len(steps) - 1:
                break
            index = min(index + stride, len(steps) - 1)
            stride *= 2
        while high < len(steps) and high - low > 1:
            middle = (low + high) // 2
            if (yield from self._holds(steps[middle])):
                high = middle
            else:
                low = middle

    def _lower(self, slot: int) -> Generator[Sequence[Question], Sequence[Answer], None]:
        """Take instances out of one slot of the best counts so far, by bisection, as long as the rest hold."""
        best = self.found.counts
        step = self._step(slot)
        low, high = 0, best[slot] // step
        while high - low > 1:
            middle = (low + high) // 2
            counts = (*best[:slot], middle * step, *best[slot + 1 :])
            if self.lower_bounds.bottleneck(self.design, counts, self.rate_per_s) is None and (
                yield from self._holds(counts)
            ):
                high = middle
            else:
                low = middle

    def _cells(self) -> list[Counts]:
        """Return all counts that could be better than the best so far, the most promising first."""
        best = self.found.value  # the cutoff, where nothing holds yet
        nothing = (0,) * len(self.design.slots)
        ranges = []
        for slot in range(len(nothing)):
            step = self._step(slot)
            server = (*nothing[:slot], step, *nothing[slot + 1 :])
            room = [
                (best - self.bound(nothing), self.bound(server) - self.bound(nothing)),
                *((most, self.taken(server, measure)) for measure, most in self.problem.budgets.items()),
            ]
            most = min(
                self.problem.most_servers,
                *(int(all_of / one + _ROUNDING) for all_of, one in room if one > 0 and all_of < float("inf")),
            )
            ranges.append(range(step, most * step + 1, step))
        cells = [
            counts
            for counts in product(*ranges)
            if self.bound(counts) < best
            and self._within(counts)
            and counts not in self._judged
            and self.lower_bounds.bottleneck(self.design, counts, self.rate_per_s) is None
        ]
        # Of equal bounds the most even counts first: they leave room on both sides.
        return sorted(cells, key=lambda counts: (self.bound(counts), max(counts) - min(counts), counts))

    def _in_order(self, cells: list[Counts]) -> Generator[Sequence[Question], Sequence[Answer], None]:
        """Try cells in order of their bound until none can be better."""
        for index, counts in enumerate(cells):
            if self.bound(counts) >= self.found.value:
                return
            yield from self._holds(counts, cells[index + 1 :])

    def _along_border(self, cells: list[Counts]) -> Generator[Sequence[Question], Sequence[Answer], None]:
        """Try the largest cells that could still be better; what breaks takes all cells below it along.

        Of a measure that is drawn, the largest are not the border: the middle ones are tried, and what holds takes all
        cells above it along, since machines that are not needed only draw more.
        """
        drawn = self.measure not in ADDITIVE
        left = [counts for counts in cells if self._may_be_better(counts)]
        while left:
            largest = left.pop(len(left) // 2 if drawn else -1)
            if (yield from self._holds(largest, () if drawn else _apart(largest, left))):
                left = [
                    counts for counts in left if self._may_be_better(counts) and not (drawn and _below(largest, counts))
                ]
            elif not any(answer.is_over_budget for answer in self._answers[largest]):
                left = [counts for counts in left if not _below(counts, largest)]

    def _may_be_better(self, counts: Counts) -> bool:
        """Whether counts could be better than the best so far by more than is worth looking for."""
        bound = self.bound(counts)
        if self.measure not in ADDITIVE and self._work < float("inf"):
            bound = max(bound, self.taken(counts) + LEAST_WORK * self._work)
        return bound < self.found.value * (1 - RESOLUTION)

    def _holds(
        self, counts: Counts, others: Iterable[Counts] = ()
    ) -> Generator[Sequence[Question], Sequence[Answer], bool]:
        """Return whether counts hold on every seed; keep them if they are the best, or the nearest miss.

        Args:
            counts: The counts.
            others: What is likely to be of interest next: the first of them are asked about at the same time.
        """
        if counts not in self._answers:
            unasked = (other for other in others if other not in self._answers)
            yield from self._ask([counts, *islice(unasked, self.width - 1)])
        answers = self._answers[counts]
        self._judged[counts] = all(answer.holds for answer in answers)
        if not self._judged[counts]:
            broken = next(answer for answer in answers if not answer.holds)
            if self.found.miss is None or broken.worst < self.found.miss[1].worst:
                self.found.miss = (counts, broken)
            return False
        taken = self.taken(counts)
        value = value_of(self.measure, taken, answers)
        self._work = min(self._work, value - taken)
        if value < self.found.value:
            self.found.value, self.found.counts, self.found.answers = value, counts, tuple(answers)
        return True

    def _ask(self, wave: Sequence[Counts]) -> Generator[Sequence[Question], Sequence[Answer], None]:
        """Ask about counts on every seed; those that break on the first are not asked about on the others."""
        answers: dict[Counts, list[Answer]] = {counts: [] for counts in wave}
        for seeds in (self.seeds[:1], self.seeds[1:]):
            questions = [
                Question(self.design, counts, self.rate_per_s, seed, self.variation)
                for counts in wave
                if all(answer.holds for answer in answers[counts])
                for seed in seeds
            ]
            if questions:
                replies = yield questions
                self.found.probes += len(questions)
                for question, answer in zip(questions, replies, strict=True):
                    answers[question.counts].append(answer)
        self._answers |= answers

    def _over_budget(self, counts: Counts) -> Bottleneck | None:
        """Return the budget that counts exceed most, None if they exceed none."""
        budgets = {**self.problem.budgets}
        budgets[Measure.MACHINES] = min(budgets.get(Measure.MACHINES, float("inf")), self.problem.most_servers)
        where = "the smallest cluster that the bounds allow"
        bottlenecks = [
            Bottleneck(str(measure), where, self.taken(counts, measure) / most) for measure, most in budgets.items()
        ]
        worst = max(bottlenecks, key=lambda bottleneck: bottleneck.share)
        return worst if worst.share > 1 + _ROUNDING else None

    def _step(self, slot: int) -> int:
        return servers_of(self.problem, self.design)[slot]

    def _stepped(self, slot: int, count: int) -> int:
        step = self._step(slot)
        return -(-count // step) * step

    def _within(self, counts: Counts) -> bool:
        """Whether counts stay within budgets, below the cutoff, and within the largest cluster that is looked at."""
        if self.bound(counts) >= self._cutoff:
            return False
        return self._over_budget(counts) is None


def _apart(largest: Counts, cells: Sequence[Counts]) -> Iterator[Counts]:
    """Yield the cells that come after the largest one as long as each in turn breaks and takes those below along."""
    broken = [largest]
    for counts in reversed(cells):
        if not any(_below(counts, other) for other in broken):
            broken.append(counts)
            yield counts


def _below(counts: Counts, other: Counts) -> bool:
    return all(own <= theirs for own, theirs in zip(counts, other, strict=True))


_MOST_CELLS = 200_000


@dataclass(slots=True, eq=False, kw_only=True)
class RateSearch:
    """One search for the counts of a design that hold the highest rate.

    Attributes:
        problem: The problem; its budgets, or the machines that exist, bound the counts.
        lower_bounds: Its bounds, under the same variation.
        design: The design.
        seeds: Seeds that must all hold.
        variation: How the problem is varied.
        found: What is known so far.
        best: Capacity of the best counts so far; None before there are any.
    """

    problem: Problem
    lower_bounds: LowerBounds
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
        self.found.bottleneck = self.lower_bounds.idle_bottleneck(self.design)
        if self.found.bottleneck is not None:
            return
        ceilings = {counts: self.lower_bounds.rate_per_s(self.design, counts) for counts in self.cells()}
        rate = self._least_per_s
        # What could hold most goes first; a cell is left as soon as it does not beat the best so far.
        for counts in sorted(ceilings, key=lambda cell: (-ceilings[cell], cell)):
            if ceilings[counts] <= rate * (1 + TOLERANCE):
                break
            one = yield from capacity(
                self.lower_bounds,
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
