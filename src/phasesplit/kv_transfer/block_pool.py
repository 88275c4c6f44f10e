"""The blocks of a machine's KV pool: who uses which, which are kept for later prompts, and which are free.

Prompts, growing requests and transfers draw from one pool, and it is the truth about each block. Leases of transfers
and the requests of the engine refer to their `Holding` here; they keep no lists of their own.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.messages import NoRoomError

_FIRST_ROOM = 64


class Use(Enum):
    """What blocks are used for."""

    COMPUTE = "compute"  # a request of this machine reads and writes them
    RECEIVE = "receive"  # KV arrives in them, or has arrived and was not taken
    SEND = "send"  # KV leaves from them


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks that a request has for one use. Only the pool changes it.

    Attributes:
        key: The request.
        use: What the blocks are used for.
        table: The blocks in the order of the request's tokens, of which the first `count` are meant, int32.
        count: How many there are.
    """

    key: str
    use: Use
    table: NDArray[np.int32] = field(default_factory=lambda: np.zeros(_FIRST_ROOM, np.int32))
    count: int = 0

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks in the order of the request's tokens."""
        return tuple(self.table[: self.count].tolist())

    def append(self, blocks: Iterable[int]) -> None:
        """Add blocks behind those that are there; for the pool."""
        added = tuple(blocks)
        end = self.count + len(added)
        if end > len(self.table):
            longer = np.zeros(max(end, 2 * len(self.table)), np.int32)
            longer[: self.count] = self.table[: self.count]
            self.table = longer
        self.table[self.count : end] = added
        self.count = end


class BlockPool:
    """All blocks of a machine, with how many holdings use each.

    A block is free, used by one holding or more, or kept: nobody uses it, but its KV may be wanted again.

    Args:
        blocks: Blocks of the pool, >= 0; their numbers are 0 to blocks - 1.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))
        self._users = [0] * blocks
        self._is_kept = bytearray(blocks)
        self._idle: dict[int, None] = {}  # kept and used by nobody, the least recently used first
        self._holdings: dict[Holding, None] = {}

    @property
    def free(self) -> int:
        """Blocks that nobody uses or keeps."""
        return len(self._free)

    @property
    def idle(self) -> int:
        """Blocks that are kept and that nobody uses."""
        return len(self._idle)

    @property
    def used(self) -> int:
        """Blocks that somebody uses."""
        return self.blocks - len(self._free) - len(self._idle)

    @property
    def holdings(self) -> Iterable[Holding]:
        """The holdings that have blocks."""
        return self._holdings.keys()

    def held(self) -> Mapping[str, int]:
        """Return how many blocks each request uses, for whatever; a block that several requests use counts for each."""
        seen: dict[str, Holding | set[int]] = {}
        for holding in self._holdings:
            before = seen.setdefault(holding.key, holding)
            if before is not holding:
                # Blocks that a request computes with and sends at once count once.
                blocks = set(before.blocks) if isinstance(before, Holding) else before
                seen[holding.key] = blocks.union(holding.blocks)
        return {key: found.count if isinstance(found, Holding) else len(found) for key, found in seen.items()}

    def used_under(self, key: str) -> int:
        """Return how many blocks the holdings of a request have; one in two of them counts twice."""
        return sum(holding.count for holding in self._holdings if holding.key == key)

    def users(self, block: int) -> int:
        """Return how many holdings use a block."""
        return self._users[block]

    def hold(self, key: str, use: Use, blocks: int) -> Holding:
        """Return a new holding of so many free blocks, see `take`.

        Raises:
            NoRoomError: Fewer are free, or none was asked for.
        """
        holding = Holding(key, use)
        self.take(holding, blocks)
        return holding

    def take(self, holding: Holding, blocks: int) -> None:
        """Add so many free blocks to a holding: those with the lowest numbers, for neighbours travel in one frame.

        Mutates: holding.

        Raises:
            NoRoomError: Fewer are free, or none was asked for.
        """
        if not 1 <= blocks <= len(self._free):
            raise NoRoomError(f"{blocks} blocks asked for, {len(self._free)} are free")
        taken = [heapq.heappop(self._free) for _ in range(blocks)]
        for block in taken:
            self._users[block] = 1
        self._add(holding, taken)

    def share(self, holding: Holding, blocks: Iterable[int]) -> None:
        """Add blocks to a holding that others use, or that are kept.

        Mutates: holding.

        Raises:
            TransferError: One is free, or is none of the pool: its KV is not there.
        """
        shared = tuple(blocks)
        for block in shared:
            if not 0 <= block < self.blocks or not (self._users[block] or self._is_kept[block]):
                raise TransferError(f"block {block} is shared, but nobody has it")
        for block in shared:
            self._users[block] += 1
            self._idle.pop(block, None)
        self._add(holding, shared)

    def give(self, holding: Holding) -> list[int]:
        """Take all blocks from a holding; return those that are free now. A second call changes nothing.

        Mutates: holding.
        """
        freed = []
        # The last blocks of a prompt are of the least use to other prompts: they are dropped first.
        for block in reversed(holding.blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if self._is_kept[block]:
                    self._idle[block] = None
                else:
                    freed.append(block)
                    heapq.heappush(self._free, block)
        holding.count = 0
        self._holdings.pop(holding, None)
        return freed

    def keep(self, block: int) -> None:
        """Keep a block, which somebody uses, beyond its last user.

        Raises:
            TransferError: Nobody uses it.
        """
        if not self._users[block]:
            raise TransferError(f"block {block} is to be kept, but nobody uses it")
        self._is_kept[block] = 1

    def drop(self, blocks: int) -> list[int]:
        """Free up to so many kept blocks that nobody uses, the least recently used first, and return them."""
        dropped = [block for block, _ in zip(self._idle, range(blocks), strict=False)]
        for block in dropped:
            del self._idle[block]
            self._is_kept[block] = 0
            heapq.heappush(self._free, block)
        return dropped

    def _add(self, holding: Holding, blocks: Iterable[int]) -> None:
        holding.append(blocks)
        if holding.count:
            self._holdings[holding] = None
