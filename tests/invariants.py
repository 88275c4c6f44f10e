"""What must hold of a ledger between any two events, and of the records of a run."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.block_pool import BlockPool, Use
from phasesplit.kv_transfer.receiver import LeaseBook
from phasesplit.scheduler.ledger import (
    AWAITING_ROOM,
    DECODE,
    ENTRY_TASK,
    MIXED,
    POOLS,
    PREEMPTED,
    PREFILL,
    PRESENT,
    QUEUE,
    READY,
    SERVING,
    UNSPLIT,
    WAITING,
    Ledger,
)
from phasesplit.scheduler.queues import entry, growth, length
from phasesplit.scheduler.tournament import DECODE_LOAD, NOBODY, PREFILL_LOAD, least_loaded
from phasesplit.simulator.setup import RunState
from phasesplit.simulator.world import COMPLETED

TREES = [(PREFILL_LOAD, (PREFILL, MIXED, UNSPLIT)), (DECODE_LOAD, (DECODE, MIXED))]
"""The loads, and the pools whose tournaments are kept for them."""


def entries(ledger: Ledger, kind: int, machine: int) -> list[int]:
    row = ledger.lists[kind, machine]
    return [entry(row, index) for index in range(length(row))]


def entry_tasks(ledger: Ledger, machine: int) -> list[int]:
    return ledger.running_entries[ENTRY_TASK, machine, : ledger.machines["running_entries"][machine]].tolist()


def pool_machines(ledger: Ledger, pool: int) -> list[int]:
    return ledger.members[pool, 1 : 1 + ledger.members[pool, 0]].tolist()


def check_state(state: RunState) -> None:
    """Raise an AssertionError unless every account of the ledger agrees with what is really there."""
    ledger = state.ledger
    check_memory(ledger)
    check_pools(ledger)
    check_loads(ledger)
    for machine in range(ledger.machines.size):
        check_machine(ledger, machine)


def check_memory(ledger: Ledger) -> None:
    """Used blocks lie within the capacity, now and at the end of the steps, and are what requests hold between them."""
    machines, requests = ledger.machines, ledger.requests
    assert (machines["used_blocks"] >= 0).all(), machines["used_blocks"]
    assert (machines["used_blocks"] <= machines["capacity_blocks"]).all(), machines["used_blocks"]
    assert (machines["committed_blocks"] >= 0).all(), machines["committed_blocks"]
    if not ledger.settings["published"][0]:
        for machine in np.flatnonzero(machines["running_entries"]):
            grown = growth(ledger, machine, machines["step_iterations"][machine])
            assert machines["used_blocks"][machine] + grown <= machines["capacity_blocks"][machine], machine
    live = requests[requests["row"] >= 0]
    held = np.zeros(machines.size, np.int64)
    arriving = live["arriving_blocks"] > 0
    on_decode = (live["prefill_machine"] == live["decode_machine"]) | (
        (live["phase"] == DECODE) & (live["kv_ready_s"] >= 0)
    )
    owner = np.where(on_decode & ~arriving, live["decode_machine"], live["assigned_machine"])
    np.add.at(held, owner, live["blocks"])
    np.add.at(held, live["decode_machine"], live["arriving_blocks"])
    if ledger.settings["published"][0] or not _grown_in_flight(ledger):
        assert machines["used_blocks"].tolist() == held.tolist()


def _grown_in_flight(ledger: Ledger) -> bool:
    """Whether running decode entries have grown beyond what their requests have written down as theirs."""
    return any(task % 2 == DECODE for machine in range(ledger.machines.size) for task in entry_tasks(ledger, machine))


def check_pools(ledger: Ledger) -> None:
    """Every serving machine is in the one pool that its record names, and no other is in any."""
    found = {machine: pool for pool in range(POOLS) for machine in pool_machines(ledger, pool)}
    serving = np.flatnonzero(ledger.machines["state"] == SERVING).tolist()
    assert sum(ledger.members[:, 0]) == len(serving)
    assert found == {machine: ledger.machines["pool"][machine] for machine in serving}


def check_loads(ledger: Ledger) -> None:
    """The machine that rules find in a pool is the one with the lowest key."""
    for load, pools in TREES:
        for pool in pools:
            members = pool_machines(ledger, pool)
            found = least_loaded(ledger.members, ledger.keys, ledger.trees, load, pool)
            if not members:
                assert found == NOBODY
            else:
                assert found in members
                assert ledger.keys[load, found] == min(ledger.keys[load, machine] for machine in members)


def check_machine(ledger: Ledger, machine: int) -> None:
    """A machine's sums are those of its running entries, and no task is in two places."""
    machines, requests = ledger.machines, ledger.requests
    own = machines[machine]
    running_entries = entry_tasks(ledger, machine)
    assert own["prefill_entries"] == sum(task % 2 == PREFILL for task in running_entries)
    assert all(requests["running"][task // 2] for task in running_entries)
    if ledger.settings["published"][0]:
        waiting = entries(ledger, QUEUE, machine)
        assert set(entries(ledger, WAITING, machine)) <= set(waiting)
        assert set(entries(ledger, PREEMPTED, machine)) <= set(waiting)
        present = entries(ledger, PRESENT, machine)
        assert len(present) == len(set(present))
        assert {task // 2 for task in running_entries + waiting} == set(present)
    else:
        waiting = [task for kind in (WAITING, PREEMPTED, READY) for task in entries(ledger, kind, machine)]
        waiting += [2 * slot + DECODE for slot in entries(ledger, AWAITING_ROOM, machine)]
    everywhere = running_entries + waiting
    assert len(everywhere) == len(set(everywhere)), everywhere
    assert all(requests["row"][task // 2] >= 0 for task in everywhere)
    live = requests[requests["row"] >= 0]
    in_prefill = live[(live["prefill_machine"] == machine) & (live["phase"] == PREFILL)]
    assert own["prefill_requests"] == in_prefill.size
    assert own["decode_requests"] == (live["decode_machine"] == machine).sum()
    emitted = in_prefill["emitted"]
    pending = int(in_prefill["prompt_tokens"].sum() + emitted.sum()) + int(own["decode_requests"])
    assert own["pending_tokens"] == pending
    expected = live["expected_tokens"][live["decode_machine"] == machine]
    assert own["pending_output_tokens"] == expected.sum()
    assert own["sending"] == ((live["flow"] > 0) & (live["flow"] < 3) & (live["assigned_machine"] == machine)).sum()
    assert own["receiving"] == ((live["flow"] > 0) & (live["flow"] < 3) & (live["decode_machine"] == machine)).sum()
    assert running_entries or not own["batch_tokens"]
    assert running_entries or not own["context_tokens"]


def check_blocks(pool: BlockPool, leases: LeaseBook | None = None, ledger: Ledger | None = None) -> None:
    """The books of a machine's KV blocks agree: the pool with itself, leases with it, and the ledger with what it says.

    Args:
        pool: The truth.
        leases: Those of the machine's incoming transfers.
        ledger: That of a live machine, between two steps of its engine.
    """
    users = Counter(block for holding in pool.holdings for block in holding.blocks)
    assert all(holding.count for holding in pool.holdings)
    assert all(len(set(holding.blocks)) == holding.count for holding in pool.holdings)
    assert [pool.users(block) for block in range(pool.blocks)] == [users[block] for block in range(pool.blocks)]
    free, idle = set(pool._free), set(pool._idle)
    assert len(free) == pool.free
    assert not free & idle
    assert free | idle == {block for block in range(pool.blocks) if not users[block]}
    assert all(pool._is_kept[block] for block in idle)
    if leases is not None:
        receiving = [holding for holding in pool.holdings if holding.use is Use.RECEIVE]
        assert {id(holding) for holding in receiving} == {id(lease.holding) for lease in leases.held}
    if ledger is not None:
        # The ledger counts a shared block for each request, and learns one step later what transfers give back.
        assert sum(pool.held().values()) <= ledger.machines["used_blocks"][0] <= pool.blocks


def check_records(done: NDArray[np.void], requests: int) -> None:
    """Each request ended exactly once, and its instants follow one another."""
    assert done["row"].tolist() == list(range(requests))
    done = done[done["status"] == COMPLETED]
    assert (done["prefill_start_s"] >= done["arrival_s"]).all()
    assert (done["first_token_s"] > done["prefill_start_s"]).all()
    assert (done["last_token_s"] >= done["first_token_s"]).all()
    several = done[done["output_tokens"] > 1]
    assert (several["kv_ready_s"] >= several["first_token_s"]).all()
    assert (several["decode_start_s"] >= several["kv_ready_s"]).all()
    assert (several["last_token_s"] >= several["decode_start_s"]).all()
    assert (several["gap_max_s"] > 0).all()
    mean_s = (several["last_token_s"] - several["first_token_s"]) / (several["output_tokens"] - 1)
    assert (several["gap_max_s"] >= mean_s * (1 - 1e-9)).all()
