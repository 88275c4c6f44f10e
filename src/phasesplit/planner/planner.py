"""Makes a plan: sizes every design, varies the best ones, compares them on every seed, and varies the question.

`Planner.make` runs these steps; each is a set of searches that run at once, and each adds to the `Plan`:

1. `_size`: the cheapest counts of every design (or the highest rate), over the machines as asked for.
2. `_vary`: slices and power caps of the machines of the best split and the best unsplit design.
3. `_judge`: the capacities of the two on every seed, and the verdict.
4. `_gain`: what one more server of each pool, and one more network card, adds.
5. `_vary_question`: the two designs sized again at other rates, lengths, links and limits.
6. `_map`: the counts around the winner's.
"""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from phasesplit.errors import WorkerLostError
from phasesplit.planner.capacity import capacity
from phasesplit.planner.designs import (
    Counts,
    Design,
    cluster_for,
    designs_of,
    divisions_of,
    nameplate,
    servers_of,
    variants_of,
)
from phasesplit.planner.drive import Journal, MemoryJournal, Workers, drive
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.plan import RATE, Gain, Plan, PlanStep, RankedDesign
from phasesplit.planner.probe import Answer, Question, value_of
from phasesplit.planner.problem import AS_ASKED, Measure, Problem, Variation
from phasesplit.planner.search import CountSearch, Found, RateSearch
from phasesplit.planner.sensitivity import FACTORS, Axis, Point, varied
from phasesplit.planner.verdict import EVEN, Verdict, advantage_of, decide

_FALLBACKS = 3
"""So many designs of a side are tried where better ones cannot keep a varied SLO."""
_MAP_STEPS = 4
_MAP_REACH = 0.6
"""The map reaches so far to each side of the best counts, as a share of them, in so many steps."""


