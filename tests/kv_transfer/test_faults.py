"""What each kind of fault of a channel does to a transfer."""

import pytest

from kv_transfer.in_memory import Fault, in_memory_pair
from kv_transfer.wires import LAYOUT, Wire, needles
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Condition
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Message, MessageKind, ReleaseReason
from phasesplit.kv_transfer.sender import Sender, drive_sender
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState

HARMLESS = [Fault.DELAY, Fault.DUPLICATE, Fault.REORDER]


def faulty(fault: Fault, kind: MessageKind, at: int) -> Wire:
    """Return a wire on which the n-th message of a kind meets a fault."""
    seen = 0

    def faults(message: Message) -> Fault:
        nonlocal seen
        seen += message.kind is kind
        return fault if message.kind is kind and seen == at + 1 else Fault.NONE

    sending, receiving = in_memory_pair(faults)
    return Wire("in-memory", sending=sending, receiving=receiving, frame_bytes=LAYOUT.block_bytes)


@pytest.mark.parametrize("at", [0, 1, 5, 11])
@pytest.mark.parametrize("fault", Fault)
def test_a_frame_that_meets_a_fault(fault: Fault, at: int) -> None:
    """KV that is not what was sent would be readable, or one that is would not; or blocks stay held."""
    wire = faulty(fault, MessageKind.FRAME, at)
    reservation = wire.reserve(16)
    wire.sender.send_all(reservation)
    wire.settle()
    # The last frame has no next one to come after: it is held back with what follows it.
    if fault is Fault.NONE or (fault in HARMLESS and not (fault is Fault.REORDER and at == 11)):
        assert wire.receiver.state(reservation.transfer) is InboundState.READY
        assert (wire.bytes_of(reservation) == wire.expected(reservation)).all()
        wire.receiver.release(reservation.transfer, 0.0)
        assert wire.receiver.leases.released == {ReleaseReason.COMPLETED: 1}
        return
    with pytest.raises(TransferError, match="may not be read"):
        wire.receiver.take(reservation.transfer)
    wire.now_s = 2_000.0
    wire.settle()
    assert wire.sender.state(reservation) is OutboundState.FAILED
    assert wire.receiver.used_bytes == 0
    assert wire.receiver.leases.released[ReleaseReason.COMPLETED] == 0


@pytest.mark.parametrize("fault", Fault)
def test_a_note_that_meets_a_fault(fault: Fault) -> None:
    """A first token that is not the sender's would be emitted, or one that is would be lost."""
    wire = faulty(fault, MessageKind.NOTE, 0)
    reservation = wire.receiver.reserve("r", 16, "prefill-0", 0.0, wants_note=True)
    wire.sender.open(reservation, wire.sources(reservation), 1_000.0)
    wire.sender.note(reservation, b"7")
    wire.sender.send_all(reservation)
    wire.settle()
    if fault is Fault.NONE or fault in HARMLESS:
        assert wire.receiver.state(reservation.transfer) is InboundState.READY
        assert wire.receiver.note(reservation.transfer) == b"7"
        return
    with pytest.raises(TransferError, match="may not be read"):
        wire.receiver.take(reservation.transfer)
    if fault is Fault.CORRUPT:
        assert wire.sender.why(reservation) == "note has a wrong checksum"
    wire.now_s = 2_000.0
    wire.settle()
    assert wire.sender.state(reservation) is OutboundState.FAILED
    assert wire.receiver.used_bytes == 0


def test_a_note_that_is_not_wanted_is_absorbed() -> None:
    """A note could make a transfer whole that wants none, or fail it."""
    wire = Wire("in-memory")
    reservation = wire.reserve(16)
    wire.channel.offer(Message(MessageKind.NOTE, 1, reservation.transfer, text=b"7"), None)
    wire.settle()
    assert wire.receiver.absorbed == {"unwanted note": 1}
    assert wire.receiver.state(reservation.transfer) is InboundState.RESERVED
    wire.sender.send_all(reservation)
    wire.finish(reservation)
    assert wire.receiver.note(reservation.transfer) == b""


def test_an_offer_is_repeated_on_a_new_channel() -> None:
    """A sender whose channel broke before it had sent anything would never learn of the reservation."""
    wire = Wire("in-memory")
    reservation = wire.receiver.reserve("r", 16, "prefill-0", 0.0, offer=True)
    sending, wire.channels[1] = in_memory_pair()
    again = Sender(wire.sender._info, wire.source)
    for _ in range(4):
        drive_sender(again, sending, 0.0)
        wire.both()
    assert again.offer("r") == reservation == wire.sender.offer("r")


def test_wholeness_waits_for_the_frame_that_was_overtaken() -> None:
    """The last message would count as the end of the transfer although a frame before it is missing."""
    wire = faulty(Fault.DROP, MessageKind.FRAME, 3)
    reservation = wire.reserve(16)
    wire.sender.send_all(reservation)
    wire.settle()
    assert wire.receiver.state(reservation.transfer) is InboundState.RECEIVING
    assert wire.receiver.layers_arrived(reservation.transfer) == LAYOUT.layers - 1
    assert wire.sender.state(reservation) is OutboundState.SENT


def test_frame_of_another_machine_is_refused() -> None:
    """A machine could write into blocks that are reserved for another one."""
    wire = Wire("in-memory")
    reservation = wire.receiver.reserve("r", 8, "prefill-7", 0.0)
    wire.sender.open(reservation, (0, 1), 1_000.0)
    wire.sender.send_all(reservation)
    wire.settle()
    assert not wire.pool.any()
    assert wire.receiver.absorbed["foreign"] == 2 * LAYOUT.layers  # each frame, and the answer to its refusal
    assert wire.receiver.state(reservation.transfer) is InboundState.RESERVED
    assert wire.sender.state(reservation) is OutboundState.FAILED
    assert "another machine" in wire.sender.why(reservation)


