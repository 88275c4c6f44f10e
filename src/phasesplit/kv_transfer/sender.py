"""The sending end of a channel: transfers to one receiver, without a socket and without a clock.

One transfer at its sender, with its states of `transfer_states`:

1. `await_offer`: our machine has an order for the key of a request (AWAITED). The receiver's OFFER comes before or
   after it; an offer without an order waits `UNORDERED_S`, then the sender declines it.
2. `on_message` joins OFFER and order (OFFERED).
3. `open` names our blocks, the i-th for the i-th block of the offer (OPEN).
4. `send` puts blocks of a layer into the `SendQueue` once they are final, as runs of neighbours; `note` puts the note
   behind them.
5. `drive_sender` gives the channel what `head` makes of the first entry: a run becomes a frame when its turn comes.
   When the channel has taken the last part, the transfer is SENT.
6. `on_message` READY completes it (COMPLETED). An abort by either end, a deadline (`tick`) or the end of the channel
   (`lost`) before that fails it (FAILED).
7. `may_free`: no byte of our blocks will be read any more. `forget` drops the record.

A channel reads blocks when it takes their frame, so the caller keeps them unchanged from `send` until `may_free`.

Offer and order come from different machines, and either may be withdrawn before the other is here. What was declined
or withdrawn is remembered for a while, so that its counterpart is declined when it comes.
"""

from collections import Counter, deque
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Channel, Condition
from phasesplit.kv_transfer.handshake import HandshakeClient, Identity
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import (
    LONGEST_TEXT_BYTES,
    BlockRun,
    Message,
    MessageKind,
    ReservedBlocks,
    checksum,
    read_offer,
    reason_text,
    runs,
)
from phasesplit.kv_transfer.transfer_states import OUTBOUND_TABLE, OutboundEvent, OutboundState

Payload = NDArray[np.uint8]

_REMEMBERED = 1_000


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
        self._queue: deque[BlockRun | Message] = deque()
        self._prepared: tuple[Message, Payload | None] | None = None
        self.epoch = 0
        self.in_channel = 0

    def add(self, entry: BlockRun | Message) -> None:
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

    def _frame(self, run: BlockRun) -> tuple[Message, Payload]:
        payload = self._pool[run.layer, run.source : run.source + run.blocks].reshape(-1)
        return Message(
            MessageKind.FRAME,
            self.epoch,
            run.transfer,
            run.layer,
            run.target,
            run.blocks,
            checksum(payload),
            len(payload),
        ), payload


def _is_part(entry: BlockRun | Message) -> bool:
    """Return whether a transfer is whole only with this entry."""
    return isinstance(entry, BlockRun) or entry.kind is MessageKind.NOTE


TransferName = ReservedBlocks | str
"""A transfer, named by its reservation or by the key that it was offered under."""


