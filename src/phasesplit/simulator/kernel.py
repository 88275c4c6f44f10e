"""The compiled loop: `run` takes arrivals and events in order and applies the rules until it needs its driver.

The life of a request in it:

1. `_arrive`: it takes a slot, `place` chooses its machines, `assign` books it there.
2. `_task_arrives`: its prefill task waits on the prefill machine. An idle machine forms a batch at once; a busy one
   ends its step early.
3. `form_and_start`: the rules form the machine's next batch and its step starts.
4. `end_step`: the step is booked; tasks that ended with it leave the batch.
5. `_end_prefill_task`: the first token is out. The KV stays, or its transfer to the decode machine starts.
6. `_transfer_event`: the KV is whole on the decode machine; the decode task arrives there, as in 2.
7. `_complete`: the last token is out. `see_end` records the request, and its KV and slot are free.

On the way it counts gaps between tokens, batch sizes, and samples of the pools. Every function on the hot path is
called from one place and inlined there: the compiled loop stays small, and no call has to hand over all the columns.
"""

import math

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline, jit_part
from phasesplit.domain.latency import BINS_PER_OCTAVE, LEAST
from phasesplit.scheduler.accounts import (
    assign,
    end_prefill,
    end_request,
    free_slot,
    leave_prefill_machine,
    open_request,
    take_slot,
)
from phasesplit.scheduler.batching import form_chunked, form_whole
from phasesplit.scheduler.ledger import (
    AWAITING_ROOM,
    CHOSEN,
    DECODE,
    ENTRY_END,
    ENTRY_TASK,
    NEVER,
    NO_TASK,
    OFF,
    POOLS,
    PREEMPTED,
    PREFILL,
    PRESENT,
    QUEUE,
    READY,
    UNSPLIT,
    WAITING,
    Ledger,
)
from phasesplit.scheduler.placement import TOO_LONG, UNDECIDED, place
from phasesplit.scheduler.pools import return_home
from phasesplit.scheduler.queues import advance, length, push, remove, step_length
from phasesplit.scheduler.rules import Batching
from phasesplit.scheduler.tournament import NOBODY
from phasesplit.simulator.events import cancel, cut, first, next_time_s, schedule, time_of, time_step
from phasesplit.simulator.published_events import hand_on, task_arrives, try_transfer, use_freed
from phasesplit.simulator.transfers import (
    DRAINING,
    IDLE,
    WAITING_FOR_ROOM,
    admit_awaiting_room,
    drained,
    kv_bytes,
    nic_bytes_per_s,
    send,
    stream,
)
from phasesplit.simulator.world import COMPLETED, REFUSED, Arrivals, World

_SEGMENT_SHARE = 0.004


@jit
def count_gaps(gaps: NDArray[np.int64], gap_s: float, count: int) -> None:
    """Count so many gaps of this length; gaps outside the histogram's range fall into its first or last bin.

    Mutates: gaps.
    """
    mantissa, exponent = math.frexp(max(gap_s, LEAST) / LEAST)
    index = (exponent - 1) * BINS_PER_OCTAVE + int((2.0 * mantissa - 1.0) * BINS_PER_OCTAVE)
    gaps[min(index, gaps.size - 1)] += count


