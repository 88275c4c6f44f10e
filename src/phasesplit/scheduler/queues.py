"""The lists of a machine and its running batch, both kept in the ledger.

*Lists*: push, insert and remove anywhere, in place. A list is a window into its storage, so taking from the front costs
nothing; the window moves back to the start when it has reached the end. The functions take the list itself,
`ledger.lists[kind, machine]`.

*Running entries*: a task joins the batch as an entry, leaves it again, and is counted in the machine's sums. A decode
entry that joins at iteration i of its machine with r tokens to go ends at iteration i + r; nothing has to be counted
down. Its context grows by one token an iteration, so only `context - iteration` is kept.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import back_to_prefill, blocks_of, use_blocks, work_tokens
from phasesplit.scheduler.ledger import (
    CHOSEN,
    DECODE,
    ENTRY_CONTEXT,
    ENTRY_END,
    ENTRY_TASK,
    FIRST,
    HEAD,
    LENGTH,
    NEVER,
    PREFILL,
    WAITING,
    Ledger,
)


@jit_inline
def length(row: NDArray[np.int64]) -> int:
    """Return how many entries a list has."""
    return int(row[LENGTH])


@jit_inline
def entry(row: NDArray[np.int64], index: int) -> int:
    """Return the entry at `index`, 0 <= index < length."""
    return int(row[FIRST + row[HEAD] + index])


@jit
def insert(row: NDArray[np.int64], index: int, value: int) -> None:
    """Insert `value` so that it stands at `index`, 0 <= index <= length.

    Mutates: row.
    """
    head = row[HEAD]
    size = row[LENGTH]
    if FIRST + head + size == row.size:
        for i in range(size):
            row[FIRST + i] = row[FIRST + head + i]
        row[HEAD] = head = 0
    base = FIRST + head
    for i in range(size, index, -1):
        row[base + i] = row[base + i - 1]
    row[base + index] = value
    row[LENGTH] = size + 1


@jit_inline
def push(row: NDArray[np.int64], value: int) -> None:
    """Append `value`.

    Mutates: row.
    """
    insert(row, row[LENGTH], value)


@jit
def remove(row: NDArray[np.int64], value: int) -> bool:
    """Remove the first entry equal to `value`; return whether there was one.

    Mutates: row.
    """
    base = FIRST + row[HEAD]
    size = row[LENGTH]
    for index in range(size):
        if row[base + index] != value:
            continue
        if index == 0:
            row[HEAD] += 1
        else:
            for i in range(index, size - 1):
                row[base + i] = row[base + i + 1]
        row[LENGTH] = size - 1
        if size == 1:
            row[HEAD] = 0
        return True
    return False


@jit_inline
def prefill_blocks(ledger: Ledger, slot: int) -> int:
    """Return the KV blocks that a request's prefill fills: what it computes, and the token it emits."""
    return blocks_of(ledger.settings, work_tokens(ledger.requests, slot) + 1)


@jit_inline
def give_chunk(ledger: Ledger, machine: int, running_entry: int, tokens: int) -> None:
    """Let a prefill entry compute so many of its tokens in the next iteration; with 0 it waits and stays in the batch.

    Mutates: requests["chunk"], running_entries, machines' sums.
    """
    requests = ledger.requests
    machines = ledger.machines
    slot = ledger.running_entries[ENTRY_TASK, machine, running_entry] // 2
    computed = requests[slot]["computed"]
    requests[slot]["chunk"] = tokens
    last = computed + tokens == work_tokens(requests, slot)
    ledger.running_entries[ENTRY_END, machine, running_entry] = machines[machine]["iteration"] + 1 if last else NEVER
    machines[machine]["batch_tokens"] += tokens
    machines[machine]["pair_tokens"] += tokens * (0.5 * tokens + computed)


