"""The heap of pending events against a sorted list."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.simulator.events import cancel, empty_future, first, next_time_s, schedule, with_entities
from phasesplit.simulator.world import CLOCK

ENTITIES = 12


def pop(clock: np.ndarray, future: np.ndarray) -> tuple[float, int]:
    entity = first(future)
    time_s = next_time_s(clock, future)
    cancel(clock, future, entity)
    return time_s, entity


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("schedule"), st.integers(0, ENTITIES - 1), st.sampled_from([0.0, 1.0, 1.0, 2.5, 7.0])),
            st.tuples(st.just("cancel"), st.integers(0, ENTITIES - 1), st.just(0.0)),
            st.tuples(st.just("pop"), st.just(0), st.just(0.0)),
        ),
        max_size=80,
    )
)
def test_order_is_that_of_time_then_of_scheduling(operations: list[tuple[str, int, float]]) -> None:
    """Events would happen out of order, or twice, or in an order that depends on how the heap happens to lie."""
    clock, future = np.zeros(1, CLOCK), empty_future(ENTITIES)
    pending: dict[int, tuple[float, int]] = {}
    for sequence, (name, entity, time_s) in enumerate(operations):
        if name == "schedule":
            schedule(clock, future, entity, time_s)
            pending[entity] = (time_s, sequence)
        elif name == "cancel":
            cancel(clock, future, entity)
            pending.pop(entity, None)
        elif pending:
            expected = min(pending, key=lambda each: pending[each])
            assert pop(clock, future) == (pending.pop(expected)[0], expected)
        assert clock["events_pending"][0] == len(pending)
        assert next_time_s(clock, future) == min((at for at, _ in pending.values()), default=np.inf)
        placed = future["place"][:ENTITIES]
        assert {entity for entity in range(ENTITIES) if placed[entity] >= 0} == pending.keys()
        assert all(future["order"][placed[entity]] == entity for entity in pending)
    while pending:
        expected = min(pending, key=lambda each: pending[each])
        assert pop(clock, future)[1] == expected
        del pending[expected]


def test_moving_an_event_makes_it_the_last_of_its_instant() -> None:
    """A step that is cut to end now would overtake what was already due now."""
    clock, future = np.zeros(1, CLOCK), empty_future(3)
    for entity in (0, 1, 2):
        schedule(clock, future, entity, 5.0)
    schedule(clock, future, 0, 5.0)
    assert [pop(clock, future)[1] for _ in range(3)] == [1, 2, 0]


def test_growing_keeps_what_is_pending() -> None:
    """More requests than slots would lose the events of those already there."""
    clock, future = np.zeros(1, CLOCK), empty_future(2)
    schedule(clock, future, 1, 3.0)
    schedule(clock, future, 0, 4.0)
    future = with_entities(future, 5)
    schedule(clock, future, 4, 1.0)
    assert [pop(clock, future) for _ in range(3)] == [(1.0, 4), (3.0, 1), (4.0, 0)]
    assert next_time_s(clock, future) == np.inf
