"""What the published simulator does otherwise, its defects included: the one place for them in the scheduler.

Each function here replaces a default where `settings["published"]` says so. All waiting tasks are in
one queue besides their lists, and a list of the requests present says whom a batch leaves out. Whole outputs are
reserved by their true length. Source: the simulator published with Splitwise; docs/rules.md.
"""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import count_of
from phasesplit.scheduler.ledger import DECODE, NO_TASK, PREEMPTED, PRESENT, QUEUE, WAITING, Ledger
from phasesplit.scheduler.queues import entry, insert, length

MIXED_FACTOR = 1.1
"""Time of a mixed iteration over that of its tokens as a prompt. Source: published simulator, performance model."""


@jit_inline
def iteration_s(prefill_s: float, decode_requests: int) -> float:
    """Return the time of an iteration with a prompt in it, whose tokens would take `prefill_s` as a prompt."""
    return prefill_s * MIXED_FACTOR if decode_requests > 0 else prefill_s


@jit_inline
def output_blocks(ledger: Ledger, slot: int) -> int:
    """Return the KV blocks that a decode task must still reserve to enter a batch: its whole output, KV(output - 1)."""
    return 0 if ledger.requests[slot]["decode_held"] else int(ledger.requests[slot]["output_tokens"] - 1)


@jit_inline
def queues(ledger: Ledger, machine: int) -> bool:
    """Return whether any task waits on the machine."""
    return length(ledger.lists[QUEUE, machine]) > 0


@jit_inline
def is_empty(ledger: Ledger, machine: int) -> bool:
    """Return whether a machine runs nothing and no request is present."""
    return bool(ledger.machines[machine]["running_entries"] == 0 and length(ledger.lists[PRESENT, machine]) == 0)


@jit_inline
def first_unfinished(ledger: Ledger, slot: int) -> int:
    """Return the task that a present request has to do next."""
    return int(2 * slot + ledger.requests[slot]["phase"])


@jit
def enqueue(ledger: Ledger, machine: int, task: int) -> None:
    """Insert a task into the queue by a binary search for its (count, arrival).

    Counts grow while tasks wait, so the queue is not sorted in general: another search would find another place.

    Mutates: lists[QUEUE, machine].
    """
    count = count_of(ledger, task)
    arrival_s = ledger.requests[task // 2]["arrival_s"]
    low, high = 0, length(ledger.lists[QUEUE, machine])
    while low < high:
        middle = (low + high) // 2
        other = entry(ledger.lists[QUEUE, machine], middle)
        other_count = count_of(ledger, other)
        other_arrival_s = ledger.requests[other // 2]["arrival_s"]
        if count < other_count or (count == other_count and arrival_s < other_arrival_s):
            high = middle
        else:
            low = middle + 1
    insert(ledger.lists[QUEUE, machine], low, task)


@jit_inline
def enter_present(ledger: Ledger, machine: int, slot: int) -> None:
    """Insert a request into the list of present ones, in order of arrival, behind equals.

    Mutates: lists[PRESENT, machine].
    """
    index = length(ledger.lists[PRESENT, machine])
    arrival_s = ledger.requests["arrival_s"]
    while index > 0 and arrival_s[entry(ledger.lists[PRESENT, machine], index - 1)] > arrival_s[slot]:
        index -= 1
    insert(ledger.lists[PRESENT, machine], index, slot)


@jit_inline
def only_candidate(ledger: Ledger, machine: int) -> int:
    """Return the task that is all a batch could gain, NO_TASK in other cases; see `batching`."""
    lists = ledger.lists
    waiting = length(lists[WAITING, machine])
    if length(lists[QUEUE, machine]) != 1 or length(lists[PREEMPTED, machine]) > 0:
        return NO_TASK
    if waiting == 1:
        return entry(lists[WAITING, machine], 0) if ledger.machines[machine]["running_entries"] == 0 else NO_TASK
    task = entry(lists[QUEUE, machine], 0)
    return NO_TASK if is_aged(ledger, task) or first_unfinished(ledger, task // 2) != task else task


@jit_inline
def is_aged(ledger: Ledger, task: int) -> bool:
    """Return whether a task was passed over so often that it goes before everything else."""
    return bool(count_of(ledger, task) >= ledger.settings[0]["preemption_limit"])


@jit_inline
def head_is_aged(ledger: Ledger, machine: int) -> bool:
    """Return whether the first of the queue, which is not empty, goes before everything else."""
    return is_aged(ledger, entry(ledger.lists[QUEUE, machine], 0))


@jit_inline
def count_passed_over(ledger: Ledger, machine: int) -> None:
    """Count every present request whose next task is not in the batch, waiting prompts included.

    Mutates: requests["decode_count"] and ["prefill_count"].
    """
    size = length(ledger.lists[PRESENT, machine])
    if size == ledger.machines[machine]["running_entries"]:
        return
    for index in range(size):
        slot = entry(ledger.lists[PRESENT, machine], index)
        if ledger.requests[slot]["running"]:
            continue
        if ledger.requests[slot]["phase"] == DECODE:
            ledger.requests[slot]["decode_count"] += 1
        else:
            ledger.requests[slot]["prefill_count"] += 1
