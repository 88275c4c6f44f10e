"""The running batch of a machine: tasks join lanes, leave them, and are counted in the machine's sums.

A decode lane that joins at iteration i of its machine with r tokens to go ends at iteration i + r; nothing has to be
counted down. Its context grows by one token an iteration, so only `context - iteration` is kept.
"""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduling.accounts import back_to_prompt, blocks_of, use_blocks, work_tokens
from phasesplit.scheduling.ledger import (
    CHOSEN,
    LANE_CONTEXT,
    LANE_END,
    LANE_TASK,
    NEVER,
    PROMPT,
    TOKEN,
    WAITING,
    Ledger,
)
from phasesplit.scheduling.lists import insert


@jit_inline
def prompt_blocks(ledger: Ledger, slot: int) -> int:
    """Return the KV blocks that a request's prefill fills: what it computes, and the token it emits."""
    return blocks_of(ledger.settings, work_tokens(ledger.requests, slot) + 1)


@jit_inline
def give_chunk(ledger: Ledger, machine: int, lane: int, tokens: int) -> None:
    """Let a prefill lane compute so many of its tokens in the next iteration; 0 lets it wait in its lane.

    Mutates: requests["chunk"], lanes, machines' sums.
    """
    requests = ledger.requests
    machines = ledger.machines
    slot = ledger.lanes[LANE_TASK, machine, lane] // 2
    computed = requests[slot]["computed"]
    requests[slot]["chunk"] = tokens
    last = computed + tokens == work_tokens(requests, slot)
    ledger.lanes[LANE_END, machine, lane] = machines[machine]["iteration"] + 1 if last else NEVER
    machines[machine]["batch_tokens"] += tokens
    machines[machine]["pair_tokens"] += tokens * (0.5 * tokens + computed)


@jit
def join(ledger: Ledger, machine: int, task: int) -> None:
    """Let a task take the next lane; a prompt is given its chunk apart (`give_chunk`).

    Mutates: lanes, lane_gap_s, requests["running"], machines' sums.
    """
    machines = ledger.machines
    requests = ledger.requests
    slot = task // 2
    lane = machines[machine]["lanes"]
    machines[machine]["lanes"] = lane + 1
    requests[slot]["running"] = 1
    ledger.lanes[LANE_TASK, machine, lane] = task
    ledger.lane_gap_s[machine, lane] = 0.0
    if task % 2 == PROMPT:
        machines[machine]["prompt_lanes"] += 1
        ledger.lanes[LANE_END, machine, lane] = NEVER
        ledger.lanes[LANE_CONTEXT, machine, lane] = 0
        return
    iteration = machines[machine]["iteration"]
    context = work_tokens(requests, slot)
    ledger.lanes[LANE_END, machine, lane] = iteration + requests[slot]["output_tokens"] - requests[slot]["emitted"]
    ledger.lanes[LANE_CONTEXT, machine, lane] = context - iteration
    machines[machine]["batch_tokens"] += 1
    machines[machine]["context_tokens"] += context


@jit_inline
def settle(ledger: Ledger, machine: int, lane: int, now_s: float) -> None:
    """Write what a lane has done so far into its request and take it out of the machine's sums; the lane itself stays.

    Mutates: requests, machines' sums.
    """
    machines = ledger.machines
    requests = ledger.requests
    task = ledger.lanes[LANE_TASK, machine, lane]
    slot = task // 2
    requests[slot]["running"] = 0
    if task % 2 == PROMPT:
        machines[machine]["prompt_lanes"] -= 1
        return
    iteration = machines[machine]["iteration"]
    emitted = requests[slot]["output_tokens"] - (ledger.lanes[LANE_END, machine, lane] - iteration)
    if emitted > requests[slot]["emitted"]:
        requests[slot]["last_token_s"] = now_s  # a lane that never ran has emitted nothing here
    requests[slot]["emitted"] = emitted
    if ledger.settings[0]["published"] == 0:
        requests[slot]["blocks"] = blocks_of(ledger.settings, work_tokens(requests, slot))
    requests[slot]["gap_max_s"] = max(requests[slot]["gap_max_s"], ledger.lane_gap_s[machine, lane])
    machines[machine]["batch_tokens"] -= 1
    machines[machine]["context_tokens"] -= ledger.lanes[LANE_CONTEXT, machine, lane] + iteration


@jit_inline
def move_lane(ledger: Ledger, machine: int, source: int, target: int) -> None:
    """Copy a lane over another.

    Mutates: lanes, lane_gap_s.
    """
    lanes = ledger.lanes
    lanes[LANE_TASK, machine, target] = lanes[LANE_TASK, machine, source]
    lanes[LANE_END, machine, target] = lanes[LANE_END, machine, source]
    lanes[LANE_CONTEXT, machine, target] = lanes[LANE_CONTEXT, machine, source]
    ledger.lane_gap_s[machine, target] = ledger.lane_gap_s[machine, source]


