"""A reservation, and how it travels from the receiver to the sender: as an offer under the key of its request."""

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from phasesplit.errors import TransferError
from phasesplit.transfer.messages import LONGEST_TEXT_BYTES


@dataclass(frozen=True, slots=True)
class Reservation:
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


def offer_text(key: str, reservation: Reservation) -> bytes:
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


def read_offer(text: bytes, most_blocks: int) -> tuple[str, Reservation]:
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
        reservation = Reservation(blocks=tuple(blocks), **parts)
        key = offer["key"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TransferError(f"not an offer: {error}") from error
    numbers = (reservation.epoch, reservation.transfer, reservation.tokens)
    if not isinstance(key, str) or not isinstance(reservation.machine, str) or not blocks:
        raise TransferError("not an offer: key, machine or blocks of the wrong type")
    if not all(isinstance(number, int) for number in numbers) or not isinstance(reservation.wants_note, bool):
        raise TransferError("not an offer: epoch, transfer, tokens or wants_note of the wrong type")
    return key, reservation