@jit
def join(ledger: Ledger, machine: int, task: int) -> None:
    """Let a task join the batch as its last entry; a prompt is given its chunk apart (`give_chunk`).

    Mutates: running_entries, entry_gap_s, requests["running"], machines' sums.
    """
    machines = ledger.machines
    requests = ledger.requests
    slot = task // 2
    running_entry = machines[machine]["running_entries"]
    machines[machine]["running_entries"] = running_entry + 1
    requests[slot]["running"] = 1
    ledger.running_entries[ENTRY_TASK, machine, running_entry] = task
    ledger.entry_gap_s[machine, running_entry] = 0.0
    if task % 2 == PREFILL:
        machines[machine]["prefill_entries"] += 1
        ledger.running_entries[ENTRY_END, machine, running_entry] = NEVER
        ledger.running_entries[ENTRY_CONTEXT, machine, running_entry] = 0
        return
    iteration = machines[machine]["iteration"]
    context = work_tokens(requests, slot)
    ledger.running_entries[ENTRY_END, machine, running_entry] = (
        iteration + requests[slot]["output_tokens"] - requests[slot]["emitted"]
    )
    ledger.running_entries[ENTRY_CONTEXT, machine, running_entry] = context - iteration
    machines[machine]["batch_tokens"] += 1
    machines[machine]["context_tokens"] += context


@jit_inline
def settle(ledger: Ledger, machine: int, running_entry: int, now_s: float) -> None:
    """Write what an entry has done into its request and take it out of the machine's sums; the entry itself stays.

    Mutates: requests, machines' sums.
    """
    machines = ledger.machines
    requests = ledger.requests
    task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
    slot = task // 2
    requests[slot]["running"] = 0
    if task % 2 == PREFILL:
        machines[machine]["prefill_entries"] -= 1
        return
    iteration = machines[machine]["iteration"]
    emitted = requests[slot]["output_tokens"] - (ledger.running_entries[ENTRY_END, machine, running_entry] - iteration)
    if emitted > requests[slot]["emitted"]:
        requests[slot]["last_token_s"] = now_s  # an entry that never ran has emitted nothing here
    requests[slot]["emitted"] = emitted
    if ledger.settings[0]["published"] == 0:
        requests[slot]["blocks"] = blocks_of(ledger.settings, work_tokens(requests, slot))
    requests[slot]["gap_max_s"] = max(requests[slot]["gap_max_s"], ledger.entry_gap_s[machine, running_entry])
    machines[machine]["batch_tokens"] -= 1
    machines[machine]["context_tokens"] -= ledger.running_entries[ENTRY_CONTEXT, machine, running_entry] + iteration


@jit_inline
def move_entry(ledger: Ledger, machine: int, source: int, target: int) -> None:
    """Copy an entry over another.

    Mutates: running_entries, entry_gap_s.
    """
    running_entries = ledger.running_entries
    running_entries[ENTRY_TASK, machine, target] = running_entries[ENTRY_TASK, machine, source]
    running_entries[ENTRY_END, machine, target] = running_entries[ENTRY_END, machine, source]
    running_entries[ENTRY_CONTEXT, machine, target] = running_entries[ENTRY_CONTEXT, machine, source]
    ledger.entry_gap_s[machine, target] = ledger.entry_gap_s[machine, source]


@jit
def growth(ledger: Ledger, machine: int, iterations: int) -> int:
    """Return the KV blocks that the decode entries need for so many more iterations."""
    shift = ledger.settings[0]["block_shift"]
    iteration = ledger.machines[machine]["iteration"]
    running_entries = ledger.running_entries
    blocks = 0
    for running_entry in range(ledger.machines[machine]["running_entries"]):
        if running_entries[ENTRY_TASK, machine, running_entry] % 2 == DECODE:
            last = running_entries[ENTRY_CONTEXT, machine, running_entry] + iteration - 1
            blocks += ((last + iterations) >> shift) - (last >> shift)
    return blocks


