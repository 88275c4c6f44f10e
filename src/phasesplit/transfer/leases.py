"""Who holds which blocks, why, and until when. Time is an argument."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.failures import NoRoomError, Reason

_REMEMBERED = 1_000


@dataclass(slots=True)
class Lease:
    """Blocks held for one owner.

    Attributes:
        number: Number of the lease, never used twice.
        owner: The request.
        purpose: Why the blocks are held.
        blocks: Blocks in the pool; the i-th holds the i-th block of the request's tokens.
        deadline_s: Instant at which it expires unless extended.
        lease_s: By how much a heartbeat extends it, > 0.
    """

    number: int
    owner: str
    purpose: str
    blocks: tuple[int, ...]
    deadline_s: float
    lease_s: float


class LeaseBook:
    """Blocks of a pool that are held under a lease: each has one owner, a purpose and a deadline.

    Args:
        pool: Where the blocks are taken from; others may draw from it too.
        block_bytes: Bytes of a block over all layers, > 0.
    """

    def __init__(self, pool: BlockPool, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = pool
        self._held: dict[int, Lease] = {}
        self._last_number = 0
        self.released: Counter[Reason] = Counter()
        self.latest: deque[tuple[Lease, Reason, float]] = deque(maxlen=_REMEMBERED)

    @property
    def used_bytes(self) -> int:
        """Bytes that are held."""
        return self._block_bytes * sum(len(lease.blocks) for lease in self._held.values())

    @property
    def held(self) -> Iterable[Lease]:
        """The leases, oldest first."""
        return self._held.values()

    def reserve(self, owner: str, purpose: str, blocks: int, now_s: float, lease_s: float) -> Lease:
        """Hold blocks, those with the lowest numbers: neighbours travel in one frame.

        Raises:
            NoRoomError: Fewer blocks are free, or none was asked for.
        """
        try:
            taken = self._pool.take(blocks)
        except NoRoomError as error:
            raise NoRoomError(f"request {owner}: {error}") from None
        self._last_number += 1
        lease = Lease(self._last_number, owner, purpose, taken, now_s + lease_s, lease_s)
        self._held[lease.number] = lease
        return lease

    def extend(self, number: int, now_s: float) -> bool:
        """Move a deadline to one lease time from now, never back; return whether the lease is held."""
        lease = self._held.get(number)
        if lease is not None:
            lease.deadline_s = max(lease.deadline_s, now_s + lease.lease_s)
        return lease is not None

    def expired(self, now_s: float) -> list[Lease]:
        """Return the leases whose deadline has passed; they stay held."""
        return [lease for lease in self._held.values() if lease.deadline_s <= now_s]

    def release(self, number: int, reason: Reason, now_s: float) -> bool:
        """Give the blocks back; return whether they were held, so that a second release changes nothing."""
        lease = self._held.pop(number, None)
        if lease is None:
            return False
        self._pool.give(lease.blocks)
        self.released[reason] += 1
        self.latest.append((lease, reason, now_s))
        return True
