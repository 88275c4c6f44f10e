"""The free blocks of a pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasesplit.errors import TransferError
from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.failures import NoRoomError


def test_neighbours_are_taken_first() -> None:
    """The blocks of a prompt would be in more pieces than they must be, and each piece travels alone."""
    pool = BlockPool(8)
    assert pool.take(3) == (0, 1, 2)
    assert pool.take(2) == (3, 4)
    pool.give((2, 0))
    assert (pool.free, pool.used) == (5, 3)
    assert pool.take(3) == (0, 2, 5)


@pytest.mark.parametrize("blocks", [-1, 0, 5])
def test_what_is_not_there_is_not_taken(blocks: int) -> None:
    """Blocks would be given out that are not there, or some of a request that does not fit be lost."""
    pool = BlockPool(4)
    with pytest.raises(NoRoomError, match="4 are free"):
        pool.take(blocks)
    assert pool.free == 4


@pytest.mark.parametrize("block", [-1, 1, 4])
def test_a_block_is_given_back_once_and_by_its_owner(block: int) -> None:
    """A block would go to two owners."""
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(TransferError, match=f"block {block} is given back, but nobody holds it"):
        pool.give([block])
    assert pool.used == 1


@given(st.lists(st.integers(-6, 6), max_size=30))
def test_every_block_has_one_owner(steps: list[int]) -> None:
    """Blocks would be held twice or be lost, in some order of taking and giving."""
    pool, held = BlockPool(12), []
    for step in steps:
        if step > 0 and step <= pool.free:
            held.append(pool.take(step))
        elif step < 0 and held:
            pool.give(held.pop(step % len(held)))
        everything = [block for blocks in held for block in blocks]
        assert len(set(everything)) == len(everything) == pool.used
        assert pool.used + pool.free == 12
