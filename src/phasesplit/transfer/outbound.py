"""What a sender's channel takes next, in order: runs of blocks become frames when their turn comes."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from phasesplit.transfer.checksum import checksum
from phasesplit.transfer.messages import Kind, Message
from phasesplit.transfer.runs import Run

Payload = NDArray[np.uint8]


class SendQueue:
    """The queue of a sender.

    Args:
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; only read.

    Attributes:
        epoch: The receiver's; it stands in every frame, so no run is queued before it is known.
        in_channel: Number of the transfer whose frame or note was taken last; 0: none was.
    """

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._pool = pool
        self._queue: deque[Run | Message] = deque()
        self._prepared: tuple[Message, Payload | None] | None = None
        self.epoch = 0
        self.in_channel = 0

    def add(self, entry: Run | Message) -> None:
        """Queue a run of blocks, or a message without blocks."""
        self._queue.append(entry)

    def head(self) -> tuple[Message, Payload | None] | None:
        """Return what a channel should take next, the same until `taken`, or None."""
        if self._prepared is None and self._queue:
            entry = self._queue[0]
            self._prepared = (entry, None) if isinstance(entry, Message) else self._frame(entry)
        return self._prepared

    def taken(self) -> int | None:
        """Take note that the channel took what `head` returned; return the transfer that it is a part of, if any."""
        entry = self._queue.popleft()
        self._prepared = None
        if not _is_part(entry):
            return None
        self.in_channel = entry.transfer
        return entry.transfer

    def drop(self, transfer: int) -> None:
        """Take the frames and the note of a transfer out of the queue."""
        if self._queue and _is_part(self._queue[0]) and self._queue[0].transfer == transfer:
            self._prepared = None
        self._queue = deque(entry for entry in self._queue if not _is_part(entry) or entry.transfer != transfer)

    def clear(self) -> None:
        """Take everything out of the queue."""
        self._queue.clear()
        self._prepared = None

    def _frame(self, run: Run) -> tuple[Message, Payload]:
        payload = self._pool[run.layer, run.source : run.source + run.blocks].reshape(-1)
        return Message(
            Kind.FRAME,
            self.epoch,
            run.transfer,
            run.layer,
            run.target,
            run.blocks,
            checksum(payload),
            len(payload),
        ), payload


def _is_part(entry: Run | Message) -> bool:
    """Return whether a transfer is whole only with this entry."""
    return isinstance(entry, Run) or entry.kind is Kind.NOTE
