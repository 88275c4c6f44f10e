"""The states of a transfer, seen from each end: every event in every state, as tables.

An event that leaves a state as it is has come late or twice: it is absorbed and counted. `READ` where nothing may be
read is the only mistake of a caller, and `None`.
"""

from collections.abc import Mapping
from enum import Enum, auto


class InboundState(Enum):
    """A transfer at its receiver."""

    RESERVED = auto()  # blocks are held, nothing has come
    RECEIVING = auto()  # some frames, or the note, have come
    READY = auto()  # every layer is there, and the note if one is wanted; each checksum was right
    READING = auto()  # the decode phase has the blocks
    DRAINING = auto()  # failed; blocks are held until the sender cannot write to them any more
    RELEASED = auto()  # the blocks are free


class InboundEvent(Enum):
    """What happens to a transfer at its receiver."""

    PART = auto()  # a frame or the note came whole
    LAST_PART = auto()  # a frame or the note came whole, and nothing is missing now
    BAD_PART = auto()  # wrong checksum, or outside the reservation
    READ = auto()  # the decode phase takes the blocks
    RELEASE = auto()  # the decode phase is done, or never began
    ABORT = auto()  # our side aborts
    EXPIRE = auto()  # nothing of the sender came before the deadline
    PEER_ABORT = auto()  # the sender aborts, and has stopped
    PEER_STOPPED = auto()  # the sender has stopped because we aborted
    PEER_LOST = auto()  # the channel ended in any way


class OutboundState(Enum):
    """A transfer at its sender."""

    AWAITED = auto()  # the prompt is here, the receiver's offer is not
    OFFERED = auto()  # the receiver's blocks are known
    OPEN = auto()  # layers may be sent
    SENT = auto()  # all frames, and the note, are handed over; the receiver's completion is awaited
    COMPLETED = auto()  # the receiver has everything
    FAILED = auto()  # anything else


class OutboundEvent(Enum):
    """What happens to a transfer at its sender."""

    OFFER = auto()  # the receiver says which blocks wait
    BEGIN = auto()  # our blocks are named
    LAST_SENT = auto()  # a channel took the last part
    PEER_READY = auto()  # the receiver's completion
    PEER_ABORT = auto()  # the receiver aborts
    ABORT = auto()  # our side aborts
    EXPIRE = auto()  # not complete before the deadline
    PEER_LOST = auto()  # the channel ended in any way


def _failing(state: InboundState) -> dict[InboundEvent, InboundState | None]:
    """Return the row of a state in which the sender may still write: whatever goes wrong, it must stop first."""
    return {
        InboundEvent.PART: InboundState.RECEIVING,
        InboundEvent.LAST_PART: InboundState.READY,
        InboundEvent.BAD_PART: InboundState.DRAINING,
        InboundEvent.READ: None,
        InboundEvent.RELEASE: InboundState.DRAINING,
        InboundEvent.ABORT: InboundState.DRAINING,
        InboundEvent.EXPIRE: InboundState.DRAINING,
        InboundEvent.PEER_ABORT: InboundState.RELEASED,
        InboundEvent.PEER_STOPPED: state,
        InboundEvent.PEER_LOST: InboundState.RELEASED,
    }


def _whole(state: InboundState, after_peer_abort: InboundState) -> dict[InboundEvent, InboundState | None]:
    """Return the row of a state in which everything has arrived: the sender writes no more.

    A deadline passes without consequence: it bounds the time without the sender, and what is here waits for its
    reader, even for one that computes for longer than a lease. Until it is read the sender may still take it back.
    """
    return {
        **dict.fromkeys(InboundEvent, state),
        InboundEvent.READ: InboundState.READING,
        InboundEvent.RELEASE: InboundState.RELEASED,
        InboundEvent.ABORT: InboundState.RELEASED,
        InboundEvent.PEER_ABORT: after_peer_abort,
    }


INBOUND_TABLE: Mapping[InboundState, Mapping[InboundEvent, InboundState | None]] = {
    InboundState.RESERVED: _failing(InboundState.RESERVED),
    InboundState.RECEIVING: _failing(InboundState.RECEIVING),
    InboundState.READY: _whole(InboundState.READY, InboundState.RELEASED),
    InboundState.READING: _whole(InboundState.READING, InboundState.READING),
    InboundState.DRAINING: {
        **dict.fromkeys(InboundEvent, InboundState.DRAINING),
        InboundEvent.READ: None,
        InboundEvent.PEER_ABORT: InboundState.RELEASED,
        InboundEvent.PEER_STOPPED: InboundState.RELEASED,
        InboundEvent.PEER_LOST: InboundState.RELEASED,
    },
    InboundState.RELEASED: {**dict.fromkeys(InboundEvent, InboundState.RELEASED), InboundEvent.READ: None},
}


def _going_on(changes: Mapping[OutboundEvent, OutboundState]) -> dict[OutboundEvent, OutboundState]:
    """Return the row of a state that any other event ends.

    A completion of what was not sent is wrong, so the transfer fails.
    """
    return {**dict.fromkeys(OutboundEvent, OutboundState.FAILED), **changes}


OUTBOUND_TABLE: Mapping[OutboundState, Mapping[OutboundEvent, OutboundState]] = {
    OutboundState.AWAITED: _going_on({OutboundEvent.OFFER: OutboundState.OFFERED}),
    OutboundState.OFFERED: _going_on(
        {OutboundEvent.OFFER: OutboundState.OFFERED, OutboundEvent.BEGIN: OutboundState.OPEN},
    ),
    OutboundState.OPEN: _going_on(
        {OutboundEvent.OFFER: OutboundState.OPEN, OutboundEvent.LAST_SENT: OutboundState.SENT}
    ),
    OutboundState.SENT: _going_on(
        {
            OutboundEvent.OFFER: OutboundState.SENT,
            OutboundEvent.LAST_SENT: OutboundState.SENT,
            OutboundEvent.PEER_READY: OutboundState.COMPLETED,
        }
    ),
    OutboundState.COMPLETED: dict.fromkeys(OutboundEvent, OutboundState.COMPLETED),
    OutboundState.FAILED: dict.fromkeys(OutboundEvent, OutboundState.FAILED),
}