@jit_inline
def see_step(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Count a step that has just been executed: its time by phase, its batch size, the gaps its tokens closed.

    Mutates: machines, entry_gap_s, world's histograms.
    """
    machines = ledger.machines
    running_entries = machines[machine]["running_entries"]
    prompts = machines[machine]["prefill_entries"]
    iterations = machines[machine]["step_iterations"]
    duration_s = now_s - machines[machine]["step_start_s"]
    machines[machine]["iterations"] += iterations
    machines[machine]["task_iterations"] += iterations * running_entries
    world.batch_s[machines[machine]["pool"], running_entries] += duration_s
    if prompts == running_entries:
        machines[machine]["busy_prefill_s"] += duration_s
        return
    if prompts > 0:
        machines[machine]["busy_mixed_s"] += duration_s
    else:
        machines[machine]["busy_decode_s"] += duration_s
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    last_s = first_s + growth_s * (iterations - 1)
    count_gaps(world.gaps, first_s, running_entries - prompts - machines[machine]["step_joiners"])
    if iterations > 1:
        _see_gaps(world, first_s + growth_s, growth_s, iterations - 1, running_entries - prompts)
    gaps_s = ledger.entry_gap_s[machine]
    for running_entry in range(running_entries):
        gaps_s[running_entry] = max(gaps_s[running_entry], last_s)


@jit_inline
def _see_gaps(world: World, first_s: float, growth_s: float, iterations: int, running_entries: int) -> None:
    """Count the gaps of so many iterations that get longer by `growth_s` each, in segments narrower than a bin."""
    segments = 1
    if growth_s * (iterations - 1) > _SEGMENT_SHARE * first_s:
        segments = min(iterations, int(growth_s * (iterations - 1) / (_SEGMENT_SHARE * first_s)) + 1)
    begin = 0
    for segment in range(segments):
        end = iterations * (segment + 1) // segments
        middle_s = first_s + growth_s * 0.5 * (begin + end - 1)
        count_gaps(world.gaps, middle_s, running_entries * (end - begin))
        begin = end


@jit
def see_end(ledger: Ledger, world: World, slot: int) -> None:
    """Write the record of a request that has ended; one that never came to a machine was refused.

    Mutates: world.done, world.clock.
    """
    requests = ledger.requests
    done = world.done
    index = world.clock[0]["done"]
    world.clock[0]["done"] = index + 1
    done[index]["row"] = requests[slot]["row"]
    done[index]["status"] = REFUSED if requests[slot]["assigned_machine"] < 0 else COMPLETED
    done[index]["prefill_machine"] = requests[slot]["assigned_machine"]
    done[index]["decode_machine"] = requests[slot]["decode_machine"]
    done[index]["preemptions"] = requests[slot]["preemptions"]
    done[index]["prompt_tokens"] = requests[slot]["prompt_tokens"]
    done[index]["output_tokens"] = requests[slot]["output_tokens"]
    done[index]["arrival_s"] = requests[slot]["arrival_s"]
    done[index]["prefill_start_s"] = requests[slot]["prefill_start_s"]
    done[index]["first_token_s"] = requests[slot]["first_token_s"]
    done[index]["kv_ready_s"] = requests[slot]["kv_ready_s"]
    done[index]["decode_start_s"] = requests[slot]["decode_start_s"]
    done[index]["last_token_s"] = requests[slot]["last_token_s"]
    done[index]["gap_max_s"] = requests[slot]["gap_max_s"]


@jit
def sample(ledger: Ledger, world: World) -> None:
    """Add a sample of all pools to the timeline; a full timeline drops every second sample and goes on half as often.

    Mutates: world.samples, world.clock.
    """
    clock = world.clock
    samples = world.samples
    if clock[0]["samples"] == samples.shape[0]:
        half = samples.shape[0] // 2
        for i in range(half):
            for pool in range(POOLS):
                for field in range(samples.shape[2]):
                    samples[i, pool, field] = samples[2 * i + 1, pool, field]
        clock[0]["samples"] = half
        clock[0]["next_sample_s"] += clock[0]["sample_every_s"]
        clock[0]["sample_every_s"] *= 2.0
        return
    row = samples[clock[0]["samples"]]
    row[:] = 0.0
    machines = ledger.machines
    for machine in range(machines.size):
        if machines[machine]["state"] == OFF:
            continue
        pool = machines[machine]["pool"]
        row[pool, 0] += 1.0
        row[pool, 1] += 1.0 if machines[machine]["running_entries"] > 0 else 0.0
        row[pool, 2] += machines[machine]["running_entries"]
        if ledger.settings[0]["published"]:
            row[pool, 3] += length(ledger.lists[QUEUE, machine])
        else:
            for kind in (WAITING, PREEMPTED, READY, AWAITING_ROOM):
                row[pool, 3] += length(ledger.lists[kind, machine])
        row[pool, 4] += machines[machine]["used_blocks"] / machines[machine]["capacity_blocks"]
    for pool in range(POOLS):
        if row[pool, 0] > 0:
            row[pool, 4] /= row[pool, 0]
    clock[0]["samples"] += 1
    clock[0]["next_sample_s"] += clock[0]["sample_every_s"]


_CHUNKED = int(Batching.CHUNKED)


@jit_part
def form_and_start(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Form the machine's next batch and start its step; without a batch it idles. KV that waits for room may come then.

    In between it may go home from the mixed pool.

    Mutates: ledger, world.
    """
    machines = ledger.machines
    settings = ledger.settings
    unsplit = machines[machine]["home"] == UNSPLIT
    batching = settings[0]["unsplit_batching"] if unsplit else settings[0]["batching"]
    if batching == _CHUNKED and settings[0]["published"] == 0:
        first_new = form_chunked(ledger, machine, now_s)
    else:
        first_new = form_whole(ledger, machine, now_s)
    return_home(ledger, machine, now_s)
    if machines[machine]["running_entries"] > 0:
        _start(ledger, world, machine, first_new, now_s)
    if length(ledger.lists[AWAITING_ROOM, machine]) > 0:
        admit_awaiting_room(ledger, world, machine, now_s)


@jit_part
def _start(ledger: Ledger, world: World, machine: int, first_new: int, now_s: float) -> None:
    """Start a step with the batch that has been formed, whose running entries from `first_new` on are new."""
    machines = ledger.machines
    iterations = step_length(ledger, machine)
    time_step(ledger, world, machine)
    machines[machine]["steps"] += 1
    machines[machine]["step_start_s"] = now_s
    machines[machine]["step_iterations"] = iterations
    if machines[machine]["prefill_entries"] > 0 and ledger.settings[0]["published"] == 0:
        _start_streams(ledger, world, machine, now_s)
    _see_joiners(ledger, world, machine, first_new, now_s)
    schedule(world.clock, world.future, machine, now_s + time_of(machines, machine, iterations))


@jit_inline
def _streams(ledger: Ledger, world: World, machine: int, running_entry: int) -> bool:
    """Whether the running entry is a prompt that ends with this step and is long enough to be sent layer by layer."""
    task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
    if task % 2 == DECODE or ledger.running_entries[ENTRY_END, machine, running_entry] == NEVER:
        return False
    slot = task // 2
    requests = ledger.requests
    if requests[slot]["decode_machine"] == machine or requests[slot]["output_tokens"] == 1:
        return False
    return bool(
        requests[slot]["prompt_tokens"] >= world.kinds[ledger.machines[machine]["kind"]]["layerwise_from_tokens"]
    )


@jit_inline
def _start_streams(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Start the layer-wise transfers of a prefill iteration, which takes longer for them.

    Source: the slowdown of computing while streaming, see `domain.machine.STREAMING_SLOWDOWN`.
    """
    machines = ledger.machines
    size = 0.0
    for running_entry in range(machines[machine]["running_entries"]):
        if _streams(ledger, world, machine, running_entry):
            size += kv_bytes(ledger, world, ledger.running_entries[ENTRY_TASK, machine, running_entry] // 2)
    if size == 0.0:
        return
    first_s = machines[machine]["step_first_s"]
    streaming_s = min(size / nic_bytes_per_s(ledger, world, machine), first_s)
    machines[machine]["step_first_s"] = (
        first_s + world.kinds[machines[machine]["kind"]]["streaming_slowdown"] * streaming_s
    )
    for running_entry in range(machines[machine]["running_entries"]):
        if _streams(ledger, world, machine, running_entry):
            slot = ledger.running_entries[ENTRY_TASK, machine, running_entry] // 2
            stream(ledger, world, slot, machines[machine]["step_first_s"], now_s)


@jit_inline
def _see_joiners(ledger: Ledger, world: World, machine: int, first_new: int, now_s: float) -> None:
    """Note the start of the tasks that are new in the batch, and the gap that their next token will close."""
    requests = ledger.requests
    first_s = ledger.machines[machine]["step_first_s"]
    joiners = 0
    for running_entry in range(first_new, ledger.machines[machine]["running_entries"]):
        task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
        slot = task // 2
        if task % 2 == PREFILL:
            if requests[slot]["prefill_start_s"] < 0.0:
                requests[slot]["prefill_start_s"] = now_s
            continue
        joiners += 1
        if requests[slot]["decode_start_s"] < 0.0:
            requests[slot]["decode_start_s"] = now_s
        gap_s = now_s + first_s - requests[slot]["last_token_s"]
        count_gaps(world.gaps, gap_s, 1)
        ledger.entry_gap_s[machine, running_entry] = gap_s
    ledger.machines[machine]["step_joiners"] = joiners


@jit_part
def end_step(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Book the step that ends now and end the tasks that ended with it, in order.

    Mutates: ledger, world.
    """
    see_step(ledger, world, machine, now_s)
    ended = advance(ledger, machine, ledger.machines[machine]["step_iterations"], now_s)
    for index in range(ended):
        task = ledger.running_entries[CHOSEN, machine, index]
        slot = task // 2
        if task % 2 == PREFILL:
            _end_prefill_task(ledger, world, machine, slot, now_s)
        if ledger.requests[slot]["emitted"] == ledger.requests[slot]["output_tokens"]:
            _complete(ledger, world, machine, slot, now_s)


@jit_part
def _end_prefill_task(ledger: Ledger, world: World, machine: int, slot: int, now_s: float) -> None:
    """End a prefill: its token is out, its KV stays, leaves for the decode machine, or is not needed any more."""
    requests = ledger.requests
    end_prefill(ledger, slot)
    requests[slot]["emitted"] += 1
    requests[slot]["phase"] = DECODE
    if requests[slot]["emitted"] == 1:
        requests[slot]["first_token_s"] = now_s
    else:
        gap_s = now_s - requests[slot]["last_token_s"]
        count_gaps(world.gaps, gap_s, 1)
        requests[slot]["gap_max_s"] = max(requests[slot]["gap_max_s"], gap_s)
        # A request whose KV was lost on the way gets its further tokens here without ever having been handed on.
        if requests[slot]["kv_ready_s"] < 0.0:
            requests[slot]["kv_ready_s"] = now_s
        if requests[slot]["decode_start_s"] < 0.0:
            requests[slot]["decode_start_s"] = now_s
    requests[slot]["last_token_s"] = now_s
    stays = requests[slot]["decode_machine"] == machine
    if requests[slot]["emitted"] == requests[slot]["output_tokens"]:
        if not stays:
            leave_prefill_machine(ledger, slot, now_s)
        return
    if ledger.settings[0]["published"]:
        hand_on(ledger, world, machine, slot, now_s)
    elif stays:
        if requests[slot]["kv_ready_s"] < 0.0:
            requests[slot]["kv_ready_s"] = now_s
        push(ledger.lists[READY, machine], 2 * slot + DECODE)
    else:
        send(ledger, world, slot, now_s)


@jit_inline
def _complete(ledger: Ledger, world: World, machine: int, slot: int, now_s: float) -> None:
    """End a request: record it, free what it holds, give its slot back."""
    if ledger.settings[0]["published"]:
        remove(ledger.lists[PRESENT, machine], slot)
    see_end(ledger, world, slot)
    end_request(ledger, slot, now_s)
    free_slot(ledger, slot)


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
        # What follows from the event: up to two tasks arrive, a machine uses freed memory, machines form a batch.
        task, next_task, freed, forming = NO_TASK, NO_TASK, NOBODY, NOBODY
        entity = first(future)
        sequence = future[entity]["sequence"]
        if is_arrival:
            if counters[0]["free_slot"] < 0 and clock[0]["pending_slot"] < 0:
                return NEED_SLOTS
            # A request has up to two tasks in a list, and one more request may come.
            if 2 * counters[0]["most_assigned"] + 4 > ledger.running_entries.shape[2]:
                return NEED_ROOM
            slot = _arrive(ledger, world, arrivals, index, now_s)
            if clock[0]["pending_slot"] >= 0:
                return NEED_CHOICE
            clock[0]["next_arrival"] += 1
            if slot >= 0:
                task = 2 * slot + PREFILL
                same = ledger.requests[slot]["prefill_machine"] == ledger.requests[slot]["decode_machine"]
                if ledger.settings[0]["published"] and same:
                    next_task = 2 * slot + DECODE
        else:
            # Its event stays in the heap, so that a machine's next step only moves it; if none comes, it goes.
            if entity < ledger.machines.size:
                if ledger.machines[entity]["running_entries"] > 0:
                    end_step(ledger, world, entity, now_s)
                forming = entity
            else:
                slot = entity - ledger.machines.size
                if _transfer_event(ledger, world, slot, now_s):
                    task = 2 * slot + DECODE
                    freed = ledger.requests[slot]["assigned_machine"]
        clock[0]["events"] += 1
        while True:
            if task != NO_TASK:
                forming = _task_arrives(ledger, world, task, now_s)
                task = next_task
                next_task = NO_TASK
            elif freed != NOBODY:
                forming = _use_freed(ledger, world, freed, now_s)
                freed = NOBODY
            if forming != NOBODY:
                form_and_start(ledger, world, forming, now_s)
                forming = NOBODY
            if task == NO_TASK and freed == NOBODY:
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
        requests[slot]["decode_machine"] = NOBODY
        see_end(ledger, world, slot)
        free_slot(ledger, slot)
        return -1
    requests[slot]["assigned_machine"] = requests[slot]["prefill_machine"]
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
    is_prefill = task % 2 == PREFILL
    requests = ledger.requests
    machines = ledger.machines
    machine = requests[slot]["prefill_machine"] if is_prefill else requests[slot]["decode_machine"]
    if ledger.settings[0]["published"]:
        return task_arrives(ledger, world, machine, task, now_s)
    push(ledger.lists[WAITING if is_prefill else READY, machine], task)
    if machines[machine]["running_entries"] == 0:
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
    leave_prefill_machine(ledger, slot, now_s)
    requests[slot]["kv_ready_s"] = now_s
    return True


@jit_inline
def _use_freed(ledger: Ledger, world: World, machine: int, now_s: float) -> int:
    """Let a machine use the memory that a transfer out of it has freed; return it if it should form a batch."""
    if ledger.settings[0]["published"]:
        return use_freed(ledger, world, machine, now_s)
    if ledger.machines[machine]["running_entries"] == 0:
        return int(machine)
    if length(ledger.lists[AWAITING_ROOM, machine]) > 0:
        admit_awaiting_room(ledger, world, machine, now_s)
    if length(ledger.lists[WAITING, machine]) > 0:
        cut(ledger.machines, world.clock, world.future, machine, now_s)
    return NOBODY
