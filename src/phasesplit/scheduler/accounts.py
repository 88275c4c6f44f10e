"""The transitions of the ledger's accounts: who is here, what is reserved, what is committed.

Two accounts are kept apart. *Used* blocks are physical: KV that is on the machine, or for which room is held.
*Committed* blocks are the cluster-level scheduler's: what the requests assigned to the machine are expected to need.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.ledger import DECODE, PREFILL, UNSPLIT, Ledger
from phasesplit.scheduler.rules import Placement
from phasesplit.scheduler.tournament import DECODE_LOAD, PREFILL_LOAD, RANK_BITS, replay

_JSQ_REQUESTS = int(Placement.JSQ_REQUESTS)
_JSQ_TOKENS = int(Placement.JSQ_TOKENS)
_JSQ_KV = int(Placement.JSQ_KV)


@jit_inline
def blocks_of(settings: NDArray[np.void], tokens: int) -> int:
    """Return the KV blocks that hold so many tokens, rounded up."""
    shift = settings[0]["block_shift"]
    return int((tokens + (1 << shift) - 1) >> shift)


@jit
def draw(settings: NDArray[np.void], counters: NDArray[np.void]) -> int:
    """Return the next pseudo-random number of the ledger's counter, 0 to 2^32 - 1.

    Source: the two-round multiply-xorshift of C. Wellons, "Prospecting for hash functions" (constants 21f0aaad,
    735a2d97), over seed and counter; both constants are below 2^31, so that 64-bit products cannot overflow.

    Mutates: counters.
    """
    counters[0]["draws"] += 1
    x = (counters[0]["draws"] + (settings[0]["seed"] & 0x7FFFFFFF) * 0x61C88647) & 0xFFFFFFFF
    x ^= x >> 16
    x = (x * 0x21F0AAAD) & 0xFFFFFFFF
    x ^= x >> 15
    x = (x * 0x735A2D97) & 0xFFFFFFFF
    return int(x ^ (x >> 15))


@jit
def touch(
    settings: NDArray[np.void],
    machines: NDArray[np.void],
    keys: NDArray[np.int64],
    trees: NDArray[np.int64],
    machine: int,
) -> None:
    """Bring a machine's keys up to date with its accounts and play its tournaments again, as far as they changed.

    Mutates: keys, trees.
    """
    requests = machines[machine]["prefill_requests"] + machines[machine]["decode_requests"]
    rule = settings[0]["prefill_placement"]
    load = machines[machine]["pending_tokens"]
    if rule == _JSQ_REQUESTS:
        load = requests
    elif rule == _JSQ_KV:
        load = machines[machine]["committed_blocks"]
    prefill_key = (load << RANK_BITS) + machines[machine]["rank"]
    rule = settings[0]["decode_placement"]
    load = machines[machine]["committed_blocks"]
    if rule == _JSQ_REQUESTS:
        load = requests
    elif rule == _JSQ_TOKENS:
        load = machines[machine]["pending_output_tokens"]
    decode_key = (load << RANK_BITS) + machines[machine]["rank"]
    first = PREFILL_LOAD if keys[PREFILL_LOAD, machine] != prefill_key else DECODE_LOAD
    last = DECODE_LOAD if keys[DECODE_LOAD, machine] != decode_key else PREFILL_LOAD
    keys[PREFILL_LOAD, machine] = prefill_key
    keys[DECODE_LOAD, machine] = decode_key
    pool = machines[machine]["pool"]
    if pool in (PREFILL, UNSPLIT):
        last = PREFILL_LOAD
    elif pool == DECODE:
        first = DECODE_LOAD
    if first <= last and trees.shape[2] > 0:
        replay(trees, keys, pool, machine, first, last)


@jit_inline
def touched(ledger: Ledger, machine: int) -> None:
    """Call `touch` with the ledger's columns.

    Mutates: as `touch`.
    """
    touch(ledger.settings, ledger.machines, ledger.keys, ledger.trees, machine)


@jit_inline
def rank_last(ledger: Ledger, machine: int) -> None:
    """Put a machine behind all others that have the same load, so that equal machines take turns.

    Mutates: machines["rank"], counters.
    """
    ledger.counters[0]["ranks"] += 1
    ledger.machines[machine]["rank"] = ledger.counters[0]["ranks"] & ((1 << RANK_BITS) - 1)


@jit_inline
def take_slot(ledger: Ledger) -> int:
    """Return a free slot and mark it taken; there must be one (see `ledger.with_slots`).

    Mutates: counters.
    """
    slot = ledger.counters[0]["free_slot"]
    ledger.counters[0]["free_slot"] = ledger.requests[slot]["next_free"]
    ledger.counters[0]["live"] += 1
    return int(slot)


@jit_inline
def open_request(
    ledger: Ledger, slot: int, arrival_s: float, prompt_tokens: int, output_tokens: int, expected_tokens: int
) -> None:
    """Write a request into a taken slot: instants unset (-1), nothing held, nothing done.

    Args:
        ledger: The ledger.
        slot: Its slot, see `take_slot`.
        arrival_s: The instant of its arrival.
        prompt_tokens: Tokens of its prompt, >= 1.
        output_tokens: Tokens at which its output ends at the latest, >= 1.
        expected_tokens: Output tokens that rules count on, >= 1.

    Mutates: requests.
    """
    requests = ledger.requests
    requests[slot]["arrival_s"] = arrival_s
    requests[slot]["prompt_tokens"] = prompt_tokens
    requests[slot]["output_tokens"] = output_tokens
    requests[slot]["expected_tokens"] = expected_tokens
    requests[slot]["prefill_start_s"] = -1.0
    requests[slot]["first_token_s"] = -1.0
    requests[slot]["kv_ready_s"] = -1.0
    requests[slot]["decode_start_s"] = -1.0
    requests[slot]["last_token_s"] = -1.0
    requests[slot]["gap_max_s"] = 0.0
    requests[slot]["running"] = 0
    requests[slot]["prefill_count"] = 0
    requests[slot]["decode_count"] = 0
    requests[slot]["prefill_held"] = 0
    requests[slot]["decode_held"] = 0
    requests[slot]["blocks"] = 0
    requests[slot]["arriving_blocks"] = 0
    requests[slot]["emitted"] = 0
    requests[slot]["computed"] = 0
    requests[slot]["phase"] = PREFILL
    requests[slot]["preemptions"] = 0
    requests[slot]["stamp"] = 0


@jit
def open_slot(ledger: Ledger, arrival_s: float, prompt_tokens: int, output_tokens: int, expected_tokens: int) -> int:
    """Take a free slot, write a request into it, see `open_request`, and return it; there must be one.

    Mutates: counters, requests.
    """
    slot = take_slot(ledger)
    ledger.requests[slot]["row"] = slot
    open_request(ledger, slot, arrival_s, prompt_tokens, output_tokens, expected_tokens)
    return slot


@jit_inline
def free_slot(ledger: Ledger, slot: int) -> None:
    """Give a slot back.

    Mutates: counters, requests["row"] and ["next_free"].
    """
    ledger.requests[slot]["row"] = -1
    ledger.requests[slot]["next_free"] = ledger.counters[0]["free_slot"]
    ledger.counters[0]["free_slot"] = slot
    ledger.counters[0]["live"] -= 1


@jit
def use_blocks(machines: NDArray[np.void], machine: int, blocks: int, now_s: float) -> None:
    """Add to a machine's used blocks (a negative count frees), and to its integral of blocks over time.

    Mutates: machines["used_blocks"], ["kv_block_s"], ["kv_since_s"].
    """
    machines[machine]["kv_block_s"] += machines[machine]["used_blocks"] * (now_s - machines[machine]["kv_since_s"])
    machines[machine]["kv_since_s"] = now_s
    machines[machine]["used_blocks"] += blocks


@jit_inline
def fits(machines: NDArray[np.void], machine: int, blocks: int) -> bool:
    """Return whether so many more blocks fit on the machine."""
    return bool(machines[machine]["used_blocks"] + blocks <= machines[machine]["capacity_blocks"])


@jit_inline
def fits_with_headroom(settings: NDArray[np.void], machines: NDArray[np.void], machine: int, blocks: int) -> bool:
    """Return whether so many more blocks fit and leave the headroom, which only a machine with a batch needs."""
    capacity = machines[machine]["capacity_blocks"]
    if machines[machine]["running_entries"] > 0:
        capacity -= int(capacity * settings[0]["kv_headroom"])
    return bool(machines[machine]["used_blocks"] + blocks <= capacity)


@jit_inline
def work_tokens(requests: NDArray[np.void], slot: int) -> int:
    """Return the tokens that a request's prefill has to compute: its prompt, and after an eviction its output."""
    return int(requests[slot]["prompt_tokens"] + requests[slot]["emitted"])


