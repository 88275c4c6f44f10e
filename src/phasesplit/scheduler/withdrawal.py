"""The end of a request in any state: it leaves lists and batch, and everything booked for it is given back."""

from phasesplit._jit import jit
from phasesplit.scheduler.accounts import end_prefill, end_request, free_slot, leave_prefill_machine
from phasesplit.scheduler.ledger import AWAITING_ROOM, DECODE, ENTRY_TASK, PREEMPTED, PREFILL, READY, WAITING, Ledger
from phasesplit.scheduler.queues import move_entry, remove, settle


@jit
def withdraw(ledger: Ledger, slot: int, now_s: float) -> None:
    """End a request wherever it is: finished, stopped early, aborted or lost. Its slot is free afterwards.

    Its KV counts as having left the prefill machine once `requests["kv_ready_s"]` is set.

    Mutates: running_entries, lists, machines, requests, counters, keys, trees.
    """
    requests = ledger.requests
    for side in range(2):
        machine = requests[slot]["prefill_machine"] if side == PREFILL else requests[slot]["decode_machine"]
        if requests[slot]["running"]:
            _leave_entry(ledger, machine, slot, now_s)
        remove(ledger.lists[WAITING, machine], 2 * slot + PREFILL)
        if not remove(ledger.lists[PREEMPTED, machine], 2 * slot + DECODE):
            remove(ledger.lists[READY, machine], 2 * slot + DECODE)
        remove(ledger.lists[AWAITING_ROOM, machine], slot)
    if requests[slot]["phase"] == PREFILL:
        end_prefill(ledger, slot)
    if requests[slot]["assigned_machine"] != requests[slot]["decode_machine"] and requests[slot]["kv_ready_s"] < 0.0:
        leave_prefill_machine(ledger, slot, now_s)
    end_request(ledger, slot, now_s)
    free_slot(ledger, slot)


@jit
def _leave_entry(ledger: Ledger, machine: int, slot: int, now_s: float) -> None:
    """Take a request's entry out of a machine's batch, if it has one there; the entries behind it move up."""
    machines = ledger.machines
    requests = ledger.requests
    found = False
    for running_entry in range(machines[machine]["running_entries"]):
        if found:
            move_entry(ledger, machine, running_entry, running_entry - 1)
        elif ledger.running_entries[ENTRY_TASK, machine, running_entry] // 2 == slot:
            found = True
            # Between two iterations the sums hold no chunks: `advance` has taken them out.
            decode_entries = machines[machine]["running_entries"] - machines[machine]["prefill_entries"]
            is_formed = machines[machine]["batch_tokens"] > decode_entries
            if ledger.running_entries[ENTRY_TASK, machine, running_entry] % 2 == PREFILL and is_formed:
                chunk = requests[slot]["chunk"]
                machines[machine]["batch_tokens"] -= chunk
                machines[machine]["pair_tokens"] -= chunk * (0.5 * chunk + requests[slot]["computed"])
            settle(ledger, machine, running_entry, now_s)
    if found:
        machines[machine]["running_entries"] -= 1
