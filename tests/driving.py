"""Drives the kernel by hand, a few events at a time, so that a test can look at the ledger in between."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.request import Trace
from phasesplit.scheduler.autoscaling import Policy
from phasesplit.scheduler.ledger import POOLS, with_room, with_slots
from phasesplit.scheduler.rules import Rules
from phasesplit.scheduler.tournament import NOBODY, set_member
from phasesplit.simulator import kernel
from phasesplit.simulator.events import with_entities
from phasesplit.simulator.fleet import Fleet
from phasesplit.simulator.setup import RunState, build_state
from phasesplit.simulator.world import Arrivals

MOST_CALLS = 1_000_000


def begin(cluster: Cluster, rules: Rules, trace: Trace) -> tuple[RunState, Arrivals]:
    """Return the state of a run that has not begun, with room for the records of every request."""
    start_s = float(trace.arrival_s[0])
    span_s = max(float(trace.arrival_s[-1]) - start_s, 1.0)
    state = build_state(
        cluster,
        rules,
        done_rows=len(trace) + rules.batch_requests + 2,
        sample_every_s=span_s / 100,
        start_s=start_s,
    )
    return state, Arrivals(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.expected_tokens)


def with_trees(state: RunState) -> RunState:
    """Return the state with tournament trees, which a cluster as small as in tests does without."""
    ledger = state.ledger
    leaves = max(2, 1 << (ledger.machines.size - 1).bit_length())
    trees = np.full((2, POOLS, 2 * leaves), NOBODY, np.int64)
    for machine in range(ledger.machines.size):
        set_member(trees, ledger.keys, int(ledger.machines["pool"][machine]), machine, True)
    return RunState(ledger._replace(trees=trees), state.world)


def drive(
    cluster: Cluster,
    rules: Rules,
    trace: Trace,
    *,
    budget: int = 1 << 20,
    trees: bool = False,
    after: Callable[[RunState], None] | None = None,
    policy: Policy | None = None,
) -> RunState:
    """Run to the end, at most `budget` events a call, and call `after` behind each call; return the last state."""
    state, arrivals = begin(cluster, rules, trace)
    if trees:
        state = with_trees(state)
    fleet = None
    if policy is not None:
        fleet = Fleet(cluster, policy, state.ledger, float(trace.arrival_s[0]))
        state.world.clock["pause_at_s"] = fleet.next_s
    for _ in range(MOST_CALLS):
        ledger, world = state.ledger, state.world
        status = kernel.run(ledger, world, arrivals, False, budget)
        if status == kernel.NEED_SLOTS:
            slots = 2 * ledger.requests.size
            grown = world._replace(future=with_entities(world.future, ledger.machines.size + slots))
            state = RunState(with_slots(ledger, slots), grown)
        elif status == kernel.NEED_ROOM:
            state = RunState(with_room(ledger, 2 * ledger.running_entries.shape[2]), world)
        elif status == kernel.NEED_CONTROL:
            assert fleet is not None
            fleet.control(ledger)
            world.clock["pause_at_s"] = fleet.next_s
        else:
            if after is not None:
                after(state)
            if status == kernel.FINISHED:
                return state
            assert status == kernel.PAUSED, status
    raise AssertionError("the run does not come to an end")


def done_rows(state: RunState) -> NDArray[np.void]:
    """Return the records of the requests that ended, in the order of the trace."""
    done = state.world.done[: int(state.world.clock["done"][0])]
    return done[np.argsort(done["row"])]
