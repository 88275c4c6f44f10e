"""Keys, deadlines and releases of leases."""

import pytest

from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.messages import NoRoomError, ReleaseReason
from phasesplit.kv_transfer.receiver import LeaseBook


def test_every_byte_has_a_lease_until_it_is_released_once() -> None:
    """Held bytes would not be counted, or a second release free blocks of the next request."""
    pool = BlockPool(8)
    book = LeaseBook(pool, block_bytes=100)
    first = book.reserve("a", 3, now_s=1.0, lease_s=10.0)
    second = book.reserve("b", 5, now_s=1.0, lease_s=10.0)
    assert (first.blocks, second.blocks) == ((0, 1, 2), (3, 4, 5, 6, 7))
    assert book.used_bytes == 800
    assert [(lease.key, lease.deadline_s) for lease in book.held] == [("a", 11.0), ("b", 11.0)]
    assert [holding.use for holding in pool.holdings] == [Use.RECEIVE] * 2
    assert sorted(book.release(first.number, ReleaseReason.ABORTED)) == [0, 1, 2]
    third = book.reserve("c", 2, now_s=2.0, lease_s=10.0)
    assert book.release(first.number, ReleaseReason.COMPLETED) == []
    assert (third.blocks, book.used_bytes) == ((0, 1), 700)
    assert len(book.release(second.number, ReleaseReason.COMPLETED)) == 5
    assert len(book.release(third.number, ReleaseReason.EXPIRED)) == 2
    assert (book.used_bytes, pool.free) == (0, 8)
    assert book.released == {ReleaseReason.ABORTED: 1, ReleaseReason.COMPLETED: 1, ReleaseReason.EXPIRED: 1}


def test_blocks_taken_over_outlive_their_lease() -> None:
    """KV that has arrived would be freed under the request that reads it now."""
    pool = BlockPool(4)
    book = LeaseBook(pool, block_bytes=100)
    lease, reader = book.reserve("a", 3, now_s=1.0, lease_s=10.0), Holding("a", Use.COMPUTE)
    pool.share(reader, lease.blocks)
    assert book.release(lease.number, ReleaseReason.COMPLETED) == []
    assert (pool.used, book.used_bytes, reader.blocks) == (3, 0, (0, 1, 2))
    assert sorted(pool.give(reader)) == [0, 1, 2]


@pytest.mark.parametrize("blocks", [0, -1, 9])
def test_what_does_not_fit_is_refused(blocks: int) -> None:
    """Blocks would be given that are not there, or none be held for an owner."""
    book = LeaseBook(BlockPool(8), block_bytes=100)
    with pytest.raises(NoRoomError, match="8 are free"):
        book.reserve("a", blocks, now_s=0.0, lease_s=10.0)
    assert book.used_bytes == 0


def test_deadline_moves_with_heartbeats_only() -> None:
    """A lease would expire too early, too late or never; or a heartbeat that came late shorten it."""
    book = LeaseBook(BlockPool(2), block_bytes=1)
    lease = book.reserve("a", 1, now_s=0.0, lease_s=10.0)
    assert book.expired(9.9) == []
    assert book.extend(lease.number, 8.0)
    assert book.extend(lease.number, 3.0)
    assert book.expired(17.9) == []
    assert book.expired(18.0) == [lease]
    assert book.used_bytes == 1
    book.release(lease.number, ReleaseReason.EXPIRED)
    assert not book.extend(lease.number, 18.0)
