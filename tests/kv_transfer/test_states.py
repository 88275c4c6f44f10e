"""The tables of states: every event in every state, and where they can lead."""

from phasesplit.kv_transfer.transfer_states import (
    INBOUND_TABLE,
    OUTBOUND_TABLE,
    InboundEvent,
    InboundState,
    OutboundEvent,
    OutboundState,
)


def test_every_event_has_a_place_in_every_state() -> None:
    """An event in some state would raise a KeyError in the middle of a transfer."""
    assert {state: set(row) for state, row in INBOUND_TABLE.items()} == {s: set(InboundEvent) for s in InboundState}
    assert {state: set(row) for state, row in OUTBOUND_TABLE.items()} == {s: set(OutboundEvent) for s in OutboundState}


def test_kv_is_read_only_where_everything_has_arrived() -> None:
    """KV of a transfer that is not whole, or has failed, could be read."""
    readable = {state for state, row in INBOUND_TABLE.items() if row[InboundEvent.READ] is not None}
    assert readable == {InboundState.READY, InboundState.READING}
    ways_to_ready = {
        (state, event)
        for state, row in INBOUND_TABLE.items()
        for event, after in row.items()
        if after is InboundState.READY
    }
    into = {(state, event) for state, event in ways_to_ready if state is not InboundState.READY}
    assert into == {(InboundState.RESERVED, InboundEvent.LAST_PART), (InboundState.RECEIVING, InboundEvent.LAST_PART)}


def test_failure_is_for_ever() -> None:
    """A transfer that has failed would come back to life."""
    for state in (InboundState.DRAINING, InboundState.RELEASED):
        after = set(INBOUND_TABLE[state].values()) - {None}
        assert after <= {InboundState.DRAINING, InboundState.RELEASED}
    assert set(INBOUND_TABLE[InboundState.RELEASED].values()) == {InboundState.RELEASED, None}
    assert set(OUTBOUND_TABLE[OutboundState.FAILED].values()) == {OutboundState.FAILED}


def test_blocks_are_not_freed_under_a_writer() -> None:
    """Blocks would be freed by our own decision while the sender may still write to them."""
    ours = {InboundEvent.ABORT, InboundEvent.RELEASE, InboundEvent.EXPIRE, InboundEvent.BAD_PART}
    for state in (InboundState.RESERVED, InboundState.RECEIVING, InboundState.DRAINING):
        assert {INBOUND_TABLE[state][event] for event in ours} == {InboundState.DRAINING}


def test_blocks_are_not_freed_under_a_reader() -> None:
    """A decode phase would read what another request writes, because its machine was busy for longer than a lease."""
    ours = {InboundEvent.RELEASE, InboundEvent.ABORT}
    assert {
        event for event, after in INBOUND_TABLE[InboundState.READING].items() if after is InboundState.RELEASED
    } == ours


def test_every_state_can_end() -> None:
    """A transfer would hold its blocks whatever happens."""
    for state in InboundState:
        assert InboundState.RELEASED in INBOUND_TABLE[state].values()


def test_only_the_receivers_word_completes_a_transfer() -> None:
    """A sender would believe in a success that its receiver has not seen."""
    completing = {
        (state, event)
        for state, row in OUTBOUND_TABLE.items()
        for event, after in row.items()
        if after is OutboundState.COMPLETED and state is not OutboundState.COMPLETED
    }
    assert completing == {(OutboundState.SENT, OutboundEvent.PEER_READY)}
