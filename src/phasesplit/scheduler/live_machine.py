"""Machine-level scheduling for a driver in real time: one compiled call for each thing that happens on one machine.

The ledger has two rows: the machine itself, and one that stands for all others, whose memory has no end. So a request
whose other phase is elsewhere is booked by the same transitions as in the simulator.
"""

import numpy as np

from phasesplit._jit import jit
from phasesplit.scheduler.accounts import assign, end_prefill, hold_arrival, leave_prefill_machine
from phasesplit.scheduler.batching import form_chunked, form_whole
from phasesplit.scheduler.ledger import AWAITING_ROOM, DECODE, PREFILL, READY, UNSPLIT, WAITING, Ledger, empty_ledger
from phasesplit.scheduler.pools import open_pools
from phasesplit.scheduler.queues import advance, entry, growth, length, prefill_blocks, push, remove
from phasesplit.scheduler.rules import Batching, Rules

HERE, ELSEWHERE = 0, 1
"""The two rows of the ledger."""

NO_ROOM_NOW, STUCK = -1, -2
"""What `hold_room` returns if no KV may come: not now, or never unless something changes."""

_ENDLESS = 1 << 40
_CHUNKED = int(Batching.CHUNKED)


def machine_ledger(rules: Rules, capacity_blocks: int) -> Ledger:
    """Return the ledger of one machine.

    Args:
        rules: The scheduler's settings; `batching` says how this machine forms its batches.
        capacity_blocks: KV blocks of the machine, >= 1.
    """
    homes = np.array([UNSPLIT, UNSPLIT], np.int32)
    capacity = np.array([capacity_blocks, _ENDLESS], np.int64)
    ledger = empty_ledger(rules, homes, np.zeros(2, np.int32), capacity)
    open_pools(ledger)
    return ledger


@jit
def take_prefill(ledger: Ledger, slot: int, stays: bool) -> None:
    """Let an opened request wait here for its prefill; its decode is here too if it stays.

    Mutates: machines, requests, lists, keys, trees.
    """
    ledger.requests[slot]["prefill_machine"] = HERE
    ledger.requests[slot]["decode_machine"] = HERE if stays else ELSEWHERE
    ledger.requests[slot]["assigned_machine"] = HERE
    assign(ledger, slot)
    push(ledger.lists[WAITING, HERE], 2 * slot + PREFILL)


@jit
def await_kv(ledger: Ledger, slot: int) -> None:
    """Let an opened request, whose prefill is elsewhere, wait for room for its KV here.

    Mutates: machines, requests, lists, keys, trees.
    """
    ledger.requests[slot]["prefill_machine"] = ELSEWHERE
    ledger.requests[slot]["decode_machine"] = HERE
    ledger.requests[slot]["assigned_machine"] = ELSEWHERE
    assign(ledger, slot)
    push(ledger.lists[AWAITING_ROOM, HERE], slot)


@jit
def hold_room(ledger: Ledger, now_s: float) -> int:
    """Hold room for the KV that has waited longest for it, and return its request's slot.

    Returns NO_ROOM_NOW if none waits or the first does not fit next to what the running batch will need, STUCK if it
    never will: nothing runs here, and no KV is on its way to or from this machine.

    Mutates: lists, machines, requests.
    """
    machines = ledger.machines
    if length(ledger.lists[AWAITING_ROOM, HERE]) == 0:
        return NO_ROOM_NOW
    slot = entry(ledger.lists[AWAITING_ROOM, HERE], 0)
    need = prefill_blocks(ledger, slot)
    free = machines[HERE]["capacity_blocks"] - machines[HERE]["used_blocks"]
    if machines[HERE]["running_entries"] > 0:
        free -= max(growth(ledger, HERE, 1), int(machines[HERE]["capacity_blocks"] * ledger.settings[0]["kv_headroom"]))
    if need > free:
        waits = machines[HERE]["running_entries"] + machines[HERE]["arriving"] + machines[HERE]["departing"] > 0
        waits = waits or length(ledger.lists[WAITING, HERE]) + length(ledger.lists[READY, HERE]) > 0
        return NO_ROOM_NOW if waits else STUCK
    remove(ledger.lists[AWAITING_ROOM, HERE], slot)
    hold_arrival(ledger, slot, need, now_s)
    return slot


@jit
def kv_arrived(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book that a request's KV and first token have come: its decode may run.

    Mutates: machines, requests, lists, keys, trees.
    """
    requests = ledger.requests
    end_prefill(ledger, slot)
    requests[slot]["emitted"] = 1
    requests[slot]["phase"] = DECODE
    leave_prefill_machine(ledger, slot, now_s)
    requests[slot]["kv_ready_s"] = now_s
    requests[slot]["last_token_s"] = now_s
    push(ledger.lists[READY, HERE], 2 * slot + DECODE)


@jit
def form_batch(ledger: Ledger, now_s: float) -> int:
    """Form the next batch by the rule in the settings; return how many running entries it has.

    Requests that had to go for lack of memory are then in the list of waiting prompts and hold no blocks.

    Mutates: running_entries, lists, requests, machines, counters, keys, trees.
    """
    if ledger.settings[0]["batching"] == _CHUNKED:
        form_chunked(ledger, HERE, now_s)
    else:
        form_whole(ledger, HERE, now_s)
    return int(ledger.machines[HERE]["running_entries"])


@jit
def end_iteration(ledger: Ledger, now_s: float) -> int:
    """Book one executed iteration; return how many tasks ended with it. The row CHOSEN has them.

    Mutates: running_entries, requests, machines.
    """
    ledger.machines[HERE]["next_end"] = 0
    return advance(ledger, HERE, 1, now_s)


@jit
def end_prefill_here(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book that a prefill task has ended and given a token: decode waits here, or its KV waits to leave.

    Mutates: machines, requests, lists, keys, trees.
    """
    requests = ledger.requests
    end_prefill(ledger, slot)
    requests[slot]["emitted"] += 1
    requests[slot]["phase"] = DECODE
    requests[slot]["last_token_s"] = now_s
    if requests[slot]["decode_machine"] == HERE:
        requests[slot]["kv_ready_s"] = now_s
        push(ledger.lists[READY, HERE], 2 * slot + DECODE)
    else:
        hold_arrival(ledger, slot, requests[slot]["blocks"], now_s)
