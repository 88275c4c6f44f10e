"""Lists in the ledger against Python's."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.scheduler.ledger import FIRST
from phasesplit.scheduler.queues import entry, insert, length, push, remove

ROOM = 6


def contents(row: np.ndarray) -> list[int]:
    return [entry(row, index) for index in range(length(row))]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("push"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("insert"), st.integers(0, 9), st.integers(0, ROOM)),
            st.tuples(st.just("remove"), st.integers(0, 9), st.just(0)),
            st.tuples(st.just("take first"), st.just(0), st.just(0)),
        ),
        max_size=60,
    )
)
def test_equal_to_a_python_list(operations: list[tuple[str, int, int]]) -> None:
    """A task would be lost, doubled or moved when its list's window reaches the end of the storage."""
    row = np.zeros(FIRST + ROOM, np.int64)
    model: list[int] = []
    for name, value, index in operations:
        if name in ("push", "insert") and len(model) == ROOM:
            continue
        if name == "push":
            push(row, value)
            model.append(value)
        elif name == "insert":
            insert(row, min(index, len(model)), value)
            model.insert(min(index, len(model)), value)
        elif name == "remove":
            assert remove(row, value) == (value in model)
            if value in model:
                model.remove(value)
        elif model:
            assert remove(row, model[0])
            model.pop(0)
        assert contents(row) == model


def test_window_moves_back_when_it_reaches_the_end() -> None:
    """A list that is used as a queue would run out of storage although it is nearly empty."""
    row = np.zeros(FIRST + ROOM, np.int64)
    for value in range(100):
        push(row, value)
        if value >= ROOM - 1:
            assert remove(row, value - ROOM + 1)
        assert contents(row) == list(range(max(0, value - ROOM + 2), value + 1))


def test_removing_what_is_not_there_changes_nothing() -> None:
    """A task that waits in another list would take one of this list with it."""
    row = np.zeros(FIRST + ROOM, np.int64)
    push(row, 7)
    assert not remove(row, 8)
    assert contents(row) == [7]
