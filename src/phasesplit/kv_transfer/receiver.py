"""The receiving end of all channels: reserved blocks, what has arrived in them, and when they are free again.

It knows no socket and no clock: messages and instants go in, messages come out of `outbox`. A channel has a number,
given by whoever drives it.

One transfer at its receiver, with its states of `transfer_states`:

1. `reserve` holds blocks of the pool under a lease (RESERVED), and puts an OFFER with their numbers into `outbox` as
   soon as the sender has a channel that has passed the handshake (`on_message`).
2. `place` says where the bytes of a frame go, before they come: into the reservation, or nowhere.
3. `on_message` FRAME and NOTE: checksum and place are right (RECEIVING). Heartbeats extend the lease.
4. With the last part it answers READY, the one completion of a transfer (READY).
5. `take` gives the blocks to their reader (READING), `release` gives them back to the pool (RELEASED).
6. What fails before that, by an abort, a bad part or the end of the lease (`tick`), is DRAINING: its blocks stay held
   until the sender has sent STOPPED, or its channel has ended (`lost`). Only then no byte can be written any more.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.channel import Channel, Condition
from phasesplit.kv_transfer.handshake import HandshakeServer
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import (
    Message,
    MessageKind,
    NoRoomError,
    ReleaseReason,
    ReservedBlocks,
    checksum,
    offer_text,
    reason_text,
)
from phasesplit.kv_transfer.transfer_states import INBOUND_TABLE, InboundEvent, InboundState

POISON = 0x47
"""Byte that fills freed blocks where asked for; as floats of any size it reads as a large number.

It has to be finite: kernels compute whole blocks and multiply what is behind the last token by zero.
"""

_REMEMBERED = 1_000


@dataclass(slots=True)
class HoldingLease:
    """The deadline of a holding.

    Attributes:
        number: Number of the lease, never used twice.
        holding: The blocks, in the pool, under the key of the request.
        deadline_s: Instant at which it expires unless extended.
        lease_s: By how much a heartbeat extends it, > 0.
    """

    number: int
    holding: Holding
    deadline_s: float
    lease_s: float

    @property
    def key(self) -> str:
        """The request."""
        return self.holding.key

    @property
    def blocks(self) -> tuple[int, ...]:
        """Blocks in the pool; the i-th holds the i-th block of the request's tokens."""
        return self.holding.blocks


