"""What every transport must do, run over all of them."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import wires
from kv_transfer.wires import LAYOUT, TRANSPORTS, Receiving, Wire, none_left_open, open_files
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Condition
from phasesplit.kv_transfer.messages import LONGEST_TEXT_BYTES, Message, MessageKind, NoRoomError, ReleaseReason
from phasesplit.kv_transfer.receiver import POISON
from phasesplit.kv_transfer.tcp import TcpChannel
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import PATIENCE_S, eventually

WITH_PROCESSES = ["shared-memory", "tcp"]
OpenWire = Callable[..., Wire]


@pytest.fixture(params=TRANSPORTS)
def open_wire(request: pytest.FixtureRequest) -> Iterator[OpenWire]:
    """Open wires of a transport; after the test no byte may be held and no handle be open."""
    before = open_files()
    opened: list[Wire] = []

    def opening(**settings: object) -> Wire:
        opened.append(Wire(request.param, **settings))
        return opened[-1]

    yield opening
    assert sum(held_after_close(wire) for wire in opened) == 0
    opened.clear()
    assert request.param == "nixl" or none_left_open(before)  # UCX keeps what it opens as long as its agent lives


def held_after_close(wire: Wire) -> int:
    """Close both ends, let the readers of whole transfers go, and return the bytes that are still held."""
    for channel in (wire.channel, *wire.channels.values()):
        channel.close()
    wire.step()
    for lease in list(wire.receiver.leases.held):
        wire.receiver.release(lease.number, wire.now_s)
    wire.close()
    return wire.receiver.used_bytes


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64])
def test_every_byte_arrives_in_its_block(open_wire: OpenWire, tokens: int) -> None:
    """A prompt around a border of blocks would miss bytes, or have them in the wrong block or layer."""
    wire = open_wire()
    reservation = wire.reserve(tokens)
    wire.sender.send_all(reservation)
    wire.finish(reservation)
    assert np.array_equal(wire.bytes_of(reservation), wire.expected(reservation))
    assert len(reservation.blocks) == -(-tokens // LAYOUT.block_tokens)
    untouched = np.delete(wire.pool, list(reservation.blocks), axis=1)
    assert not untouched.any()


@pytest.mark.parametrize("blocks", [(9, 8, 2, 3, 4, 12, 15, 0, 1), tuple(range(7, 16))])
def test_scattered_blocks_are_paired_by_name(open_wire: OpenWire, blocks: tuple[int, ...]) -> None:
    """Blocks would be paired by position: both pools are in pieces, and layers and pieces go in any order."""
    wire = open_wire()
    held = [wire.receiver.reserve(str(i), 4, "prefill-0", 0.0) for i in range(16)]
    rng = np.random.default_rng(3)
    for place in rng.permutation(16)[:9]:
        wire.receiver.release(held[place].transfer, 0.0)
    wire.settle()
    reservation = wire.receiver.reserve("r", 36, "prefill-0", 0.0)
    wire.sender.open(reservation, blocks, 1_000.0)
    pieces = [(layer, place) for layer in range(3) for place in range(0, 9, 3)]
    rng.shuffle(pieces)
    for layer, place in pieces:
        wire.sender.send(reservation, layer, place, place + 3)
    wire.finish(reservation)
    assert np.array_equal(wire.bytes_of(reservation), wire.source[:, list(blocks)])


def test_a_transfer_is_whole_only_with_its_last_layer(open_wire: OpenWire) -> None:
    """KV could be read while layers are missing, or a layer count before all its blocks are there."""
    wire = open_wire()
    reservation = wire.reserve(16)
    for layer in range(3):
        assert wire.receiver.layers_arrived(reservation.transfer) == layer
        wire.sender.send(reservation, layer, 0, 2)
        wire.settle()
        assert wire.receiver.layers_arrived(reservation.transfer) == layer
        with pytest.raises(TransferError, match="may not be read"):
            wire.receiver.take(reservation.transfer)
        assert wire.sender.state(reservation) is OutboundState.OPEN
        wire.sender.send(reservation, layer, 2)
        eventually(lambda layer=layer: wire.receiver.layers_arrived(reservation.transfer) == layer + 1, wire.both)
    wire.finish(reservation)


@pytest.mark.parametrize("noted_after", [0, 1, 2, 3])
def test_a_transfer_with_a_note_is_whole_only_with_it(open_wire: OpenWire, noted_after: int) -> None:
    """The decode phase would begin without the first token, or hold it for a transfer that lacks a layer."""
    wire = open_wire()
    reservation = wire.receiver.reserve("r", 16, "prefill-0", 0.0, wants_note=True)
    wire.sender.open(reservation, wire.sources(reservation), 1_000.0)
    for layer in range(4):
        if layer == noted_after:
            wire.sender.note(reservation, "t\u00f6ken 7".encode())
        else:
            wire.sender.send(reservation, layer if layer < noted_after else layer - 1)
        if layer < 3:
            eventually(lambda: wire.receiver.state(reservation.transfer) is InboundState.RECEIVING, wire.both)
            wire.settle()
            assert wire.receiver.state(reservation.transfer) is InboundState.RECEIVING
            assert wire.sender.state(reservation) is OutboundState.OPEN
    wire.finish(reservation)
    assert wire.receiver.note(reservation.transfer).decode() == "t\u00f6ken 7"
    assert np.array_equal(wire.bytes_of(reservation), wire.expected(reservation))


def test_the_longest_note_and_the_longest_offer_pass(open_wire: OpenWire) -> None:
    """A text that the protocol allows would end the channel of some transport."""
    layout = replace(LAYOUT, layers=1, kv_heads=1, head_dim=1, block_tokens=1)
    wire = open_wire(layout=layout, blocks=9_000)
    singles = [wire.receiver.reserve(str(number), 1, "prefill-0", 0.0).transfer for number in range(9_000)]
    for transfer in singles[::2]:
        wire.receiver.release(transfer, 0.0)
    eventually(lambda: wire.receiver.used_bytes == 4_500 * layout.block_bytes, wire.both)
    scattered = wire.receiver.reserve("scattered", 4_500, "prefill-0", 0.0, offer=True, wants_note=True)
    eventually(lambda: wire.sender.offer("scattered") == scattered, wire.both)
    note = bytes(range(256)) * (LONGEST_TEXT_BYTES // 256)
    wire.sender.open(scattered, scattered.blocks, 1_000.0)
    wire.sender.note(scattered, note)
    wire.sender.send_all(scattered)
    wire.finish(scattered)
    assert wire.receiver.note(scattered.transfer) == note
    assert np.array_equal(wire.bytes_of(scattered), wire.source[:, ::2])


@pytest.mark.parametrize("ordered", ["before", "after", "never"])
def test_an_offer_reaches_its_sender_and_can_be_withdrawn(open_wire: OpenWire, ordered: str) -> None:
    """A sender would not learn where KV goes, or go on for a receiver that has given up."""
    wire = open_wire()
    if ordered == "before":
        wire.sender.await_offer("r", 1_000.0)
    reservation = wire.receiver.reserve("r", 16, "prefill-0", 0.0, offer=True)
    wire.receiver.reserve("foreign", 16, "prefill-7", 0.0, offer=True)
    eventually(lambda: wire.sender.offer("r") == reservation, wire.both)
    if ordered == "after":
        wire.sender.await_offer("r", 1_000.0)
    wire.receiver.abort(reservation.transfer, 0.0, "no use")
    eventually(lambda: wire.receiver.state(reservation.transfer) is InboundState.RELEASED, wire.both)
    assert wire.sender.offer("foreign") is None
    if ordered == "never":
        assert wire.sender.offer("r") is None
    else:
        assert wire.sender.state("r") is OutboundState.FAILED
        assert wire.sender.why("r") == "no use"


@pytest.mark.parametrize("step", ["awaited", "offered", "open", "layer"])
def test_a_sender_that_gives_up_frees_what_was_offered(open_wire: OpenWire, step: str) -> None:
    """Blocks would stay held for a prefill phase that has failed, until their lease ends."""
    wire = open_wire()
    wire.sender.await_offer("r", 1_000.0)
    if step == "awaited":
        wire.sender.abort("r", "the prompt failed")
    reservation = wire.receiver.reserve("r", 16, "prefill-0", 0.0, offer=True)
    if step != "awaited":
        eventually(lambda: wire.sender.state("r") is OutboundState.OFFERED, wire.both)
    if step in ("open", "layer"):
        wire.sender.open(reservation, wire.sources(reservation), 1_000.0)
    if step == "layer":
        wire.sender.send("r", 0)
        wire.settle()
    wire.sender.abort("r", "the prompt failed")
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.why(reservation.transfer) == "the prompt failed"
    assert wire.receiver.leases.released == {ReleaseReason.ABORTED: 1}


def test_completion_is_recorded_once(open_wire: OpenWire) -> None:
    """A success would be released by a time-out, or twice."""
    wire = open_wire()
    reservation = wire.reserve(16)
    wire.sender.send_all(reservation)
    wire.finish(reservation)
    wire.receiver.take(reservation.transfer)
    for _ in range(3):
        wire.receiver.release(reservation.transfer, 1.0)
    assert wire.receiver.leases.released == {ReleaseReason.COMPLETED: 1}
    assert wire.receiver.used_bytes == 0
    assert wire.sender.may_free(reservation, channel_idle=True)


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("layers", [0, 1, 2, 3])
@pytest.mark.parametrize("settled", [False, True])
def test_abort_in_every_state(open_wire: OpenWire, side: str, layers: int, settled: bool) -> None:
    """An abort, repeated, would leave blocks held, a transfer open or KV readable; or hurt another transfer."""
    wire = open_wire()
    other, reservation = wire.reserve(8, "other"), wire.reserve(16)
    for layer in range(layers):
        wire.sender.send(reservation, layer)
    if settled:
        wire.settle()
    for _ in range(2):
        if side == "sender":
            wire.sender.abort(reservation)
        else:
            wire.receiver.abort(reservation.transfer, 0.0)
        assert side == "receiver" or wires.queued_bytes(wire.sender) == 0
        wire.settle()
    done = side == "sender" and layers == 3 and settled
    if not done:
        eventually(lambda: wire.receiver.state(reservation.transfer) is InboundState.RELEASED, wire.both)
        with pytest.raises(TransferError):
            wire.receiver.take(reservation.transfer)
        assert (wire.pool[:, list(reservation.blocks)] == POISON).all()
    ended = OutboundState.COMPLETED if layers == 3 and settled else OutboundState.FAILED
    assert wire.sender.state(reservation) is ended
    wire.sender.send_all(other)
    wire.finish(other)
    assert np.array_equal(wire.bytes_of(other), wire.expected(other))


def test_blocks_stay_held_until_the_sender_has_stopped(open_wire: OpenWire) -> None:
    """Blocks would be given to another request while bytes of the aborted one are still on their way to them."""
    wire = open_wire(blocks=4)
    reservation = wire.reserve(16)
    wire.sender.send(reservation, 0)
    wire.receiver.abort(reservation.transfer, 0.0)
    wire.step()
    with pytest.raises(NoRoomError):
        wire.receiver.reserve("next", 4, "prefill-0", 0.0)
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.reserve("next", 4, "prefill-0", 0.0).transfer != reservation.transfer


def test_reservation_too_small(open_wire: OpenWire) -> None:
    """A prompt larger than the memory would wait for ever, or be written over other blocks."""
    wire = open_wire(blocks=4)
    with pytest.raises(NoRoomError, match="5 blocks asked for, 4 are free"):
        wire.receiver.reserve("large", 17, "prefill-0", 0.0)
    reservation = wire.receiver.reserve("r", 8, "prefill-0", 0.0)
    with pytest.raises(TransferError, match="3 blocks to send, 2 are reserved"):
        wire.sender.open(reservation, (0, 1, 2), 1_000.0)
    assert wire.receiver.used_bytes == 2 * 3 * LAYOUT.block_bytes


def test_frame_outside_its_reservation_fails_that_transfer_alone(open_wire: OpenWire) -> None:
    """A frame could be written into, or be counted for, blocks of another request."""
    wire = open_wire()
    other, reservation = wire.reserve(8, "other"), wire.reserve(8)
    lie = replace(reservation, blocks=(reservation.blocks[1], reservation.blocks[1] + 1))
    wire.sender.forget(reservation)
    wire.sender._queue.clear()  # the receiver does not learn of it
    wire.sender.open(lie, (0, 1), 1_000.0)
    wire.sender.send(lie, 0)
    eventually(lambda: wire.sender.state(lie) is OutboundState.FAILED, wire.both)
    assert "outside the reservation" in wire.sender.why(lie)
    eventually(lambda: wire.receiver.state(reservation.transfer) is InboundState.RELEASED, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.REFUSED: 1}
    wire.sender.send_all(other)
    wire.finish(other)
    assert np.array_equal(wire.bytes_of(other), wire.expected(other))


def test_corruption_is_found(open_wire: OpenWire) -> None:
    """KV that changed on its way would be read: the source is changed between checksum and copy."""
    wire = open_wire()
    reservation = wire.reserve(16)
    wire.sender.send(reservation, 0)
    assert wire.sender.head() is not None
    wire.source[0, -1, 7] ^= 1
    eventually(lambda: wire.sender.state(reservation) is OutboundState.FAILED, wire.both)
    assert "wrong checksum" in wire.sender.why(reservation)
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.REFUSED: 1}


def test_repeated_and_late_messages_are_absorbed(open_wire: OpenWire) -> None:
    """A message that comes twice, or after the end, would be counted twice or free blocks of another request."""
    wire = open_wire()
    reservation = wire.reserve(8)
    wire.sender.send(reservation, 0)
    frame = wire.sender.head()
    assert frame is not None
    for _ in range(3):
        eventually(lambda: wire.channel.offer(*frame), wire.step)
    wire.settle()
    eventually(lambda: wire.receiver.absorbed["duplicate"] == 3, wire.both)
    wire.sender.send(reservation, 1)
    wire.sender.send(reservation, 2)
    wire.finish(reservation)
    wire.receiver.take(reservation.transfer)
    for kind in (MessageKind.STOPPED, MessageKind.HEARTBEAT, MessageKind.ABORT):
        wire.channel.offer(Message(kind, 1, reservation.transfer), None)
    wire.channel.offer(*frame)
    wire.settle()
    assert np.array_equal(wire.bytes_of(reservation), wire.expected(reservation))
    wire.receiver.release(reservation.transfer, 0.0)
    late = wire.receiver.absorbed["late"]
    wire.channel.offer(Message(MessageKind.ABORT, 1, reservation.transfer), None)
    eventually(lambda: wire.receiver.absorbed["late"] > late, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.COMPLETED: 1}


def test_stale_epoch_is_refused(open_wire: OpenWire) -> None:
    """An order for a receiver that was started again would be carried out in its new life."""
    wire = open_wire()
    reservation = wire.reserve(8)
    with pytest.raises(TransferError, match="epoch 0"):
        wire.sender.open(replace(reservation, epoch=0), (0, 1), 1_000.0)
    wire.channel.offer(Message(MessageKind.ABORT, 0, reservation.transfer), None)
    eventually(lambda: wire.receiver.absorbed["stale epoch"] == 1, wire.both)
    assert wire.receiver.state(reservation.transfer) is InboundState.RESERVED


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "other"),
        ("layers", 2),
        ("kv_heads", 1),
        ("head_dim", 8),
        ("dtype", "bfloat16"),
        ("block_tokens", 8),
        ("block_layout", "v then k"),
        ("protocol", 1),
    ],
)
def test_mismatch_is_refused_at_registration(open_wire: OpenWire, field: str, value: object) -> None:
    """Machines whose blocks differ would exchange them, or nobody would learn which field differs."""
    wire = open_wire(theirs=replace(LAYOUT, **{field: value}))
    ours = getattr(LAYOUT, field)
    assert f"layout {field}: ours is {ours!r}, the peer's is {value!r}" in wire.sender.lost_because
    with pytest.raises(TransferError, match=field):
        wire.reserve(4)
    wire.receiver.abort(1, 0.0)
    assert wire.receiver.used_bytes == 0


@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("layers", [0, 2, 3])
def test_every_end_of_a_channel_is_a_failure(open_wire: OpenWire, end: str, layers: int) -> None:
    """A transfer would count as done, or hold blocks, because its channel ended in good order."""
    wire = open_wire()
    reservation = wire.reserve(16)
    for layer in range(layers):
        wire.sender.send(reservation, layer)
    (wire.channel if end == "sender" else wire.channels[0]).close()
    eventually(lambda: wire.sender.state(reservation) is OutboundState.FAILED, wire.both)
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.PEER_LOST: 1}
    assert wire.channel.condition is not Condition.OPEN
    assert not wire.channel.offer(Message(MessageKind.HEARTBEAT), None)


def test_lease_expires_without_heartbeats_only(open_wire: OpenWire) -> None:
    """A lease would end while its sender is alive, or not end when it is silent."""
    wire = open_wire(lease_s=10.0)
    silent, alive = wire.receiver.reserve("silent", 8, "prefill-0", 0.0), wire.reserve(8, "alive")
    for now_s in (6.0, 12.0, 18.0):
        wire.now_s = now_s
        wire.sender.heartbeat()
        wire.settle()
    assert wire.receiver.state(alive.transfer) is InboundState.RESERVED
    eventually(lambda: wire.receiver.state(silent.transfer) is InboundState.RELEASED, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.EXPIRED: 1}


def test_what_has_arrived_waits_for_its_reader_alone(open_wire: OpenWire) -> None:
    """KV would go from under a decode phase whose machine stood still for longer than a lease: its sender is silent."""
    wire = open_wire(lease_s=10.0)
    read, unread = wire.reserve(8, "read"), wire.reserve(8, "unread")
    for reservation in (read, unread):
        wire.sender.send_all(reservation)
        wire.finish(reservation)
    blocks = wire.receiver.take(read.transfer)
    wire.now_s = 100.0
    wire.receiver.reserve("another", 8, "prefill-0", wire.now_s)
    wire.settle()
    assert wire.receiver.state(read.transfer) is InboundState.READING
    assert wire.receiver.take(unread.transfer) == unread.blocks
    assert blocks == read.blocks
    assert not wire.receiver.leases.released


def test_sender_that_does_not_stop_is_cut(open_wire: OpenWire) -> None:
    """Blocks of an expired lease would stay held for ever because the sender does not answer."""
    wire = open_wire(lease_s=10.0)
    wire.reserve(8)
    for now_s in (11.0, 22.0, 33.0):
        wire.now_s = now_s
        wire.step()
    # Whoever writes into our memory is only known to have stopped when its own end is closed.
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.EXPIRED: 1}
    eventually(lambda: wire.channel.condition is not Condition.OPEN, wire.both)


def test_many_small_transfers_leave_nothing(open_wire: OpenWire) -> None:
    """Handles, leases or memory of ended transfers would pile up."""
    wire = open_wire()
    for number in range(2_000):
        reservation = wire.reserve(3, str(number))
        wire.sender.send_all(reservation)
        wire.finish(reservation)
        wire.receiver.take(reservation.transfer)
        wire.receiver.release(reservation.transfer, 0.0)
        wire.sender.forget(reservation)
        if number == 0:
            before = open_files()
    assert open_files() == before
    assert wire.receiver.leases.released == {ReleaseReason.COMPLETED: 2_000}
    assert wire.receiver.used_bytes == wires.queued_bytes(wire.sender) == 0


def test_full_channel_pushes_back(open_wire: OpenWire) -> None:
    """A sender would lose frames, or wait, when its receiver does not read."""
    layout = replace(LAYOUT, block_tokens=256)
    wire = open_wire(layout=layout, blocks=512, frame_bytes=layout.block_bytes)
    reservation = wire.reserve(256 * 512)
    wire.sender.send_all(reservation)
    queued = wires.queued_bytes(wire.sender)
    assert queued == wire.source.nbytes
    wires.drive_sender(wire.sender, wire.channel, 0.0)
    wires.drive_sender(wire.sender, wire.channel, 0.0)
    assert 0 < wires.queued_bytes(wire.sender) < queued
    wire.finish(reservation)
    assert np.array_equal(wire.bytes_of(reservation), wire.source)


def test_source_blocks_are_kept_until_the_channel_has_read_them(open_wire: OpenWire) -> None:
    """The prefill machine would reuse blocks of an aborted transfer while the channel still sends from them."""
    layout = replace(LAYOUT, block_tokens=2**16)
    wire = open_wire(layout=layout, blocks=4)
    reservation = wire.reserve(4 * 2**16)
    wire.sender.send_all(reservation)
    for _ in range(4):
        wires.drive_sender(wire.sender, wire.channel, 0.0)
    assert not wire.sender.may_free(reservation, channel_idle=wire.channel.flush())
    wire.sender.abort(reservation)
    assert wire.sender.state(reservation) is OutboundState.FAILED
    partly_sent = not wire.channel.flush()
    assert wire.transport == "nixl" or partly_sent == isinstance(wire.channel, TcpChannel)
    assert wire.sender.may_free(reservation, channel_idle=wire.channel.flush()) != partly_sent
    eventually(lambda: wire.sender.may_free(reservation, channel_idle=wire.channel.flush()), wire.both)
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)


def test_a_writer_that_went_astray_keeps_its_blocks_until_it_is_gone() -> None:
    """Blocks would go to another request while a process that speaks nonsense can still write to them."""
    wire = Wire("shared-memory")
    wire.reserve(16)
    wire.channel._socket.send(b"nonsense" * 20)
    wire.channel._socket.send(Message(MessageKind.HEARTBEAT, epoch=0, transfer=99).pack())
    for _ in range(3):
        wire.step()
        assert wire.receiver.used_bytes
    eventually(lambda: wire.receiver.used_bytes == 0, wire.both)
    assert wire.receiver.leases.released == {ReleaseReason.PEER_LOST: 1}
    wire.close()


@pytest.mark.parametrize("transport", WITH_PROCESSES)
@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n" * 9, b"\0" * 100, Message(MessageKind.HELLO).pack()[:-1] + b"x" * 90]
)
def test_a_peer_that_does_not_identify_itself_hurts_nobody(transport: str, garbage: bytes) -> None:
    """Bytes that are not the protocol would stop the receiver, or another machine's transfers."""
    wire = Wire(transport)
    reservation = wire.reserve(16)
    if transport == "tcp":
        peer = socket.create_connection(("127.0.0.1", int(wire.address)))
    else:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(wire.address)
    with peer:
        peer.send(garbage)
        peer.settimeout(PATIENCE_S)
        eventually(lambda: len(wire.channels) == 2, wire.both)
        wire.settle()
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
        # Whoever could write into shared memory is watched until its own end is closed.
        assert (wire.channels[1].condition is Condition.OPEN) == (transport == "shared-memory")
    eventually(lambda: wire.channels[1].condition is not Condition.OPEN, wire.both)
    wire.sender.send_all(reservation)
    wire.finish(reservation)
    wire.close()


