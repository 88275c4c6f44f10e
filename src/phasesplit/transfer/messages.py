"""What travels between the two ends: one header of fixed size, then a frame's blocks or a short text."""

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from phasesplit.errors import TransferError

_FIELDS = struct.Struct("<4sB3xQQIIIII")  # magic, kind, epoch, transfer, layer, first, blocks, checksum, length
_SEAL = struct.Struct("<I")
_MAGIC = b"pskv"
HEADER_BYTES = _FIELDS.size + _SEAL.size
LONGEST_TEXT_BYTES = 64 * 1024
LONGEST_FRAME_BYTES = 64 * 1024 * 1024


class Kind(IntEnum):
    """What a message says; who sends it is in brackets."""

    HELLO = 1  # [sender] a greeting
    WELCOME = 2  # [receiver] its greeting: the layouts are equal
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

    kind: Kind
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
        length_bytes = self.length_bytes if self.kind is Kind.FRAME else len(self.text)
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
    if magic != _MAGIC or kind not in Kind.__members__.values():
        raise TransferError("a message header of another protocol")
    limit_bytes = LONGEST_FRAME_BYTES if kind == Kind.FRAME else LONGEST_TEXT_BYTES
    if length_bytes > limit_bytes:
        raise TransferError(f"a message of {length_bytes} bytes, allowed are {limit_bytes}")
    return Message(Kind(kind), epoch, transfer, layer, first, blocks, checksum, length_bytes, text)


def reason_text(reason: str) -> bytes:
    """Return a reason as the text of a message, cut to what is allowed."""
    return reason.encode(errors="replace")[:LONGEST_TEXT_BYTES]
