"""Staging slots: memory between vLLM's KV blocks and the network, for KV that leaves and KV that has come in.

vLLM owns its KV memory, and on a GPU that is the device's. Transfers read and write host memory that processes of a
host share, so blocks are copied from the one to the other, and nothing else knows where vLLM's blocks are.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.machine import blocks_for
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.messages import NoRoomError

IsDone = Callable[[], bool]
"""Whether a copy has ended."""

Bytes = NDArray[np.uint8]


class Device(Protocol):
    """vLLM's KV blocks, wherever they are."""

    def gather(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> IsDone | None:
        """Copy blocks of a layer into staging slots, after all that was ordered from the device before.

        Args:
            layer: The layer.
            blocks: vLLM's blocks.
            slots: Where they go, as many.

        Returns:
            Says whether the copy has ended; None: it has.
        """

    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy staging slots into blocks, all layers; has ended when it returns."""

    def order_after_copies(self) -> None:
        """Let what is ordered from the device from now on come after the copies that were begun."""


class HostDevice:
    """KV blocks in memory of the host.

    Args:
        layers: For each layer vLLM's blocks as bytes, (blocks, block bytes).
        staging: The slots, (layers, slots, block bytes).
    """

    def __init__(self, layers: Sequence[Bytes], staging: Bytes) -> None:
        self._layers, self._staging = layers, staging

    def gather(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """See `Device.gather`; None is returned, for the copy has ended."""
        source, target = self._layers[layer], self._staging[layer]
        for block, slot in zip(blocks, slots, strict=True):
            target[slot] = source[block]

    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for source, target in zip(self._staging, self._layers, strict=True):
            for slot, block in zip(slots, blocks, strict=True):
                target[block] = source[slot]

    def order_after_copies(self) -> None:
        """See `Device.order_after_copies`; there is nothing to wait for."""


class Slots:
    """Staging slots for KV that leaves. Those for KV that comes in belong to the endpoint.

    Two shares instead of one: machines whose slots are all taken by what comes in could send nothing, and would wait
    for each other in a ring.

    Args:
        first: Number of the first slot.
        count: How many, >= 1.
    """

    def __init__(self, first: int, count: int) -> None:
        self.count = count
        self._first = first
        self._free = BlockPool(count)
        self._taken: dict[tuple[int, ...], Holding] = {}
        self._lock = threading.Lock()

    @property
    def used(self) -> int:
        """Slots that are taken."""
        return self._free.used

    def take(self, count: int) -> tuple[int, ...] | None:
        """Return so many slots, None if fewer are free."""
        with self._lock:
            try:
                taken = self._free.hold("", Use.SEND, count)
            except NoRoomError:
                return None
            slots = tuple(self._first + slot for slot in taken.blocks)
            self._taken[slots] = taken
            return slots

    def give(self, slots: Sequence[int]) -> None:
        """Give slots back."""
        with self._lock:
            self._free.give(self._taken.pop(tuple(slots)))


def slots_for(size_bytes: int, slot_bytes: int, longest_tokens: int, block_tokens: int) -> int:
    """Return how many slots each of the two shares has.

    Args:
        size_bytes: Memory for both.
        slot_bytes: Bytes of a block over all layers.
        longest_tokens: Tokens of the longest prompt.
        block_tokens: Tokens of a block.

    Raises:
        TransferError: The longest prompt does not fit in.
    """
    slots, longest = size_bytes // (2 * slot_bytes), blocks_for(longest_tokens, block_tokens)
    if slots < longest:
        raise TransferError(
            f"staging_bytes: got {size_bytes}, allowed is {2 * slot_bytes * longest} or more: a prompt of"
            f" {longest_tokens} tokens has to fit into each half"
        )
    return slots