@pytest.mark.parametrize("transport", WITH_PROCESSES)
@pytest.mark.parametrize("layers", [0, 2, 3])
def test_sender_killed_in_mid_transfer(transport: str, layers: int) -> None:
    """A sender's death would leave blocks held, or a transfer that lacks layers readable; or undo a whole one."""
    before = open_files()
    kill_in_mid_transfer(transport, layers)
    assert none_left_open(before)


def kill_in_mid_transfer(transport: str, layers: int) -> None:
    """Let another process send so many layers, kill it, and look at what is left."""
    end = Receiving(transport)
    reservation = end.receiver.reserve("r", 16, "prefill-0", 0.0)
    blocks = ",".join(map(str, reservation.blocks))
    sender = subprocess.Popen(
        [sys.executable, "-m", wires.__name__, transport, end.address, blocks, str(layers)],
        cwd=Path(wires.__file__).parent.parent,
    )
    try:
        arrived = functools.partial(end.receiver.layers_arrived, reservation.transfer)
        eventually(lambda: len(end.channels) == 1 and arrived() == layers, lambda: end.step(0.05))
        os.kill(sender.pid, signal.SIGKILL)
        eventually(lambda: end.channels[0].condition is not Condition.OPEN, lambda: end.step(0.05))
    finally:
        sender.kill()
        sender.wait()
    if layers == LAYOUT.layers:
        assert np.array_equal(end.bytes_of(reservation), wires.needles(LAYOUT, 16)[:, list(reservation.blocks)])
        end.receiver.release(reservation.transfer, 0.0)
    else:
        end.now_s = 31.0  # it may have ended before it had registered: then only the lease runs out
        end.step()
        with pytest.raises(TransferError):
            end.receiver.take(reservation.transfer)
    assert end.receiver.used_bytes == 0
    end.close()
