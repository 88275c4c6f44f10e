"""Random orders of everything that can happen to transfers, over a channel that loses, swaps, repeats and damages."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_transfer.in_memory import Fault, InMemoryChannel, in_memory_pair
from kv_transfer.wires import LAYOUT, needles, queued_bytes
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Condition
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Message, NoRoomError, ReleaseReason, ReservedBlocks
from phasesplit.kv_transfer.receiver import Receiver, drive_receiver
from phasesplit.kv_transfer.sender import Sender, drive_sender
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState

BLOCKS = 8
WHOLE = (InboundState.READY, InboundState.READING)
places = st.integers(0, 99)


class Interleavings(RuleBasedStateMachine):
    """One receiver, and a sender that may be started again; the rules are what can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epoch = 0
        self.faults: list[Fault] = []
        self.pool = np.zeros((LAYOUT.layers, BLOCKS, LAYOUT.block_bytes), np.uint8)
        self.receiver = Receiver(
            PeerInfo(machine="decode-0", epoch=1, layout=LAYOUT), self.pool, lease_s=10.0, poison=True
        )
        self.channels: dict[int, InMemoryChannel] = {}
        self.reserved: list[ReservedBlocks] = []
        self.ended: set[int] = set()
        self.read: set[int] = set()
        self.restart()

    @rule()
    def restart(self) -> None:
        """Start the sender again, with a new epoch and a new channel; the old one is not closed by anybody."""
        self.epoch += 1
        self.source = needles(LAYOUT, BLOCKS, seed=self.epoch)
        info = PeerInfo(machine="prefill-0", epoch=self.epoch, layout=LAYOUT)
        self.sender = Sender(info, self.source, frame_bytes=2 * LAYOUT.block_bytes)
        self.channel, receiving = in_memory_pair(self.next_fault, room=5)
        self.channels[self.epoch] = receiving
        self.opened: dict[int, tuple[ReservedBlocks, tuple[int, ...]]] = {}
        self.left: dict[int, list[tuple[int, int]]] = {}
        self.unnoted: list[ReservedBlocks] = []
        self.ordered: set[str] = set()

    def next_fault(self, message: Message) -> Fault:
        del message
        return self.faults.pop(0) if self.faults else Fault.NONE

    @rule(fault=st.sampled_from(Fault))
    def break_next(self, fault: Fault) -> None:
        """Let something happen to the next message."""
        self.faults.append(fault)

    @rule(tokens=st.integers(1, 4 * BLOCKS + 4), backwards=st.booleans(), noted=st.booleans(), offer=st.booleans())
    def reserve(self, tokens: int, backwards: bool, noted: bool, offer: bool) -> None:
        """Hold room for a prompt, and offer it, or open the transfer where the receiver is known."""
        blocks = LAYOUT.blocks_for(tokens)
        free = BLOCKS - self.receiver.used_bytes // (LAYOUT.layers * LAYOUT.block_bytes)
        try:
            key = f"r{len(self.reserved)}"
            reservation = self.receiver.reserve(key, tokens, "prefill-0", self.now_s, offer=offer, wants_note=noted)
        except NoRoomError:
            assert blocks > free
            return
        assert blocks <= free
        self.reserved.append(reservation)
        if not offer and self.sender.receiver is not None and not self.sender.lost_because:
            self.open(reservation, backwards)

    def open(self, reservation: ReservedBlocks, backwards: bool) -> None:
        """Begin a transfer."""
        blocks = len(reservation.blocks)
        sources = tuple(range(blocks))[:: -1 if backwards else 1]
        self.sender.open(reservation, sources, self.now_s + 25.0)
        self.opened[reservation.transfer] = (reservation, sources)
        self.left[reservation.transfer] = [(layer, place) for layer in range(LAYOUT.layers) for place in range(blocks)]
        if reservation.wants_note:
            self.unnoted.append(reservation)

    @rule(which=places)
    def order(self, which: int) -> None:
        """Ask for the KV of a request that is, or will be, offered."""
        key = f"r{which % (len(self.reserved) + 2)}"
        try:
            self.sender.await_offer(key, self.now_s + 25.0)
        except TransferError:
            assert key in self.ordered
        self.ordered.add(key)

    @rule(which=places, backwards=st.booleans())
    def open_offered(self, which: int, backwards: bool) -> None:
        """Begin a transfer whose offer and order are here."""
        ready = [key for key in sorted(self.ordered) if self.sender.state(key) is OutboundState.OFFERED]
        if ready:
            reservation = self.sender.offer(ready[which % len(ready)])
            assert reservation is not None
            self.open(reservation, backwards)

    @rule(which=places, forget=st.booleans())
    def end_order(self, which: int, forget: bool) -> None:
        """Give up a request at the sending end, whatever is known of it."""
        key = f"r{which % (len(self.reserved) + 2)}"
        self.sender.abort(key)
        if forget and key not in [f"r{r.transfer - 1}" for r, _ in self.opened.values()]:
            self.sender.forget(key)
            self.ordered.discard(key)

    @precondition(lambda self: self.unnoted)
    @rule(which=places)
    def note(self, which: int) -> None:
        """Send a note."""
        reservation = self.unnoted.pop(which % len(self.unnoted))
        self.sender.note(reservation, b"%d" % reservation.transfer)

    @precondition(lambda self: any(self.left.values()))
    @rule(which=places, part=places)
    def send(self, which: int, part: int) -> None:
        """Send one block of a layer that was not sent."""
        transfer = sorted(key for key, left in self.left.items() if left)[which % sum(map(bool, self.left.values()))]
        layer, place = self.left[transfer].pop(part % len(self.left[transfer]))
        self.sender.send(self.opened[transfer][0], layer, place, place + 1)

    @precondition(lambda self: any(self.left.values()))
    @rule()
    def send_rest(self) -> None:
        """Send whatever was not sent."""
        for transfer, left in self.left.items():
            while left:
                layer, place = left.pop()
                self.sender.send(self.opened[transfer][0], layer, place, place + 1)

    @precondition(lambda self: self.opened)
    @rule(which=places)
    def sender_aborts(self, which: int) -> None:
        """Give up at the sending end."""
        self.sender.abort(self.opened[sorted(self.opened)[which % len(self.opened)]][0])

    @precondition(lambda self: self.reserved)
    @rule(which=places, how=st.sampled_from(["abort", "release"]))
    def receiver_acts(self, which: int, how: str) -> None:
        """Give up or let go at the receiving end."""
        transfer = self.reserved[which % len(self.reserved)].transfer
        getattr(self.receiver, how)(transfer, now_s=self.now_s)
        self.read.discard(transfer)

    @precondition(lambda self: self.reserved)
    @rule(which=places)
    def take(self, which: int) -> None:
        """Take blocks; only whole ones are given out."""
        transfer = self.reserved[which % len(self.reserved)].transfer
        state = self.receiver.state(transfer)
        try:
            self.receiver.take(transfer)
        except TransferError:
            assert state not in WHOLE
        else:
            assert state in WHOLE
            self.read.add(transfer)

    @rule()
    def drive_sending_end(self) -> None:
        """Let the sender work."""
        drive_sender(self.sender, self.channel, self.now_s)

    @rule()
    def drive_receiving_end(self) -> None:
        """Let the receiver work."""
        drive_receiver(self.receiver, self.channels, self.now_s)

    @rule(seconds=st.sampled_from([0.5, 6.0, 11.0]), beat=st.booleans())
    def wait(self, seconds: float, beat: bool) -> None:
        """Let time pass."""
        self.now_s += seconds
        if beat:
            self.sender.heartbeat()

    @invariant()
    def every_block_has_one_owner(self) -> None:
        """Blocks would be held by two, or be lost."""
        held = [block for lease in self.receiver.leases.held for block in lease.blocks]
        assert len(held) == len(set(held))
        assert self.receiver.used_bytes == len(held) * LAYOUT.layers * LAYOUT.block_bytes
        released = self.receiver.leases.released
        assert sum(released.values()) + len(list(self.receiver.leases.held)) == len(self.reserved)
        assert all(reason in ReleaseReason for reason in released)

    @invariant()
    def whole_means_equal(self) -> None:
        """KV that is not what was sent would count as whole."""
        for transfer, (reservation, sources) in self.opened.items():
            if self.receiver.state(transfer) in WHOLE:
                assert np.array_equal(self.pool[:, list(reservation.blocks)], self.source[:, list(sources)])
                assert not self.left[transfer]
                assert self.receiver.note(transfer) == (b"%d" % transfer if reservation.wants_note else b"")

    @invariant()
    def what_is_read_stays(self) -> None:
        """Blocks would go from under who reads them, whatever the sender does and however long it takes."""
        assert all(self.receiver.state(transfer) is InboundState.READING for transfer in self.read)

    @invariant()
    def nothing_comes_back(self) -> None:
        """A released transfer would live again."""
        for reservation in self.reserved:
            if self.receiver.state(reservation.transfer) is InboundState.RELEASED:
                self.ended.add(reservation.transfer)
            assert (reservation.transfer in self.ended) == (
                self.receiver.state(reservation.transfer) is InboundState.RELEASED
            )

    @invariant()
    def completed_means_whole(self) -> None:
        """The sender would believe in a completion that was none."""
        for transfer, (reservation, _) in self.opened.items():
            if self.sender.state(reservation) is OutboundState.COMPLETED:
                assert not self.left[transfer]
                assert self.receiver.leases.released[ReleaseReason.REFUSED] < len(self.reserved)
                assert self.receiver.state(transfer) in (*WHOLE, InboundState.RELEASED)

    def teardown(self) -> None:
        """Whatever happened, two silent lease times later nothing is held but what has arrived."""
        self.faults.clear()
        for _ in range(4):
            self.now_s += 30.0
            drive_receiver(self.receiver, self.channels, self.now_s)
        for lease in tuple(self.receiver.leases.held):
            assert self.receiver.state(lease.number) in WHOLE
            self.receiver.release(lease.number, self.now_s)
        assert self.receiver.used_bytes == 0
        drive_sender(self.sender, self.channel, self.now_s)
        assert all(
            self.sender.state(r) in (OutboundState.COMPLETED, OutboundState.FAILED) for r, _ in self.opened.values()
        )
        assert queued_bytes(self.sender) == 0 or self.channel.condition is Condition.OPEN


Interleavings.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TestInterleavings(Interleavings.TestCase):
    """Random orders would break an invariant that the rules above state."""
