"""KV transfers: where one may begin, how flows share network cards, and what follows when one ends.

A flow is in one of these states:

1. STREAMING: layer by layer while the prompt is computed, no faster than layers get ready.
2. DRAINING: prefill is over; the rest goes as fast as the cards let it.
3. TAIL: all bytes are out, the completion is on its way.

WAITING_FOR_ROOM (published rules only): the destination was full; it is tried again every second.

Each flow gets an equal share of the cards at both ends, and the smaller share counts. Sharing is equal and not max-min
fair: what a flow leaves of its share at a faster end is not given to the others there, so congestion is never
understated.
"""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import back_to_prefill, blocks_of, hold_arrival, leave_prefill_machine, work_tokens
from phasesplit.scheduler.ledger import AWAITING_ROOM, PREFILL, WAITING, Ledger
from phasesplit.scheduler.queues import entry, growth, length, prefill_blocks, push, remove
from phasesplit.simulator.events import cut, iterations_by, schedule
from phasesplit.simulator.world import World

IDLE, STREAMING, DRAINING, TAIL, WAITING_FOR_ROOM = range(5)
"""States of a request's transfer."""

UNLIMITED = 1e30
"""A cap on a flow's rate that never binds, in bytes per second."""


@jit_inline
def kv_bytes(ledger: Ledger, world: World, slot: int) -> float:
    """Return the bytes of KV that a request's prefill leaves behind."""
    return float(ledger.requests[slot]["prompt_tokens"] * world.kinds[0]["kv_bytes_per_token"])


@jit_inline
def nic_bytes_per_s(ledger: Ledger, world: World, machine: int) -> float:
    """Return the bandwidth of a machine's network cards, one direction."""
    return float(world.kinds[ledger.machines[machine]["kind"]]["nic_bytes_per_s"])


@jit_inline
def progress(ledger: Ledger, slot: int, now_s: float) -> None:
    """Bring a flow's bytes left up to date.

    Mutates: requests["left_bytes"], ["flow_since_s"].
    """
    requests = ledger.requests
    sent = requests[slot]["rate_bytes_per_s"] * (now_s - requests[slot]["flow_since_s"])
    requests[slot]["left_bytes"] = max(0.0, requests[slot]["left_bytes"] - sent)
    requests[slot]["flow_since_s"] = now_s


