"""The narrow seam to what carries the bytes, and the loop body that joins it to the ends.

A transport gives two `Channel`s. It keeps the order of messages; what it loses or damages makes transfers fail. Where
the sender writes into the receiver's pool itself (shared memory; RDMA would be the next), `poll` finds the bytes in
their place and ignores `place`, and `cut` must wait until the writer is known to have stopped.
"""

import select
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.messages import Message
from phasesplit.kv_transfer.receiver import Receiver
from phasesplit.kv_transfer.sender import Sender

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


def drive_sender(sender: Sender, channel: Channel, now_s: float) -> None:
    """Move what can move without waiting, at the sending end."""
    for message in channel.poll(_nowhere):
        sender.on_message(message, now_s)
    sender.tick(now_s)
    while channel.condition is Condition.OPEN and (head := sender.head()) and channel.offer(*head):
        sender.taken()
    channel.flush()
    if channel.condition is not Condition.OPEN and not sender.lost_because:
        why = f" ({channel.why})" if channel.why else ""
        sender.lost(f"the channel is {channel.condition.value}{why}")


def drive_receiver(receiver: Receiver, channels: Mapping[int, Channel], now_s: float) -> None:
    """Move what can move without waiting, at the receiving end; channels that ended stay in the mapping."""
    for number, channel in channels.items():

        def place(frame: Message, number: int = number) -> NDArray[np.uint8] | None:
            return receiver.place(number, frame)

        for message in channel.poll(place):
            receiver.on_message(number, message, now_s)
    receiver.tick(now_s)
    for _ in range(len(receiver.outbox)):
        number, message = receiver.outbox.popleft()
        there = number in channels and channels[number].condition is Condition.OPEN
        if there and not channels[number].offer(message, None):
            receiver.outbox.append((number, message))
    for number, channel in channels.items():
        if number in receiver.cuts:
            channel.cut()
        channel.flush()
        if channel.condition is not Condition.OPEN:
            receiver.lost(number, now_s)


def wait_readable(descriptors: list[int], timeout_s: float) -> bool:
    """Wait until something has come on one of the descriptors; return whether it did in time."""
    poller = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(timeout_s * 1e3))


def _nowhere(frame: Message) -> None:
    """Return no place: a receiver sends no frames."""
    del frame
