"""The least loaded machine of a pool."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.scheduler.ledger import POOLS
from phasesplit.scheduler.tournament import (
    DECODE_LOAD,
    NOBODY,
    PREFILL_LOAD,
    SCANNED,
    WORST,
    least_loaded,
    leaves_for,
    replay,
    scan,
    set_member,
)

Update = tuple[int, int, int, bool]


def empty_trees(machines: int, leaves: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return keys, trees and members of pools without machines; 0 leaves: no trees, as in small clusters."""
    keys = np.full((2, machines + 1), WORST)
    trees = np.full((2, POOLS, 2 * leaves), NOBODY, np.int64)
    return keys, trees, np.zeros((POOLS, 1 + machines), np.int64)


def test_trees_are_as_large_as_the_cluster_needs() -> None:
    """A machine would have no leaf, the tree would not be complete, or a small cluster would pay for one."""
    assert {leaves_for(machines) for machines in range(1, SCANNED + 1)} == {0}
    assert [leaves_for(machines) for machines in (SCANNED + 1, 128, 129, 1_000)] == [128, 128, 256, 1_024]


@pytest.mark.parametrize("leaves", [0, 16])
@settings(max_examples=60, deadline=None)
@given(
    machines=st.integers(1, 9),
    updates=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=60),
)
def test_least_loaded_member_is_found_after_any_updates(leaves: int, machines: int, updates: list[Update]) -> None:
    """An arrival would go to a machine that is not the least loaded, or has left the pool."""
    keys, trees, table = empty_trees(machines, leaves)
    keys[:, :machines] = 0
    members: list[int] = []
    for number, prefill_load, decode_load, joins in updates:
        machine = number % machines
        keys[PREFILL_LOAD, machine], keys[DECODE_LOAD, machine] = prefill_load, decode_load
        if joins != (machine in members):
            (members.append if joins else members.remove)(machine)
            set_member(trees, keys, 1, machine, joins)
        elif leaves and machine in members:
            replay(trees, keys, 1, machine, PREFILL_LOAD, DECODE_LOAD)
        table[1, 0] = len(members)
        table[1, 1 : 1 + len(members)] = members
        for load in (PREFILL_LOAD, DECODE_LOAD):
            found, looked_up = least_loaded(table, keys, trees, load, 1), scan(table, keys, load, 1)
            if not members:
                assert found == looked_up == NOBODY
                continue
            least = min(int(keys[load, machine]) for machine in members)
            assert found in members
            assert keys[load, found] == least
            assert looked_up == next(machine for machine in members if keys[load, machine] == least)


def test_other_pools_are_left_alone() -> None:
    """A machine of one pool would be picked for another."""
    keys, trees, table = empty_trees(4)
    keys[:, :4] = [3, 1, 2, 0]
    for machine in (0, 1):
        set_member(trees, keys, 0, machine, True)
    set_member(trees, keys, 2, 2, True)
    roots = [least_loaded(table, keys, trees, PREFILL_LOAD, pool) for pool in range(POOLS)]
    assert roots == [1, NOBODY, 2, NOBODY]


def test_replay_of_one_load_leaves_the_other() -> None:
    """A change of one load would be paid for in both tournaments, or be seen in the wrong one."""
    keys, trees, table = empty_trees(2)
    keys[:, :2] = [[1, 2], [1, 2]]
    for machine in (0, 1):
        set_member(trees, keys, 0, machine, True)
    keys[:, 0] = 9
    replay(trees, keys, 0, 0, DECODE_LOAD, DECODE_LOAD)
    roots = [least_loaded(table, keys, trees, load, 0) for load in (PREFILL_LOAD, DECODE_LOAD)]
    assert roots == [0, 1]