@jit
def set_rate(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Give a flow its present share, and a draining one its new end.

    Mutates: requests, world.future, world.clock.
    """
    requests = ledger.requests
    progress(ledger, slot, now_s)
    source = requests[slot]["assigned_machine"]
    target = requests[slot]["decode_machine"]
    out = nic_bytes_per_s(ledger, world, source) / ledger.machines[source]["sending"]
    into = nic_bytes_per_s(ledger, world, target) / ledger.machines[target]["receiving"]
    rate = min(requests[slot]["cap_bytes_per_s"], min(out, into))
    requests[slot]["rate_bytes_per_s"] = rate
    if requests[slot]["flow"] == DRAINING:
        schedule(world.clock, world.future, ledger.machines.size + slot, now_s + requests[slot]["left_bytes"] / rate)


@jit
def _share_again(ledger: Ledger, world: World, source: int, target: int, now_s: float) -> None:
    """Give all flows out of `source` and into `target` their shares again."""
    slot = ledger.machines[source]["first_sending"]
    while slot >= 0:
        set_rate(ledger, world, slot, now_s)
        slot = ledger.requests[slot]["next_sending"]
    slot = ledger.machines[target]["first_receiving"]
    while slot >= 0:
        if ledger.requests[slot]["assigned_machine"] != source:
            set_rate(ledger, world, slot, now_s)
        slot = ledger.requests[slot]["next_receiving"]


@jit
def open_flow(
    ledger: Ledger, world: World, slot: int, state: int, left_bytes: float, cap_bytes_per_s: float, now_s: float
) -> None:
    """Start a flow from a request's prefill machine to its decode machine.

    Mutates: requests, machines, world.future, world.clock.
    """
    machines = ledger.machines
    requests = ledger.requests
    source = requests[slot]["assigned_machine"]
    target = requests[slot]["decode_machine"]
    requests[slot]["flow"] = state
    requests[slot]["left_bytes"] = left_bytes
    requests[slot]["cap_bytes_per_s"] = cap_bytes_per_s
    requests[slot]["rate_bytes_per_s"] = 0.0
    requests[slot]["flow_since_s"] = now_s
    head = machines[source]["first_sending"]
    requests[slot]["next_sending"] = head
    requests[slot]["previous_sending"] = -1
    if head >= 0:
        requests[head]["previous_sending"] = slot
    machines[source]["first_sending"] = slot
    machines[source]["sending"] += 1
    head = machines[target]["first_receiving"]
    requests[slot]["next_receiving"] = head
    requests[slot]["previous_receiving"] = -1
    if head >= 0:
        requests[head]["previous_receiving"] = slot
    machines[target]["first_receiving"] = slot
    machines[target]["receiving"] += 1
    _share_again(ledger, world, source, target, now_s)


@jit
def close_flow(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Take a flow off the cards at both ends and share its part among the others.

    Mutates: requests, machines, world.future, world.clock.
    """
    machines = ledger.machines
    requests = ledger.requests
    source = requests[slot]["assigned_machine"]
    target = requests[slot]["decode_machine"]
    after = requests[slot]["next_sending"]
    before = requests[slot]["previous_sending"]
    if before >= 0:
        requests[before]["next_sending"] = after
    else:
        machines[source]["first_sending"] = after
    if after >= 0:
        requests[after]["previous_sending"] = before
    machines[source]["sending"] -= 1
    after = requests[slot]["next_receiving"]
    before = requests[slot]["previous_receiving"]
    if before >= 0:
        requests[before]["next_receiving"] = after
    else:
        machines[target]["first_receiving"] = after
    if after >= 0:
        requests[after]["previous_receiving"] = before
    machines[target]["receiving"] -= 1
    _share_again(ledger, world, source, target, now_s)


@jit_inline
def end_streaming(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Let a streaming flow drain, now that prefill has ended: at least the last layer is still to go.

    Mutates: requests, world.future, world.clock.
    """
    requests = ledger.requests
    progress(ledger, slot, now_s)
    share = requests[slot]["chunk"] / requests[slot]["prompt_tokens"]
    last_layer = share * kv_bytes(ledger, world, slot) / world.kinds[0]["layers"]
    requests[slot]["left_bytes"] = max(requests[slot]["left_bytes"], last_layer)
    requests[slot]["cap_bytes_per_s"] = UNLIMITED
    requests[slot]["flow"] = DRAINING
    set_rate(ledger, world, slot, now_s)


@jit
def _hold_room(ledger: Ledger, world: World, slot: int, blocks: int, now_s: float) -> bool:
    """Hold room for a request's KV on its decode machine, if it is there next to what the running batch will need."""
    machine = ledger.requests[slot]["decode_machine"]
    machines = ledger.machines
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    running_entries = machines[machine]["running_entries"]
    if running_entries > 0:
        headroom = int(machines[machine]["capacity_blocks"] * ledger.settings[0]["kv_headroom"])
        if blocks + headroom > free:
            return False
        shift = ledger.settings[0]["block_shift"]
        most = running_entries * ((machines[machine]["step_iterations"] >> shift) + 1)
        if blocks + most > free:
            begun = 1
            if machines[machine]["prefill_entries"] == 0:
                begun = min(iterations_by(machines, machine, now_s), machines[machine]["step_iterations"])
            if blocks + growth(ledger, machine, begun) > free:
                return False
            if blocks + growth(ledger, machine, machines[machine]["step_iterations"]) > free:
                cut(machines, world.clock, world.future, machine, now_s)
    elif blocks > free:
        return False
    hold_arrival(ledger, slot, blocks, now_s)
    return True


@jit
def stream(ledger: Ledger, world: World, slot: int, step_s: float, now_s: float) -> None:
    """Begin to send a prompt's KV layer by layer, as its last iteration begins, if there is room for it over there.

    Layers get ready evenly over the iteration, so that is the fastest that the flow can go.

    Mutates: requests, machines, world.future, world.clock.
    """
    requests = ledger.requests
    target = requests[slot]["decode_machine"]
    if length(ledger.lists[AWAITING_ROOM, target]) > 0 or not _hold_room(
        ledger, world, slot, prefill_blocks(ledger, slot), now_s
    ):
        return
    size = kv_bytes(ledger, world, slot)
    requests[slot]["streamed"] = 1
    world.clock[0]["layerwise"] += 1
    open_flow(ledger, world, slot, STREAMING, size, size / step_s, now_s)


@jit_inline
def send(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Send a request's KV now that its prefill has ended: what is left of the stream, or all of it.

    Mutates: requests, machines, lists, world.future, world.clock.
    """
    if ledger.requests[slot]["flow"] == STREAMING:
        end_streaming(ledger, world, slot, now_s)
        return
    target = ledger.requests[slot]["decode_machine"]
    push(ledger.lists[AWAITING_ROOM, target], slot)
    admit_awaiting_room(ledger, world, target, now_s)


@jit
def admit_awaiting_room(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Begin the transfers that wait for room on a machine, in order, as long as they fit.

    Where the first never would, because the machine found nothing to run and no KV is on its way to it or from it, the
    KV is dropped at its source and the prompt computed again here: two machines that are full of KV for each other
    would otherwise wait for ever.

    Mutates: requests, machines, lists, world.future, world.clock.
    """
    requests = ledger.requests
    while length(ledger.lists[AWAITING_ROOM, machine]) > 0:
        slot = entry(ledger.lists[AWAITING_ROOM, machine], 0)
        blocks = blocks_of(ledger.settings, work_tokens(ledger.requests, slot))
        if _hold_room(ledger, world, slot, blocks, now_s):
            remove(ledger.lists[AWAITING_ROOM, machine], slot)
            world.clock[0]["serialized"] += 1
            open_flow(ledger, world, slot, DRAINING, kv_bytes(ledger, world, slot), UNLIMITED, now_s)
            continue
        machines = ledger.machines
        if machines[machine]["running_entries"] + machines[machine]["arriving"] + machines[machine]["departing"] > 0:
            return
        remove(ledger.lists[AWAITING_ROOM, machine], slot)
        world.clock[0]["recomputed"] += 1
        leave_prefill_machine(ledger, slot, now_s)
        back_to_prefill(ledger, machine, slot)
        push(ledger.lists[WAITING, machine], 2 * slot + PREFILL)
        schedule(world.clock, world.future, machine, now_s)
        source = requests[slot]["assigned_machine"]
        if ledger.machines[source]["running_entries"] == 0:
            schedule(world.clock, world.future, source, now_s)


@jit_inline
def drained(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Take a flow whose bytes are all out off the cards; its completion arrives after the link's latency.

    Mutates: requests, machines, world.future, world.clock.
    """
    requests = ledger.requests
    close_flow(ledger, world, slot, now_s)
    kind = ledger.machines[requests[slot]["assigned_machine"]]["kind"]
    streamed = requests[slot]["streamed"] != 0
    kinds = world.kinds
    latency_s = kinds[kind]["layerwise_latency_s"] if streamed else kinds[kind]["serialized_latency_s"]
    requests[slot]["flow"] = TAIL
    schedule(world.clock, world.future, ledger.machines.size + slot, now_s + latency_s)
