"""The receiving end: reserved blocks, what has arrived in them, and when they are free again.

It knows no socket and no clock: messages and instants go in, messages come out of `outbox`. A channel has a number,
given by whoever drives it.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.transfer.checksum import checksum
from phasesplit.transfer.failures import Reason
from phasesplit.transfer.layout import Greeting
from phasesplit.transfer.leases import Lease, LeaseBook
from phasesplit.transfer.messages import Kind, Message, Reservation, reason_text
from phasesplit.transfer.states import ARRIVAL_TABLE, Arrival, ArrivalEvent

POISON = 0xFF
"""Byte that fills freed blocks where asked for; as floats of any size it reads as not-a-number."""


@dataclass(slots=True)
class _Awaited:
    """One transfer at its receiver."""

    lease: Lease
    sender: str
    tokens: int
    arrived: NDArray[np.bool_]  # (layers, blocks of the transfer)
    places: Mapping[int, int]  # block in the pool -> its place in the transfer
    state: Arrival = Arrival.RESERVED
    reason: Reason = Reason.COMPLETED
    why: str = ""
    channels: set[int] = field(default_factory=set)  # channels that a frame of it may still come through


class Receiver:
    """Takes KV blocks into a pool.

    Args:
        greeting: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; written to.
        lease_s: Time that a reservation lives without a heartbeat, > 0.
        poison: Fill blocks with `POISON` when they are freed, so that a late reader is found out.

    Raises:
        TransferError: The pool is not that of the layout.
    """

    def __init__(
        self, greeting: Greeting, pool: NDArray[np.uint8], *, lease_s: float = 30.0, poison: bool = False
    ) -> None:
        layout = greeting.layout
        if pool.shape[::2] != (layout.layers, layout.block_bytes) or not pool.flags.c_contiguous:
            raise TransferError(f"pool of shape {pool.shape}, allowed is ({layout.layers}, n, {layout.block_bytes})")
        self._greeting = replace(greeting, blocks=pool.shape[1])
        self._layout = layout
        self._pool = pool
        self._lease_s = lease_s
        self._poison = poison
        self._awaited: dict[int, _Awaited] = {}
        self._peers: dict[int, str] = {}
        self._epochs: dict[str, int] = {}
        self.leases = LeaseBook(pool.shape[1], layout.layers * layout.block_bytes)
        self.outbox: deque[tuple[int, Message]] = deque()
        self.cuts: set[int] = set()
        self.absorbed: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Bytes of the pool that are held."""
        return self.leases.used_bytes

    def reserve(
        self, owner: str, tokens: int, sender: str, now_s: float, *, purpose: str = "transfer", lease_s: float = 0.0
    ) -> Reservation:
        """Hold the blocks of a prompt whose KV a machine will send.

        Args:
            owner: The request.
            tokens: Tokens of the prompt, >= 1.
            sender: Machine that will send.
            now_s: The instant.
            purpose: Why they are held, for people.
            lease_s: Time without a heartbeat, by default the receiver's.

        Raises:
            NoRoomError: They do not fit.
        """
        lease = self.leases.reserve(owner, purpose, self._layout.blocks_for(tokens), now_s, lease_s or self._lease_s)
        arrived = np.zeros((self._layout.layers, len(lease.blocks)), np.bool_)
        places = {block: place for place, block in enumerate(lease.blocks)}
        channels = {number for number, name in self._peers.items() if name == sender}
        self._awaited[lease.number] = _Awaited(lease, sender, tokens, arrived, places, channels=channels)
        return Reservation(self._greeting.machine, self._greeting.epoch, lease.number, tokens, lease.blocks)

    def state(self, transfer: int) -> Arrival:
        """Return the state of a transfer; one that is not known has been released."""
        awaited = self._awaited.get(transfer)
        return awaited.state if awaited else Arrival.RELEASED

    def layers_arrived(self, transfer: int) -> int:
        """Return how many layers of a transfer are there whole."""
        awaited = self._awaited.get(transfer)
        return int(awaited.arrived.all(axis=1).sum()) if awaited else 0

    def take(self, transfer: int) -> tuple[int, ...]:
        """Return the blocks of a transfer that is whole; they are the caller's until `release`.

        Raises:
            TransferError: It is not whole, has failed, or was released.
        """
        awaited = self._awaited.get(transfer)
        if awaited is None or ARRIVAL_TABLE[awaited.state][ArrivalEvent.READ] is None:
            state = self.state(transfer).name.lower()
            why = f" ({awaited.why})" if awaited and awaited.why else ""
            raise TransferError(f"transfer {transfer} is {state}{why}: its KV may not be read")
        awaited.state = Arrival.READING
        return awaited.lease.blocks

    def heartbeat(self, transfer: int, now_s: float) -> bool:
        """Extend the lease of a transfer that has not failed; return whether there is one."""
        if self.state(transfer) in (Arrival.DRAINING, Arrival.RELEASED):
            return False
        return self.leases.extend(transfer, now_s)

    def release(self, transfer: int, now_s: float) -> None:
        """Give the blocks back; before the transfer is whole this aborts it. A second call changes nothing."""
        whole = self.state(transfer) in (Arrival.READY, Arrival.READING)
        reason = Reason.COMPLETED if whole else Reason.ABORTED
        self._happen(transfer, ArrivalEvent.RELEASE, now_s, reason, "released")

    def abort(self, transfer: int, now_s: float, why: str = "aborted", reason: Reason = Reason.ABORTED) -> None:
        """Give up a transfer in any state; a second call changes nothing."""
        self._happen(transfer, ArrivalEvent.ABORT, now_s, reason, why)

    def tick(self, now_s: float) -> None:
        """Let leases expire. A sender that did not stop when asked, within another lease, has its channel cut."""
        for lease in self.leases.expired(now_s):
            awaited = self._awaited[lease.number]
            if awaited.state is Arrival.DRAINING:
                self.cuts |= awaited.channels
            self._happen(lease.number, ArrivalEvent.EXPIRE, now_s, Reason.EXPIRED, "no heartbeat")
            self.leases.extend(lease.number, now_s)

    def lost(self, channel: int, now_s: float) -> None:
        """Take note that nothing more can come through a channel, however it ended."""
        self._peers.pop(channel, None)
        self.cuts.discard(channel)
        for transfer in [number for number, awaited in self._awaited.items() if channel in awaited.channels]:
            self._awaited[transfer].channels.discard(channel)
            if not self._awaited[transfer].channels:
                self._happen(transfer, ArrivalEvent.PEER_LOST, now_s, Reason.PEER_LOST, "the sender is gone")

    def place(self, channel: int, frame: Message) -> NDArray[np.uint8] | None:
        """Return where the bytes of a frame belong, uint8 (length,), or None where they must be thrown away."""
        if self._objection(channel, frame)[0]:
            return None
        awaited = self._awaited[frame.transfer]
        if self._fault(awaited, frame) or self._seen(awaited, frame).any():
            return None
        return self._bytes(frame)

    def on_message(self, channel: int, message: Message, now_s: float) -> None:
        """Take a message; the bytes of a frame are in their place already."""
        if message.kind is Kind.HELLO:
            self._register(channel, message.text)
            return
        word, why = self._objection(channel, message)
        if word:
            self.absorbed[word] += 1
            if message.kind in (Kind.FRAME, Kind.HEARTBEAT):  # its sender does not know yet
                stop = Message(Kind.ABORT, message.epoch, message.transfer, text=reason_text(why))
                self.outbox.append((channel, stop))
            return
        transfer = message.transfer
        if message.kind is Kind.FRAME:
            self._on_frame(self._awaited[transfer], message, now_s)
        elif message.kind is Kind.ABORT:
            why = message.text.decode(errors="replace")
            self._happen(transfer, ArrivalEvent.PEER_ABORT, now_s, Reason.ABORTED, why)
        elif message.kind is Kind.STOPPED:
            self._happen(transfer, ArrivalEvent.PEER_STOPPED, now_s, Reason.ABORTED, "")
        elif message.kind is Kind.HEARTBEAT:
            self.heartbeat(transfer, now_s)
        else:
            self.absorbed["message of a receiver"] += 1

    def _register(self, channel: int, text: bytes) -> None:
        try:
            theirs = Greeting.from_text(text)
            self._layout.demand_equal(theirs.layout)
            latest = self._epochs.get(theirs.machine, theirs.epoch)
            if theirs.epoch < latest:
                raise TransferError(f"epoch {theirs.epoch} of {theirs.machine} is stale, the latest is {latest}")
        except TransferError as error:
            self.absorbed["refused registration"] += 1
            self.outbox.append((channel, Message(Kind.REFUSE, text=reason_text(str(error)))))
            return
        if theirs.epoch > latest:  # the machine was started again: nothing comes from its former life
            self.cuts |= {number for number, name in self._peers.items() if name == theirs.machine}
        self._epochs[theirs.machine] = theirs.epoch
        self._peers[channel] = theirs.machine
        for awaited in self._awaited.values():
            if awaited.sender == theirs.machine and awaited.state is Arrival.RESERVED:
                awaited.channels.add(channel)
        self.outbox.append((channel, Message(Kind.WELCOME, text=self._greeting.to_text())))

    def _objection(self, channel: int, message: Message) -> tuple[str, str]:
        """Return why a message cannot speak for its transfer, as a word to count it by and a reason; else empty."""
        awaited = self._awaited.get(message.transfer)
        if message.epoch != self._greeting.epoch:
            return "stale epoch", f"epoch {message.epoch} of {self._greeting.machine} is stale"
        if awaited is None:
            return "late", "released"
        if channel not in awaited.channels:
            return "foreign", "reserved for another machine"
        return "", ""

    def _on_frame(self, awaited: _Awaited, frame: Message, now_s: float) -> None:
        if awaited.state not in (Arrival.RESERVED, Arrival.RECEIVING):
            self.absorbed["late"] += 1
            return
        fault = self._fault(awaited, frame)
        if not fault:
            seen = self._seen(awaited, frame)
            if seen.all():
                self.absorbed["duplicate"] += 1
                return
            if seen.any():
                fault = "overlaps what has arrived"
            elif checksum(self._bytes(frame)) != frame.checksum:
                fault = "has a wrong checksum"
            else:
                seen[:] = True
        event = ArrivalEvent.LAST_FRAME if awaited.arrived.all() else ArrivalEvent.FRAME
        why = f"frame of layer {frame.layer}, block {frame.first_block} {fault}"
        self._happen(
            frame.transfer, ArrivalEvent.BAD_FRAME if fault else event, now_s, Reason.REFUSED, why if fault else ""
        )

    def _fault(self, awaited: _Awaited, frame: Message) -> str:
        """Return what is wrong with the address of a frame, or the empty text."""
        if frame.layer >= self._layout.layers or not frame.blocks:
            return "is outside the layers"
        # Block numbers of a reservation ascend, so a frame is inside it if and only if its blocks are neighbours there.
        first = awaited.places.get(frame.first_block)
        last = awaited.places.get(frame.first_block + frame.blocks - 1)
        if first is None or last is None or last - first != frame.blocks - 1:
            return "is outside the reservation"
        if frame.length_bytes != frame.blocks * self._layout.block_bytes:
            return "has a wrong length"
        return ""

    def _seen(self, awaited: _Awaited, frame: Message) -> NDArray[np.bool_]:
        """Return a view of which blocks of a frame have arrived."""
        first = awaited.places[frame.first_block]
        return awaited.arrived[frame.layer, first : first + frame.blocks]

    def _bytes(self, frame: Message) -> NDArray[np.uint8]:
        return self._pool[frame.layer, frame.first_block : frame.first_block + frame.blocks].reshape(-1)

    def _happen(self, transfer: int, event: ArrivalEvent, now_s: float, reason: Reason, why: str) -> None:
        """Take one step of the table, and do what entering the next state asks for."""
        awaited = self._awaited.get(transfer)
        if awaited is None:
            self.absorbed[event.name.lower()] += 1
            return
        before, after = awaited.state, ARRIVAL_TABLE[awaited.state][event]
        if after is None:
            raise TransferError(f"transfer {transfer}: {event.name} in state {before.name}")
        if after is before:
            # A further frame is the only event that is expected where it changes nothing.
            if event is not ArrivalEvent.FRAME:
                self.absorbed[event.name.lower()] += 1
            return
        awaited.state = after
        if before is not Arrival.DRAINING and after in (Arrival.DRAINING, Arrival.RELEASED):
            awaited.reason, awaited.why = reason, why
        if after is Arrival.READY:
            self._tell(awaited, Message(Kind.READY, self._greeting.epoch, transfer))
        elif after is Arrival.DRAINING:
            self._tell(awaited, Message(Kind.ABORT, self._greeting.epoch, transfer, text=reason_text(why)))
            self.leases.extend(transfer, now_s)
            if not awaited.channels:  # nobody to stop
                awaited.state = Arrival.RELEASED
        if awaited.state is Arrival.RELEASED:
            self._free(awaited, now_s)

    def _tell(self, awaited: _Awaited, message: Message) -> None:
        self.outbox.extend((channel, message) for channel in sorted(awaited.channels))

    def _free(self, awaited: _Awaited, now_s: float) -> None:
        if self._poison:
            self._pool[:, list(awaited.lease.blocks)] = POISON
        del self._awaited[awaited.lease.number]
        self.leases.release(awaited.lease.number, awaited.reason, now_s)
