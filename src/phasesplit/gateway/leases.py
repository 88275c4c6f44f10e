"""Who owns the KV blocks that are reserved on each machine, why, and until when.

The ledger of `scheduling` keeps one number per machine (`committed_blocks`), which rules compare. This one keeps the
ownership behind that number: each reservation is a lease with an owner, a purpose and a deadline that heartbeats
extend, and it ends exactly once, for a recorded reason. Both are changed at the same instants: a pair's assignment
reserves in both, and a release here is the moment at which the account there is lowered. Once all requests have ended,
both are zero.

A lease is the gateway's claim. The machine frees the blocks themselves, and not before the last byte in flight has
landed. Claims may add up to more than a machine has: what is placed beyond that waits in the machine's own queue.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from phasesplit.errors import GatewayError


class LeaseEnd(StrEnum):
    """Why a lease ended; everything but `completed` is worth a look."""

    COMPLETED = "completed"
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    REFUSED = "refused"
    WORKER_LOST = "worker_lost"
    TRANSFER_FAILED = "transfer_failed"
    EXPIRED = "expired"


class Purpose(StrEnum):
    """What the blocks are reserved for."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class KvLease:
    """One reservation.

    Attributes:
        number: Its number, never used twice; late releases name it, so that they cannot meet a later reservation.
        machine: The machine's name.
        request: The owner.
        blocks: KV blocks, >= 1.
        purpose: What for.
        since_s: When it was made, on the gateway's clock.
        deadline_s: When it ends unless a heartbeat comes first.
    """

    number: int
    machine: str
    request: str
    blocks: int
    purpose: Purpose
    since_s: float
    deadline_s: float


class Leases:
    """All leases in force, and how many ended for each reason.

    Attributes:
        ended: Leases that ended, by reason.
        late: Releases of a lease that had already ended; they change nothing.
    """

    def __init__(self) -> None:
        self.ended: Counter[LeaseEnd] = Counter()
        self.late = 0
        self._by_number: dict[int, KvLease] = {}
        self._held: dict[str, dict[int, None]] = {}
        self._blocks: Counter[str] = Counter()
        self._made = 0

    def reserve(
        self, machine: str, request: str, blocks: int, purpose: Purpose, *, now_s: float, deadline_s: float
    ) -> KvLease:
        """Return a new lease.

        Args:
            machine: The machine's name.
            request: The owner.
            blocks: KV blocks, >= 1.
            purpose: What for.
            now_s: The instant, on the gateway's clock.
            deadline_s: When it ends unless extended, after `now_s`.

        Raises:
            GatewayError: There is nothing to reserve, or the deadline has passed.
        """
        if blocks < 1 or deadline_s <= now_s:
            raise GatewayError(
                f"request {request} on {machine}: a lease of {blocks} blocks, {now_s} to {deadline_s} s, holds nothing"
            )
        self._made += 1
        lease = KvLease(self._made, machine, request, blocks, purpose, now_s, deadline_s)
        self._by_number[lease.number] = lease
        self._held.setdefault(machine, {})[lease.number] = None
        self._blocks[machine] += blocks
        return lease

    def extend(self, machine: str, requests: Iterable[str], *, deadline_s: float) -> frozenset[str]:
        """Extend the leases that a machine's heartbeat names; a deadline never moves back.

        Args:
            machine: The machine's name.
            requests: The owners of all KV that the machine says it holds.
            deadline_s: The new deadline.

        Returns:
            The named requests that have no lease there: the machine is to free their KV.
        """
        named = frozenset(requests)
        known = set()
        for number in self._held.get(machine, {}):
            lease = self._by_number[number]
            if lease.request in named:
                known.add(lease.request)
                self._by_number[number] = replace(lease, deadline_s=max(lease.deadline_s, deadline_s))
        return named - known

    def release(self, number: int, reason: LeaseEnd) -> KvLease | None:
        """End a lease; a second time changes nothing but the count of late releases.

        Args:
            number: The lease's number.
            reason: Why it ends.

        Returns:
            The lease, or None if it had already ended.
        """
        lease = self._by_number.pop(number, None)
        if lease is None:
            self.late += 1
            return None
        held = self._held[lease.machine]
        del held[number]
        self._blocks[lease.machine] -= lease.blocks
        if not held:
            del self._held[lease.machine], self._blocks[lease.machine]
        self.ended[reason] += 1
        return lease

    def expire(self, now_s: float) -> list[KvLease]:
        """End the leases whose deadline has come, and return them, oldest first.

        Args:
            now_s: The instant, on the gateway's clock.
        """
        due = [lease for lease in self._by_number.values() if lease.deadline_s <= now_s]
        for lease in due:
            self.release(lease.number, LeaseEnd.EXPIRED)
        return due

    def lose(self, machine: str) -> list[KvLease]:
        """End all leases on a machine that is gone or has restarted, and return them, oldest first."""
        lost = [self._by_number[number] for number in self._held.get(machine, {})]
        for lease in lost:
            self.release(lease.number, LeaseEnd.WORKER_LOST)
        return lost

    def blocks(self, machine: str | None = None) -> int:
        """Return the blocks reserved on a machine, or on all of them together."""
        return self._blocks.total() if machine is None else self._blocks[machine]

    def machines(self) -> dict[str, int]:
        """Return the blocks reserved on each machine that holds any."""
        return dict(self._blocks)

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[KvLease]:
        """Iterate over the leases in force, oldest first."""
        return iter(tuple(self._by_number.values()))

    def listed(self, now_s: float) -> list[dict[str, str | int | float]]:
        """Return the leases in force as a page shows them, oldest first.

        Args:
            now_s: The instant, on the gateway's clock.
        """
        return [
            {
                "lease": lease.number,
                "machine": lease.machine,
                "request": lease.request,
                "purpose": str(lease.purpose),
                "blocks": lease.blocks,
                "age_s": round(now_s - lease.since_s, 3),
                "left_s": round(lease.deadline_s - now_s, 3),
            }
            for lease in self
        ]
