"""Cluster-level scheduling: the machines of a request's two phases, chosen together at its arrival and for good."""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import blocks_of, draw, expected_blocks
from phasesplit.scheduler.ledger import DECODE, MIXED, PREEMPTED, PREFILL, READY, UNSPLIT, WAITING, Ledger
from phasesplit.scheduler.pools import size, spill_into_mixed
from phasesplit.scheduler.published import queues
from phasesplit.scheduler.queues import length
from phasesplit.scheduler.rules import Placement
from phasesplit.scheduler.tournament import DECODE_LOAD, NOBODY, PREFILL_LOAD, RANK_BITS, least_loaded, scan, winner_of

PLACED, TOO_LONG, UNDECIDED = range(3)
"""What `place` returns: both machines are set; no machine could ever hold the request; a custom rule has to choose."""

_PREFILL_ORDER = (UNSPLIT, PREFILL, MIXED)
_DECODE_ORDER = (DECODE, MIXED)
_ALL_ORDER = (PREFILL, MIXED, DECODE)
_STATIC_PREFILL_ORDER = (PREFILL, MIXED)
_ROUND_ROBIN = int(Placement.ROUND_ROBIN)
_RANDOM = int(Placement.RANDOM)
_TWO_CHOICES = int(Placement.TWO_CHOICES)
_CUSTOM = int(Placement.CUSTOM)


@jit
def pick(ledger: Ledger, load: int, pool: int) -> int:
    """Return the pool's machine that the rule for this phase picks, NOBODY if the pool is empty.

    Args:
        ledger: The ledger.
        load: PREFILL_LOAD or DECODE_LOAD; also says whose rule applies.
        pool: The pool's number.

    Mutates: counters (turns and draws).
    """
    count = size(ledger, pool)
    if count == 0:
        return NOBODY
    counters = ledger.counters
    field = ledger.settings[0]["prefill_placement"] if load == PREFILL_LOAD else ledger.settings[0]["decode_placement"]
    if field == _ROUND_ROBIN:
        if load == PREFILL_LOAD:
            turn = counters[0]["prefill_turn"]
            counters[0]["prefill_turn"] += 1
        else:
            turn = counters[0]["decode_turn"]
            counters[0]["decode_turn"] += 1
        return int(ledger.members[pool, 1 + turn % count])
    if field == _RANDOM:
        return int(ledger.members[pool, 1 + draw(ledger.settings, counters) % count])
    if field == _TWO_CHOICES:
        first = ledger.members[pool, 1 + draw(ledger.settings, counters) % count]
        second = ledger.members[pool, 1 + draw(ledger.settings, counters) % count]
        return int(winner_of(ledger.keys, load, first, second))
    return least_loaded(ledger.members, ledger.keys, ledger.trees, load, pool)


@jit_inline
def has_waiting(ledger: Ledger, machine: int) -> bool:
    """Return whether any task waits on the machine for a place in its batch."""
    if ledger.settings[0]["published"]:
        return queues(ledger, machine)
    return (
        length(ledger.lists[WAITING, machine]) > 0
        or length(ledger.lists[PREEMPTED, machine]) > 0
        or length(ledger.lists[READY, machine]) > 0
    )


@jit_inline
def prefill_choice(ledger: Ledger, prompt_tokens: int, pool: int) -> int:
    """Return the pool's choice for prefill, NOBODY if that machine has a queue and would exceed the limit.

    An unsplit machine has nowhere to spill to: it takes what comes.

    Mutates: as `pick`.
    """
    machine = pick(ledger, PREFILL_LOAD, pool)
    if machine == NOBODY:
        return NOBODY
    pending = ledger.machines[machine]["pending_tokens"] + prompt_tokens
    if pool != UNSPLIT and has_waiting(ledger, machine) and pending > ledger.settings[0]["spill_tokens"]:
        return NOBODY
    return machine


@jit_inline
def decode_choice(ledger: Ledger, blocks: int, pool: int) -> int:
    """Return the pool's choice for decode, NOBODY if the blocks committed there would exceed its memory.

    Mutates: as `pick`.
    """
    machine = pick(ledger, DECODE_LOAD, pool)
    if machine == NOBODY:
        return NOBODY
    if ledger.machines[machine]["committed_blocks"] + blocks > ledger.machines[machine]["capacity_blocks"]:
        return NOBODY
    return machine


