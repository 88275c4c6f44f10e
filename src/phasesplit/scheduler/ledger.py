"""The ledger: what is queued, what KV is reserved and who owns it, as columns that compiled rules read.

Both drivers keep one: the simulator in model time, the live cluster in real time. The functions of this package change
it. A driver writes only a request's instants and its KV transfer.

A request lives in a *slot* from arrival to its end; a *task* is one phase of it, numbered `2 * slot + phase`. A
*running entry* is the place of a task in a machine's batch.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasesplit.scheduler.rules import Rules
from phasesplit.scheduler.tournament import WORST, leaves_for

PREFILL, DECODE = 0, 1
"""Phases of a request, and the home of a prefill or decode machine; both also number the pools."""
MIXED, UNSPLIT = 2, 3
"""The other two pools and homes."""
POOLS = 4
NO_TASK = -1

SERVING, STARTING, DRAINING, OFF = range(4)
"""States of a machine: in a pool; switched on and loading the model; in no pool, finishing what it holds; switched off.
Only a serving machine is a member of a pool; the others keep the pool's number, for statistics."""

WAITING, PREEMPTED, READY, QUEUE, PRESENT, AWAITING_ROOM = range(6)
"""Lists of a machine: prompts waiting; decode tasks preempted; decode tasks with KV here that never ran here; the
published queue of all waiting tasks; the published list of requests present; requests whose KV waits for room here."""
LISTS = 6
HEAD, LENGTH, FIRST = 0, 1, 2
"""Layout of `lists[kind, machine]`: where the list begins, how long it is, and where its storage begins."""

ENTRY_TASK, ENTRY_END, ENTRY_CONTEXT, CHOSEN = range(4)
"""Rows of `running_entries`: the task; the machine's iteration count at which it ends; its context tokens less that
count; and, as scratch, the tasks chosen for the batch being formed, or those that ended with the last step."""
NEVER = 1 << 60
"""ENTRY_END of an entry that does not end by counting iterations (a prompt with chunks to come)."""

SETTINGS = np.dtype(
    [
        ("published", "i8"), ("prefill_placement", "i8"), ("decode_placement", "i8"), ("batching", "i8"),
        ("unsplit_batching", "i8"), ("batch_prompt_tokens", "i8"), ("batch_requests", "i8"), ("spill_tokens", "i8"),
        ("elastic", "i8"), ("preemption_limit", "i8"), ("repurpose_after_s", "f8"), ("block_shift", "i8"),
        ("kv_headroom", "f8"), ("seed", "i8"), ("most_blocks", "i8"),
    ]
)  # fmt: skip
"""One record: the rules as numbers."""

COUNTERS = np.dtype(
    [
        ("draws", "i8"), ("ranks", "i8"), ("prefill_turn", "i8"), ("decode_turn", "i8"), ("builds", "i8"),
        ("free_slot", "i8"), ("live", "i8"), ("most_assigned", "i8"), ("preemptions", "i8"), ("evictions", "i8"),
        ("prefill_to_mixed", "i8"), ("decode_to_mixed", "i8"), ("returns", "i8"), ("repurposed", "i8"),
        ("one_machine", "i8"), ("chosen_prefill", "i8"), ("chosen_decode", "i8"),
    ]
)  # fmt: skip
"""One record: draws taken, the last rank, turns, batches built, free slots, and counts of what happened."""

MACHINES = np.dtype(
    [
        ("home", "i8"), ("pool", "i8"), ("state", "i8"), ("kind", "i8"), ("running_entries", "i8"),
        ("prefill_entries", "i8"), ("batch_tokens", "i8"), ("context_tokens", "i8"), ("pair_tokens", "f8"),
        ("iteration", "i8"), ("next_end", "i8"),
        ("step_start_s", "f8"), ("step_first_s", "f8"), ("step_growth_s", "f8"), ("step_iterations", "i8"),
        ("step_joiners", "i8"), ("rank", "i8"), ("prefill_requests", "i8"), ("decode_requests", "i8"),
        ("pending_tokens", "i8"), ("pending_output_tokens", "i8"), ("committed_blocks", "i8"), ("used_blocks", "i8"),
        ("capacity_blocks", "i8"), ("kv_block_s", "f8"), ("kv_since_s", "f8"), ("mixed_since_s", "f8"),
        ("arriving", "i8"), ("departing", "i8"), ("sending", "i8"), ("receiving", "i8"), ("first_sending", "i8"),
        ("first_receiving", "i8"), ("busy_prefill_s", "f8"), ("busy_decode_s", "f8"), ("busy_mixed_s", "f8"),
        ("steps", "i8"), ("iterations", "i8"), ("task_iterations", "i8"),
    ],
    align=True,
)  # fmt: skip
"""One record per machine: home and pool, what is running, the accounts, the present step, and what it has done."""

