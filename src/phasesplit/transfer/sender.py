"""The sending end: which frames go next, and what became of each transfer.

It knows no socket and no clock. Blocks are read when a channel takes the frame, so the caller keeps them unchanged from
`send` until `may_free`.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.transfer.checksum import checksum
from phasesplit.transfer.layout import Greeting
from phasesplit.transfer.messages import Kind, Message, Reservation, reason_text
from phasesplit.transfer.states import DEPARTURE_TABLE, Departure, DepartureEvent

FRAME_BYTES = 2 * 1024 * 1024
"""Longest frame that blocks are coalesced into: a frame costs about 15 us besides its bytes, and an error one frame.

Source: measured, `bench/transfer.py` with frames of 64 KiB to 4 MiB through shared memory.
"""

Payload = NDArray[np.uint8]


@dataclass(slots=True)
class _Leaving:
    """One transfer at its sender."""

    reservation: Reservation
    blocks: tuple[int, ...]
    unsent: NDArray[np.bool_]  # (layers, blocks of the transfer)
    deadline_s: float
    state: Departure = Departure.OPEN
    why: str = ""
    queued: int = 0  # frames that no channel has taken yet


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring blocks on both ends."""

    transfer: int
    layer: int
    source: int
    target: int
    blocks: int


class Sender:
    """Sends KV blocks of a pool to one receiver.

    Args:
        greeting: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; only read.
        frame_bytes: Longest frame; a block that is longer goes alone.
    """

    def __init__(self, greeting: Greeting, pool: NDArray[np.uint8], *, frame_bytes: int = FRAME_BYTES) -> None:
        self._greeting = greeting
        self._pool = pool
        self._frame_blocks = max(1, frame_bytes // greeting.layout.block_bytes)
        self._leaving: dict[tuple[int, int], _Leaving] = {}
        self._queue: deque[_Run | Message] = deque([Message(Kind.HELLO, text=greeting.to_text())])
        self._prepared: tuple[Message, Payload | None] | None = None
        self._in_channel = (0, 0)
        self._lost = ""
        self.receiver: Greeting | None = None
        self.absorbed: Counter[str] = Counter()

    @property
    def queued_bytes(self) -> int:
        """Bytes of blocks that no channel has taken yet: the back-pressure that a caller sees."""
        block_bytes = self._greeting.layout.block_bytes
        queued = sum(entry.blocks for entry in self._queue if isinstance(entry, _Run))
        return block_bytes * queued

    @property
    def capabilities(self) -> frozenset[str]:
        """What both ends can do; nothing before the receiver's greeting."""
        return frozenset(self._greeting.capabilities).intersection(self.receiver.capabilities if self.receiver else ())

    @property
    def lost_because(self) -> str:
        """Why no more transfers can be opened, or the empty text."""
        return self._lost

    def open(self, reservation: Reservation, blocks: tuple[int, ...], deadline_s: float) -> None:
        """Begin a transfer.

        Args:
            reservation: What the receiver holds for it.
            blocks: Our blocks; the i-th goes to the i-th of the reservation. As many as reserved.
            deadline_s: Instant after which it has failed.

        Raises:
            TransferError: The receiver is not known, is gone, is another one or in another epoch; it reserved too few
                blocks or too many; a block is outside our pool; or the transfer is open already.
        """
        key = (reservation.epoch, reservation.transfer)
        if self._lost or self.receiver is None:
            raise TransferError(self._lost or "the receiver has not answered the greeting")
        if (reservation.machine, reservation.epoch) != (self.receiver.machine, self.receiver.epoch):
            raise TransferError(
                f"reservation of {reservation.machine} in epoch {reservation.epoch}, the receiver is "
                f"{self.receiver.machine} in epoch {self.receiver.epoch}"
            )
        if len(blocks) != len(reservation.blocks):
            raise TransferError(f"{len(blocks)} blocks to send, {len(reservation.blocks)} are reserved")
        if not blocks or min(blocks) < 0 or max(blocks) >= self._pool.shape[1]:
            raise TransferError(f"blocks {blocks!r}, allowed are 0 to {self._pool.shape[1] - 1}")
        if min(reservation.blocks) < 0 or max(reservation.blocks) >= self.receiver.blocks:
            raise TransferError(f"reserved blocks {reservation.blocks!r} are outside the receiver's pool")
        if key in self._leaving:
            raise TransferError(f"transfer {reservation.transfer} is open already")
        unsent = np.ones((self._greeting.layout.layers, len(blocks)), np.bool_)
        self._leaving[key] = _Leaving(reservation, blocks, unsent, deadline_s)

    def send(self, reservation: Reservation, layer: int, first: int = 0, end: int | None = None) -> None:
        """Queue blocks of a layer that are final; nothing is queued for a transfer that has failed.

        Args:
            reservation: An open transfer.
            layer: The layer.
            first: First block of the request.
            end: One behind the last, by default all.

        Raises:
            TransferError: There are no such blocks, or they were sent before.
        """
        leaving = self._find(reservation)
        end = len(leaving.blocks) if end is None else end
        if not (0 <= layer < len(leaving.unsent) and 0 <= first < end <= len(leaving.blocks)):
            raise TransferError(f"layer {layer}, blocks {first} to {end} are not in transfer {reservation.transfer}")
        if not leaving.unsent[layer, first:end].all():
            raise TransferError(f"layer {layer}, blocks {first} to {end} were sent before")
        leaving.unsent[layer, first:end] = False
        if leaving.state is not Departure.OPEN:
            return
        for at, blocks in _runs(leaving.blocks, reservation.blocks, first, end, self._frame_blocks):
            self._queue.append(_Run(reservation.transfer, layer, leaving.blocks[at], reservation.blocks[at], blocks))
            leaving.queued += 1

    def send_all(self, reservation: Reservation) -> None:
        """Queue every layer: a serialized transfer."""
        for layer in range(self._greeting.layout.layers):
            self.send(reservation, layer)

    def state(self, reservation: Reservation) -> Departure:
        """Return the state of a transfer."""
        return self._find(reservation).state

    def why(self, reservation: Reservation) -> str:
        """Return why a transfer failed, or the empty text."""
        return self._find(reservation).why

    def abort(self, reservation: Reservation, why: str = "aborted") -> None:
        """Give up a transfer in any state; a second call changes nothing."""
        key = (reservation.epoch, reservation.transfer)
        if key in self._leaving and self._happen(key, DepartureEvent.ABORT, why):
            self._queue.append(Message(Kind.ABORT, *key, text=reason_text(why)))

    def may_free(self, reservation: Reservation, *, channel_idle: bool) -> bool:
        """Return whether no byte of our blocks will be read any more.

        Args:
            reservation: The transfer.
            channel_idle: Whether the channel has put everything that it took on its way (`Channel.flush`).
        """
        ended = self.state(reservation) in (Departure.COMPLETED, Departure.FAILED)
        in_channel = self._in_channel == (reservation.epoch, reservation.transfer)
        return ended and (channel_idle or not in_channel)

    def forget(self, reservation: Reservation) -> None:
        """Drop what is known of a transfer that has ended; of one that has not, abort it first."""
        self.abort(reservation)
        self._leaving.pop((reservation.epoch, reservation.transfer), None)

    def heartbeat(self) -> None:
        """Queue a heartbeat for every transfer that goes on."""
        going_on = [key for key, leaving in self._leaving.items() if leaving.state in (Departure.OPEN, Departure.SENT)]
        self._queue.extend(Message(Kind.HEARTBEAT, *key) for key in going_on)

    def tick(self, now_s: float) -> None:
        """Let transfers whose deadline has passed fail."""
        for key in [key for key, leaving in self._leaving.items() if leaving.deadline_s <= now_s]:
            if self._happen(key, DepartureEvent.EXPIRE, "not complete before its deadline"):
                self._queue.append(Message(Kind.ABORT, *key, text=b"the sender's deadline has passed"))

    def lost(self, why: str) -> None:
        """Take note that the channel ended in any way: what is not complete has failed."""
        self._lost = self._lost or why
        self._queue.clear()
        self._prepared = None
        for key in self._leaving:
            self._happen(key, DepartureEvent.PEER_LOST, why)

    def head(self) -> tuple[Message, Payload | None] | None:
        """Return what a channel should take next, the same until `taken`, or None."""
        if self._prepared is None and self._queue:
            entry = self._queue[0]
            self._prepared = (entry, None) if isinstance(entry, Message) else self._frame(entry)
        return self._prepared

    def taken(self) -> None:
        """Take note that the channel took what `head` returned."""
        message = self._queue.popleft()
        self._prepared = None
        if isinstance(message, _Run):
            assert self.receiver is not None  # noqa: S101 - nothing is queued before it
            key = self._in_channel = (self.receiver.epoch, message.transfer)
            leaving = self._leaving[key]
            leaving.queued -= 1
            if not leaving.queued and not leaving.unsent.any():
                self._happen(key, DepartureEvent.LAST_SENT, "")

    def on_message(self, message: Message) -> None:
        """Take a message of the receiver."""
        if message.kind is Kind.WELCOME:
            try:
                theirs = Greeting.from_text(message.text)
                self._greeting.layout.demand_equal(theirs.layout)
                self.receiver = theirs
            except TransferError as error:
                self.lost(str(error))
        elif message.kind is Kind.REFUSE:
            self.lost(f"refused: {message.text.decode(errors='replace')}")
        elif message.kind is Kind.READY:
            self._happen((message.epoch, message.transfer), DepartureEvent.PEER_READY, "completed before it was sent")
        elif message.kind is Kind.ABORT:
            key = (message.epoch, message.transfer)
            self._happen(key, DepartureEvent.PEER_ABORT, message.text.decode(errors="replace"))
            self._queue.append(Message(Kind.STOPPED, *key))
        else:
            self.absorbed["message of a sender"] += 1

    def _find(self, reservation: Reservation) -> _Leaving:
        leaving = self._leaving.get((reservation.epoch, reservation.transfer))
        if leaving is None:
            raise TransferError(f"transfer {reservation.transfer} in epoch {reservation.epoch} is not open here")
        return leaving

    def _frame(self, run: _Run) -> tuple[Message, Payload]:
        payload = self._pool[run.layer, run.source : run.source + run.blocks].reshape(-1)
        assert self.receiver is not None  # noqa: S101 - nothing is queued before it
        return Message(
            Kind.FRAME,
            self.receiver.epoch,
            run.transfer,
            run.layer,
            run.target,
            run.blocks,
            checksum(payload),
            len(payload),
        ), payload

    def _happen(self, key: tuple[int, int], event: DepartureEvent, why: str) -> bool:
        """Take one step of the table; return whether it changed the state."""
        leaving = self._leaving.get(key)
        after = DEPARTURE_TABLE[leaving.state][event] if leaving else None
        if leaving is None or after is None or after is leaving.state:
            self.absorbed[event.name.lower()] += 1
            return False
        leaving.state = after
        if after is Departure.FAILED:
            leaving.why = why
            self._queue = deque(e for e in self._queue if not (isinstance(e, _Run) and e.transfer == key[1]))
            if self._prepared and self._prepared[0].kind is Kind.FRAME and self._prepared[0].transfer == key[1]:
                self._prepared = None
        return True


def _runs(
    sources: tuple[int, ...], targets: tuple[int, ...], first: int, end: int, longest: int
) -> Iterator[tuple[int, int]]:
    """Yield place and length of stretches that are neighbours on both ends, none longer than a frame."""
    start = first
    for at in range(first + 1, end + 1):
        joined = (
            at < end
            and at - start < longest
            and sources[at] == sources[at - 1] + 1
            and targets[at] == targets[at - 1] + 1
        )
        if not joined:
            yield start, at - start
            start = at
