"""The blocks of a pool: free, used or kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariants import check_blocks
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.messages import NoRoomError
from phasesplit.kv_transfer.receiver import LeaseBook
from phasesplit.scheduler.live_machine import machine_ledger
from phasesplit.scheduler.rules import Rules


def test_neighbours_are_taken_first() -> None:
    """The blocks of a prompt would be in more pieces than they must be, and each piece travels alone."""
    pool = BlockPool(8)
    first, middle, second = (pool.hold(key, Use.COMPUTE, blocks) for key, blocks in (("a", 1), ("b", 1), ("c", 1)))
    assert pool.hold("d", Use.COMPUTE, 2).blocks == (3, 4)
    assert sorted(pool.give(second) + pool.give(first)) == [0, 2]
    assert (pool.free, pool.used, middle.blocks) == (5, 3, (1,))
    assert pool.hold("e", Use.COMPUTE, 3).blocks == (0, 2, 5)


@pytest.mark.parametrize("blocks", [-1, 0, 5])
def test_what_is_not_there_is_not_taken(blocks: int) -> None:
    """Blocks would be given out that are not there, or some of a request that does not fit be lost."""
    pool = BlockPool(4)
    with pytest.raises(NoRoomError, match="4 are free"):
        pool.hold("a", Use.COMPUTE, blocks)
    assert (pool.free, list(pool.holdings)) == (4, [])


def test_blocks_are_given_back_once() -> None:
    """A second return would free the blocks of the next request."""
    pool = BlockPool(4)
    first = pool.hold("a", Use.COMPUTE, 2)
    assert sorted(pool.give(first)) == [0, 1]
    second = pool.hold("b", Use.COMPUTE, 2)
    assert pool.give(first) == []
    assert (pool.used, second.blocks) == (2, (0, 1))


@pytest.mark.parametrize("block", [-1, 1, 4])
def test_only_what_somebody_has_is_shared(block: int) -> None:
    """A request would read KV of a block that is free, and that the next one writes to."""
    pool = BlockPool(4)
    pool.hold("a", Use.COMPUTE, 1)
    reader = Holding("b", Use.COMPUTE)
    with pytest.raises(TransferError, match=f"block {block} is shared, but nobody has it"):
        pool.share(reader, [0, block])
    assert (pool.used, pool.users(0), reader.blocks) == (1, 1, ())


def test_shared_blocks_are_free_after_their_last_user() -> None:
    """Blocks would be free while a transfer still reads them, or never; or count twice for one request."""
    pool = BlockPool(4)
    own, leaving = pool.hold("a", Use.COMPUTE, 3), Holding("a", Use.SEND)
    pool.share(leaving, own.blocks[:2])
    assert (pool.held(), pool.used_under("a")) == ({"a": 3}, 5)
    assert pool.give(own) == [2]
    assert (pool.held(), pool.free) == ({"a": 2}, 2)
    assert sorted(pool.give(leaving)) == [0, 1]
    assert (pool.held(), pool.free) == ({}, 4)


def test_kept_blocks_outlive_their_users_until_they_are_dropped() -> None:
    """KV of prompts would be lost with its first request, or a block be dropped that somebody reads."""
    pool = BlockPool(4)
    first = pool.hold("a", Use.COMPUTE, 3)
    pool.keep(0)
    pool.keep(1)
    with pytest.raises(TransferError, match="nobody uses it"):
        pool.keep(3)
    assert pool.give(first) == [2]
    assert (pool.free, pool.idle, pool.used) == (2, 2, 0)
    second = Holding("b", Use.COMPUTE)
    pool.share(second, [0])
    assert (pool.idle, pool.used) == (1, 1)
    assert pool.drop(2) == [1]
    assert pool.give(second) == []
    assert pool.drop(1) == [0]
    assert (pool.free, pool.idle) == (4, 0)


def test_the_end_of_a_prompt_is_dropped_first() -> None:
    """The beginning of a prompt would go, without which nobody finds the rest."""
    pool = BlockPool(4)
    prompt = pool.hold("a", Use.COMPUTE, 3)
    for block in prompt.blocks:
        pool.keep(block)
    pool.give(prompt)
    assert [pool.drop(1), pool.drop(1), pool.drop(1)] == [[2], [1], [0]]


_STEPS = st.tuples(st.sampled_from(["take", "share", "give", "keep", "drop"]), st.integers(0, 6), st.integers(1, 6))


@given(st.lists(_STEPS, max_size=30))
def test_every_block_is_where_its_users_are(steps: list[tuple[str, int, int]]) -> None:
    """Blocks would be lost, or be free while they are used, in some order of taking, sharing, keeping and giving."""
    pool, held = BlockPool(12), [Holding(str(number), Use.COMPUTE) for number in range(7)]
    for step, which, blocks in steps:
        holding, other = held[which], held[which - 1]
        if step == "take" and blocks <= pool.free:
            pool.take(holding, blocks)
        elif step == "share" and not holding.count:
            pool.share(holding, other.blocks[:blocks])
        elif step == "give":
            pool.give(holding)
        elif step == "keep" and holding.count:
            pool.keep(holding.blocks[0])
        elif step == "drop":
            pool.drop(blocks)
        assert set(pool.holdings) == {each for each in held if each.count}
        check_blocks(pool)


@pytest.mark.parametrize("fault", ["user", "free", "lease", "ledger"])
def test_the_check_of_the_books_can_fail(fault: str) -> None:
    """Books that differ would pass for equal in every test that relies on the check."""
    pool = BlockPool(4)
    leases, ledger = LeaseBook(pool, block_bytes=1), machine_ledger(Rules(), 4)
    leases.reserve("a", 2, now_s=0.0, lease_s=1.0)
    ledger.machines["used_blocks"][0] = 2
    check_blocks(pool, leases, ledger)
    if fault == "user":
        pool._users[0] += 1
    elif fault == "free":
        pool._free.append(1)
    elif fault == "lease":
        pool.hold("b", Use.RECEIVE, 1)
    else:
        ledger.machines["used_blocks"][0] = 1
    with pytest.raises(AssertionError):
        check_blocks(pool, leases, ledger)