@dataclass(slots=True, eq=False, kw_only=True)
class Planner:
    """Makes one plan.

    Attributes:
        problem: What is asked.
        workers: Where simulations run.
        journal: Answers known from before, and where new ones go.
        on_step: Called after every answer.
        thorough: Look also at gains and at where the verdict flips.
        mapped: Look also at the counts around the winner's.
    """

    problem: Problem
    workers: Workers
    journal: Journal = field(default_factory=MemoryJournal)
    on_step: Callable[[PlanStep], None] | None = None
    thorough: bool = True
    mapped: bool = False
    plan: Plan = field(init=False)
    _lower_bounds: dict[Variation, LowerBounds] = field(init=False, default_factory=dict)
    _stage: str = field(init=False, default="")
    _searches: dict[Hashable, CountSearch | RateSearch] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = Plan(problem=self.problem)

    def make(self) -> Plan:
        """Return the plan; interrupted, or left by its workers, what is known by then, marked as not complete.

        Raises:
            WorkerLostError: Workers were lost before any design was found to keep the SLO.
        """
        try:
            self._size()
            self._vary()
            self._judge()
            if self.thorough and self.plan.best is not None:
                self._gain()
                self._vary_question()
            if self.mapped and self.plan.best is not None and not self.problem.machines_exist:
                self._map()
        except KeyboardInterrupt:
            self.plan.complete = False
        except WorkerLostError as lost:
            if self.plan.best is None:
                raise
            self.plan.complete, self.plan.lost = False, str(lost)
        return self.plan

    def _size(self) -> None:
        """Size every design over the machines as asked for."""
        designs = divisions_of(self.problem) if self.problem.machines_exist else designs_of(self.problem)
        self._search(f"sizing {len(designs)} designs", designs)

    def _vary(self) -> None:
        """Look whether another setting of one machine makes the best split or the best unsplit design better."""
        if self.problem.machines_exist:
            return
        variants: dict[Design, float] = {}
        for base in (self.plan.best_split, self.plan.best_unsplit):
            if base is not None:
                variants |= dict.fromkeys(variants_of(self.problem, base.design), base.found.value)
        if variants:
            self._search(f"sizing {len(variants)} variants", list(variants), variants)

    def _search(self, stage: str, designs: list[Design], cutoffs: Mapping[Design, float] | None = None) -> None:
        self._stage = stage
        searches: dict[Hashable, CountSearch | RateSearch] = {design: self._count_search(design) for design in designs}
        for design, cutoff in (cutoffs or {}).items():
            searches[design].cut(cutoff)
        self._searches |= searches
        try:
            self._drive({key: search.run() for key, search in searches.items()})
        finally:
            self._rank()

    def _count_search(
        self,
        design: Design,
        variation: Variation = AS_ASKED,
        rate: float = 1.0,
        seeds: tuple[int, ...] | None = None,
    ) -> CountSearch | RateSearch:
        if not design.kind.is_split:
            variation = variation._replace(link=1.0)  # no KV moves: the question is the one asked already
        lower_bounds = self._bounds(variation)
        seeds = seeds or self.problem.seeds
        if self.problem.objective is None:
            return RateSearch(
                problem=self.problem, lower_bounds=lower_bounds, design=design, variation=variation, seeds=seeds
            )
        return CountSearch(
            problem=self.problem,
            lower_bounds=lower_bounds,
            design=design,
            rate_per_s=self.problem.traffic.rate_per_s * rate,
            measure=self.problem.objective,
            variation=variation,
            seeds=seeds,
            width=self.workers.width,
        )

    def _bounds(self, variation: Variation) -> LowerBounds:
        if variation not in self._lower_bounds:
            self._lower_bounds[variation] = LowerBounds(self.problem, variation)
        return self._lower_bounds[variation]

    def _rank(self) -> None:
        entries = [self._entry(search.found) for search in self._searches.values()]
        # Of equals, the one that is further from its limits; sums in another order differ in their last digits.
        entries.sort(key=lambda one: (not one.found.holds, float(f"{one.found.value:.9g}"), _nearest(one.found)))
        self.plan.entries = entries

    def _entry(self, found: Found) -> RankedDesign:
        problem = self.problem
        if not found.holds:
            return RankedDesign(found=found, cluster=None, taken={}, rate_per_s=0.0)
        taken = {
            measure: value_of(measure, nameplate(problem, found.design, found.counts, measure), found.answers)
            for measure in Measure
        }
        rate = problem.traffic.rate_per_s if problem.objective is not None else -found.value
        cluster = cluster_for(problem, found.design, found.counts)
        return RankedDesign(found=found, cluster=cluster, taken=taken, rate_per_s=rate)

    def _judge(self) -> None:
        """Compare the best split with the best unsplit design, on every seed."""
        self._stage = "comparing on every seed"
        plan = self.plan
        split = plan.best_split
        finalists = [*([] if split is None else [split]), *plan.unsplit_side]
        seeds = self.problem.seeds
        whole = {one: search.best for one, search in self._searches.items() if isinstance(search, RateSearch)}
        overall = [] if whole else [seeds]
        sets = {entry.design: [*overall, *((seed,) for seed in seeds)] for entry in finalists}
        if self.thorough and not whole:
            sets = {entry.design: [seeds[:1]] for entry in plan.entries if entry.found.holds} | sets
        bounds = self._bounds(AS_ASKED)
        holding = {entry.design: entry for entry in plan.entries if entry.found.holds}
        found = self._drive(
            {
                (design, of): capacity(
                    bounds, design, holding[design].found.counts, of, guess=holding[design].rate_per_s
                )
                for design, several in sets.items()
                for of in several
            }
        )
        plan.entries = [
            replace(
                entry,
                capacity=whole[entry.design] if whole else found[entry.design, sets[entry.design][0]],
                per_seed=tuple(found[entry.design, of] for of in sets.get(entry.design, [])[len(overall) :]),
            )
            if entry.design in sets or (whole and entry.found.holds)
            else entry
            for entry in plan.entries
        ]
        if {entry.design.kind.is_split for entry in plan.entries} == {True, False}:
            split, side = plan.best_split, plan.unsplit_side
            plan.verdict = decide(
                split.found.value if split else float("inf"),
                sum(entry.found.value for entry in side) if side else float("inf"),
                [] if split is None else self._per_seed(split, side),
                str(self.problem.objective or RATE),
                apart=len(side) > 1,
            )
            self._follow(plan.verdict)

    def _follow(self, verdict: Verdict) -> None:
        """Let the side that the verdict is for go first where the two are even."""
        entries, best = self.plan.entries, self.plan.best
        winner = self.plan.best_split if verdict.split else self.plan.best_unsplit
        if best is not None and winner is not None and abs(verdict.advantage) <= EVEN:
            entries.remove(winner)
            entries.insert(0, winner)

    def _per_seed(self, split: RankedDesign, side: list[RankedDesign]) -> list[float]:
        """Return the advantage of the split on each seed, of the objective per request/s of capacity."""
        found = []
        for index, own in enumerate(split.per_seed if side else ()):
            unsplit_per_s = sum(entry.per_seed[index].rate_per_s for entry in side)
            if not (own.rate_per_s and unsplit_per_s):
                continue
            if self.problem.objective is None:
                found.append(advantage_of(-own.rate_per_s, -unsplit_per_s))
            else:
                value = sum(entry.found.value for entry in side)
                found.append(advantage_of(split.found.value / own.rate_per_s, value / unsplit_per_s))
        return found

    def _gain(self) -> None:
        """Find what one more server of each pool, and one more network card on each server, would buy."""
        best = self.plan.best
        assert best is not None and best.cluster is not None  # noqa: S101, PT018 - asked by `make`
        self._stage = "one more of each"
        problem, design, counts = self.problem, best.design, best.found.counts
        self.plan.bottlenecks = self._bounds(AS_ASKED).needs(design, counts, best.rate_per_s)
        base = best.capacity.rate_per_s if best.capacity else best.rate_per_s
        searches: dict[Hashable, Any] = {}
        seeds, steps = problem.seeds, servers_of(problem, design)

        def grown(slot: int) -> Counts:
            return (*counts[:slot], counts[slot] + steps[slot], *counts[slot + 1 :])

        for slot, (role, number) in enumerate(design.slots):
            if counts[slot]:
                name = f"one more {role} {problem.offers[number].machine.name}"
                searches[name] = capacity(self._bounds(AS_ASKED), design, grown(slot), seeds, guess=base)
        if design.kind.is_split:
            cards = max(problem.offers[number].machine.accelerators for _, number in design.slots)
            faster = Variation(link=(cards + 1) / cards)
            name = "one more network card on every server"
            searches[name] = capacity(self._bounds(faster), design, counts, seeds, variation=faster, guess=base)
        found = self._drive(searches)
        self.plan.gains = [Gain(what=what, rate_per_s=one.rate_per_s, base_per_s=base) for what, one in found.items()]

    def _map(self) -> None:
        """Ask about counts around the winner's."""
        best = self.plan.best
        assert best is not None  # noqa: S101 - asked by `make`
        self._stage = "around the best counts"
        design, centre = best.design, best.found.counts
        ranges = []
        for step, count in zip(servers_of(self.problem, design), centre, strict=True):
            stride = step * max(1, round(count * _MAP_REACH / _MAP_STEPS / step))
            around = [count + stride * offset for offset in range(-_MAP_STEPS, _MAP_STEPS + 1)]
            ranges.append([one for one in around if one >= step])
        questions = [Question(design, counts, best.rate_per_s, self.problem.seeds[0]) for counts in product(*ranges)]
        self.plan.grid = self._drive({"grid": _asked(questions)})["grid"]

    def _vary_question(self) -> None:
        """Size the best split and the best unsplit design again under other conditions."""
        if self.problem.machines_exist or not (self._rivals(True) and self._rivals(False)):
            return
        self._stage = "where the verdict flips"
        places = {
            (axis, factor): varied(axis, factor)
            for axis in Axis
            for factor in FACTORS[axis]
            if axis != Axis.RATE or self.problem.objective is not None
        }
        values = {("split", place): float("inf") for place in places} | {
            ("unsplit", place): float("inf") for place in places
        }
        # Where the best design cannot keep the SLO, the next best ones may.
        for turn in range(_FALLBACKS):
            searches: dict[Hashable, Any] = {}
            for (side, place), value in values.items():
                rivals = self._rivals(side == "split")
                if value == float("inf") and turn < len(rivals):
                    rate, variation = places[place]
                    searches[side, place] = self._count_search(
                        rivals[turn], variation, rate, self.problem.seeds[:1]
                    ).run()
            values |= {key: one.value for key, one in self._drive(searches).items()}
        for axis in Axis:
            self.plan.points += [
                Point(axis=axis, factor=place[1], split=values["split", place], unsplit=values["unsplit", place])
                for place in places
                if place[0] == axis
            ]
        self._doubt()

    def _doubt(self) -> None:
        """Say so where the points, which are on the first seed alone, lead the other way at what was asked."""
        verdict = self.plan.verdict
        asked = next((point for point in self.plan.points if point.factor == 1.0), None)
        if verdict is None or asked is None or abs(asked.advantage) <= EVEN:
            return
        if (asked.advantage > 0) != verdict.split:
            text = f"{verdict.text.removesuffix('.')}. On the first seed alone it is the other way round."
            self.plan.verdict = replace(verdict, sure=False, text=text)

    def _rivals(self, split: bool) -> list[Design]:
        """Return the designs of one side on different machines, the best first."""
        rivals: dict[tuple[int, ...], Design] = {}
        for entry in self.plan.entries:
            if entry.found.holds and entry.design.kind.is_split == split:
                rivals.setdefault(tuple(number for _, number in entry.design.slots), entry.design)
        return list(rivals.values())

    def _drive(self, searches: Mapping[Any, Any]) -> dict[Any, Any]:
        return drive(searches, self.workers, self.journal, self._on_answer)

    def _on_answer(self, _key: Hashable, _question: Question, _answer: Answer) -> None:
        self.plan.questions += 1
        if self.on_step is None:
            return
        holding = [search.found for search in self._searches.values() if search.found.holds]
        best = min(holding, key=lambda found: found.value, default=None)
        self.on_step(
            PlanStep(
                stage=self._stage,
                questions=self.plan.questions,
                best=None if best is None else (best.design, best.counts, best.value),
            )
        )


def _asked(questions: list[Question]) -> Generator[Sequence[Question], Sequence[Answer], dict[Counts, Answer]]:
    """Ask questions about several counts at once."""
    answers = yield questions
    return {question.counts: answer for question, answer in zip(questions, answers, strict=True)}


def _nearest(found: Found) -> float:
    """Return how near the counts found come to a limit on the worst seed, as a share of it."""
    return max((answer.worst for answer in found.answers), default=0.0)
