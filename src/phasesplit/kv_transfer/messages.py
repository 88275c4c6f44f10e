"""The messages of a transfer, and what both ends use to make and to check them.

- `Message`: a header of fixed size, then a frame's blocks or a short text.
- `ReservedBlocks`: what a receiver holds for a request; it travels to the sender as the text of an OFFER.
- `BlockRun`: which blocks travel in one frame: neighbours on both ends, no longer than a frame may be.
- `checksum`: of a frame.
- `TransferTimeouts`, the errors, and the reasons why held blocks are given back.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError

_FIELDS = struct.Struct("<4sB3xQQIIIII")  # magic, kind, epoch, transfer, layer, first, blocks, checksum, length
_SEAL = struct.Struct("<I")
_MAGIC = b"pskv"
HEADER_BYTES = _FIELDS.size + _SEAL.size
LONGEST_TEXT_BYTES = 64 * 1024
LONGEST_FRAME_BYTES = 64 * 1024 * 1024


class MessageKind(IntEnum):
    """What a message says; who sends it is in brackets."""

    HELLO = 1  # [sender] who it is
    WELCOME = 2  # [receiver] who it is: the layouts are equal
    REFUSE = 3  # [receiver] the layouts or keys differ, or the epoch is stale: the reason
    FRAME = 4  # [sender] blocks of one layer of one transfer
    READY = 5  # [receiver] all layers are there: the one completion of a transfer
    ABORT = 6  # [both] nothing more is wanted, or will come
    STOPPED = 7  # [sender] answer to ABORT: no byte of the transfer is on its way
    HEARTBEAT = 8  # [sender] the transfer is still wanted: its lease is extended
    OFFER = 9  # [receiver] blocks wait for the KV of a request: its key, and the reservation
    NOTE = 10  # [sender] a short text that belongs to a transfer, opaque here
    CHALLENGE = 11  # [receiver] answer to HELLO where the cluster has a key: what a proof is wanted over
    PROOF = 12  # [sender] it knows the key


@dataclass(frozen=True, slots=True)
class Message:
    """One message without the blocks of a frame.

    Attributes:
        kind: What it says.
        epoch: Epoch of the receiver that made the reservation (HELLO, WELCOME, REFUSE, CHALLENGE, PROOF: 0).
        transfer: Number that the receiver gave the reservation; never used twice in an epoch.
        layer: Layer of a frame.
        first_block: First block of a frame in the receiver's pool.
        blocks: Blocks of a frame.
        checksum: Checksum of a frame's blocks or of a note's text.
        length_bytes: Bytes that follow the header: the frame's blocks or the text.
        text: Who one is, a reason, offer, note, challenge or proof.
    """

    kind: MessageKind
    epoch: int = 0
    transfer: int = 0
    layer: int = 0
    first_block: int = 0
    blocks: int = 0
    checksum: int = 0
    length_bytes: int = 0
    text: bytes = b""

    def pack(self) -> bytes:
        """Return header and text, ready for the wire."""
        length_bytes = self.length_bytes if self.kind is MessageKind.FRAME else len(self.text)
        head = _FIELDS.pack(
            _MAGIC,
            self.kind,
            self.epoch,
            self.transfer,
            self.layer,
            self.first_block,
            self.blocks,
            self.checksum,
            length_bytes,
        )
        return head + _SEAL.pack(zlib.crc32(head)) + self.text


def unpack(header: bytes | bytearray | memoryview, text: bytes = b"") -> Message:
    """Read a header; `length_bytes` says what follows it.

    Args:
        header: `HEADER_BYTES` bytes.
        text: The text, where it is already there.

    Raises:
        TransferError: This is no header, it is damaged, or it announces more than is allowed.
    """
    head = bytes(header[: _FIELDS.size])
    if len(header) != HEADER_BYTES or _SEAL.unpack_from(header, _FIELDS.size)[0] != zlib.crc32(head):
        raise TransferError("a message header is damaged")
    magic, kind, epoch, transfer, layer, first, blocks, checksum, length_bytes = _FIELDS.unpack(head)
    if magic != _MAGIC or kind not in MessageKind.__members__.values():
        raise TransferError("a message header of another protocol")
    limit_bytes = LONGEST_FRAME_BYTES if kind == MessageKind.FRAME else LONGEST_TEXT_BYTES
    if length_bytes > limit_bytes:
        raise TransferError(f"a message of {length_bytes} bytes, allowed are {limit_bytes}")
    return Message(MessageKind(kind), epoch, transfer, layer, first, blocks, checksum, length_bytes, text)


def reason_text(reason: str) -> bytes:
    """Return a reason as the text of a message, cut to what is allowed."""
    return reason.encode(errors="replace")[:LONGEST_TEXT_BYTES]


@dataclass(frozen=True, slots=True)
class ReservedBlocks:
    """What a sender must know of the blocks that wait for it.

    Attributes:
        machine: The receiver.
        epoch: Its epoch.
        transfer: Number of the reservation.
        tokens: Tokens of the prompt, >= 1.
        blocks: Blocks in the receiver's pool; the i-th is for the i-th block of the prompt.
        wants_note: Whether the transfer is whole only with a note.
    """

    machine: str
    epoch: int
    transfer: int
    tokens: int
    blocks: tuple[int, ...]
    wants_note: bool = False


def offer_text(key: str, reservation: ReservedBlocks) -> bytes:
    """Return an offer as JSON, UTF-8; neighbouring blocks are written as the first one and how many.

    Args:
        key: What both ends call the request.
        reservation: Blocks, at least one, ascending.

    Raises:
        TransferError: The blocks are in too many pieces for one message.
    """
    # In an ascending row, number less place is equal exactly among neighbours.
    pieces = [
        [members[0][1], len(members)]
        for _, group in groupby(enumerate(reservation.blocks), lambda pair: pair[1] - pair[0])
        if (members := list(group))
    ]
    parts = {
        "machine": reservation.machine,
        "epoch": reservation.epoch,
        "transfer": reservation.transfer,
        "tokens": reservation.tokens,
        "pieces": pieces,
        "wants_note": reservation.wants_note,
    }
    text = json.dumps({"key": key, "reservation": parts}, separators=(",", ":")).encode()
    if len(text) > LONGEST_TEXT_BYTES:
        raise TransferError(
            f"request {key}: its {len(reservation.blocks)} blocks are in {len(pieces)} pieces, too many"
        )
    return text


def read_offer(text: bytes, most_blocks: int) -> tuple[str, ReservedBlocks]:
    """Read an offer.

    Args:
        text: What `offer_text` wrote.
        most_blocks: Blocks of the receiver's pool: none outside it may be offered.

    Returns:
        The key and the reservation.

    Raises:
        TransferError: It is not an offer.
    """
    try:
        offer: dict[str, Any] = json.loads(text)
        parts = offer["reservation"]
        blocks: list[int] = []
        for first, count in parts.pop("pieces"):
            ascends = first > blocks[-1] if blocks else first >= 0
            if not ascends or count < 1 or first + count > most_blocks:
                raise TransferError(f"not an offer: {count} blocks from {first}, the pool has {most_blocks}")
            blocks += range(first, first + count)
        reservation = ReservedBlocks(blocks=tuple(blocks), **parts)
        key = offer["key"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TransferError(f"not an offer: {error}") from error
    numbers = (reservation.epoch, reservation.transfer, reservation.tokens)
    if not isinstance(key, str) or not isinstance(reservation.machine, str) or not blocks:
        raise TransferError("not an offer: key, machine or blocks of the wrong type")
    if not all(isinstance(number, int) for number in numbers) or not isinstance(reservation.wants_note, bool):
        raise TransferError("not an offer: epoch, transfer, tokens or wants_note of the wrong type")
    return key, reservation


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Neighbouring blocks on both ends.

    Attributes:
        transfer: Number of the reservation.
        layer: The layer.
        source: First block in the sender's pool.
        target: First block in the receiver's pool.
        blocks: How many, >= 1.
    """

    transfer: int
    layer: int
    source: int
    target: int
    blocks: int


