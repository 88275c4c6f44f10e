"""Until when blocks of a pool wait for KV, and for whose. Time is an argument."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from phasesplit.transfer.blocks import BlockPool, Holding, Use
from phasesplit.transfer.failures import NoRoomError, Reason


@dataclass(slots=True)
class Lease:
    """The deadline of a holding.

    Attributes:
        number: Number of the lease, never used twice.
        holding: The blocks, in the pool, under the key of the request.
        deadline_s: Instant at which it expires unless extended.
        lease_s: By how much a heartbeat extends it, > 0.
    """

    number: int
    holding: Holding
    deadline_s: float
    lease_s: float

    @property
    def key(self) -> str:
        """The request."""
        return self.holding.key

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in the pool; the i-th holds the i-th block of the request's tokens."""
        return self.holding.blocks


class LeaseBook:
    """The leases of a pool: each has a holding there that waits for KV, and a deadline.

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

    @property
    def used_bytes(self) -> int:
        """Bytes that are held."""
        return self._block_bytes * sum(len(lease.blocks) for lease in self._held.values())

    @property
    def held(self) -> Iterable[Lease]:
        """The leases, oldest first."""
        return self._held.values()

    def reserve(self, key: str, blocks: int, now_s: float, lease_s: float) -> Lease:
        """Hold blocks for a request, those with the lowest numbers: neighbours travel in one frame.

        Raises:
            NoRoomError: Fewer blocks are free, or none was asked for.
        """
        try:
            holding = self._pool.hold(key, Use.RECEIVE, blocks)
        except NoRoomError as error:
            raise NoRoomError(f"request {key}: {error}") from None
        self._last_number += 1
        lease = Lease(self._last_number, holding, now_s + lease_s, lease_s)
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

    def release(self, number: int, reason: Reason) -> list[int]:
        """Give the blocks back; return those that nobody uses now. A second release changes nothing."""
        lease = self._held.pop(number, None)
        if lease is None:
            return []
        self.released[reason] += 1
        return self._pool.give(lease.holding)