@jit
def evict_last(ledger: Ledger, machine: int, now_s: float) -> None:
    """Take the KV of the entry that joined last, and put its request at the head of the waiting prompts.

    Its prompt, and the output it has already, are computed again. Source: recomputation of the latest request when
    memory runs out (Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention", section 4.5).

    Mutates: running_entries, lists, requests, machines, counters, keys, trees.
    """
    machines = ledger.machines
    requests = ledger.requests
    running_entry = machines[machine]["running_entries"] - 1
    task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
    slot = task // 2
    if task % 2 == PREFILL:
        chunk = requests[slot]["chunk"]
        machines[machine]["batch_tokens"] -= chunk
        machines[machine]["pair_tokens"] -= chunk * (0.5 * chunk + requests[slot]["computed"])
    settle(ledger, machine, running_entry, now_s)
    machines[machine]["running_entries"] = running_entry
    use_blocks(machines, machine, -requests[slot]["blocks"], now_s)
    requests[slot]["blocks"] = 0
    requests[slot]["preemptions"] += 1
    ledger.counters[0]["evictions"] += 1
    if task % 2 == DECODE:
        back_to_prefill(ledger, machine, slot)
    requests[slot]["prefill_held"] = 0
    requests[slot]["computed"] = 0
    insert(ledger.lists[WAITING, machine], 0, 2 * slot + PREFILL)


@jit
def make_room(ledger: Ledger, machine: int, now_s: float) -> bool:
    """Evict the entries that joined last until the KV of one more iteration fits; return whether any had to go.

    Mutates: as `evict_last`.
    """
    machines = ledger.machines
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    if free >= machines[machine]["running_entries"]:
        return False
    running_entries = machines[machine]["running_entries"]
    while machines[machine]["used_blocks"] + growth(ledger, machine, 1) > machines[machine]["capacity_blocks"]:
        evict_last(ledger, machine, now_s)
    return bool(machines[machine]["running_entries"] < running_entries)


@jit_inline
def step_length(ledger: Ledger, machine: int) -> int:
    """Return how many iterations the batch runs unchanged: 1 with prefill, else until an entry ends or KV is full.

    Requires: one iteration fits (see `make_room`); not under the published rules, which reserve whole outputs.

    Mutates: machines["next_end"].
    """
    machines = ledger.machines
    running_entries = machines[machine]["running_entries"]
    if machines[machine]["prefill_entries"] > 0:
        return 1
    end = NEVER
    for running_entry in range(running_entries):
        end = min(end, ledger.running_entries[ENTRY_END, machine, running_entry])
    machines[machine]["next_end"] = end
    longest = int(end - machines[machine]["iteration"])
    if ledger.settings[0]["published"]:
        return longest
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    if running_entries * ((longest >> ledger.settings[0]["block_shift"]) + 1) <= free:
        return longest
    fitting, beyond = 1, longest + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if growth(ledger, machine, middle) <= free:
            fitting = middle
        else:
            beyond = middle
    return fitting


@jit_inline
def advance(ledger: Ledger, machine: int, iterations: int, now_s: float) -> int:
    """Book an executed step, take out the entries that ended, and return how many did; the row CHOSEN has their tasks.

    Mutates: running_entries, requests, machines.
    """
    machines = ledger.machines
    requests = ledger.requests
    running_entries = machines[machine]["running_entries"]
    prompts = machines[machine]["prefill_entries"]
    if ledger.settings[0]["published"] == 0 and running_entries > prompts:
        blocks = growth(ledger, machine, iterations)
        if blocks > 0:
            use_blocks(machines, machine, blocks, now_s)
    machines[machine]["iteration"] += iterations
    machines[machine]["context_tokens"] += iterations * (running_entries - prompts)
    iteration = machines[machine]["iteration"]
    if prompts == 0 and iteration < machines[machine]["next_end"]:
        return 0
    ended = 0
    for running_entry in range(running_entries):
        task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
        if prompts > 0 and task % 2 == PREFILL:
            requests[task // 2]["computed"] += requests[task // 2]["chunk"]
        if ledger.running_entries[ENTRY_END, machine, running_entry] == iteration:
            settle(ledger, machine, running_entry, now_s)
            ledger.running_entries[CHOSEN, machine, ended] = task
            ended += 1
        elif ended > 0:
            move_entry(ledger, machine, running_entry, running_entry - ended)
    machines[machine]["running_entries"] = running_entries - ended
    if prompts > 0:
        machines[machine]["batch_tokens"] = running_entries - ended - machines[machine]["prefill_entries"]
        machines[machine]["pair_tokens"] = 0.0
    return ended