def runs(
    transfer: int, layer: int, sources: tuple[int, ...], targets: tuple[int, ...], places: range, longest: int
) -> Iterator[BlockRun]:
    """Yield the runs of some blocks of a request, in order.

    Args:
        transfer: Number of the reservation.
        layer: The layer.
        sources: Blocks of the request at the sender.
        targets: Its blocks at the receiver, as many.
        places: Which of them, at least one.
        longest: Blocks of a frame at most, >= 1.
    """
    start = places.start
    for at in range(places.start + 1, places.stop + 1):
        joined = (
            at < places.stop
            and at - start < longest
            and sources[at] == sources[at - 1] + 1
            and targets[at] == targets[at - 1] + 1
        )
        if not joined:
            yield BlockRun(transfer, layer, sources[start], targets[start], at - start)
            start = at


_ROW_WORDS = 509
_ROW_BYTES = 8 * _ROW_WORDS
_SHORT_BYTES = 4 * _ROW_BYTES  # below, CRC-32 of the bytes costs less than the sums


def checksum(frame: NDArray[np.uint8]) -> int:
    """Return the checksum of a frame, 0 to 2^32 - 1: CRC-32 of the sums of its columns and of the remaining bytes.

    The frame is read as rows of 509 words of 64 bits, and each column is summed modulo 2^64. One changed bit, and a
    zeroed, stale or foreign stretch, change a sum. So do two stretches swapped, unless their distance is a multiple of
    509 words: 509 is a prime that divides no size of a block (heads, head sizes and block sizes are small or round). It
    finds accidents, not forgeries.

    CRC-32 of all bytes is slower: measured on one core of an EPYC, `zlib.crc32` reads 4.2 GB/s and the sums 17 GB/s,
    where a copy in memory makes 9 to 14 GB/s. `xxhash` is not in the standard library.

    Args:
        frame: The bytes, uint8 (n,), contiguous.

    Source: ours.
    """
    whole_bytes = len(frame) // _ROW_BYTES * _ROW_BYTES
    if whole_bytes < _SHORT_BYTES:
        return zlib.crc32(frame.data)
    sums = np.add.reduce(frame[:whole_bytes].view(np.uint64).reshape(-1, _ROW_WORDS), axis=0)
    return zlib.crc32(frame[whole_bytes:].data, zlib.crc32(sums.data))


Clock = Callable[[], float]
"""Returns the instant in seconds; never goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimeouts:
    """How long each thing may take.

    Attributes:
        lease_s: Time that reserved blocks are held without a message of their sender, > 0.
        heartbeat_s: Time between the sender's heartbeats, below `lease_s`, > 0.
        answer_s: Time for each end to do its part of the handshake, > 0. A machine answers between two
            iterations, so it is longer than the longest one.
        transfer_s: Time from the order, and again from its opening, to the completion of a transfer, > 0.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 5.0
    answer_s: float = 10.0
    transfer_s: float = 120.0


class LayoutMismatchError(TransferError):
    """Two machines cannot exchange blocks; the message names the field and both values."""


class NoRoomError(TransferError):
    """A reservation does not fit into the blocks that are free."""


class ReleaseReason(Enum):
    """Why a reservation was released; each is released once, with one of these."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    REFUSED = "refused"
    PEER_LOST = "peer lost"