class LeaseBook:
    """The leases of a pool: each has a holding there that waits for KV, and a deadline.

    Args:
        pool: Where the blocks are taken from; others may draw from it too.
        block_bytes: Bytes of a block over all layers, > 0.
    """

    def __init__(self, pool: BlockPool, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = pool
        self._held: dict[int, HoldingLease] = {}
        self._last_number = 0
        self.released: Counter[ReleaseReason] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes that are held."""
        return self._block_bytes * sum(len(lease.blocks) for lease in self._held.values())

    @property
    def held(self) -> Iterable[HoldingLease]:
        """The leases, oldest first."""
        return self._held.values()

    def reserve(self, key: str, blocks: int, now_s: float, lease_s: float) -> HoldingLease:
        """Hold blocks for a request, those with the lowest numbers: neighbours travel in one frame.

        Raises:
            NoRoomError: Fewer blocks are free, or none was asked for.
        """
        try:
            holding = self._pool.hold(key, Use.RECEIVE, blocks)
        except NoRoomError as error:
            raise NoRoomError(f"request {key}: {error}") from None
        self._last_number += 1
        lease = HoldingLease(self._last_number, holding, now_s + lease_s, lease_s)
        self._held[lease.number] = lease
        return lease

    def extend(self, number: int, now_s: float) -> bool:
        """Move a deadline to one lease time from now, never back; return whether the lease is held."""
        lease = self._held.get(number)
        if lease is not None:
            lease.deadline_s = max(lease.deadline_s, now_s + lease.lease_s)
        return lease is not None

    def expired(self, now_s: float) -> list[HoldingLease]:
        """Return the leases whose deadline has passed; they stay held."""
        return [lease for lease in self._held.values() if lease.deadline_s <= now_s]

    def release(self, number: int, reason: ReleaseReason) -> list[int]:
        """Give the blocks back; return those that nobody uses now. A second release changes nothing."""
        lease = self._held.pop(number, None)
        if lease is None:
            return []
        self.released[reason] += 1
        return self._pool.give(lease.holding)


@dataclass(slots=True)
class InboundTransfer:
    """A transfer that blocks are held for.

    Attributes:
        lease: The blocks.
        sender: Machine that sends.
        offer: The message that offers it; None where the sender gets the reservation in another way.
        wants_note: Whether it is whole only with a note.
        arrived: Which blocks have come, bool (layers, blocks of the transfer).
        channels: Numbers of the channels that a part of it may still come through.
        note: Its note, once it has come.
        state: Its state.
        reason: Why its blocks are given back.
        why: The same for people.
    """

    lease: HoldingLease
    sender: str
    offer: Message | None
    wants_note: bool
    arrived: NDArray[np.bool_]
    channels: set[int]
    note: bytes | None = None
    state: InboundState = InboundState.RESERVED
    reason: ReleaseReason = ReleaseReason.COMPLETED
    why: str = ""
    _places: Mapping[int, int] = field(init=False)  # block in the pool -> its place in the transfer

    def __post_init__(self) -> None:
        self._places = {block: place for place, block in enumerate(self.lease.blocks)}

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return bool(self.arrived.all()) and (self.note is not None or not self.wants_note)

    def error_in(self, frame: Message, layout: KvLayout) -> str:
        """Return what is wrong with the address of a frame, or the empty text."""
        if frame.layer >= layout.layers or not frame.blocks:
            return "is outside the layers"
        # Block numbers of a reservation ascend, so a frame is inside it if and only if its blocks are neighbours there.
        first = self._places.get(frame.first_block)
        last = self._places.get(frame.first_block + frame.blocks - 1)
        if first is None or last is None or last - first != frame.blocks - 1:
            return "is outside the reservation"
        if frame.length_bytes != frame.blocks * layout.block_bytes:
            return "has a wrong length"
        return ""

    def seen(self, frame: Message) -> NDArray[np.bool_]:
        """Return a view of which blocks of a frame without an error have arrived."""
        first = self._places[frame.first_block]
        return self.arrived[frame.layer, first : first + frame.blocks]


class Receiver:
    """Takes KV blocks into a pool.

    Args:
        info: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; written to.
        free: Where the blocks are taken from, by default a pool of its own.
        lease_s: Time that a reservation lives without a heartbeat, > 0.
        poison: Fill blocks with `POISON` when they are freed, so that a late reader is found out.
        secret: The cluster's key, which both ends prove to know; None: there is none.

    Raises:
        TransferError: The pool is not that of the layout.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: NDArray[np.uint8],
        free: BlockPool | None = None,
        *,
        lease_s: float = 30.0,
        poison: bool = False,
        secret: bytes | None = None,
    ) -> None:
        layout = info.layout
        if pool.shape[::2] != (layout.layers, layout.block_bytes) or not pool.flags.c_contiguous:
            raise TransferError(f"pool of shape {pool.shape}, allowed is ({layout.layers}, n, {layout.block_bytes})")
        self._info = replace(info, blocks=pool.shape[1])
        self._layout = layout
        self._pool = pool
        self._lease_s = lease_s
        self._poison = poison
        self._inbound: dict[int, InboundTransfer] = {}
        self._secret = secret
        self._handshakes: dict[int, HandshakeServer | None] = {}  # None: it was refused, and gets no second attempt
        self._peers: dict[int, str] = {}
        self._epochs: dict[str, int] = {}
        self._why: dict[int, str] = {}  # of the latest that ended
        self.leases = LeaseBook(free or BlockPool(pool.shape[1]), layout.layers * layout.block_bytes)
        self.outbox: deque[tuple[int, Message]] = deque()
        self.cuts: set[int] = set()
        self.absorbed: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that are held."""
        return self.leases.used_bytes

    def reserve(
        self,
        owner: str,
        tokens: int,
        sender: str,
        now_s: float,
        *,
        lease_s: float = 0.0,
        offer: bool = False,
        wants_note: bool = False,
    ) -> ReservedBlocks:
        """Hold the blocks of a prompt whose KV a machine will send.

        Args:
            owner: The request; the key of its offer.
            tokens: Tokens of the prompt, >= 1.
            sender: Machine that will send.
            now_s: The instant.
            lease_s: Time without a heartbeat, by default the receiver's.
            offer: Send the reservation to the sender, now or as soon as it has a channel to us.
            wants_note: The transfer is whole only with a note.

        Raises:
            NoRoomError: They do not fit.
            TransferError: The blocks are in too many pieces to be offered.
        """
        lease = self.leases.reserve(owner, self._layout.blocks_for(tokens), now_s, lease_s or self._lease_s)
        arrived = np.zeros((self._layout.layers, len(lease.blocks)), np.bool_)
        channels = {number for number, name in self._peers.items() if name == sender}
        machine, epoch = self._info.machine, self._info.epoch
        reservation = ReservedBlocks(machine, epoch, lease.number, tokens, lease.blocks, wants_note)
        offered = None
        if offer:
            try:
                offered = Message(MessageKind.OFFER, epoch, lease.number, text=offer_text(owner, reservation))
            except TransferError:
                self.leases.release(lease.number, ReleaseReason.REFUSED)
                raise
        inbound = InboundTransfer(lease, sender, offered, wants_note, arrived, channels)
        self._inbound[lease.number] = inbound
        if offered:
            self._send(inbound, offered)
        return reservation

    def state(self, transfer: int) -> InboundState:
        """Return the state of a transfer; one that is not known has been released."""
        inbound = self._inbound.get(transfer)
        return inbound.state if inbound else InboundState.RELEASED

    def why(self, transfer: int) -> str:
        """Return why a transfer failed or was aborted, or the empty text; the latest 1,000 that ended are known."""
        inbound = self._inbound.get(transfer)
        return inbound.why if inbound else self._why.get(transfer, "")

    def layers_arrived(self, transfer: int) -> int:
        """Return how many layers of a transfer are there whole."""
        inbound = self._inbound.get(transfer)
        return int(inbound.arrived.all(axis=1).sum()) if inbound else 0

    def take(self, transfer: int) -> tuple[int, ...]:
        """Return the blocks of a transfer that is whole; they are the caller's until `release`.

        Raises:
            TransferError: It is not whole, has failed, or was released.
        """
        inbound = self._inbound.get(transfer)
        if inbound is None or INBOUND_TABLE[inbound.state][InboundEvent.READ] is None:
            state = self.state(transfer).name.lower()
            why = f" ({inbound.why})" if inbound and inbound.why else ""
            raise TransferError(f"transfer {transfer} is {state}{why}: its KV may not be read")
        inbound.state = InboundState.READING
        return inbound.lease.blocks

    def note(self, transfer: int) -> bytes:
        """Return what was sent along with a transfer; empty where nothing has come."""
        inbound = self._inbound.get(transfer)
        return (inbound.note if inbound else None) or b""

    def release(self, transfer: int, now_s: float) -> None:
        """Give the blocks back; before the transfer is whole this aborts it. A second call changes nothing."""
        whole = self.state(transfer) in (InboundState.READY, InboundState.READING)
        reason = ReleaseReason.COMPLETED if whole else ReleaseReason.ABORTED
        self._step(transfer, InboundEvent.RELEASE, now_s, reason, "released")

    def abort(
        self, transfer: int, now_s: float, why: str = "aborted", reason: ReleaseReason = ReleaseReason.ABORTED
    ) -> None:
        """Abort a transfer in any state; a second call changes nothing."""
        self._step(transfer, InboundEvent.ABORT, now_s, reason, why)

    def is_registered(self, channel: int) -> bool:
        """Return whether a machine has said through a channel who it is, and was welcome."""
        return channel in self._peers

    def tick(self, now_s: float) -> None:
        """Let leases expire. A sender that did not stop when asked, within another lease, has its channel cut."""
        for lease in self.leases.expired(now_s):
            inbound = self._inbound[lease.number]
            if inbound.state is InboundState.DRAINING:
                self.cuts |= inbound.channels
            self._step(lease.number, InboundEvent.EXPIRE, now_s, ReleaseReason.EXPIRED, "no heartbeat")
            self.leases.extend(lease.number, now_s)

    def lost(self, channel: int, now_s: float) -> None:
        """Take note that nothing more can come through a channel, however it ended."""
        self._peers.pop(channel, None)
        self._handshakes.pop(channel, None)
        self.cuts.discard(channel)
        for transfer in [number for number, inbound in self._inbound.items() if channel in inbound.channels]:
            self._inbound[transfer].channels.discard(channel)
            if not self._inbound[transfer].channels:
                self._step(transfer, InboundEvent.PEER_LOST, now_s, ReleaseReason.PEER_LOST, "the sender is gone")

    def place(self, channel: int, frame: Message) -> NDArray[np.uint8] | None:
        """Return where the bytes of a frame belong, uint8 (length,), or None where they must be thrown away."""
        if self._objection(channel, frame)[0]:
            return None
        inbound = self._inbound[frame.transfer]
        if inbound.error_in(frame, self._layout) or inbound.seen(frame).any():
            return None
        return self._bytes(frame)

    def on_message(self, channel: int, message: Message, now_s: float) -> None:
        """Take a message; the bytes of a frame are in their place already."""
        if channel not in self._peers:
            self._handshake(channel, message)
            return
        counted_as, why = self._objection(channel, message)
        if counted_as:
            self.absorbed[counted_as] += 1
            if message.kind in (MessageKind.FRAME, MessageKind.NOTE, MessageKind.HEARTBEAT):
                # Its sender does not know yet.
                stop = Message(MessageKind.ABORT, message.epoch, message.transfer, text=reason_text(why))
                self.outbox.append((channel, stop))
            return
        transfer = message.transfer
        if message.kind is MessageKind.FRAME:
            self._on_frame(self._inbound[transfer], message, now_s)
        elif message.kind is MessageKind.NOTE:
            self._on_note(self._inbound[transfer], message, now_s)
        elif message.kind is MessageKind.ABORT:
            why = message.text.decode(errors="replace")
            self._step(transfer, InboundEvent.PEER_ABORT, now_s, ReleaseReason.ABORTED, why)
        elif message.kind is MessageKind.STOPPED:
            self._step(transfer, InboundEvent.PEER_STOPPED, now_s, ReleaseReason.ABORTED, "")
        elif message.kind is MessageKind.HEARTBEAT:
            if self.state(transfer) is not InboundState.DRAINING:
                self.leases.extend(transfer, now_s)
        else:
            self.absorbed["message of a receiver"] += 1

    def _handshake(self, channel: int, message: Message) -> None:
        """Take a message about who is at the other end of a channel; it has one attempt."""
        server = self._handshakes.setdefault(channel, HandshakeServer(self._info, self._secret))
        if server is None:
            self.absorbed["refused before"] += 1
            self.cuts.add(channel)
            return
        try:
            theirs = server.on_message(message)
            if theirs is None:
                self.outbox.append((channel, server.challenge()))
                return
            self._layout.require_equal(theirs.layout)
            latest = self._epochs.get(theirs.machine, theirs.epoch)
            if theirs.epoch < latest:
                raise TransferError(f"epoch {theirs.epoch} of {theirs.machine} is stale, the latest is {latest}")
        except TransferError as error:
            self.absorbed["refused registration"] += 1
            self._handshakes[channel] = None
            self.outbox.append((channel, Message(MessageKind.REFUSE, text=reason_text(str(error)))))
            return
        if theirs.epoch > latest:  # the machine was started again: nothing may come from its earlier process
            self.cuts |= {number for number, name in self._peers.items() if name == theirs.machine}
        self._epochs[theirs.machine] = theirs.epoch
        self._peers[channel] = theirs.machine
        self.outbox.append((channel, server.welcome()))
        for inbound in self._inbound.values():
            if inbound.sender == theirs.machine and inbound.state is InboundState.RESERVED:
                inbound.channels.add(channel)
                if inbound.offer:
                    self.outbox.append((channel, inbound.offer))

    def _objection(self, channel: int, message: Message) -> tuple[str, str]:
        """Return why a message is of no transfer here: a name to count it under, and a reason; else empty texts."""
        inbound = self._inbound.get(message.transfer)
        if message.epoch != self._info.epoch:
            return "stale epoch", f"epoch {message.epoch} of {self._info.machine} is stale"
        if inbound is None:
            return "late", "released"
        if channel not in inbound.channels:
            return "foreign", "reserved for another machine"
        return "", ""

    def _on_frame(self, inbound: InboundTransfer, frame: Message, now_s: float) -> None:
        if inbound.state not in (InboundState.RESERVED, InboundState.RECEIVING):
            self.absorbed["late"] += 1
            return
        error = inbound.error_in(frame, self._layout)
        if not error:
            seen = inbound.seen(frame)
            if seen.all():
                self.absorbed["duplicate"] += 1
                return
            if seen.any():
                error = "overlaps what has arrived"
            elif checksum(self._bytes(frame)) != frame.checksum:
                error = "has a wrong checksum"
            else:
                seen[:] = True
        why = f"frame of layer {frame.layer}, block {frame.first_block} {error}" if error else ""
        self._take_in(inbound, why, now_s)

    def _on_note(self, inbound: InboundTransfer, message: Message, now_s: float) -> None:
        if inbound.state not in (InboundState.RESERVED, InboundState.RECEIVING):
            self.absorbed["late"] += 1
        elif inbound.note is not None or not inbound.wants_note:
            self.absorbed["duplicate" if inbound.wants_note else "unwanted note"] += 1
        elif crc32(message.text) != message.checksum:
            self._take_in(inbound, "note has a wrong checksum", now_s)
        else:
            inbound.note = message.text
            self._take_in(inbound, "", now_s)

    def _take_in(self, inbound: InboundTransfer, error: str, now_s: float) -> None:
        """Take note that a part came: whole, or with an error."""
        event = InboundEvent.LAST_PART if inbound.is_whole else InboundEvent.PART
        self._step(inbound.lease.number, InboundEvent.BAD_PART if error else event, now_s, ReleaseReason.REFUSED, error)

    def _bytes(self, frame: Message) -> NDArray[np.uint8]:
        return self._pool[frame.layer, frame.first_block : frame.first_block + frame.blocks].reshape(-1)

    def _step(self, transfer: int, event: InboundEvent, now_s: float, reason: ReleaseReason, why: str) -> None:
        """Take one step of the table, and do what entering the next state asks for."""
        inbound = self._inbound.get(transfer)
        if inbound is None:
            self.absorbed[event.name.lower()] += 1
            return
        before, after = inbound.state, INBOUND_TABLE[inbound.state][event]
        if after is None:
            raise TransferError(f"transfer {transfer}: {event.name} in state {before.name}")
        if after is before:
            # A further part is the only event that is expected where it changes nothing.
            if event is not InboundEvent.PART:
                self.absorbed[event.name.lower()] += 1
            return
        inbound.state = after
        if before is not InboundState.DRAINING and after in (InboundState.DRAINING, InboundState.RELEASED):
            inbound.reason, inbound.why = reason, why
        if after is InboundState.READY:
            self._send(inbound, Message(MessageKind.READY, self._info.epoch, transfer))
        elif after is InboundState.DRAINING:
            self._send(inbound, Message(MessageKind.ABORT, self._info.epoch, transfer, text=reason_text(why)))
            self.leases.extend(transfer, now_s)
            if not inbound.channels:  # nobody to stop
                inbound.state = InboundState.RELEASED
        if inbound.state is InboundState.RELEASED:
            self._free(inbound)

    def _send(self, inbound: InboundTransfer, message: Message) -> None:
        self.outbox.extend((channel, message) for channel in sorted(inbound.channels))

    def _free(self, inbound: InboundTransfer) -> None:
        del self._inbound[inbound.lease.number]
        self._why[inbound.lease.number] = inbound.why
        while len(self._why) > _REMEMBERED:
            del self._why[next(iter(self._why))]
        freed = self.leases.release(inbound.lease.number, inbound.reason)
        if self._poison and freed:
            self._pool[:, freed] = POISON


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
