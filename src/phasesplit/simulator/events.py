"""The future: a heap with at most one pending event for each entity, ordered by (time, sequence).

Entities are the machines (the end of their step), then the request slots (the next instant of their KV transfer). An
entity's event is moved in place when it changes, so nothing stale is ever in the heap and its size stays bounded by the
number of entities. Arrivals are not in it: they come sorted from the trace and go before anything at the same time.

The event of a machine is the end of a *step*: iterations with an unchanged batch, timed in closed form, and cut short
when work arrives.
"""

import math

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.ledger import Ledger
from phasesplit.scheduler.published import iteration_s
from phasesplit.simulator.world import DECODE_S, FUTURE, KNOT_S, KNOT_TOKENS, World


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


@jit_inline
def prefill_time_s(world: World, kind: int, tokens: float) -> float:
    """Return f(tokens) of `domain.profile.PhaseTimes`: linear between knots, end segments extended, never below 0."""
    last = world.kinds[kind]["knots"] - 1
    left = 0
    curve = world.curves[kind]
    while left < last - 1 and tokens >= curve[KNOT_TOKENS, left + 1]:
        left += 1
    x = curve[KNOT_TOKENS, left]
    y = curve[KNOT_S, left]
    slope = (curve[KNOT_S, left + 1] - y) / (curve[KNOT_TOKENS, left + 1] - x)
    return float(max(y + slope * (tokens - x), 0.0))


@jit_inline
def time_step(ledger: Ledger, world: World, machine: int) -> None:
    """Set the time of the batch's first iteration, and by how much each further one is longer.

    Source: `domain.profile.PhaseTimes`.

    Mutates: machines["step_first_s"], ["step_growth_s"], world's counts of extrapolated steps.
    """
    machines = ledger.machines
    kind = machines[machine]["kind"]
    kinds = world.kinds
    tokens = machines[machine]["batch_tokens"]
    requests = machines[machine]["running_entries"] - machines[machine]["prefill_entries"]
    context_s = kinds[kind]["decode_context_s"] * machines[machine]["context_tokens"]
    machines[machine]["step_growth_s"] = 0.0
    if requests > kinds[kind]["measured_requests"]:
        world.clock[0]["steps_beyond_requests"] += 1
    if tokens == requests:
        machines[machine]["step_first_s"] = world.curves[kind, DECODE_S, requests] + context_s
        machines[machine]["step_growth_s"] = kinds[kind]["decode_context_s"] * requests
        return
    if tokens > kinds[kind]["measured_prompt_tokens"]:
        world.clock[0]["steps_beyond_prompt"] += 1
    prefill_s = prefill_time_s(world, kind, tokens)
    if ledger.settings[0]["published"]:
        machines[machine]["step_first_s"] = iteration_s(prefill_s, requests)
        return
    if requests > 0:
        prefill_s = max(prefill_s, world.curves[kind, DECODE_S, requests])
    pairs_s = kinds[kind]["prefill_pair_s"] * machines[machine]["pair_tokens"]
    machines[machine]["step_first_s"] = prefill_s + pairs_s + context_s


@jit_inline
def time_of(machines: NDArray[np.void], machine: int, iterations: int) -> float:
    """Return how long so many iterations of the present step take."""
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    return float(iterations * first_s + growth_s * (0.5 * iterations * (iterations - 1)))


@jit
def iterations_by(machines: NDArray[np.void], machine: int, now_s: float) -> int:
    """Return how many iterations of the present step will have run when the one in progress ends."""
    elapsed_s = now_s - machines[machine]["step_start_s"]
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    if growth_s <= 0.0:
        return int(elapsed_s / first_s) + 1
    half = first_s - 0.5 * growth_s
    count = int((math.sqrt(half * half + 2.0 * growth_s * elapsed_s) - half) / growth_s) + 1
    # The root is exact only up to rounding; the definition decides.
    while count > 1 and time_of(machines, machine, count - 1) > elapsed_s:
        count -= 1
    while time_of(machines, machine, count) <= elapsed_s:
        count += 1
    return count


@jit
def cut(
    machines: NDArray[np.void], clock: NDArray[np.void], future: NDArray[np.void], machine: int, now_s: float
) -> None:
    """End the present step after the iteration in progress, unless a prompt is in the batch (then it is the only one).

    Mutates: machines["step_iterations"], future, clock.
    """
    if machines[machine]["prefill_entries"] > 0 or machines[machine]["step_iterations"] <= 1:
        return
    iterations = iterations_by(machines, machine, now_s)
    if iterations < machines[machine]["step_iterations"]:
        machines[machine]["step_iterations"] = iterations
        schedule(clock, future, machine, machines[machine]["step_start_s"] + time_of(machines, machine, iterations))
