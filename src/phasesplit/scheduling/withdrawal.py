"""The end of a request in any state: it is taken out of lists and lanes, and everything booked for it is given back."""

from phasesplit._jit import jit
from phasesplit.scheduling.accounts import end_prompt, end_request, free_slot, leave_prompt_machine
from phasesplit.scheduling.lanes import move_lane, settle
from phasesplit.scheduling.ledger import LANDING, LANE_TASK, PREEMPTED, PROMPT, READY, TOKEN, WAITING, Ledger
from phasesplit.scheduling.lists import remove


@jit
def withdraw(ledger: Ledger, slot: int, now_s: float) -> None:
    """End a request wherever it is: finished, stopped early, given up or lost. Its slot is free afterwards.

    Its KV counts as having left the prefill machine once `requests["kv_ready_s"]` is set.

    Mutates: lanes, lists, machines, requests, counters, keys, trees.
    """
    requests = ledger.requests
    for side in range(2):
        machine = requests[slot]["prompt_machine"] if side == PROMPT else requests[slot]["token_machine"]
        if requests[slot]["running"]:
            _leave_lane(ledger, machine, slot, now_s)
        remove(ledger.lists[WAITING, machine], 2 * slot + PROMPT)
        if not remove(ledger.lists[PREEMPTED, machine], 2 * slot + TOKEN):
            remove(ledger.lists[READY, machine], 2 * slot + TOKEN)
        remove(ledger.lists[LANDING, machine], slot)
    if requests[slot]["phase"] == PROMPT:
        end_prompt(ledger, slot)
    if requests[slot]["assigned_machine"] != requests[slot]["token_machine"] and requests[slot]["kv_ready_s"] < 0.0:
        leave_prompt_machine(ledger, slot, now_s)
    end_request(ledger, slot, now_s)
    free_slot(ledger, slot)


@jit
def _leave_lane(ledger: Ledger, machine: int, slot: int, now_s: float) -> None:
    """Take a request's lane out of a machine's batch, if it has one there; the lanes behind it move up."""
    machines = ledger.machines
    requests = ledger.requests
    found = False
    for lane in range(machines[machine]["lanes"]):
        if found:
            move_lane(ledger, machine, lane, lane - 1)
        elif ledger.lanes[LANE_TASK, machine, lane] // 2 == slot:
            found = True
            # Between two iterations the sums hold no chunks: `advance` has taken them out.
            token_lanes = machines[machine]["lanes"] - machines[machine]["prompt_lanes"]
            is_formed = machines[machine]["batch_tokens"] > token_lanes
            if ledger.lanes[LANE_TASK, machine, lane] % 2 == PROMPT and is_formed:
                chunk = requests[slot]["chunk"]
                machines[machine]["batch_tokens"] -= chunk
                machines[machine]["pair_tokens"] -= chunk * (0.5 * chunk + requests[slot]["computed"])
            settle(ledger, machine, lane, now_s)
    if found:
        machines[machine]["lanes"] -= 1
