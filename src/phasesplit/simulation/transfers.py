"""The life of a KV transfer: where it may begin, what happens when it ends, and who was waiting for that."""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduling.accounts import (
    back_to_prompt,
    blocks_of,
    hold_arrival,
    leave_prompt_machine,
    work_tokens,
)
from phasesplit.scheduling.lanes import growth, prompt_blocks
from phasesplit.scheduling.ledger import LANDING, PROMPT, WAITING, Ledger
from phasesplit.scheduling.lists import entry, length, push, remove
from phasesplit.simulation.events import schedule
from phasesplit.simulation.flows import (
    DRAINING,
    STREAMING,
    TAIL,
    UNLIMITED,
    close_flow,
    end_streaming,
    kv_bytes,
    open_flow,
)
from phasesplit.simulation.steps import cut, iterations_by
from phasesplit.simulation.world import World


@jit
def _land(ledger: Ledger, world: World, slot: int, blocks: int, now_s: float) -> bool:
    """Hold room for a request's KV on its decode machine, if it is there beside what the running batch will need."""
    machine = ledger.requests[slot]["token_machine"]
    machines = ledger.machines
    free = machines[machine]["capacity_blocks"] - machines[machine]["used_blocks"]
    lanes = machines[machine]["lanes"]
    if lanes > 0:
        headroom = int(machines[machine]["capacity_blocks"] * ledger.settings[0]["kv_headroom"])
        if blocks + headroom > free:
            return False
        shift = ledger.settings[0]["block_shift"]
        most = lanes * ((machines[machine]["step_iterations"] >> shift) + 1)
        if blocks + most > free:
            begun = 1
            if machines[machine]["prompt_lanes"] == 0:
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
    target = requests[slot]["token_machine"]
    if length(ledger.lists[LANDING, target]) > 0 or not _land(ledger, world, slot, prompt_blocks(ledger, slot), now_s):
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
    target = ledger.requests[slot]["token_machine"]
    push(ledger.lists[LANDING, target], slot)
    admit_landings(ledger, world, target, now_s)


@jit
def admit_landings(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Begin the transfers that wait for room on a machine, in order, as long as they fit.

    Where the first never would, because the machine found nothing to run and no KV is on its way to it or from it, the
    KV is dropped at its source and the prompt computed again here: two machines that are full of KV for each other
    would otherwise wait for ever.

    Mutates: requests, machines, lists, world.future, world.clock.
    """
    requests = ledger.requests
    while length(ledger.lists[LANDING, machine]) > 0:
        slot = entry(ledger.lists[LANDING, machine], 0)
        blocks = blocks_of(ledger.settings, work_tokens(ledger.requests, slot))
        if _land(ledger, world, slot, blocks, now_s):
            remove(ledger.lists[LANDING, machine], slot)
            world.clock[0]["serialized"] += 1
            open_flow(ledger, world, slot, DRAINING, kv_bytes(ledger, world, slot), UNLIMITED, now_s)
            continue
        machines = ledger.machines
        if machines[machine]["lanes"] + machines[machine]["arriving"] + machines[machine]["departing"] > 0:
            return
        remove(ledger.lists[LANDING, machine], slot)
        world.clock[0]["refilled"] += 1
        leave_prompt_machine(ledger, slot, now_s)
        back_to_prompt(ledger, machine, slot)
        push(ledger.lists[WAITING, machine], 2 * slot + PROMPT)
        schedule(world.clock, world.future, machine, now_s)
        source = requests[slot]["assigned_machine"]
        if ledger.machines[source]["lanes"] == 0:
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
