"""The compiled loop: takes arrivals and events in order and applies the scheduling rules until it needs its driver.

Every function on the hot path is called from one place and inlined there: the compiled loop stays small, and no call
has to hand over all the columns.
"""

from phasesplit._jit import jit, jit_inline, jit_part
from phasesplit.scheduling.accounts import assign, free_slot, leave_prompt_machine, open_request, take_slot
from phasesplit.scheduling.ledger import LANDING, NO_TASK, PROMPT, READY, TOKEN, WAITING, Ledger
from phasesplit.scheduling.lists import length, push
from phasesplit.scheduling.placement import TOO_LONG, UNDECIDED, place
from phasesplit.scheduling.tournament import NOBODY
from phasesplit.simulation.events import cancel, first, next_time_s
from phasesplit.simulation.flows import DRAINING, IDLE, WAITING_FOR_ROOM
from phasesplit.simulation.machine import end_step, form_and_start
from phasesplit.simulation.observe import sample, see_end
from phasesplit.simulation.published import task_arrives, told_freed, try_transfer
from phasesplit.simulation.steps import cut
from phasesplit.simulation.transfers import admit_landings, drained
from phasesplit.simulation.world import Arrivals, World

FINISHED, NEED_ARRIVALS, NEED_SLOTS, NEED_ROOM, NEED_DONE, NEED_CHOICE, NEED_CONTROL, PAUSED = range(8)
"""Why the loop returned: nothing left; the trace's next stretch; more slots; more room on machines; the records of
ended requests are full; a custom rule has to choose for `clock["pending_slot"]`; nothing that happens before
`clock["pause_at_s"]` is left; the budget of events is spent."""


@jit
def run(ledger: Ledger, world: World, arrivals: Arrivals, more_arrivals: bool, budget: int) -> int:
    """Simulate until the driver is needed; return why (see FINISHED and its neighbours). Calling again goes on.

    Args:
        ledger: The scheduler's columns.
        world: The simulator's columns.
        arrivals: The present stretch of the trace; `clock["next_arrival"]` is an index into it.
        more_arrivals: Whether another stretch follows.
        budget: Events and arrivals to handle at most.

    Mutates: ledger, world.
    """
    clock = world.clock
    future = world.future
    counters = ledger.counters
    size = arrivals.arrival_s.size
    most_done = world.done.size - ledger.settings[0]["batch_requests"] - 1
    for _ in range(budget):
        if clock[0]["done"] > most_done:
            return NEED_DONE
        event_s = next_time_s(clock, future)
        index = clock[0]["next_arrival"]
        if index == size:
            if more_arrivals:
                return NEED_ARRIVALS
            if clock[0]["events_pending"] == 0:
                return FINISHED
        # At the same instant arrivals come first: all of them were known before any event.
        is_arrival = index < size and arrivals.arrival_s[index] <= event_s
        now_s = arrivals.arrival_s[index] if is_arrival else event_s
        if now_s > clock[0]["horizon_s"]:
            return FINISHED
        while clock[0]["next_sample_s"] <= min(now_s, clock[0]["pause_at_s"]):
            sample(ledger, world)
        if now_s >= clock[0]["pause_at_s"]:
            return NEED_CONTROL
        clock[0]["now_s"] = now_s
        # What follows from the event: up to two tasks arrive, a machine hears of freed memory, machines form a batch.
        task, next_task, told, forming = NO_TASK, NO_TASK, NOBODY, NOBODY
        entity = first(future)
        sequence = future[entity]["sequence"]
        if is_arrival:
            if counters[0]["free_slot"] < 0 and clock[0]["pending_slot"] < 0:
                return NEED_SLOTS
            # A request has up to two tasks in a list, and one more request may come.
            if 2 * counters[0]["most_assigned"] + 4 > ledger.lanes.shape[2]:
                return NEED_ROOM
            slot = _arrive(ledger, world, arrivals, index, now_s)
            if clock[0]["pending_slot"] >= 0:
                return NEED_CHOICE
            clock[0]["next_arrival"] += 1
            if slot >= 0:
                task = 2 * slot + PROMPT
                same = ledger.requests[slot]["prompt_machine"] == ledger.requests[slot]["token_machine"]
                if ledger.settings[0]["published"] and same:
                    next_task = 2 * slot + TOKEN
        else:
            # Its event stays in the heap, so that a machine's next step only moves it; if none comes, it goes.
            if entity < ledger.machines.size:
                if ledger.machines[entity]["lanes"] > 0:
                    end_step(ledger, world, entity, now_s)
                forming = entity
            else:
                slot = entity - ledger.machines.size
                if _transfer_event(ledger, world, slot, now_s):
                    task = 2 * slot + TOKEN
                    told = ledger.requests[slot]["assigned_machine"]
        clock[0]["events"] += 1
        while True:
            if task != NO_TASK:
                forming = _task_arrives(ledger, world, task, now_s)
                task = next_task
                next_task = NO_TASK
            elif told != NOBODY:
                forming = _told_freed(ledger, world, told, now_s)
                told = NOBODY
            if forming != NOBODY:
                form_and_start(ledger, world, forming, now_s)
                forming = NOBODY
            if task == NO_TASK and told == NOBODY:
                break
        if not is_arrival and future[entity]["sequence"] == sequence:
            cancel(clock, future, entity)
    return PAUSED


