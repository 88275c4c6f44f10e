"""The counts found within budgets, or of machines that exist, hold as much as any others."""

from itertools import product
from typing import Any

import pytest

from phasesplit.domain.cluster import Role
from phasesplit.domain.slo import Limit, Slo
from phasesplit.errors import SpecError
from phasesplit.planner.capacity import TOLERANCE, capacity
from phasesplit.planner.designs import Counts, Design, DesignKind, design, divisions_of
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.probe import Prober
from phasesplit.planner.problem import Measure, Problem
from phasesplit.planner.search import RateSearch, divisions
from planner.problems import offer, problem, searched
from refusals import assert_refused

SLOW = {"decode_s": 0.02, "decode_s_per_request": 0.01, "nic_bytes_per_s": 1e11}
FAST = {"prefill_s_per_token": 4e-4, "decode_s": 0.01, "decode_s_per_request": 0.004, "nic_bytes_per_s": 1e11}
FIRM = Slo("firm", (Limit("e2e_s", 90.0, 2.0),))


def small(existing: tuple[int | None, int | None] = (None, None), **fields: Any) -> Problem:
    return problem(
        offer("slow", price=1.0, power=400, existing=existing[0], **SLOW),
        offer("fast", price=2.3, power=700, existing=existing[1], **FAST),
        objective=None,
        slo=FIRM,
        duration_s=15.0,
        seeds=(0,),
        **fields,
    )


def searched_rate(made: Problem, chosen: Design) -> RateSearch:
    search = RateSearch(problem=made, lower_bounds=LowerBounds(made), design=chosen, seeds=made.seeds)
    searched(search.run(), Prober(made))
    return search


def most(made: Problem, chosen: Design, cells: list[Counts]) -> float:
    """Return the largest capacity of some counts, by trying all of them."""
    lower_bounds, prober = LowerBounds(made), Prober(made)
    return max(searched(capacity(lower_bounds, chosen, cell, made.seeds), prober).rate_per_s for cell in cells)


@pytest.mark.parametrize(
    "budgets",
    [
        {Measure.COST: 5.0},
        {Measure.POWER: 2_000.0, Measure.COST: 6.0},
        {Measure.MACHINES: 3.0},
        {Measure.ENERGY: 450.0, Measure.MACHINES: 4.0},
        {Measure.CARBON: 0.4, Measure.MACHINES: 4.0},
    ],
)
@pytest.mark.parametrize(
    ("kind", "numbers"), [(DesignKind.CHUNKED, [0]), (DesignKind.STATIC, [1, 0]), (DesignKind.ELASTIC, [0, 1])]
)
def test_within_budgets_it_equals_brute_force(
    kind: DesignKind, numbers: list[int], budgets: dict[Measure, float]
) -> None:
    """If wrong, a budget buys less than it could, or is overdrawn."""
    made = small(budgets=budgets)
    chosen = design(made, kind, numbers)
    units = {
        measure: [
            {Measure.COST: offer.machine.price_usd_per_hour, Measure.POWER: offer.machine.provisioned_w}.get(measure, 1)
            for offer in (made.offers[number] for number in numbers)
        ]
        for measure in budgets
        if measure not in (Measure.ENERGY, Measure.CARBON)
    }
    cells = [
        cell
        for cell in product(*(range(1, 7) for _ in numbers))
        if all(
            sum(count * unit for count, unit in zip(cell, units[measure], strict=True)) <= budgets[measure]
            for measure in units
        )
    ]
    search = searched_rate(made, chosen)
    best = most(made, chosen, cells)
    assert best > 0
    assert search.best is not None
    assert best / (1 + TOLERANCE) ** 2 <= search.best.rate_per_s <= best * (1 + TOLERANCE) ** 2
    assert search.found.counts in cells
    assert search.found.value == -search.best.rate_per_s
    for measure, drawn in ((Measure.ENERGY, "energy_w"), (Measure.CARBON, "kg_per_hour")):
        if measure in budgets:
            assert all(getattr(answer, drawn) <= budgets[measure] for answer in search.found.answers)


@pytest.mark.parametrize("existing", [(2, 2), (0, 3), (4, 1)])
def test_machines_that_exist_are_divided_as_well_as_can_be(existing: tuple[int, int]) -> None:
    """If wrong, a better division of one's machines is missed, or machines are used that are not there."""
    made = small(existing)
    for chosen in divisions_of(made):
        used_types = {number for _, number in chosen.slots}
        there = tuple(count if number in used_types else 0 for number, count in enumerate(existing))
        cells = []
        for cell in product(*(range(existing[number] + 1) for _, number in chosen.slots)):
            used = [0, 0]
            for count, (_, number) in zip(cell, chosen.slots, strict=True):
                used[number] += count
            roles = {role for (role, _), count in zip(chosen.slots, cell, strict=True) if count}
            if tuple(used) == there and roles in ({Role.UNSPLIT}, {Role.PREFILL, Role.DECODE}):
                cells.append(cell)
        assert sorted(divisions(made, chosen)) == sorted(cells)
        search = searched_rate(made, chosen)
        if not cells:
            assert not search.found.holds
            continue
        assert search.found.counts in cells
        best = most(made, chosen, cells)
        assert search.best is not None
        assert best / (1 + TOLERANCE) ** 2 <= search.best.rate_per_s <= best * (1 + TOLERANCE) ** 2


def test_one_machine_cannot_be_split() -> None:
    """If wrong, a split of one machine is simulated, with a pool of none."""
    made = small((1, 0))
    split = next(one for one in divisions_of(made) if one.kind == DesignKind.STATIC)
    assert divisions(made, split) == []
    assert not searched_rate(made, split).found.holds


def test_too_many_divisions_are_refused() -> None:
    """If wrong, a large inventory is searched for days."""
    made = problem(*(offer(str(number), existing=99) for number in range(3)), objective=None)
    split = next(one for one in divisions_of(made) if one.kind == DesignKind.STATIC)
    with pytest.raises(SpecError) as caught:
        divisions(made, split)
    assert_refused(caught.value, "ways to divide them")


def test_a_cutoff_hides_what_holds_no_more() -> None:
    """If wrong, a variant takes the place of an equal, or of a better one."""
    made = small(budgets={Measure.COST: 5.0})
    chosen = design(made, DesignKind.CHUNKED, [0])
    best = searched_rate(made, chosen).found.value
    for cutoff, finds in ((best, False), (best * 0.9, True)):
        search = RateSearch(problem=made, lower_bounds=LowerBounds(made), design=chosen, seeds=made.seeds)
        search.cut(cutoff)
        found = searched(search.run(), Prober(made))
        assert found.holds == finds
        assert not finds or found.value <= cutoff