def test_older_life_of_a_machine_is_refused() -> None:
    """A machine that was started again would be written for by its former process."""
    wire = Wire("in-memory", sender_epoch=5)
    reservation = wire.reserve(8)
    for epoch in (4, 6):
        sending, wire.channels[epoch] = in_memory_pair()
        sending.offer(
            Message(MessageKind.HELLO, text=wire.sender._info.to_text().replace(b'"epoch": 5', b'"epoch": %d' % epoch)),
            None,
        )
        wire.step()
        refused = epoch == 4
        answers = [message.kind for message in sending.poll(lambda _: None)]
        assert answers == [MessageKind.REFUSE if refused else MessageKind.WELCOME]
        assert (wire.channel.condition is Condition.OPEN) == refused
    wire.settle()
    assert wire.receiver.state(reservation.transfer) is not InboundState.READY
    assert wire.sender.state(reservation) is OutboundState.FAILED


def test_a_repeated_frame_is_not_written_again() -> None:
    """KV that the decode phase reads already would change under it."""
    wire = Wire("in-memory")
    reservation = wire.reserve(8)
    wire.sender.send(reservation, 0)
    head = wire.sender.head()
    assert head is not None
    wire.sender.send(reservation, 1)
    wire.sender.send(reservation, 2)
    wire.finish(reservation)
    before = wire.bytes_of(reservation)
    wire.channel.offer(head[0], wire.source[1, :2].reshape(-1))
    wire.settle()
    assert (wire.bytes_of(reservation) == before).all()
    assert wire.receiver.state(reservation.transfer) is InboundState.READING


@pytest.mark.parametrize(
    ("layer", "first", "blocks", "length_bytes"),
    [
        (3, 0, 1, 256),
        (0, 0, 3, 768),
        (0, 1, 1, 256),
        (0, 2, 2, 512),
        (0, 0, 0, 0),
        (0, 0, 1, 255),
        (0, 0, 2**32 - 1, 9),
    ],
)
def test_a_frame_that_lies_about_its_place(layer: int, first: int, blocks: int, length_bytes: int) -> None:
    """Bytes could land in a gap of the reservation, behind it, in no layer, or in part of a block."""
    wire = Wire("in-memory")
    kept = [wire.receiver.reserve(str(number), 4, "prefill-0", 0.0) for number in range(3)]
    for each in (kept[0], kept[2]):
        wire.receiver.release(each.transfer, 0.0)
    wire.settle()
    wire.pool[:] = 0
    reservation = wire.reserve(8)
    assert reservation.blocks == (0, 2)
    lie = Message(MessageKind.FRAME, 1, reservation.transfer, layer, first, blocks, 0, length_bytes)
    wire.channel.offer(lie, wire.source.reshape(-1)[:length_bytes])
    wire.step()
    assert not wire.pool.any()
    assert wire.receiver.state(reservation.transfer) is InboundState.DRAINING
    assert wire.receiver.state(kept[1].transfer) is InboundState.RESERVED


def test_a_peer_says_what_it_can_do() -> None:
    """A machine would use what its peer cannot do."""
    ours = PeerInfo(machine="prefill-0", epoch=1, layout=LAYOUT, capabilities=("a", "b"))
    sender = Sender(ours, needles(LAYOUT, 1))
    assert sender.receiver is None
    theirs = PeerInfo(machine="decode-0", epoch=1, layout=LAYOUT, capabilities=("b", "c"))
    sender.on_message(Message(MessageKind.WELCOME, text=theirs.to_text()), 0.0)
    assert sender.receiver is not None
    assert sender.receiver.capabilities == ("b", "c")


@pytest.mark.parametrize(
    ("layer", "first", "end"), [(3, 0, 1), (-1, 0, 1), (0, 0, 5), (0, 2, 2), (0, -1, 1), (0, 3, 4)]
)
def test_sending_what_is_not_there_or_twice_is_refused(layer: int, first: int, end: int) -> None:
    """A mistake of the engine would send another request's blocks, or a transfer never become whole."""
    wire = Wire("in-memory")
    reservation = wire.reserve(16)
    wire.sender.send(reservation, 0, 3, 4)
    with pytest.raises(TransferError, match=f"layer {layer}, blocks {first} to {end}"):
        wire.sender.send(reservation, layer, first, end)


@pytest.mark.parametrize("condition", [condition for condition in Condition if condition is not Condition.OPEN])
@pytest.mark.parametrize("sent", [False, True])
def test_no_end_of_a_channel_is_a_success(condition: Condition, sent: bool) -> None:
    """The end of a channel, in whatever way, would complete a transfer or leave it waiting."""
    wire = Wire("in-memory")
    reservation = wire.reserve(16)
    wire.sender.send(reservation, 0)
    if sent:
        wire.sender.send(reservation, 1)
        wire.sender.send(reservation, 2)
        drive_sender(wire.sender, wire.channel, 0.0)
    wire.channel.condition = wire.channels[0].condition = condition
    wire.channels[0]._incoming.clear()
    wire.settle()
    assert wire.sender.state(reservation) is OutboundState.FAILED
    assert condition.value in wire.sender.why(reservation)
    assert wire.receiver.leases.released == {ReleaseReason.PEER_LOST: 1}
    assert wire.receiver.used_bytes == 0
