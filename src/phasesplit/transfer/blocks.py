"""The blocks of a machine's KV pool: which are free. Transfers, prompts and growing requests draw from the same one."""

import heapq
from collections.abc import Iterable

from phasesplit.errors import TransferError
from phasesplit.transfer.failures import NoRoomError


class BlockPool:
    """All block numbers of a pool; each is free or was taken by one owner.

    Args:
        blocks: Blocks of the pool, >= 0; their numbers are 0 to blocks - 1.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks))
        self._is_free = bytearray(b"\1" * blocks)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.blocks - len(self._free)

    def take(self, blocks: int) -> tuple[int, ...]:
        """Return so many free blocks, those with the lowest numbers, ascending: neighbours travel in one frame.

        Raises:
            NoRoomError: Fewer are free, or none was asked for.
        """
        if not 1 <= blocks <= len(self._free):
            raise NoRoomError(f"{blocks} blocks asked for, {len(self._free)} are free")
        taken = tuple(heapq.heappop(self._free) for _ in range(blocks))
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Give blocks back.

        Raises:
            TransferError: One is free already, or is none of the pool: two owners believed in it.
        """
        for block in blocks:
            if not 0 <= block < self.blocks or self._is_free[block]:
                raise TransferError(f"block {block} is given back, but nobody holds it")
            self._is_free[block] = 1
            heapq.heappush(self._free, block)