@jit_part
def _arrive(ledger: Ledger, world: World, arrivals: Arrivals, index: int, now_s: float) -> int:
    """Take in the next request and return its slot; -1 if it is refused or a custom rule has to choose for it first."""
    clock = world.clock
    requests = ledger.requests
    slot = clock[0]["pending_slot"]
    if slot < 0:
        slot = take_slot(ledger)
        _write_request(ledger, slot, clock[0]["first_row"] + index, arrivals, index)
    verdict = place(ledger, slot, now_s)
    if verdict == UNDECIDED:
        clock[0]["pending_slot"] = slot
        return -1
    clock[0]["pending_slot"] = -1
    if verdict == TOO_LONG:
        requests[slot]["assigned_machine"] = NOBODY
        requests[slot]["token_machine"] = NOBODY
        see_end(ledger, world, slot)
        free_slot(ledger, slot)
        return -1
    requests[slot]["assigned_machine"] = requests[slot]["prompt_machine"]
    assign(ledger, slot)
    return int(slot)


@jit_inline
def _write_request(ledger: Ledger, slot: int, row: int, arrivals: Arrivals, index: int) -> None:
    """Fill a slot with the request at `index`."""
    requests = ledger.requests
    requests[slot]["row"] = row
    open_request(
        ledger,
        slot,
        arrivals.arrival_s[index],
        arrivals.prompt_tokens[index],
        arrivals.output_tokens[index],
        arrivals.expected_tokens[index],
    )
    requests[slot]["flow"] = IDLE
    requests[slot]["streamed"] = 0


@jit_part
def _task_arrives(ledger: Ledger, world: World, task: int, now_s: float) -> int:
    """Let a task come to its machine, where it waits; return the machine if it is idle and should form a batch.

    A machine that is busy ends its step early instead, so that the task may join.
    """
    slot = task // 2
    is_prompt = task % 2 == PROMPT
    requests = ledger.requests
    machines = ledger.machines
    machine = requests[slot]["prompt_machine"] if is_prompt else requests[slot]["token_machine"]
    if ledger.settings[0]["published"]:
        return task_arrives(ledger, world, machine, task, now_s)
    push(ledger.lists[WAITING if is_prompt else READY, machine], task)
    if machines[machine]["lanes"] == 0:
        return int(machine)
    cut(machines, world.clock, world.future, machine, now_s)
    return NOBODY


@jit_inline
def _transfer_event(ledger: Ledger, world: World, slot: int, now_s: float) -> bool:
    """Handle the next instant of a KV transfer: a retry, the last byte, the completion; return whether it is over."""
    requests = ledger.requests
    if requests[slot]["flow"] == WAITING_FOR_ROOM:
        try_transfer(ledger, world, slot, now_s)
        return False
    if requests[slot]["flow"] == DRAINING:
        drained(ledger, world, slot, now_s)
        return False
    requests[slot]["flow"] = IDLE
    leave_prompt_machine(ledger, slot, now_s)
    requests[slot]["kv_ready_s"] = now_s
    return True


@jit_inline
def _told_freed(ledger: Ledger, world: World, machine: int, now_s: float) -> int:
    """Let a machine use the memory that a transfer out of it has freed; return it if it should form a batch."""
    if ledger.settings[0]["published"]:
        return told_freed(ledger, world, machine, now_s)
    if ledger.machines[machine]["lanes"] == 0:
        return int(machine)
    if length(ledger.lists[LANDING, machine]) > 0:
        admit_landings(ledger, world, machine, now_s)
    if length(ledger.lists[WAITING, machine]) > 0:
        cut(ledger.machines, world.clock, world.future, machine, now_s)
    return NOBODY
