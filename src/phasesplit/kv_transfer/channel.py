"""What a transport gives the two ends of a transfer: a `Channel` each, which carries messages and blocks.

A channel keeps the order of messages; what it loses or damages makes transfers fail. Where the sender writes into the
receiver's pool itself (shared memory, RDMA), `poll` finds the bytes in their place and ignores `place`, and `cut` must
wait until the writer is known to have stopped.
"""

import select
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.messages import Message

Place = Callable[[Message], NDArray[np.uint8] | None]
"""Where the bytes of a frame belong; None where they must be thrown away."""


class Condition(Enum):
    """How a channel is. There is no good end: a transfer succeeds by the receiver's completion alone."""

    OPEN = "open"
    CLOSED = "closed"  # in order, by either end
    LOST = "lost"  # the peer or the way to it is gone
    DAMAGED = "damaged"  # what came is not the protocol


class Channel(Protocol):
    """One end of a way between two machines. No call waits."""

    @property
    def condition(self) -> Condition:
        """How the channel is; once it is not `OPEN`, no byte of ours moves any more."""
        ...

    @property
    def why(self) -> str:
        """What the operating system said when the channel ended, or the empty text."""
        ...

    def offer(self, message: Message, payload: NDArray[np.uint8] | None) -> bool:
        """Take a message and, for a frame, its bytes; False if there is no room now (offer it again later)."""
        ...

    def flush(self) -> bool:
        """Return whether everything taken is on its way, so that no payload is read any more."""
        ...

    def poll(self, place: Place) -> list[Message]:
        """Return what has come; the bytes of each frame are in their place."""
        ...

    def cut(self) -> None:
        """Stop the peer from writing. The condition changes when it can write no more."""
        ...

    def close(self) -> None:
        """Give back every handle; a second call changes nothing."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when something has come."""
        ...


def wait_readable(descriptors: list[int], timeout_s: float) -> bool:
    """Wait until something has come on one of the descriptors; return whether it did in time."""
    poller = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))
