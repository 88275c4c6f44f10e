"""The sending end: which transfers wait for it, and what became of each.

It knows no socket and no clock. Blocks are read when a channel takes the frame, so the caller keeps them unchanged from
`send` until `may_free`.
"""

from collections import Counter
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.transfer.departures import Departures, Leaving, Transfer
from phasesplit.transfer.layout import Greeting
from phasesplit.transfer.meeting import Caller, Identity
from phasesplit.transfer.messages import LONGEST_TEXT_BYTES, Kind, Message, reason_text
from phasesplit.transfer.offers import Reservation, read_offer
from phasesplit.transfer.outbound import Outbound, Payload
from phasesplit.transfer.runs import runs
from phasesplit.transfer.states import DEPARTURE_TABLE, Departure, DepartureEvent

FRAME_BYTES = 2 * 1024 * 1024
"""Longest frame that blocks are coalesced into: a frame costs about 15 us besides its bytes, and an error one frame.

Source: measured, `bench/transfer.py` with frames of 64 KiB to 4 MiB through shared memory.
"""

UNORDERED_S = 30.0
"""How long an offer without an order is kept."""

MOST_UNORDERED = 1_000
"""How many offers without an order are kept."""


class Sender:
    """Sends KV blocks of a pool to one receiver.

    Args:
        greeting: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; only read.
        frame_bytes: Longest frame; a block that is longer goes alone.
        secret: The cluster's key, which both ends prove to know; None: there is none.
        looks_for: Name and epoch of the receiver; None: any.
    """

    def __init__(
        self,
        greeting: Greeting,
        pool: NDArray[np.uint8],
        *,
        frame_bytes: int = FRAME_BYTES,
        secret: bytes | None = None,
        looks_for: Identity | None = None,
    ) -> None:
        self._greeting = greeting
        self._pool = pool
        self._frame_blocks = max(1, frame_bytes // greeting.layout.block_bytes)
        self._departures = Departures()
        self._caller = Caller(greeting, secret, looks_for)
        self._outbound = Outbound(pool)
        self._outbound.add(self._caller.hello())
        self._lost = ""
        self.receiver: Greeting | None = None
        self.absorbed: Counter[str] = Counter()

    @property
    def lost_because(self) -> str:
        """Why no more transfers can be opened, or the empty text."""
        return self._lost

    def await_offer(self, key: str, deadline_s: float) -> None:
        """Take note that our machine has an order: blocks are, or will be, offered under a key.

        It has failed at once where the channel has ended, or an offer under the key was withdrawn or turned down.

        Args:
            key: What both ends call the request.
            deadline_s: Instant after which the transfer has failed, unless `open` names another.

        Raises:
            TransferError: The key was ordered before.
        """
        leaving = self._departures.of_key(key)
        if leaving and leaving.ordered:
            raise TransferError(f"request {key} was ordered before")
        if leaving is None:
            why = self._lost or self._departures.given_up_because(key)
            leaving = Leaving(deadline_s, Departure.FAILED if why else Departure.AWAITED, key, why=why)
            self._departures.add(leaving)
        leaving.ordered, leaving.deadline_s = True, deadline_s

    def offer(self, key: str) -> Reservation | None:
        """Return what the receiver holds for a request, or None before its offer is here and after it was forgotten."""
        leaving = self._departures.of_key(key)
        return leaving.reservation if leaving else None

    def open(self, reservation: Reservation, blocks: tuple[int, ...], deadline_s: float) -> None:
        """Begin a transfer.

        Args:
            reservation: What the receiver holds for it, offered or known in another way.
            blocks: Our blocks; the i-th goes to the i-th of the reservation. As many as reserved.
            deadline_s: Instant after which it has failed.

        Raises:
            TransferError: The receiver is not known, is gone, is another one or in another epoch; it reserved too few
                blocks or too many; a block is outside our pool; or the transfer is open, or has ended, already.
        """
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
        leaving = self._departures.of_number(reservation.transfer)
        if leaving is None:
            leaving = Leaving(deadline_s, Departure.OFFERED, reservation=reservation)
            self._departures.add(leaving)
        elif leaving.state is not Departure.OFFERED:
            why = f" ({leaving.why})" if leaving.why else ""
            raise TransferError(f"transfer {reservation.transfer} is {leaving.state.name.lower()} already{why}")
        leaving.blocks, leaving.deadline_s, leaving.ordered = blocks, deadline_s, True
        leaving.unsent = np.ones((self._greeting.layout.layers, len(blocks)), np.bool_)
        self._happen(leaving, DepartureEvent.BEGIN, "")

    def send(self, transfer: Transfer, layer: int, first: int = 0, end: int | None = None) -> None:
        """Queue blocks of a layer that are final; nothing is queued for a transfer that has failed.

        Args:
            transfer: A transfer that was opened.
            layer: The layer.
            first: First block of the request.
            end: One behind the last, by default all.

        Raises:
            TransferError: It was not opened, there are no such blocks, or they were sent before.
        """
        leaving, reservation, unsent = self._opened(transfer)
        end = len(leaving.blocks) if end is None else end
        if not (0 <= layer < len(unsent) and 0 <= first < end <= len(leaving.blocks)):
            raise TransferError(f"layer {layer}, blocks {first} to {end} are not in transfer {reservation.transfer}")
        if not unsent[layer, first:end].all():
            raise TransferError(f"layer {layer}, blocks {first} to {end} were sent before")
        unsent[layer, first:end] = False
        if leaving.state is not Departure.OPEN:
            return
        ours, theirs, places = leaving.blocks, reservation.blocks, range(first, end)
        for run in runs(reservation.transfer, layer, ours, theirs, places, self._frame_blocks):
            self._outbound.add(run)
            leaving.queued += 1

    def send_all(self, transfer: Transfer) -> None:
        """Queue every layer: a serialized transfer."""
        for layer in range(self._greeting.layout.layers):
            self.send(transfer, layer)

    def note(self, transfer: Transfer, text: bytes) -> None:
        """Queue the note of a transfer; nothing is queued for one that has failed.

        Args:
            transfer: A transfer that was opened.
            text: Up to `LONGEST_TEXT_BYTES`, opaque here.

        Raises:
            TransferError: It was not opened, wants no note, has one already, or the text is too long.
        """
        leaving, reservation, _ = self._opened(transfer)
        if leaving.noted or not reservation.wants_note or len(text) > LONGEST_TEXT_BYTES:
            raise TransferError(f"a note of {len(text)} bytes is not wanted in transfer {reservation.transfer}")
        leaving.noted = True
        if leaving.state is Departure.OPEN:
            self._say(Kind.NOTE, reservation.transfer, text, checksum=crc32(text))
            leaving.queued += 1

    def state(self, transfer: Transfer) -> Departure:
        """Return the state of a transfer."""
        return self._departures.find(transfer).state

    def why(self, transfer: Transfer) -> str:
        """Return why a transfer failed, or the empty text."""
        return self._departures.find(transfer).why

    def abort(self, transfer: Transfer, why: str = "aborted") -> None:
        """Give up a transfer, or what is offered under a key, in any state; a second call changes nothing."""
        leaving = self._departures.look_up(transfer)
        if leaving is not None:
            self._end(leaving, DepartureEvent.ABORT, why)
        elif isinstance(transfer, str):
            self._departures.give_up(transfer, why)  # its offer may still come

    def may_free(self, transfer: Transfer, *, channel_idle: bool) -> bool:
        """Return whether no byte of our blocks will be read any more.

        Args:
            transfer: The transfer.
            channel_idle: Whether the channel has put everything that it took on its way (`Channel.flush`).
        """
        leaving = self._departures.find(transfer)
        if leaving.reservation is None or not leaving.blocks:
            return True
        return leaving.is_over and (channel_idle or self._outbound.in_channel != leaving.reservation.transfer)

    @property
    def is_sending_in_vain(self) -> bool:
        """Whether what a channel took last is of a transfer that has failed or was forgotten."""
        leaving = self._departures.of_number(self._outbound.in_channel)
        return self._outbound.in_channel > 0 and (leaving is None or leaving.state is Departure.FAILED)

    def forget(self, transfer: Transfer) -> None:
        """Drop what is known of a transfer that has ended; of one that has not, abort it first."""
        self.abort(transfer)
        leaving = self._departures.look_up(transfer)
        if leaving is not None:
            self._departures.drop(leaving)

    def heartbeat(self) -> None:
        """Queue a heartbeat for every transfer that our machine has an order for and that goes on."""
        going_on = (Departure.OFFERED, Departure.OPEN, Departure.SENT)
        for number, leaving in self._departures.numbered():
            if leaving.ordered and leaving.state in going_on:
                self._say(Kind.HEARTBEAT, number)

    def tick(self, now_s: float) -> None:
        """Let transfers whose deadline has passed fail; an offer without an order is turned down then."""
        for leaving in self._departures.every():
            if leaving.deadline_s <= now_s and not leaving.is_over:
                self._end(leaving, DepartureEvent.EXPIRE, "not complete before the sender's deadline")

    def lost(self, why: str) -> None:
        """Take note that the channel ended in any way: what is not complete has failed."""
        self._lost = self._lost or why
        self._outbound.clear()
        for leaving in self._departures.every():
            self._happen(leaving, DepartureEvent.PEER_LOST, why)

    def head(self) -> tuple[Message, Payload | None] | None:
        """Return what a channel should take next, the same until `taken`, or None."""
        return self._outbound.head()

    def taken(self) -> None:
        """Take note that the channel took what `head` returned."""
        number = self._outbound.taken()
        if number is not None:
            leaving = self._departures.of_number(number)
            assert leaving is not None  # noqa: S101 - what ends leaves the queue
            leaving.queued -= 1
            if leaving.is_sent:
                self._happen(leaving, DepartureEvent.LAST_SENT, "")

    def on_message(self, message: Message, now_s: float) -> None:
        """Take a message of the receiver."""
        text = message.text.decode(errors="replace")
        if message.kind in (Kind.CHALLENGE, Kind.WELCOME):
            self._meet(message)
        elif message.kind is Kind.REFUSE:
            self.lost(f"refused: {text}")
        elif self.receiver is None or message.epoch != self.receiver.epoch:
            self.absorbed["stale epoch"] += 1
        elif message.kind is Kind.OFFER:
            self._on_offer(message, self.receiver, now_s)
        elif message.kind is Kind.READY:
            leaving = self._departures.of_number(message.transfer)
            self._happen(leaving, DepartureEvent.PEER_READY, "completed before it was sent")
        elif message.kind is Kind.ABORT:
            leaving = self._departures.of_number(message.transfer)
            self._happen(leaving, DepartureEvent.PEER_ABORT, text)
            if leaving is None:
                self._departures.withdraw(message.transfer)
            elif not leaving.ordered:
                self._departures.drop(leaving)
            self._say(Kind.STOPPED, message.transfer)
        else:
            self.absorbed["message of a sender"] += 1

    def _meet(self, message: Message) -> None:
        """Prove who we are, or take note of who the receiver is."""
        try:
            if message.kind is Kind.CHALLENGE:
                self._outbound.add(self._caller.proof(message.text))
            else:
                self.receiver = self._caller.met(message.text)
                self._outbound.epoch = self.receiver.epoch
        except TransferError as error:
            self.lost(str(error))

    def _on_offer(self, message: Message, receiver: Greeting, now_s: float) -> None:
        """Join an offer to its order, keep it until there is one, or turn it down."""
        try:
            key, reservation = read_offer(message.text, receiver.blocks)
            named = (reservation.machine, reservation.epoch, reservation.transfer)
            if named != (receiver.machine, receiver.epoch, message.transfer):
                raise TransferError(f"an offer of {named} from {receiver.machine}")
        except TransferError as error:
            self.absorbed["bad offer"] += 1
            self._say(Kind.ABORT, message.transfer, reason_text(str(error)))
            return
        leaving = self._departures.of_key(key)
        if leaving is not None and leaving.reservation == reservation:
            self.absorbed["duplicate"] += 1
        elif self._departures.was_withdrawn(message.transfer):
            self.absorbed["withdrawn offer"] += 1
        elif why := self._objection(key, leaving):
            self._say(Kind.ABORT, message.transfer, reason_text(why))
        else:
            if leaving is None:
                leaving = Leaving(now_s + UNORDERED_S, Departure.AWAITED, key, ordered=False)
            leaving.reservation = reservation
            self._departures.add(leaving)
            self._happen(leaving, DepartureEvent.OFFER, "")

    def _objection(self, key: str, leaving: Leaving | None) -> str:
        """Return why a new offer is turned down, or the empty text."""
        if leaving is not None:
            return "" if leaving.state is Departure.AWAITED else leaving.why or "the key has a reservation already"
        if sum(not each.ordered for each in self._departures.every()) >= MOST_UNORDERED:
            return f"{MOST_UNORDERED} offers wait for their orders already"
        return self._departures.given_up_because(key)

    def _opened(self, transfer: Transfer) -> tuple[Leaving, Reservation, NDArray[np.bool_]]:
        leaving = self._departures.find(transfer)
        if leaving.reservation is None or leaving.unsent is None:
            raise TransferError(f"transfer {leaving.key} is {leaving.state.name.lower()}: it was not opened")
        return leaving, leaving.reservation, leaving.unsent

    def _say(self, kind: Kind, transfer: int, text: bytes = b"", checksum: int = 0) -> None:
        if self.receiver is not None and not self._lost:
            self._outbound.add(Message(kind, self.receiver.epoch, transfer, text=text, checksum=checksum))

    def _end(self, leaving: Leaving, event: DepartureEvent, why: str) -> None:
        """Give up a transfer, tell the receiver if it knows of it, and forget it where nobody here does."""
        if self._happen(leaving, event, why) and leaving.reservation is not None:
            self._say(Kind.ABORT, leaving.reservation.transfer, reason_text(why))
        if not leaving.ordered:
            self._departures.drop(leaving)

    def _happen(self, leaving: Leaving | None, event: DepartureEvent, why: str) -> bool:
        """Take one step of the table; return whether it changed the state."""
        after = DEPARTURE_TABLE[leaving.state][event] if leaving else None
        if leaving is None or after is None or after is leaving.state:
            self.absorbed[event.name.lower()] += 1
            return False
        leaving.state = after
        if after is Departure.FAILED:
            leaving.why = why
            if leaving.reservation is not None:
                self._outbound.drop(leaving.reservation.transfer)
        return True