@jit_inline
def place(ledger: Ledger, slot: int, now_s: float) -> int:
    """Set the machines of both phases of a request that has just arrived; nothing is booked yet.

    Own pool, then mixed pool, then a machine of the other pool, which moves to the mixed pool; if a side is still
    missing, the machine with the least prefill load takes both. Source: Splitwise, section IV-A; order and limits as in
    the published simulator. In static pools: own pool, then mixed pool, then the queue of whichever machine of the
    two has the least load.

    Mutates: requests, and pools where a machine spills into the mixed pool.
    """
    requests = ledger.requests
    if _too_long(ledger, slot):
        return TOO_LONG
    if ledger.settings[0]["prefill_placement"] == _CUSTOM:
        if ledger.counters[0]["chosen_prefill"] < 0:
            return UNDECIDED
        requests[slot]["prefill_machine"] = ledger.counters[0]["chosen_prefill"]
        requests[slot]["decode_machine"] = ledger.counters[0]["chosen_decode"]
        ledger.counters[0]["chosen_prefill"] = -1
        return PLACED
    prefill_machine = NOBODY
    decode_machine = NOBODY
    for pool in _PREFILL_ORDER:
        if prefill_machine == NOBODY:
            prefill_machine = prefill_choice(ledger, requests[slot]["prompt_tokens"], pool)
    if size(ledger, UNSPLIT) > 0:
        requests[slot]["prefill_machine"] = prefill_machine
        requests[slot]["decode_machine"] = prefill_machine
        return PLACED
    blocks = expected_blocks(ledger, slot)
    for pool in _DECODE_ORDER:
        if decode_machine == NOBODY:
            decode_machine = decode_choice(ledger, blocks, pool)
    if prefill_machine == NOBODY or decode_machine == NOBODY:
        if ledger.settings[0]["elastic"]:
            if prefill_machine == NOBODY and size(ledger, DECODE) > 0:
                prefill_machine = scan(ledger.members, ledger.keys, PREFILL_LOAD, DECODE)
                spill_into_mixed(ledger, prefill_machine, now_s)
            if decode_machine == NOBODY and size(ledger, PREFILL) > 0:
                decode_machine = scan(ledger.members, ledger.keys, DECODE_LOAD, PREFILL)
                spill_into_mixed(ledger, decode_machine, now_s)
            if prefill_machine == NOBODY or decode_machine == NOBODY:
                prefill_machine = _least_of(ledger, PREFILL_LOAD, _ALL_ORDER)
                decode_machine = prefill_machine
        else:
            if prefill_machine == NOBODY:
                prefill_machine = _least_of(ledger, PREFILL_LOAD, _STATIC_PREFILL_ORDER)
            if decode_machine == NOBODY:
                decode_machine = _least_of(ledger, DECODE_LOAD, _DECODE_ORDER)
    requests[slot]["prefill_machine"] = prefill_machine
    requests[slot]["decode_machine"] = decode_machine
    return PLACED


@jit_inline
def _least_of(ledger: Ledger, load: int, pools: tuple[int, ...]) -> int:
    """Return the machine of some pools that has the least load; an earlier pool wins a tie, rank only within a pool."""
    keys = ledger.keys
    machine = NOBODY
    for pool in pools:
        other = scan(ledger.members, keys, load, pool)
        if machine == NOBODY or (other != NOBODY and keys[load, other] >> RANK_BITS < keys[load, machine] >> RANK_BITS):
            machine = other
    return machine


@jit_inline
def _too_long(ledger: Ledger, slot: int) -> bool:
    """Whether the smallest machine could not hold the request at its full length.

    A server knows this bound as its longest context, so the true output length is used to refuse, never to choose.
    """
    requests = ledger.requests
    need = blocks_of(ledger.settings, requests[slot]["prompt_tokens"] + requests[slot]["output_tokens"] + 1)
    return bool(need > ledger.settings[0]["most_blocks"])