@jit_inline
def tokens_to_compute(requests: NDArray[np.void], slot: int) -> int:
    """Return what is left of them: all, unless chunks are done or a machine has the KV of its first tokens already."""
    return int(work_tokens(requests, slot) - requests[slot]["computed"])


@jit_inline
def count_of(ledger: Ledger, task: int) -> int:
    """Return how often a task was passed over."""
    if task % 2 == PREFILL:
        return int(ledger.requests[task // 2]["prefill_count"])
    return int(ledger.requests[task // 2]["decode_count"])


@jit_inline
def expected_blocks(ledger: Ledger, slot: int) -> int:
    """Return the KV blocks that a request is expected to fill at its end.

    The published rules know the true output length: KV(prompt + 1) and KV(output - 1) are reserved apart.
    """
    requests = ledger.requests
    if ledger.settings[0]["published"]:
        return int(requests[slot]["prompt_tokens"] + requests[slot]["output_tokens"])
    return blocks_of(ledger.settings, requests[slot]["prompt_tokens"] + requests[slot]["expected_tokens"])


@jit_inline
def assign(ledger: Ledger, slot: int) -> None:
    """Book a request on its two machines: pending tokens, committed blocks, counts.

    Both machines then go last among equals; under the published rules the first in the pool's order stays first.

    Mutates: machines, trees.
    """
    machines = ledger.machines
    published = ledger.settings[0]["published"] != 0
    requests = ledger.requests
    prefill_machine = requests[slot]["prefill_machine"]
    decode_machine = requests[slot]["decode_machine"]
    machines[prefill_machine]["prefill_requests"] += 1
    machines[decode_machine]["decode_requests"] += 1
    machines[prefill_machine]["pending_tokens"] += requests[slot]["prompt_tokens"]
    machines[decode_machine]["pending_tokens"] += 1
    machines[decode_machine]["pending_output_tokens"] += requests[slot]["expected_tokens"]
    machines[decode_machine]["committed_blocks"] += expected_blocks(ledger, slot)
    most = machines[decode_machine]["prefill_requests"] + machines[decode_machine]["decode_requests"]
    if prefill_machine != decode_machine:
        machines[prefill_machine]["committed_blocks"] += blocks_of(ledger.settings, requests[slot]["prompt_tokens"] + 1)
        if not published:
            rank_last(ledger, prefill_machine)
        touched(ledger, prefill_machine)
        most = max(most, machines[prefill_machine]["prefill_requests"] + machines[prefill_machine]["decode_requests"])
    else:
        ledger.counters[0]["one_machine"] += 1
    if not published:
        rank_last(ledger, decode_machine)
    touched(ledger, decode_machine)
    ledger.counters[0]["most_assigned"] = max(ledger.counters[0]["most_assigned"], most)


@jit_inline
def end_prefill(ledger: Ledger, slot: int) -> None:
    """Book the end of a request's prefill on its prefill machine.

    Mutates: machines, trees.
    """
    machine = ledger.requests[slot]["prefill_machine"]
    ledger.machines[machine]["pending_tokens"] -= work_tokens(ledger.requests, slot)
    ledger.machines[machine]["prefill_requests"] -= 1
    touched(ledger, machine)


@jit
def hold_arrival(ledger: Ledger, slot: int, blocks: int, now_s: float) -> None:
    """Hold room on a request's decode machine for its KV, which is about to leave its prefill machine.

    Mutates: machines, requests.
    """
    requests = ledger.requests
    machines = ledger.machines
    use_blocks(machines, requests[slot]["decode_machine"], blocks, now_s)
    requests[slot]["arriving_blocks"] = blocks
    machines[requests[slot]["decode_machine"]]["arriving"] += 1
    machines[requests[slot]["assigned_machine"]]["departing"] += 1


@jit
def leave_prefill_machine(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book that a request's KV has left its prefill machine for the decode machine, which now owns it.

    Mutates: machines, requests, trees.
    """
    requests = ledger.requests
    machine = requests[slot]["assigned_machine"]
    use_blocks(ledger.machines, machine, -requests[slot]["blocks"], now_s)
    if requests[slot]["arriving_blocks"] > 0:
        ledger.machines[machine]["departing"] -= 1
        ledger.machines[requests[slot]["decode_machine"]]["arriving"] -= 1
    requests[slot]["blocks"] = requests[slot]["arriving_blocks"]
    requests[slot]["arriving_blocks"] = 0
    ledger.machines[machine]["committed_blocks"] -= blocks_of(ledger.settings, requests[slot]["prompt_tokens"] + 1)
    touched(ledger, machine)


@jit_inline
def end_request(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book the end of a request on its decode machine and free its KV there.

    Mutates: machines, requests, trees.
    """
    machines = ledger.machines
    requests = ledger.requests
    machine = requests[slot]["decode_machine"]
    use_blocks(machines, machine, -requests[slot]["blocks"], now_s)
    requests[slot]["blocks"] = 0
    machines[machine]["pending_tokens"] -= 1
    machines[machine]["pending_output_tokens"] -= requests[slot]["expected_tokens"]
    machines[machine]["committed_blocks"] -= expected_blocks(ledger, slot)
    machines[machine]["decode_requests"] -= 1
    requests[slot]["phase"] = DECODE
    touched(ledger, machine)


@jit
def back_to_prefill(ledger: Ledger, machine: int, slot: int) -> None:
    """Book that a request whose KV is lost computes its prompt, and what it has emitted, again on its decode machine.

    Mutates: requests, machines, trees.
    """
    requests = ledger.requests
    requests[slot]["phase"] = 0
    requests[slot]["prefill_held"] = 0
    requests[slot]["computed"] = 0
    requests[slot]["prefill_machine"] = machine
    ledger.machines[machine]["prefill_requests"] += 1
    ledger.machines[machine]["pending_tokens"] += work_tokens(requests, slot)
    touched(ledger, machine)