@jit
def growth(ledger: Ledger, machine: int, iterations: int) -> int:
    """Return the KV blocks that the decode lanes need for so many more iterations."""
    shift = ledger.settings[0]["block_shift"]
    iteration = ledger.machines[machine]["iteration"]
    lanes = ledger.lanes
    blocks = 0
    for lane in range(ledger.machines[machine]["lanes"]):
        if lanes[LANE_TASK, machine, lane] % 2 == TOKEN:
            last = lanes[LANE_CONTEXT, machine, lane] + iteration - 1
            blocks += ((last + iterations) >> shift) - (last >> shift)
    return blocks


@jit
def evict_last(ledger: Ledger, machine: int, now_s: float) -> None:
    """Take the KV of the lane that joined last, and put its request at the head of the waiting prompts.

    Its prompt, and the output it has already, are computed again. Source: recomputation of the latest request when
    memory runs out (Kwon et al. 2023, "Efficient Memory Management for LLM Serving with PagedAttention", section 4.5).

    Mutates: lanes, lists, requests, machines, counters, keys, trees.
    """
    machines = ledger.machines
    requests = ledger.requests
    lane = machines[machine]["lanes"] - 1
    task = ledger.lanes[LANE_TASK, machine, lane]
    slot = task // 2
    if task % 2 == PROMPT:
        chunk = requests[slot]["chunk"]
        machines[machine]["batch_tokens"] -= chunk
        machines[machine]["pair_tokens"] -= chunk * (0.5 * chunk + requests[slot]["computed"])
    settle(ledger, machine, lane, now_s)
    machines[machine]["lanes"] = lane
    use_blocks(machines, machine, -requests[slot]["blocks"], now_s)
    requests[slot]["blocks"] = 0
    requests[slot]["preemptions"] += 1
    ledger.counters[0]["evictions"] += 1
    if task % 2 == TOKEN:
        back_to_prompt(ledger, machine, slot)
    requests[slot]["prompt_held"] = 0
    requests[slot]["computed"] = 0
    insert(ledger.lists[WAITING, machine], 0, 2 * slot + PROMPT)


@jit
def make_room(ledger: Ledger, machine: int, now_s: float) -> bool:
    """Evict the lanes that joined last until the KV of one more iteration fits; return whether any had to go.

    Mutates: as `evict_last`.
    """
    machines = ledger.machines
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    if free >= machines[machine]["lanes"]:
        return False
    lanes = machines[machine]["lanes"]
    while machines[machine]["used_blocks"] + growth(ledger, machine, 1) > machines[machine]["capacity_blocks"]:
        evict_last(ledger, machine, now_s)
    return bool(machines[machine]["lanes"] < lanes)


@jit_inline
def step_length(ledger: Ledger, machine: int) -> int:
    """Return how many iterations the batch runs unchanged: 1 with a prompt in it, else until a lane ends or KV is full.

    Requires: one iteration fits (see `make_room`); not under the published rules, which reserve whole outputs.

    Mutates: machines["next_end"].
    """
    machines = ledger.machines
    lanes = machines[machine]["lanes"]
    if machines[machine]["prompt_lanes"] > 0:
        return 1
    end = NEVER
    for lane in range(lanes):
        end = min(end, ledger.lanes[LANE_END, machine, lane])
    machines[machine]["next_end"] = end
    longest = int(end - machines[machine]["iteration"])
    if ledger.settings[0]["published"]:
        return longest
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    if lanes * ((longest >> ledger.settings[0]["block_shift"]) + 1) <= free:
        return longest
    fitting, beyond = 1, longest + 1
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if growth(ledger, machine, middle) <= free:
            fitting = middle
        else:
            beyond = middle
    return fitting


@jit_inline
def advance(ledger: Ledger, machine: int, iterations: int, now_s: float) -> int:
    """Book an executed step and take out the lanes that ended; return how many did, their tasks in the row CHOSEN.

    Mutates: lanes, requests, machines.
    """
    machines = ledger.machines
    requests = ledger.requests
    lanes = machines[machine]["lanes"]
    prompts = machines[machine]["prompt_lanes"]
    if ledger.settings[0]["published"] == 0 and lanes > prompts:
        blocks = growth(ledger, machine, iterations)
        if blocks > 0:
            use_blocks(machines, machine, blocks, now_s)
    machines[machine]["iteration"] += iterations
    machines[machine]["context_tokens"] += iterations * (lanes - prompts)
    iteration = machines[machine]["iteration"]
    if prompts == 0 and iteration < machines[machine]["next_end"]:
        return 0
    ended = 0
    for lane in range(lanes):
        task = ledger.lanes[LANE_TASK, machine, lane]
        if prompts > 0 and task % 2 == PROMPT:
            requests[task // 2]["computed"] += requests[task // 2]["chunk"]
        if ledger.lanes[LANE_END, machine, lane] == iteration:
            settle(ledger, machine, lane, now_s)
            ledger.lanes[CHOSEN, machine, ended] = task
            ended += 1
        elif ended > 0:
            move_lane(ledger, machine, lane, lane - ended)
    machines[machine]["lanes"] = lanes - ended
    if prompts > 0:
        machines[machine]["batch_tokens"] = lanes - ended - machines[machine]["prompt_lanes"]
        machines[machine]["pair_tokens"] = 0.0
    return ended
