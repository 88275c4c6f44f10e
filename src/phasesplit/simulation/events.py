"""The future: a heap with at most one pending event for each entity, ordered by (time, sequence).

Entities are the machines (the end of their step), then the request slots (the next instant of their KV transfer). An
entity's event is moved in place when it changes, so nothing stale is ever in the heap and its size stays bounded by the
number of entities. Arrivals are not in it: they come sorted from the trace and go before anything at the same time.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.simulation.world import FUTURE


def empty_future(entities: int) -> NDArray[np.void]:
    """Return a heap for so many entities, none of which has an event: FUTURE (entities,)."""
    future = np.zeros(entities, FUTURE)
    future["place"] = -1
    return future


def with_entities(future: NDArray[np.void], entities: int) -> NDArray[np.void]:
    """Return the heap with room for so many entities; pending events stay."""
    grown = empty_future(entities)
    grown[: future.size] = future
    return grown


@jit_inline
def _later(future: NDArray[np.void], entity: int, time_s: float, sequence: int) -> bool:
    """Return whether an entity's event comes after (time, sequence)."""
    other_s = future[entity]["time_s"]
    return bool(other_s > time_s or (other_s == time_s and future[entity]["sequence"] > sequence))


@jit
def _settle(future: NDArray[np.void], size: int, index: int, entity: int) -> None:
    """Put an entity where it belongs, from a free place on: towards the root, or else away from it.

    Mutates: future.
    """
    time_s = future[entity]["time_s"]
    sequence = future[entity]["sequence"]
    start = index
    while index > 0:
        parent = (index - 1) >> 1
        above = future[parent]["order"]
        if not _later(future, above, time_s, sequence):
            break
        future[index]["order"] = above
        future[above]["place"] = index
        index = parent
    child = 2 * index + 1
    while index == start and child < size:
        below = future[child]["order"]
        if child + 1 < size:
            right = future[child + 1]["order"]
            if _later(future, below, future[right]["time_s"], future[right]["sequence"]):
                child += 1
                below = right
        if _later(future, below, time_s, sequence):
            break
        future[index]["order"] = below
        future[below]["place"] = index
        index = start = child
        child = 2 * index + 1
    future[index]["order"] = entity
    future[entity]["place"] = index


@jit
def schedule(clock: NDArray[np.void], future: NDArray[np.void], entity: int, time_s: float) -> None:
    """Set an entity's event to `time_s`, whether it had one or not.

    Mutates: future, clock's counts.
    """
    clock[0]["sequence"] += 1
    future[entity]["sequence"] = clock[0]["sequence"]
    future[entity]["time_s"] = time_s
    index = future[entity]["place"]
    if index < 0:
        index = clock[0]["events_pending"]
        clock[0]["events_pending"] += 1
    _settle(future, clock[0]["events_pending"], index, entity)


@jit
def cancel(clock: NDArray[np.void], future: NDArray[np.void], entity: int) -> None:
    """Remove an entity's event, if it has one.

    Mutates: future, clock's counts.
    """
    index = future[entity]["place"]
    if index < 0:
        return
    future[entity]["place"] = -1
    clock[0]["events_pending"] -= 1
    size = clock[0]["events_pending"]
    if index < size:
        _settle(future, size, index, future[size]["order"])


@jit_inline
def first(future: NDArray[np.void]) -> int:
    """Return the entity whose event is next; there must be one."""
    return int(future[0]["order"])


@jit_inline
def next_time_s(clock: NDArray[np.void], future: NDArray[np.void]) -> float:
    """Return when the next event happens, infinity if there is none."""
    if clock[0]["events_pending"] == 0:
        return np.inf
    return float(future[future[0]["order"]]["time_s"])
