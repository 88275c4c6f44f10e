"""Ledgers for tests of the scheduling rules, and requests put into them without a simulator."""

import numpy as np

from phasesplit.scheduler.accounts import assign, end_prefill, end_request, free_slot, take_slot
from phasesplit.scheduler.ledger import (
    CHOSEN,
    DECODE,
    ENTRY_TASK,
    MIXED,
    PREFILL,
    READY,
    UNSPLIT,
    WAITING,
    Ledger,
    empty_ledger,
    with_slots,
)
from phasesplit.scheduler.placement import PLACED, place
from phasesplit.scheduler.pools import open_pools
from phasesplit.scheduler.queues import advance, entry, length, push
from phasesplit.scheduler.rules import Rules

HOMES = {"prefill": PREFILL, "decode": DECODE, "mixed": MIXED, "unsplit": UNSPLIT}
INSTANTS = ("prefill_start_s", "first_token_s", "kv_ready_s", "decode_start_s", "last_token_s")


def ledger_of(*homes: str, rules: Rules | None = None, capacity_blocks: int = 10_000, slots: int = 64) -> Ledger:
    """Return a ledger with one machine for each home, all in their pools, with room for some requests."""
    numbers = np.array([HOMES[home] for home in homes], np.int32)
    capacities = np.full(len(homes), capacity_blocks, np.int64)
    ledger = empty_ledger(rules or Rules(), numbers, np.zeros(len(homes), np.int32), capacities)
    ledger = with_slots(ledger, slots)
    open_pools(ledger)
    return ledger


def written(ledger: Ledger, prompt_tokens: int, output_tokens: int = 10, *, arrival_s: float = 0.0) -> int:
    """Return the slot of a new request that has no machine yet."""
    slot = take_slot(ledger)
    request = ledger.requests[slot]
    free = request["next_free"]
    ledger.requests[slot] = np.zeros(1, ledger.requests.dtype)[0]
    request["next_free"] = free
    request["row"] = slot
    request["arrival_s"] = arrival_s
    request["prompt_tokens"] = prompt_tokens
    request["output_tokens"] = request["expected_tokens"] = output_tokens
    for instant in INSTANTS:
        request[instant] = -1.0
    return slot


def booked(ledger: Ledger, slot: int, prefill_machine: int, decode_machine: int) -> int:
    """Book a request on machines of the test's choice."""
    ledger.requests["prefill_machine"][slot] = ledger.requests["assigned_machine"][slot] = prefill_machine
    ledger.requests["decode_machine"][slot] = decode_machine
    assign(ledger, slot)
    return slot


def placed(ledger: Ledger, prompt_tokens: int, output_tokens: int = 10, now_s: float = 0.0) -> tuple[int, int]:
    """Let the rules place a new request, book it, and return its two machines."""
    slot = written(ledger, prompt_tokens, output_tokens, arrival_s=now_s)
    assert place(ledger, slot, now_s) == PLACED
    machines = int(ledger.requests["prefill_machine"][slot]), int(ledger.requests["decode_machine"][slot])
    booked(ledger, slot, *machines)
    return machines


def waiting(
    ledger: Ledger, machine: int, prompt_tokens: int, output_tokens: int = 10, *, arrival_s: float = 0.0
) -> int:
    """Return the slot of a new request, both phases on a machine, whose prompt waits there."""
    slot = booked(ledger, written(ledger, prompt_tokens, output_tokens, arrival_s=arrival_s), machine, machine)
    push(ledger.lists[WAITING, machine], 2 * slot + PREFILL)
    return slot


def batch(ledger: Ledger, machine: int) -> list[tuple[str, int]]:
    """Return the running batch as (phase, slot), in order of entries."""
    tasks = ledger.running_entries[ENTRY_TASK, machine, : ledger.machines["running_entries"][machine]].tolist()
    return [("prefill" if task % 2 == PREFILL else "decode", task // 2) for task in tasks]


def listed(ledger: Ledger, kind: int, machine: int) -> list[int]:
    """Return the slots of the tasks in a machine's list."""
    row = ledger.lists[kind, machine]
    return [entry(row, index) // 2 for index in range(length(row))]


def run_step(ledger: Ledger, machine: int, iterations: int = 1, now_s: float = 0.0) -> list[int]:
    """Execute a step of the running batch; tasks that end become decode tasks or leave. Return the slots that ended."""
    requests = ledger.requests
    count = advance(ledger, machine, iterations, now_s)
    tasks = ledger.running_entries[CHOSEN, machine, :count].tolist()
    for task in tasks:
        slot = task // 2
        if task % 2 == PREFILL:
            end_prefill(ledger, slot)
            requests["emitted"][slot] += 1
            requests["phase"][slot] = DECODE
            push(ledger.lists[READY, machine], 2 * slot + DECODE)
        else:
            end_request(ledger, slot, now_s)
            free_slot(ledger, slot)
    return [task // 2 for task in tasks]
