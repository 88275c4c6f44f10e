"""Why a transfer did not bring its KV cache, and why held blocks were given back."""

from enum import Enum

from phasesplit.errors import TransferError


class LayoutMismatchError(TransferError):
    """Two machines cannot exchange blocks; the message names the field and both values."""


class NoRoomError(TransferError):
    """A reservation does not fit into the blocks that are free."""


class Reason(Enum):
    """Why a reservation was released; each is released once, with one of these."""

    COMPLETED = "completed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    REFUSED = "refused"
    PEER_LOST = "peer lost"
