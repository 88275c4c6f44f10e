"""The tables of states: every event in every state, and where they can lead."""

from phasesplit.kv_transfer.transfer_states import (
    ARRIVAL_TABLE,
    DEPARTURE_TABLE,
    Arrival,
    ArrivalEvent,
    Departure,
    DepartureEvent,
)


def test_every_event_has_a_place_in_every_state() -> None:
    """An event in some state would raise a KeyError in the middle of a transfer."""
    assert {state: set(row) for state, row in ARRIVAL_TABLE.items()} == {s: set(ArrivalEvent) for s in Arrival}
    assert {state: set(row) for state, row in DEPARTURE_TABLE.items()} == {s: set(DepartureEvent) for s in Departure}


def test_kv_is_read_only_where_everything_has_arrived() -> None:
    """KV of a transfer that is not whole, or has failed, could be read."""
    readable = {state for state, row in ARRIVAL_TABLE.items() if row[ArrivalEvent.READ] is not None}
    assert readable == {Arrival.READY, Arrival.READING}
    ways_to_ready = {
        (state, event) for state, row in ARRIVAL_TABLE.items() for event, after in row.items() if after is Arrival.READY
    }
    into = {(state, event) for state, event in ways_to_ready if state is not Arrival.READY}
    assert into == {(Arrival.RESERVED, ArrivalEvent.LAST_PART), (Arrival.RECEIVING, ArrivalEvent.LAST_PART)}


def test_failure_is_for_ever() -> None:
    """A transfer that has failed would come back to life."""
    for state in (Arrival.DRAINING, Arrival.RELEASED):
        after = set(ARRIVAL_TABLE[state].values()) - {None}
        assert after <= {Arrival.DRAINING, Arrival.RELEASED}
    assert set(ARRIVAL_TABLE[Arrival.RELEASED].values()) == {Arrival.RELEASED, None}
    assert set(DEPARTURE_TABLE[Departure.FAILED].values()) == {Departure.FAILED}


def test_blocks_are_not_freed_under_a_writer() -> None:
    """Blocks would be freed by our own decision while the sender may still write to them."""
    ours = {ArrivalEvent.ABORT, ArrivalEvent.RELEASE, ArrivalEvent.EXPIRE, ArrivalEvent.BAD_PART}
    for state in (Arrival.RESERVED, Arrival.RECEIVING, Arrival.DRAINING):
        assert {ARRIVAL_TABLE[state][event] for event in ours} == {Arrival.DRAINING}


def test_blocks_are_not_freed_under_a_reader() -> None:
    """A decode phase would read what another request writes, because its machine was busy for longer than a lease."""
    ours = {ArrivalEvent.RELEASE, ArrivalEvent.ABORT}
    assert {event for event, after in ARRIVAL_TABLE[Arrival.READING].items() if after is Arrival.RELEASED} == ours


def test_every_state_can_end() -> None:
    """A transfer would hold its blocks whatever happens."""
    for state in Arrival:
        assert Arrival.RELEASED in ARRIVAL_TABLE[state].values()


def test_only_the_receivers_word_completes_a_transfer() -> None:
    """A sender would believe in a success that its receiver has not seen."""
    completing = {
        (state, event)
        for state, row in DEPARTURE_TABLE.items()
        for event, after in row.items()
        if after is Departure.COMPLETED and state is not Departure.COMPLETED
    }
    assert completing == {(Departure.SENT, DepartureEvent.PEER_READY)}