@dataclass(slots=True)
class OutboundTransfer:
    """One transfer at its sender.

    Attributes:
        deadline_s: Instant after which it has failed.
        state: Its state.
        key: What both ends call the request; empty for one that was never offered.
        ordered: Whether our machine has an order for it.
        reservation: What the receiver holds, once it is known.
        blocks: Our blocks, once they are named.
        unsent: Blocks that were not given to `send`, bool (layers, blocks of the transfer), once it is open.
        noted: Whether its note was given.
        why: Why it failed.
        queued: Frames and notes that no channel has taken yet.
    """

    deadline_s: float
    state: OutboundState
    key: str = ""
    ordered: bool = True
    reservation: ReservedBlocks | None = None
    blocks: tuple[int, ...] = ()
    unsent: NDArray[np.bool_] | None = None
    noted: bool = False
    why: str = ""
    queued: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether a channel has taken every part."""
        if self.queued or self.unsent is None or self.reservation is None or self.unsent.any():
            return False
        return self.noted or not self.reservation.wants_note

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.state in (OutboundState.COMPLETED, OutboundState.FAILED)


class OutboundTransfers:
    """All transfers of a sender, and the latest that ended before all of it was known.

    Attributes:
        by_key: Those of a request that is known here.
        by_number: Those whose reservation is known, by its number in the receiver's present epoch.
        declined: Why nothing is sent for a key any more, for the latest keys.
        withdrawn: The latest reservations that ended before they were offered.
    """

    def __init__(self) -> None:
        self.by_key: dict[str, OutboundTransfer] = {}
        self.by_number: dict[int, OutboundTransfer] = {}
        self.declined: dict[str, str] = {}
        self.withdrawn: deque[int] = deque(maxlen=_REMEMBERED)

    def every(self) -> list[OutboundTransfer]:
        """Return each transfer once, whether it has a key, a number or both."""
        return [*self.by_key.values(), *(outbound for outbound in self.by_number.values() if not outbound.key)]

    def look_up(self, name: TransferName) -> OutboundTransfer | None:
        """Return a transfer, or None where it is not known."""
        if isinstance(name, str):
            return self.by_key.get(name)
        outbound = self.by_number.get(name.transfer)
        return outbound if outbound and outbound.reservation and outbound.reservation.epoch == name.epoch else None

    def find(self, name: TransferName) -> OutboundTransfer:
        """Return a transfer.

        Raises:
            TransferError: It is not known.
        """
        outbound = self.look_up(name)
        if outbound is None:
            shown = name if isinstance(name, str) else f"{name.transfer} in epoch {name.epoch}"
            raise TransferError(f"transfer {shown} is not open here")
        return outbound

    def add(self, outbound: OutboundTransfer) -> None:
        """Make a transfer known by what it has of key and reservation; once more when it has more."""
        if outbound.key:
            self.by_key[outbound.key] = outbound
        if outbound.reservation is not None:
            self.by_number[outbound.reservation.transfer] = outbound

    def drop(self, outbound: OutboundTransfer) -> None:
        """Forget a transfer; what still comes under its key is declined."""
        if outbound.reservation is not None:
            self.by_number.pop(outbound.reservation.transfer, None)
        if outbound.key:
            self.by_key.pop(outbound.key, None)
            self.decline(outbound.key, outbound.why or "it is over")

    def decline(self, key: str, why: str) -> None:
        """Remember that nothing is sent for a request any more."""
        self.declined.setdefault(key, why)
        while len(self.declined) > _REMEMBERED:
            del self.declined[next(iter(self.declined))]


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
        info: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; only read.
        frame_bytes: Longest frame; a block that is longer goes alone.
        secret: The cluster's key, which both ends prove to know; None: there is none.
        expected: Name and epoch of the receiver; None: any.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: NDArray[np.uint8],
        *,
        frame_bytes: int = FRAME_BYTES,
        secret: bytes | None = None,
        expected: Identity | None = None,
    ) -> None:
        self._info = info
        self._pool = pool
        self._frame_blocks = max(1, frame_bytes // info.layout.block_bytes)
        self._transfers = OutboundTransfers()
        self._client = HandshakeClient(info, secret, expected)
        self._queue = SendQueue(pool)
        self._queue.add(self._client.hello())
        self._lost = ""
        self.receiver: PeerInfo | None = None
        self.absorbed: Counter[str] = Counter()

    @property
    def lost_because(self) -> str:
        """Why no more transfers can be opened, or the empty text."""
        return self._lost

    def await_offer(self, key: str, deadline_s: float) -> None:
        """Take note that our machine has an order: blocks are, or will be, offered under a key.

        It has failed at once where the channel has ended, or an offer under the key was withdrawn or declined.

        Args:
            key: What both ends call the request.
            deadline_s: Instant after which the transfer has failed, unless `open` names another.

        Raises:
            TransferError: The key was ordered before.
        """
        outbound = self._transfers.by_key.get(key)
        if outbound and outbound.ordered:
            raise TransferError(f"request {key} was ordered before")
        if outbound is None:
            why = self._lost or self._transfers.declined.get(key, "")
            outbound = OutboundTransfer(
                deadline_s, OutboundState.FAILED if why else OutboundState.AWAITED, key, why=why
            )
            self._transfers.add(outbound)
        outbound.ordered, outbound.deadline_s = True, deadline_s

    def offer(self, key: str) -> ReservedBlocks | None:
        """Return what the receiver holds for a request, or None before its offer is here and after it was forgotten."""
        outbound = self._transfers.by_key.get(key)
        return outbound.reservation if outbound else None

    def open(self, reservation: ReservedBlocks, blocks: tuple[int, ...], deadline_s: float) -> None:
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
            raise TransferError(self._lost or "the receiver has not answered the handshake")
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
        outbound = self._transfers.by_number.get(reservation.transfer)
        if outbound is None:
            outbound = OutboundTransfer(deadline_s, OutboundState.OFFERED, reservation=reservation)
            self._transfers.add(outbound)
        elif outbound.state is not OutboundState.OFFERED:
            why = f" ({outbound.why})" if outbound.why else ""
            raise TransferError(f"transfer {reservation.transfer} is {outbound.state.name.lower()} already{why}")
        outbound.blocks, outbound.deadline_s, outbound.ordered = blocks, deadline_s, True
        outbound.unsent = np.ones((self._info.layout.layers, len(blocks)), np.bool_)
        self._step(outbound, OutboundEvent.BEGIN, "")

    def send(self, transfer: TransferName, layer: int, first: int = 0, end: int | None = None) -> None:
        """Queue blocks of a layer that are final; nothing is queued for a transfer that has failed.

        Args:
            transfer: A transfer that was opened.
            layer: The layer.
            first: First block of the request.
            end: One behind the last, by default all.

        Raises:
            TransferError: It was not opened, there are no such blocks, or they were sent before.
        """
        outbound, reservation, unsent = self._opened(transfer)
        end = len(outbound.blocks) if end is None else end
        if not (0 <= layer < len(unsent) and 0 <= first < end <= len(outbound.blocks)):
            raise TransferError(f"layer {layer}, blocks {first} to {end} are not in transfer {reservation.transfer}")
        if not unsent[layer, first:end].all():
            raise TransferError(f"layer {layer}, blocks {first} to {end} were sent before")
        unsent[layer, first:end] = False
        if outbound.state is not OutboundState.OPEN:
            return
        ours, theirs, places = outbound.blocks, reservation.blocks, range(first, end)
        for run in runs(reservation.transfer, layer, ours, theirs, places, self._frame_blocks):
            self._queue.add(run)
            outbound.queued += 1

    def send_all(self, transfer: TransferName) -> None:
        """Queue every layer: a serialized transfer."""
        for layer in range(self._info.layout.layers):
            self.send(transfer, layer)

    def note(self, transfer: TransferName, text: bytes) -> None:
        """Queue the note of a transfer; nothing is queued for one that has failed.

        Args:
            transfer: A transfer that was opened.
            text: Up to `LONGEST_TEXT_BYTES`, opaque here.

        Raises:
            TransferError: It was not opened, wants no note, has one already, or the text is too long.
        """
        outbound, reservation, _ = self._opened(transfer)
        if outbound.noted or not reservation.wants_note or len(text) > LONGEST_TEXT_BYTES:
            raise TransferError(f"a note of {len(text)} bytes is not wanted in transfer {reservation.transfer}")
        outbound.noted = True
        if outbound.state is OutboundState.OPEN:
            self._queue_message(MessageKind.NOTE, reservation.transfer, text, checksum=crc32(text))
            outbound.queued += 1

    def state(self, transfer: TransferName) -> OutboundState:
        """Return the state of a transfer."""
        return self._transfers.find(transfer).state

    def why(self, transfer: TransferName) -> str:
        """Return why a transfer failed, or the empty text."""
        return self._transfers.find(transfer).why

    def abort(self, transfer: TransferName, why: str = "aborted") -> None:
        """Abort a transfer, or what is offered under a key, in any state; a second call changes nothing."""
        outbound = self._transfers.look_up(transfer)
        if outbound is not None:
            self._end(outbound, OutboundEvent.ABORT, why)
        elif isinstance(transfer, str):
            self._transfers.decline(transfer, why)  # its offer may still come

    def may_free(self, transfer: TransferName, *, channel_idle: bool) -> bool:
        """Return whether no byte of our blocks will be read any more.

        Args:
            transfer: The transfer.
            channel_idle: Whether the channel has put everything that it took on its way (`Channel.flush`).
        """
        outbound = self._transfers.find(transfer)
        if outbound.reservation is None or not outbound.blocks:
            return True
        return outbound.is_over and (channel_idle or self._queue.in_channel != outbound.reservation.transfer)

    @property
    def is_sending_unwanted(self) -> bool:
        """Whether what a channel took last is of a transfer that has failed or was forgotten."""
        outbound = self._transfers.by_number.get(self._queue.in_channel)
        return self._queue.in_channel > 0 and (outbound is None or outbound.state is OutboundState.FAILED)

    def forget(self, transfer: TransferName) -> None:
        """Drop what is known of a transfer that has ended; of one that has not, abort it first."""
        self.abort(transfer)
        outbound = self._transfers.look_up(transfer)
        if outbound is not None:
            self._transfers.drop(outbound)

    def heartbeat(self) -> None:
        """Queue a heartbeat for every transfer that our machine has an order for and that goes on."""
        going_on = (OutboundState.OFFERED, OutboundState.OPEN, OutboundState.SENT)
        for number, outbound in self._transfers.by_number.items():
            if outbound.ordered and outbound.state in going_on:
                self._queue_message(MessageKind.HEARTBEAT, number)

    def tick(self, now_s: float) -> None:
        """Fail transfers whose deadline has passed; an offer without an order is declined then."""
        for outbound in self._transfers.every():
            if outbound.deadline_s <= now_s and not outbound.is_over:
                self._end(outbound, OutboundEvent.EXPIRE, "not complete before the sender's deadline")

    def lost(self, why: str) -> None:
        """Take note that the channel ended in any way: what is not complete has failed."""
        self._lost = self._lost or why
        self._queue.clear()
        for outbound in self._transfers.every():
            self._step(outbound, OutboundEvent.PEER_LOST, why)

    def head(self) -> tuple[Message, Payload | None] | None:
        """Return what a channel should take next, the same until `taken`, or None."""
        return self._queue.head()

    def taken(self) -> None:
        """Take note that the channel took what `head` returned."""
        number = self._queue.taken()
        if number is not None:
            outbound = self._transfers.by_number.get(number)
            assert outbound is not None  # noqa: S101 - what ends leaves the queue
            outbound.queued -= 1
            if outbound.is_sent:
                self._step(outbound, OutboundEvent.LAST_SENT, "")

    def on_message(self, message: Message, now_s: float) -> None:
        """Take a message of the receiver."""
        text = message.text.decode(errors="replace")
        if message.kind in (MessageKind.CHALLENGE, MessageKind.WELCOME):
            self._handshake(message)
        elif message.kind is MessageKind.REFUSE:
            self.lost(f"refused: {text}")
        elif self.receiver is None or message.epoch != self.receiver.epoch:
            self.absorbed["stale epoch"] += 1
        elif message.kind is MessageKind.OFFER:
            self._on_offer(message, self.receiver, now_s)
        elif message.kind is MessageKind.READY:
            outbound = self._transfers.by_number.get(message.transfer)
            self._step(outbound, OutboundEvent.PEER_READY, "completed before it was sent")
        elif message.kind is MessageKind.ABORT:
            outbound = self._transfers.by_number.get(message.transfer)
            self._step(outbound, OutboundEvent.PEER_ABORT, text)
            if outbound is None:
                self._transfers.withdrawn.append(message.transfer)
            elif not outbound.ordered:
                self._transfers.drop(outbound)
            self._queue_message(MessageKind.STOPPED, message.transfer)
        else:
            self.absorbed["message of a sender"] += 1

    def _handshake(self, message: Message) -> None:
        """Prove who we are, or take note of who the receiver is."""
        try:
            if message.kind is MessageKind.CHALLENGE:
                self._queue.add(self._client.proof(message.text))
            else:
                self.receiver = self._client.on_welcome(message.text)
                self._queue.epoch = self.receiver.epoch
        except TransferError as error:
            self.lost(str(error))

    def _on_offer(self, message: Message, receiver: PeerInfo, now_s: float) -> None:
        """Join an offer to its order, keep it until there is one, or decline it."""
        try:
            key, reservation = read_offer(message.text, receiver.blocks)
            named = (reservation.machine, reservation.epoch, reservation.transfer)
            if named != (receiver.machine, receiver.epoch, message.transfer):
                raise TransferError(f"an offer of {named} from {receiver.machine}")
        except TransferError as error:
            self.absorbed["bad offer"] += 1
            self._queue_message(MessageKind.ABORT, message.transfer, reason_text(str(error)))
            return
        outbound = self._transfers.by_key.get(key)
        if outbound is not None and outbound.reservation == reservation:
            self.absorbed["duplicate"] += 1
        elif message.transfer in self._transfers.withdrawn:
            self.absorbed["withdrawn offer"] += 1
        elif why := self._objection(key, outbound):
            self._queue_message(MessageKind.ABORT, message.transfer, reason_text(why))
        else:
            if outbound is None:
                outbound = OutboundTransfer(now_s + UNORDERED_S, OutboundState.AWAITED, key, ordered=False)
            outbound.reservation = reservation
            self._transfers.add(outbound)
            self._step(outbound, OutboundEvent.OFFER, "")

    def _objection(self, key: str, outbound: OutboundTransfer | None) -> str:
        """Return why a new offer is declined, or the empty text."""
        if outbound is not None:
            is_awaited = outbound.state is OutboundState.AWAITED
            return "" if is_awaited else outbound.why or "the key has a reservation already"
        if sum(not each.ordered for each in self._transfers.every()) >= MOST_UNORDERED:
            return f"{MOST_UNORDERED} offers wait for their orders already"
        return self._transfers.declined.get(key, "")

    def _opened(self, transfer: TransferName) -> tuple[OutboundTransfer, ReservedBlocks, NDArray[np.bool_]]:
        outbound = self._transfers.find(transfer)
        if outbound.reservation is None or outbound.unsent is None:
            raise TransferError(f"transfer {outbound.key} is {outbound.state.name.lower()}: it was not opened")
        return outbound, outbound.reservation, outbound.unsent

    def _queue_message(self, kind: MessageKind, transfer: int, text: bytes = b"", checksum: int = 0) -> None:
        if self.receiver is not None and not self._lost:
            self._queue.add(Message(kind, self.receiver.epoch, transfer, text=text, checksum=checksum))

    def _end(self, outbound: OutboundTransfer, event: OutboundEvent, why: str) -> None:
        """End a transfer, send an ABORT if the receiver knows of it, and drop it where there is no order for it."""
        if self._step(outbound, event, why) and outbound.reservation is not None:
            self._queue_message(MessageKind.ABORT, outbound.reservation.transfer, reason_text(why))
        if not outbound.ordered:
            self._transfers.drop(outbound)

    def _step(self, outbound: OutboundTransfer | None, event: OutboundEvent, why: str) -> bool:
        """Take one step of the table; return whether it changed the state."""
        after = OUTBOUND_TABLE[outbound.state][event] if outbound else None
        if outbound is None or after is None or after is outbound.state:
            self.absorbed[event.name.lower()] += 1
            return False
        outbound.state = after
        if after is OutboundState.FAILED:
            outbound.why = why
            if outbound.reservation is not None:
                self._queue.drop(outbound.reservation.transfer)
        return True


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


def _nowhere(frame: Message) -> None:
    """Return no place: a receiver sends no frames."""
    del frame