REQUESTS = np.dtype(
    [
        ("row", "i8"), ("arrival_s", "f8"), ("prompt_tokens", "i4"), ("output_tokens", "i4"), ("expected_tokens", "i4"),
        ("emitted", "i4"), ("prefill_machine", "i8"), ("decode_machine", "i8"), ("running", "i8"), ("phase", "i8"),
        ("blocks", "i8"), ("stamp", "i8"), ("prefill_held", "i4"), ("decode_held", "i4"), ("prefill_count", "i4"),
        ("decode_count", "i4"), ("computed", "i4"), ("chunk", "i4"), ("preemptions", "i4"), ("streamed", "i4"),
        ("assigned_machine", "i8"), ("arriving_blocks", "i8"), ("prefill_start_s", "f8"), ("first_token_s", "f8"),
        ("kv_ready_s", "f8"), ("decode_start_s", "f8"), ("last_token_s", "f8"), ("gap_max_s", "f8"), ("flow", "i8"),
        ("next_sending", "i8"), ("previous_sending", "i8"), ("next_receiving", "i8"), ("previous_receiving", "i8"),
        ("left_bytes", "f8"), ("rate_bytes_per_s", "f8"), ("cap_bytes_per_s", "f8"), ("flow_since_s", "f8"),
        ("next_free", "i8"),
    ],
    align=True,
)  # fmt: skip
"""One record per slot: the request, where it is, what it holds, its instants, and its KV transfer."""


class Ledger(NamedTuple):
    """All columns of the ledger.

    Attributes:
        settings: SETTINGS (1,).
        counters: COUNTERS (1,).
        machines: MACHINES (m,).
        requests: REQUESTS (slots,).
        lists: int64 (LISTS, m, 2 + room): HEAD, LENGTH, then storage; tasks (slots in PRESENT and AWAITING_ROOM).
        running_entries: int64 (4, m, room): rows ENTRY_TASK, ENTRY_END, ENTRY_CONTEXT, of which the first
            `machines["running_entries"]` are in use, and CHOSEN.
        entry_gap_s: float64 (m, room): the entry's longest gap between tokens since it joined.
        keys: int64 (2, m + 1): what the tournaments compare, see `tournament`.
        trees: int64 (2, POOLS, 2 * leaves), see `tournament`.
        members: int64 (POOLS, 1 + m): number of machines in the pool, then the machines in order.
    """

    settings: NDArray[np.void]
    counters: NDArray[np.void]
    machines: NDArray[np.void]
    requests: NDArray[np.void]
    lists: NDArray[np.int64]
    running_entries: NDArray[np.int64]
    entry_gap_s: NDArray[np.float64]
    keys: NDArray[np.int64]
    trees: NDArray[np.int64]
    members: NDArray[np.int64]


def empty_ledger(
    rules: Rules,
    homes: NDArray[np.int32],
    kinds: NDArray[np.int32],
    capacity_blocks: NDArray[np.int64],
    *,
    room: int = 64,
) -> Ledger:
    """Return a ledger without requests, its machines not yet in any pool (see `pools.open_pools`).

    Args:
        rules: The scheduler's settings.
        homes: (m,) each machine's home: PREFILL, DECODE, MIXED or UNSPLIT.
        kinds: (m,) each machine's type, an index into the driver's table of phase times.
        capacity_blocks: (m,) KV blocks that fit next to the weights.
        room: Initial room for tasks on each machine; `with_room` makes more.
    """
    count = homes.size
    settings = np.zeros(1, SETTINGS)
    for name in SETTINGS.names or ():
        if name == "block_shift":
            settings[name] = rules.block_tokens.bit_length() - 1
        elif name == "most_blocks":
            settings[name] = capacity_blocks.min()
        else:
            settings[name] = getattr(rules, name)
    machines = np.zeros(count, MACHINES)
    machines["home"], machines["pool"], machines["kind"] = homes, homes, kinds
    machines["capacity_blocks"] = capacity_blocks
    machines["first_sending"] = machines["first_receiving"] = -1
    ledger = Ledger(
        settings=settings,
        counters=np.zeros(1, COUNTERS),
        machines=machines,
        requests=np.zeros(0, REQUESTS),
        lists=np.zeros((LISTS, count, FIRST + room), np.int64),
        running_entries=np.zeros((4, count, room), np.int64),
        entry_gap_s=np.zeros((count, room)),
        keys=np.full((2, count + 1), WORST),
        trees=np.full((2, POOLS, 2 * leaves_for(count)), -1, np.int64),
        members=np.zeros((POOLS, 1 + count), np.int64),
    )
    ledger.counters["free_slot"] = ledger.counters["chosen_prefill"] = -1
    return ledger


def with_slots(ledger: Ledger, slots: int) -> Ledger:
    """Return the ledger with at least so many slots; present requests keep theirs."""
    old = ledger.requests.size
    requests = np.zeros(slots, REQUESTS)
    requests["row"] = -1
    requests[:old] = ledger.requests
    requests[old:]["next_free"] = np.arange(old + 1, slots + 1)
    requests[-1]["next_free"] = ledger.counters[0]["free_slot"]
    ledger.counters["free_slot"] = old
    return ledger._replace(requests=requests)


def with_room(ledger: Ledger, room: int) -> Ledger:
    """Return the ledger with room for so many tasks on each machine; lists and running entries keep their contents."""
    old = ledger.running_entries.shape[2]
    count = ledger.machines.size
    lists = np.zeros((LISTS, count, FIRST + room), np.int64)
    lists[:, :, : FIRST + old] = ledger.lists
    running_entries = np.zeros((4, count, room), np.int64)
    running_entries[:, :, :old] = ledger.running_entries
    gaps = np.zeros((count, room))
    gaps[:, :old] = ledger.entry_gap_s
    return ledger._replace(lists=lists, running_entries=running_entries, entry_gap_s=gaps)
