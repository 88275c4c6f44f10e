"""What a machine does at the end of a step: books it, ends what ended, forms the next batch and starts it."""

from phasesplit._jit import jit_inline, jit_part
from phasesplit.scheduling.accounts import end_prompt, end_request, free_slot, leave_prompt_machine
from phasesplit.scheduling.batching import form_chunked, form_whole
from phasesplit.scheduling.lanes import advance, step_length
from phasesplit.scheduling.ledger import (
    CHOSEN,
    LANDING,
    LANE_END,
    LANE_TASK,
    NEVER,
    PRESENT,
    PROMPT,
    READY,
    TOKEN,
    UNSPLIT,
    Ledger,
)
from phasesplit.scheduling.lists import length, push, remove
from phasesplit.scheduling.pools import return_home
from phasesplit.scheduling.rules import Batching
from phasesplit.simulation.events import schedule
from phasesplit.simulation.flows import kv_bytes, nic_bytes_per_s
from phasesplit.simulation.observe import count_gaps, see_end, see_step
from phasesplit.simulation.published import hand_on
from phasesplit.simulation.steps import time_of, time_step
from phasesplit.simulation.transfers import admit_landings, send, stream
from phasesplit.simulation.world import World

_CHUNKED = int(Batching.CHUNKED)


@jit_part
def form_and_start(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Form the machine's next batch and start its step; without a batch it idles. KV that waits may land then.

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
    if machines[machine]["lanes"] > 0:
        _start(ledger, world, machine, first_new, now_s)
    if length(ledger.lists[LANDING, machine]) > 0:
        admit_landings(ledger, world, machine, now_s)


@jit_part
def _start(ledger: Ledger, world: World, machine: int, first_new: int, now_s: float) -> None:
    """Start a step with the batch that has been formed, whose lanes from `first_new` on are new."""
    machines = ledger.machines
    iterations = step_length(ledger, machine)
    time_step(ledger, world, machine)
    machines[machine]["steps"] += 1
    machines[machine]["step_start_s"] = now_s
    machines[machine]["step_iterations"] = iterations
    if machines[machine]["prompt_lanes"] > 0 and ledger.settings[0]["published"] == 0:
        _start_streams(ledger, world, machine, now_s)
    _see_joiners(ledger, world, machine, first_new, now_s)
    schedule(world.clock, world.future, machine, now_s + time_of(machines, machine, iterations))


@jit_inline
def _streams(ledger: Ledger, world: World, machine: int, lane: int) -> bool:
    """Whether the lane is a prompt that ends with this step and is long enough to be sent layer by layer."""
    task = ledger.lanes[LANE_TASK, machine, lane]
    if task % 2 == TOKEN or ledger.lanes[LANE_END, machine, lane] == NEVER:
        return False
    slot = task // 2
    requests = ledger.requests
    if requests[slot]["token_machine"] == machine or requests[slot]["output_tokens"] == 1:
        return False
    return bool(
        requests[slot]["prompt_tokens"] >= world.kinds[ledger.machines[machine]["kind"]]["layerwise_from_tokens"]
    )


@jit_inline
def _start_streams(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Start the layer-wise transfers of a prefill iteration, which takes longer for them.

    Source: the slowdown of computing while streaming, see `domain.link.STREAMING_SLOWDOWN`.
    """
    machines = ledger.machines
    size = 0.0
    for lane in range(machines[machine]["lanes"]):
        if _streams(ledger, world, machine, lane):
            size += kv_bytes(ledger, world, ledger.lanes[LANE_TASK, machine, lane] // 2)
    if size == 0.0:
        return
    first_s = machines[machine]["step_first_s"]
    streaming_s = min(size / nic_bytes_per_s(ledger, world, machine), first_s)
    machines[machine]["step_first_s"] = (
        first_s + world.kinds[machines[machine]["kind"]]["streaming_slowdown"] * streaming_s
    )
    for lane in range(machines[machine]["lanes"]):
        if _streams(ledger, world, machine, lane):
            slot = ledger.lanes[LANE_TASK, machine, lane] // 2
            stream(ledger, world, slot, machines[machine]["step_first_s"], now_s)


@jit_inline
def _see_joiners(ledger: Ledger, world: World, machine: int, first_new: int, now_s: float) -> None:
    """Note the start of the tasks that are new in the batch, and the gap that their next token will close."""
    requests = ledger.requests
    first_s = ledger.machines[machine]["step_first_s"]
    joiners = 0
    for lane in range(first_new, ledger.machines[machine]["lanes"]):
        task = ledger.lanes[LANE_TASK, machine, lane]
        slot = task // 2
        if task % 2 == PROMPT:
            if requests[slot]["prompt_start_s"] < 0.0:
                requests[slot]["prompt_start_s"] = now_s
            continue
        joiners += 1
        if requests[slot]["token_start_s"] < 0.0:
            requests[slot]["token_start_s"] = now_s
        gap_s = now_s + first_s - requests[slot]["last_token_s"]
        count_gaps(world.gaps, gap_s, 1)
        ledger.lane_gap_s[machine, lane] = gap_s
    ledger.machines[machine]["step_joiners"] = joiners


@jit_part
def end_step(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Book the step that ends now and end the tasks that ended with it, in order.

    Mutates: ledger, world.
    """
    see_step(ledger, world, machine, now_s)
    ended = advance(ledger, machine, ledger.machines[machine]["step_iterations"], now_s)
    for index in range(ended):
        task = ledger.lanes[CHOSEN, machine, index]
        slot = task // 2
        if task % 2 == PROMPT:
            _end_prompt_task(ledger, world, machine, slot, now_s)
        if ledger.requests[slot]["emitted"] == ledger.requests[slot]["output_tokens"]:
            _complete(ledger, world, machine, slot, now_s)


@jit_part
def _end_prompt_task(ledger: Ledger, world: World, machine: int, slot: int, now_s: float) -> None:
    """End a prefill: its token is out, its KV stays, leaves for the decode machine, or is not needed any more."""
    requests = ledger.requests
    end_prompt(ledger, slot)
    requests[slot]["emitted"] += 1
    requests[slot]["phase"] = TOKEN
    if requests[slot]["emitted"] == 1:
        requests[slot]["first_token_s"] = now_s
    else:
        gap_s = now_s - requests[slot]["last_token_s"]
        count_gaps(world.gaps, gap_s, 1)
        requests[slot]["gap_max_s"] = max(requests[slot]["gap_max_s"], gap_s)
        # A request whose KV was lost on the way gets its further tokens here without ever having been handed on.
        if requests[slot]["kv_ready_s"] < 0.0:
            requests[slot]["kv_ready_s"] = now_s
        if requests[slot]["token_start_s"] < 0.0:
            requests[slot]["token_start_s"] = now_s
    requests[slot]["last_token_s"] = now_s
    stays = requests[slot]["token_machine"] == machine
    if requests[slot]["emitted"] == requests[slot]["output_tokens"]:
        if not stays:
            leave_prompt_machine(ledger, slot, now_s)
        return
    if ledger.settings[0]["published"]:
        hand_on(ledger, world, machine, slot, now_s)
    elif stays:
        if requests[slot]["kv_ready_s"] < 0.0:
            requests[slot]["kv_ready_s"] = now_s
        push(ledger.lists[READY, machine], 2 * slot + TOKEN)
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
