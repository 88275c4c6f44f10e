"""The search finds what trying everything finds, however many questions go out at once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.domain.slo import Limit, Slo
from phasesplit.planner.designs import Counts, Design, DesignKind, design
from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.probe import OVER_BUDGET, Answer, Prober, Question, value_of
from phasesplit.planner.problem import AS_ASKED, Measure, Problem
from phasesplit.planner.search import EXACT_CELLS, RESOLUTION, CountSearch, Found, Stopped
from planner.problems import LOOSE, Answering, holding, offer, problem, searched

SLOW = {"decode_s": 0.02, "decode_s_per_request": 0.01, "decode_context_s": 1e-4}
FAST = {"prefill_s_per_token": 4e-4, "decode_s": 0.01, "decode_s_per_request": 0.004}


def count_search(made: Problem, chosen: Design, width: int = 1, rate: float | None = None) -> CountSearch:
    assert made.objective is not None
    return CountSearch(
        problem=made,
        lower_bounds=LowerBounds(made),
        design=chosen,
        rate_per_s=rate or made.traffic.rate_per_s,
        measure=made.objective,
        variation=AS_ASKED,
        seeds=made.seeds,
        width=width,
    )


def cheapest(made: Problem, chosen: Design, most: int) -> tuple[float, set[Counts]]:
    """Return the least value and where it is, by trying all counts up to so many servers in each slot."""
    assert made.objective is not None
    steps = [made.offers[number].machine.instances_per_server for _, number in chosen.slots]
    one = count_search(made, chosen)
    cells = [
        counts
        for counts in product(*(range(step, most * step + 1, step) for step in steps))
        if all(one.taken(counts, measure) <= limit for measure, limit in made.budgets.items())
    ]
    values = {
        counts: value_of(made.objective, one.taken(counts), answers)
        for counts, answers in holding(made, chosen, cells, made.traffic.rate_per_s).items()
    }
    least = min(values.values(), default=float("inf"))
    return least, {counts for counts, value in values.items() if value == pytest.approx(least)}


def small(**fields: Any) -> Problem:
    """Return a problem of two types, the dearer one faster."""
    return problem(offer("slow", price=1.0, power=400, **SLOW), offer("fast", price=2.3, power=700, **FAST), **fields)


DESIGNS = [
    (DesignKind.CHUNKED, [0]),
    (DesignKind.WHOLE, [1]),
    (DesignKind.STATIC, [0, 0]),
    (DesignKind.STATIC, [1, 0]),
    (DesignKind.ELASTIC, [0, 0]),
    (DesignKind.ELASTIC, [0, 1]),
]


@pytest.mark.parametrize("measure", list(Measure))
@pytest.mark.parametrize(("kind", "numbers"), DESIGNS)
def test_it_equals_brute_force(kind: DesignKind, numbers: list[int], measure: Measure) -> None:
    """If wrong, a plan names a cluster that is dearer than another that would do, or one that does not do."""
    made = small(rate=22.0, duration_s=20.0, objective=measure)
    chosen = design(made, kind, numbers)
    least, where = cheapest(made, chosen, 7)
    assert least < float("inf")
    found = searched(count_search(made, chosen).run(), Prober(made))
    assert found.value == pytest.approx(least)
    assert found.counts in where
    assert max(found.counts) < 7  # else what was tried was too little to tell


@pytest.mark.parametrize("kind", list(DesignKind))
def test_slices_come_by_the_server(kind: DesignKind) -> None:
    """If wrong, a plan rents a part of a server, or misses the cheapest whole ones."""
    made = problem(offer("half", slices=2, price=0.5, **SLOW), offer("third", slices=3, price=0.6, **SLOW), rate=14.0)
    chosen = design(made, kind, [0, 1] if kind.is_split else [1])
    least, where = cheapest(made, chosen, 5)
    found = searched(count_search(made, chosen).run(), Prober(made))
    assert found.value == pytest.approx(least)
    assert found.counts in where
    assert all(count % (2, 3)[number] == 0 for count, (_, number) in zip(found.counts, chosen.slots, strict=True))


@pytest.mark.parametrize(
    "budgets",
    [
        {Measure.POWER: 2_500.0},
        {Measure.MACHINES: 4.0},
        {Measure.COST: 4.0, Measure.POWER: 1_700.0},
        {Measure.MACHINES: 2.0},
        {Measure.ENERGY: 700.0},
        {Measure.CARBON: 0.6, Measure.MACHINES: 6},
    ],
)
@pytest.mark.parametrize("measure", [Measure.COST, Measure.MACHINES, Measure.ENERGY])
@pytest.mark.parametrize(
    ("kind", "numbers"), [(DesignKind.STATIC, [1, 0]), (DesignKind.ELASTIC, [0, 0]), (DesignKind.ELASTIC, [1, 0])]
)
def test_within_budgets_it_equals_brute_force(
    kind: DesignKind, numbers: list[int], measure: Measure, budgets: dict[Measure, float]
) -> None:
    """If wrong, a budget hides a cluster that fits into it, or lets one through that does not."""
    made = small(rate=14.0, duration_s=15.0, objective=measure, budgets=budgets)
    chosen = design(made, kind, numbers)
    least, where = cheapest(made, chosen, 7)
    found = searched(count_search(made, chosen).run(), Prober(made))
    assert found.holds == (least < float("inf"))
    assert found.value == pytest.approx(least)
    assert not found.holds or found.counts in where


def test_a_lopsided_cluster_is_found_where_only_that_fits_the_budget() -> None:
    """If wrong, growing all pools alike runs out of budget and a design that fits is called impossible."""
    made = problem(rate=0.1, budgets={Measure.MACHINES: 14})
    chosen = design(made, DesignKind.STATIC, [0, 0])
    found = searched(count_search(made, chosen).run(), faked(made, lambda one, two: one >= 1 and two >= 12))
    assert found.value == 13
    assert found.counts == (1, 12)


def faked(made: Problem, keeps: Callable[..., bool]) -> Callable[[Question], Answer]:
    """Return answers by a rule on the counts, on every seed."""

    def answer(question: Question) -> Answer:
        holds = keeps(*question.counts)
        return Answer(holds, 0.5 if holds else 2.0, "ttft", (1.0,), sum(question.counts) * 100.0, 1.0, (0.5,), (0.5,))

    return answer


@st.composite
def borders(draw: st.DrawFn) -> tuple[list[int], int]:
    """Monotone borders: how many decode machines each number of prefill machines needs at the least."""
    steps = draw(st.lists(st.integers(0, 6), min_size=10, max_size=10))
    needed = [30]
    for step in steps:
        needed.append(max(needed[-1] - step, 1))
    return needed, draw(st.integers(1, 8))


@pytest.mark.parametrize("dear", [1.0, 2.3, 0.31])
def test_on_large_spaces_it_is_within_its_resolution_of_brute_force(dear: float) -> None:
    """If wrong, the monotone search stops short of the cheapest cluster by more than it says."""

    @settings(max_examples=20, deadline=None)
    @given(borders(), st.sampled_from([1, 2, 5]))
    def check(border: tuple[list[int], int], width: int) -> None:
        needed, least = border
        made = problem(offer(price=1.0), offer("dear", price=dear), rate=0.01)
        chosen = design(made, DesignKind.STATIC, [0, 1])

        def keeps(prompt: int, token: int) -> bool:
            return prompt >= least and token >= needed[min(prompt - least, len(needed) - 1)]

        best = min(prompt + dear * token for prompt in range(1, 25) for token in range(1, 31) if keeps(prompt, token))
        found = searched(count_search(made, chosen, width).run(), faked(made, keeps), width)
        assert keeps(*found.counts)
        assert best <= found.value <= best / (1 - RESOLUTION) + 1e-9

    check()


@pytest.mark.parametrize("measure", [Measure.COST, Measure.ENERGY])
def test_what_is_found_does_not_depend_on_the_number_of_workers(measure: Measure) -> None:
    """If wrong, the same plan differs between two computers."""

    @settings(max_examples=8, deadline=None)
    @given(borders())
    def check(border: tuple[list[int], int]) -> None:
        needed, least = border
        made = problem(offer(price=1.0), offer("dear", price=1.7), rate=0.01, objective=measure)
        chosen = design(made, DesignKind.ELASTIC, [0, 1])

        def keeps(prompt: int, token: int) -> bool:
            return prompt >= least and token >= needed[min(prompt - least, len(needed) - 1)]

        found = [searched(count_search(made, chosen, width).run(), faked(made, keeps), width) for width in (1, 2, 5)]
        assert {(one.counts, one.value, one.miss and one.miss[0]) for one in found} == {
            (found[0].counts, found[0].value, found[0].miss and found[0].miss[0])
        }

    check()


def test_it_equals_brute_force_on_any_answers_where_there_are_few_cells() -> None:
    """If wrong, the exact search takes monotony for granted where it promises not to."""

    @settings(max_examples=40, deadline=None)
    @given(st.sets(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1), st.sampled_from([1, 2, 5]))
    def check(holds: set[Counts], width: int) -> None:
        made = problem(offer(price=1.0), offer("dear", price=1.3), rate=0.01, budgets={Measure.MACHINES: 7.0})
        chosen = design(made, DesignKind.STATIC, [0, 1])
        inside = [counts for counts in holds if sum(counts) <= 7]
        best = min((one + 1.3 * two for one, two in inside), default=float("inf"))
        found = searched(count_search(made, chosen, width).run(), faked(made, lambda *counts: counts in holds), width)
        assert EXACT_CELLS >= 21
        assert found.value == pytest.approx(best)

    check()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_draws_too_much_on_any_seed_does_not_take_fewer_machines_along(seed: int) -> None:
    """If wrong, a budget for power drawn hides the smaller clusters that keep within it."""
    made = problem(rate=0.01, seeds=(0, 1, 2), budgets={Measure.ENERGY: 3_000.0}, objective=Measure.MACHINES)
    chosen = design(made, DesignKind.ELASTIC, [0, 0])

    def answer(question: Question) -> Answer:
        slow = faked(made, lambda one, two: one + two >= 9)(question)
        if sum(question.counts) > 10 and question.seed == seed:
            return slow._replace(holds=False, worst=1.5, bottleneck=f"{OVER_BUDGET} {Measure.ENERGY}")
        return slow

    assert searched(count_search(made, chosen).run(), answer).value == 9


def test_what_keeps_no_slo_says_what_came_nearest() -> None:
    """If wrong, a plan that finds nothing cannot say why."""
    made = problem(budgets={Measure.MACHINES: 3.0}, rate=0.1)
    chosen = design(made, DesignKind.STATIC, [0, 0])

    def answer(question: Question) -> Answer:
        return faked(made, lambda *_: False)(question)._replace(worst=10.0 / sum(question.counts))

    found = searched(count_search(made, chosen).run(), answer)
    assert not found.holds
    assert found.value == float("inf")
    assert found.miss is not None
    assert sum(found.miss[0]) == 3
    found = searched(count_search(made, chosen, rate=1_000.0).run(), answer)
    assert found.miss is None
    assert str(found.bottleneck).startswith("machines of the smallest cluster that the bounds allow: ")


def test_a_limit_that_no_machine_keeps_is_not_simulated() -> None:
    """If wrong, a hopeless design costs as many simulations as a good one."""
    made = problem(slo=Slo("tight", (Limit("ttft_s", 50.0, 1e-6),)))
    workers = Answering(Prober(made))
    found = drive({0: count_search(made, design(made, DesignKind.CHUNKED, [0])).run()}, workers, MemoryJournal())[0]
    assert not workers.asked
    assert found.bottleneck is not None


def test_a_cutoff_hides_what_is_not_better() -> None:
    """If wrong, a variant that is no better than what it varies costs simulations, or takes its place."""
    made = small(rate=22.0, duration_s=20.0)
    chosen = design(made, DesignKind.ELASTIC, [0, 1])
    best = searched(count_search(made, chosen).run(), Prober(made))
    for cutoff, finds in ((best.value, False), (best.value + 0.1, True)):
        one = count_search(made, chosen)
        one.cut(cutoff)
        found = searched(one.run(), Prober(made))
        assert found.holds == finds
        assert found.value == (best.value if finds else float("inf"))


def test_stopped_at_any_question_it_returns_the_best_so_far() -> None:
    """If wrong, an interrupted search loses what it had, or says it came to its end."""
    made = small(rate=12.0, duration_s=10.0)
    chosen = design(made, DesignKind.ELASTIC, [0, 1])
    prober = cache(Prober(made))
    whole = searched(count_search(made, chosen).run(), prober)
    best = float("inf")
    for stop_at in range(1, 40):
        search = count_search(made, chosen).run()
        asked = next(search)
        found: Found | None = None
        for _ in range(stop_at - 1):
            try:
                asked = search.send([prober(question) for question in asked])
            except StopIteration as end:
                found = end.value
                break
        if found is not None:
            assert found.complete
            assert found.counts == whole.counts
            break
        with pytest.raises(StopIteration) as end:
            search.throw(Stopped())
        assert not end.value.value.complete
        assert end.value.value.value <= best
        best = end.value.value.value
    else:
        pytest.fail("the search never ended")


def test_an_slo_that_is_looser_is_never_dearer() -> None:
    """If wrong, the variations of a plan contradict each other."""
    values = []
    for below in (1.0, 2.0, 4.0):
        made = small(rate=22.0, duration_s=20.0, slo=replace(LOOSE, limits=(Limit("e2e_s", 90.0, below),)))
        values.append(searched(count_search(made, design(made, DesignKind.CHUNKED, [0])).run(), Prober(made)).value)
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]
