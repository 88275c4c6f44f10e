"""The states of a transfer, seen from each end: every event in every state, as tables.

An event that leaves a state as it is has come late or twice: it is absorbed and counted. `READ` where nothing may be
read is the only mistake of a caller, and `None`.
"""

from collections.abc import Mapping
from enum import Enum, auto


class Arrival(Enum):
    """A transfer at its receiver."""

    RESERVED = auto()  # blocks are held, nothing has come
    RECEIVING = auto()  # some frames, or the note, have come
    READY = auto()  # every layer is there, and the note if one is wanted; each checksum was right
    READING = auto()  # the decode phase has the blocks
    DRAINING = auto()  # failed; blocks are held until the sender cannot write to them any more
    RELEASED = auto()  # the blocks are free


class ArrivalEvent(Enum):
    """What happens to a transfer at its receiver."""

    PART = auto()  # a frame or the note came whole
    LAST_PART = auto()  # a frame or the note came whole, and nothing is missing now
    BAD_PART = auto()  # wrong checksum, or outside the reservation
    READ = auto()  # the decode phase takes the blocks
    RELEASE = auto()  # the decode phase is done, or never began
    ABORT = auto()  # our side gives up
    EXPIRE = auto()  # no word of the sender before the deadline
    PEER_ABORT = auto()  # the sender gives up, and has stopped
    PEER_STOPPED = auto()  # the sender has stopped because we gave up
    PEER_LOST = auto()  # the channel ended in any way


class Departure(Enum):
    """A transfer at its sender."""

    AWAITED = auto()  # the prompt is here, the receiver's offer is not
    OFFERED = auto()  # the receiver's blocks are known
    OPEN = auto()  # layers may be sent
    SENT = auto()  # all frames, and the note, are handed over; the receiver's completion is awaited
    COMPLETED = auto()  # the receiver has everything
    FAILED = auto()  # anything else


class DepartureEvent(Enum):
    """What happens to a transfer at its sender."""

    OFFER = auto()  # the receiver says which blocks wait
    BEGIN = auto()  # our blocks are named
    LAST_SENT = auto()  # a channel took the last part
    PEER_READY = auto()  # the receiver's completion
    PEER_ABORT = auto()  # the receiver gives up
    ABORT = auto()  # our side gives up
    EXPIRE = auto()  # not complete before the deadline
    PEER_LOST = auto()  # the channel ended in any way


def _failing(state: Arrival) -> dict[ArrivalEvent, Arrival | None]:
    """Return the row of a state in which the sender may still write: whatever goes wrong, it must stop first."""
    return {
        ArrivalEvent.PART: Arrival.RECEIVING,
        ArrivalEvent.LAST_PART: Arrival.READY,
        ArrivalEvent.BAD_PART: Arrival.DRAINING,
        ArrivalEvent.READ: None,
        ArrivalEvent.RELEASE: Arrival.DRAINING,
        ArrivalEvent.ABORT: Arrival.DRAINING,
        ArrivalEvent.EXPIRE: Arrival.DRAINING,
        ArrivalEvent.PEER_ABORT: Arrival.RELEASED,
        ArrivalEvent.PEER_STOPPED: state,
        ArrivalEvent.PEER_LOST: Arrival.RELEASED,
    }


def _whole(state: Arrival, after_peer_abort: Arrival) -> dict[ArrivalEvent, Arrival | None]:
    """Return the row of a state in which everything has arrived: the sender writes no more.

    A deadline passes without consequence: it waits for the sender's word, and what is here waits for its reader, even
    for one that computes for longer than a lease. Until it is read the sender may still take it back.
    """
    return {
        **dict.fromkeys(ArrivalEvent, state),
        ArrivalEvent.READ: Arrival.READING,
        ArrivalEvent.RELEASE: Arrival.RELEASED,
        ArrivalEvent.ABORT: Arrival.RELEASED,
        ArrivalEvent.PEER_ABORT: after_peer_abort,
    }


ARRIVAL_TABLE: Mapping[Arrival, Mapping[ArrivalEvent, Arrival | None]] = {
    Arrival.RESERVED: _failing(Arrival.RESERVED),
    Arrival.RECEIVING: _failing(Arrival.RECEIVING),
    Arrival.READY: _whole(Arrival.READY, Arrival.RELEASED),
    Arrival.READING: _whole(Arrival.READING, Arrival.READING),
    Arrival.DRAINING: {
        **dict.fromkeys(ArrivalEvent, Arrival.DRAINING),
        ArrivalEvent.READ: None,
        ArrivalEvent.PEER_ABORT: Arrival.RELEASED,
        ArrivalEvent.PEER_STOPPED: Arrival.RELEASED,
        ArrivalEvent.PEER_LOST: Arrival.RELEASED,
    },
    Arrival.RELEASED: {**dict.fromkeys(ArrivalEvent, Arrival.RELEASED), ArrivalEvent.READ: None},
}


def _going_on(changes: Mapping[DepartureEvent, Departure]) -> dict[DepartureEvent, Departure]:
    """Return the row of a state that any other event ends.

    A completion for what was not sent is a lie of the peer: nothing may be built on it.
    """
    return {**dict.fromkeys(DepartureEvent, Departure.FAILED), **changes}


DEPARTURE_TABLE: Mapping[Departure, Mapping[DepartureEvent, Departure]] = {
    Departure.AWAITED: _going_on({DepartureEvent.OFFER: Departure.OFFERED}),
    Departure.OFFERED: _going_on(
        {DepartureEvent.OFFER: Departure.OFFERED, DepartureEvent.BEGIN: Departure.OPEN},
    ),
    Departure.OPEN: _going_on({DepartureEvent.OFFER: Departure.OPEN, DepartureEvent.LAST_SENT: Departure.SENT}),
    Departure.SENT: _going_on(
        {
            DepartureEvent.OFFER: Departure.SENT,
            DepartureEvent.LAST_SENT: Departure.SENT,
            DepartureEvent.PEER_READY: Departure.COMPLETED,
        }
    ),
    Departure.COMPLETED: dict.fromkeys(DepartureEvent, Departure.COMPLETED),
    Departure.FAILED: dict.fromkeys(DepartureEvent, Departure.FAILED),
}
