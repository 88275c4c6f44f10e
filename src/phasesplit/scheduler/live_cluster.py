"""Cluster-level scheduling for a driver in real time: one compiled call for each thing that happens to a request.

The calls only put together transitions that the simulator makes too. The driver's ledger has a row for every machine of
the cluster; what runs inside a machine is not in it: it has no running entries, and of the lists only
the waiting prompts.
"""

from phasesplit._jit import jit
from phasesplit.scheduler.accounts import assign, end_prefill, leave_prefill_machine
from phasesplit.scheduler.ledger import DECODE, OFF, PREFILL, SERVING, WAITING, Ledger, with_room, with_slots
from phasesplit.scheduler.placement import PLACED, place
from phasesplit.scheduler.pools import leave, return_home
from phasesplit.scheduler.queues import push, remove
from phasesplit.scheduler.withdrawal import withdraw

_FIRST_SLOTS = 64


def with_place_for_one(ledger: Ledger) -> Ledger:
    """Return the ledger with a free slot, and room in every list for one more request than any machine has."""
    if ledger.counters[0]["free_slot"] < 0:
        ledger = with_slots(ledger, max(_FIRST_SLOTS, 2 * ledger.requests.size))
    # A request has up to two tasks in a list.
    if 2 * ledger.counters[0]["most_assigned"] + 4 > ledger.running_entries.shape[2]:
        ledger = with_room(ledger, 2 * ledger.running_entries.shape[2])
    return ledger


@jit
def assign_pair(ledger: Ledger, slot: int, now_s: float) -> int:
    """Choose the machines of an opened request and book it there; return the verdict of `placement.place`.

    Unless it is PLACED, nothing is booked, and the slot is still taken.

    Mutates: ledger.
    """
    verdict = place(ledger, slot, now_s)
    if verdict == PLACED:
        ledger.requests[slot]["assigned_machine"] = ledger.requests[slot]["prefill_machine"]
        assign(ledger, slot)
        push(ledger.lists[WAITING, ledger.requests[slot]["prefill_machine"]], 2 * slot + PREFILL)
    return verdict


@jit
def begin_prefill(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book that a request's prefill has begun to run; a second time changes nothing.

    Mutates: lists, requests["prefill_start_s"].
    """
    if remove(ledger.lists[WAITING, ledger.requests[slot]["prefill_machine"]], 2 * slot + PREFILL):
        ledger.requests[slot]["prefill_start_s"] = now_s


@jit
def end_prefill_phase(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book a request's first token. Its prefill machine may go home from the mixed pool.

    Mutates: ledger.
    """
    requests = ledger.requests
    machine = requests[slot]["prefill_machine"]
    begin_prefill(ledger, slot, now_s)
    end_prefill(ledger, slot)
    requests[slot]["emitted"] = 1
    requests[slot]["phase"] = DECODE
    requests[slot]["first_token_s"] = now_s
    if requests[slot]["decode_machine"] == machine:
        requests[slot]["kv_ready_s"] = now_s
    return_home(ledger, machine, now_s)


@jit
def end_transfer(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book that a request's KV is whole on its decode machine and gone from its prefill machine.

    Mutates: machines, requests, keys, trees.
    """
    leave_prefill_machine(ledger, slot, now_s)
    ledger.requests[slot]["kv_ready_s"] = now_s


@jit
def end_request_anywhere(ledger: Ledger, slot: int, now_s: float) -> None:
    """Book a request's end, whatever state it is in. Its machines may go home from the mixed pool.

    Mutates: ledger.
    """
    prefill_machine = ledger.requests[slot]["prefill_machine"]
    decode_machine = ledger.requests[slot]["decode_machine"]
    withdraw(ledger, slot, now_s)
    return_home(ledger, decode_machine, now_s)
    if prefill_machine != decode_machine:
        return_home(ledger, prefill_machine, now_s)


@jit
def look_home(ledger: Ledger, machine: int, now_s: float) -> bool:
    """Let a machine of the mixed pool go home, or change its home, if the time has come; return whether it moved.

    Mutates: as `pools.return_home`.
    """
    return return_home(ledger, machine, now_s)


@jit
def switch_off(ledger: Ledger, machine: int) -> None:
    """Take a machine out of service whose requests have all been withdrawn.

    Mutates: as `pools.leave`, machines["pool"] and ["state"].
    """
    if ledger.machines[machine]["state"] == SERVING:
        leave(ledger, machine)
        ledger.machines[machine]["pool"] = ledger.machines[machine]["home"]
    ledger.machines[machine]["state"] = OFF
