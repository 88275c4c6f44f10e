"""Owners, deadlines and releases of blocks."""

import pytest

from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.failures import NoRoomError, Reason
from phasesplit.transfer.leases import LeaseBook


def test_every_byte_has_an_owner_until_it_is_released_once() -> None:
    """Held bytes would not be counted, or a second release free blocks of the next owner."""
    book = LeaseBook(BlockPool(8), block_bytes=100)
    first = book.reserve("a", "transfer", 3, now_s=1.0, lease_s=10.0)
    second = book.reserve("b", "transfer", 5, now_s=1.0, lease_s=10.0)
    assert (first.blocks, second.blocks) == ((0, 1, 2), (3, 4, 5, 6, 7))
    assert book.used_bytes == 800
    assert [(lease.owner, lease.purpose, lease.deadline_s) for lease in book.held] == [
        ("a", "transfer", 11.0),
        ("b", "transfer", 11.0),
    ]
    assert book.release(first.number, Reason.ABORTED, 2.0)
    third = book.reserve("c", "transfer", 2, now_s=2.0, lease_s=10.0)
    assert not book.release(first.number, Reason.COMPLETED, 3.0)
    assert (third.blocks, book.used_bytes) == ((0, 1), 700)
    assert book.release(second.number, Reason.COMPLETED, 4.0)
    assert book.release(third.number, Reason.EXPIRED, 5.0)
    assert book.used_bytes == 0
    assert book.released == {Reason.ABORTED: 1, Reason.COMPLETED: 1, Reason.EXPIRED: 1}
    assert [(lease.owner, reason, at_s) for lease, reason, at_s in book.latest] == [
        ("a", Reason.ABORTED, 2.0),
        ("b", Reason.COMPLETED, 4.0),
        ("c", Reason.EXPIRED, 5.0),
    ]


@pytest.mark.parametrize("blocks", [0, -1, 9])
def test_what_does_not_fit_is_refused(blocks: int) -> None:
    """Blocks would be given that are not there, or none be held for an owner."""
    book = LeaseBook(BlockPool(8), block_bytes=100)
    with pytest.raises(NoRoomError, match="8 are free"):
        book.reserve("a", "transfer", blocks, now_s=0.0, lease_s=10.0)
    assert book.used_bytes == 0


def test_deadline_moves_with_heartbeats_only() -> None:
    """A lease would expire too early, too late or never; or a heartbeat that came late shorten it."""
    book = LeaseBook(BlockPool(2), block_bytes=1)
    lease = book.reserve("a", "transfer", 1, now_s=0.0, lease_s=10.0)
    assert book.expired(9.9) == []
    assert book.extend(lease.number, 8.0)
    assert book.extend(lease.number, 3.0)
    assert book.expired(17.9) == []
    assert book.expired(18.0) == [lease]
    assert book.used_bytes == 1
    book.release(lease.number, Reason.EXPIRED, 18.0)
    assert not book.extend(lease.number, 18.0)
