"""What a channel is given next."""

import numpy as np

from kv_transfer.wires import LAYOUT, needles
from phasesplit.kv_transfer.messages import BlockRun, Message, MessageKind, checksum
from phasesplit.kv_transfer.sender import SendQueue

POOL = needles(LAYOUT, 8)


def queued(*entries: BlockRun | Message) -> SendQueue:
    """Return the queue of a sender whose receiver is in epoch 3."""
    outbound = SendQueue(POOL)
    outbound.epoch = 3
    for entry in entries:
        outbound.add(entry)
    return outbound


def test_a_run_becomes_the_frame_of_its_blocks() -> None:
    """Other blocks than those named would leave, to another place, or under a checksum that is not theirs."""
    message, payload = queued(BlockRun(7, 1, 2, 5, 3)).head() or (None, None)
    assert payload is not None
    assert np.array_equal(payload, POOL[1, 2:5].reshape(-1))
    assert message == Message(MessageKind.FRAME, 3, 7, 1, 5, 3, checksum(payload), payload.size)


def test_entries_leave_in_order_and_say_what_they_are_part_of() -> None:
    """The first token would overtake its KV, or a heartbeat count as a part of a transfer."""
    note, beat = Message(MessageKind.NOTE, 3, 7, text=b"1"), Message(MessageKind.HEARTBEAT, 3, 9)
    outbound = queued(BlockRun(7, 0, 0, 0, 2), note, beat)
    assert (outbound.head(), outbound.in_channel) == (outbound.head(), 0)
    assert outbound.taken() == outbound.in_channel == 7
    assert outbound.head() == (note, None)
    assert outbound.taken() == 7
    assert outbound.head() == (beat, None)
    assert outbound.taken() is None
    assert outbound.in_channel == 7
    assert outbound.head() is None


def test_a_dropped_transfer_takes_its_prepared_frame_along() -> None:
    """Blocks of a transfer that has failed would leave although they are another request's by then."""
    beat, other = Message(MessageKind.HEARTBEAT, 3, 7), BlockRun(8, 0, 4, 4, 1)
    outbound = queued(
        BlockRun(7, 0, 0, 0, 1), beat, other, BlockRun(7, 1, 0, 0, 1), Message(MessageKind.NOTE, 3, 7, text=b"1")
    )
    assert outbound.head() is not None
    outbound.drop(7)
    assert outbound.head() == (beat, None)
    outbound.drop(7)
    assert outbound.head() == (beat, None)
    assert outbound.taken() is None
    head = outbound.head()
    assert head is not None
    assert (head[0].kind, head[0].transfer) == (MessageKind.FRAME, 8)
    assert outbound.taken() == 8
    assert outbound.head() is None


def test_a_cleared_queue_is_empty() -> None:
    """A frame would be written to a channel that has ended."""
    outbound = queued(BlockRun(7, 0, 0, 0, 1))
    assert outbound.head() is not None
    outbound.clear()
    assert outbound.head() is None
