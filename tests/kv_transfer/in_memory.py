"""A transport inside one process, shipped for tests: it can lose, hold back, repeat, swap, damage and cut."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.channel import Condition, Place
from phasesplit.kv_transfer.messages import Message, MessageKind


class Fault(Enum):
    """What happens to a message on its way."""

    NONE = auto()
    DROP = auto()
    DELAY = auto()  # it comes one poll later, and so does what follows it
    DUPLICATE = auto()
    REORDER = auto()  # it comes after the next one
    CORRUPT = auto()  # one bit of its bytes, or of its checksum, is turned
    CUT = auto()  # the channel ends here


Faults = Callable[[Message], Fault]


@dataclass(frozen=True, slots=True)
class _Parcel:
    message: Message
    payload: NDArray[np.uint8] | None
    held: bool = False


class InMemoryChannel:
    """One end; make two with `in_memory_pair`.

    Args:
        faults: What happens to each message that this end offers.
        room: Messages on their way at most, >= 1.
    """

    def __init__(self, faults: Faults, room: int) -> None:
        self._faults = faults
        self._room = room
        self._incoming: deque[_Parcel] = deque()
        self._swapped: _Parcel | None = None
        self._peer = self
        self.condition = Condition.OPEN
        self.why = ""

    def join(self, peer: "InMemoryChannel") -> None:
        """Name the other end."""
        self._peer = peer

    def offer(self, message: Message, payload: NDArray[np.uint8] | None) -> bool:
        """See `Channel.offer`; the bytes are copied at once."""
        incoming = self._peer._incoming
        if self.condition is not Condition.OPEN or len(incoming) >= self._room:
            return False
        fault = self._faults(message)
        if fault is Fault.CUT:
            self._end(Condition.LOST)
            return False
        parcel = _Parcel(message, None if payload is None else payload.copy(), held=fault is Fault.DELAY)
        if fault is Fault.CORRUPT:
            parcel = _damaged(parcel)
        if fault is Fault.REORDER and self._swapped is None:
            self._swapped = parcel
            return True
        if fault is not Fault.DROP:
            incoming.extend([parcel] * (2 if fault is Fault.DUPLICATE else 1))
        if self._swapped is not None:
            incoming.append(self._swapped)
            self._swapped = None
        return True

    def flush(self) -> bool:
        """See `Channel.flush`."""
        return True

    def poll(self, place: Place) -> list[Message]:
        """See `Channel.poll`."""
        come = []
        while self._incoming:
            parcel = self._incoming.popleft()
            if parcel.held:
                self._incoming.appendleft(replace(parcel, held=False))
                break
            target = place(parcel.message) if parcel.payload is not None else None
            if target is not None and parcel.payload is not None:
                target[:] = parcel.payload
            come.append(parcel.message)
        return come

    def cut(self) -> None:
        """See `Channel.cut`."""
        self._end(Condition.CLOSED)

    def close(self) -> None:
        """See `Channel.close`."""
        self._end(Condition.CLOSED)

    def fileno(self) -> int:
        """Return -1: there is nothing to wait for."""
        return -1

    def _end(self, condition: Condition) -> None:
        for end in (self, self._peer):
            if end.condition is Condition.OPEN:
                end.condition = condition


def in_memory_pair(faults: Faults = lambda _: Fault.NONE, room: int = 1_000) -> tuple[InMemoryChannel, InMemoryChannel]:
    """Return sending and receiving end of a channel.

    Args:
        faults: What happens to each message of the sender; the receiver's arrive.
        room: Messages on their way at most, in each direction.
    """
    sending, receiving = InMemoryChannel(faults, room), InMemoryChannel(lambda _: Fault.NONE, room)
    sending.join(receiving)
    receiving.join(sending)
    return sending, receiving


def _damaged(parcel: _Parcel) -> _Parcel:
    if parcel.message.kind is MessageKind.NOTE:
        return replace(parcel, message=replace(parcel.message, checksum=parcel.message.checksum ^ 1))
    if parcel.payload is None:
        return parcel
    payload = parcel.payload.copy()
    payload[len(payload) // 2] ^= 1
    return replace(parcel, payload=payload)
