"""What the published simulator does otherwise with events: arrivals of tasks, freed memory, transfers, its end."""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import fits, hold_arrival
from phasesplit.scheduler.batching import blocks_needed
from phasesplit.scheduler.ledger import PREFILL, PRESENT, QUEUE, WAITING, Ledger
from phasesplit.scheduler.published import enqueue, enter_present, queues
from phasesplit.scheduler.queues import entry, push, remove
from phasesplit.scheduler.tournament import NOBODY
from phasesplit.simulator.events import cut, schedule
from phasesplit.simulator.transfers import TAIL, WAITING_FOR_ROOM
from phasesplit.simulator.world import World

HORIZON_S = 86_400.0
"""When a run of the published simulator ends, finished or not."""
LINK_BYTES_PER_S = 200 * 2.0**30
"""Bandwidth of the published simulator's private links. Source: its cluster configurations (200 GiB/s)."""
RETRY_S = 1.0
"""A transfer whose destination is full is tried again after so long. Source: published simulator."""


@jit
def try_transfer(ledger: Ledger, world: World, slot: int, now_s: float) -> None:
    """Start a transfer over a private link, after prefill; full destinations are retried.

    Mutates: requests, machines, world.future, world.clock.
    """
    requests = ledger.requests
    target = requests[slot]["decode_machine"]
    blocks = requests[slot]["prompt_tokens"] + 1
    entity = ledger.machines.size + slot
    if not fits(ledger.machines, target, blocks):
        requests[slot]["flow"] = WAITING_FOR_ROOM
        schedule(world.clock, world.future, entity, now_s + RETRY_S)
        return
    hold_arrival(ledger, slot, blocks, now_s)
    requests[slot]["flow"] = TAIL
    size = requests[slot]["prompt_tokens"] * world.kinds[0]["kv_bytes_per_token"]
    schedule(world.clock, world.future, entity, now_s + size / LINK_BYTES_PER_S)


@jit_inline
def hand_on(ledger: Ledger, world: World, machine: int, slot: int, now_s: float) -> None:
    """Let a request whose prefill has ended go on to decode; its task waits in the queue already here.

    Mutates: requests, machines, lists, world.future, world.clock.
    """
    if ledger.requests[slot]["decode_machine"] == machine:
        ledger.requests[slot]["kv_ready_s"] = now_s
    else:
        remove(ledger.lists[PRESENT, machine], slot)
        try_transfer(ledger, world, slot, now_s)


@jit_inline
def task_arrives(ledger: Ledger, world: World, machine: int, task: int, now_s: float) -> int:
    """Let a task come to its machine; return the machine if it is idle and the task fits, so that it forms a batch.

    A busy machine ends its step early only where the task could join or displace another one.

    Mutates: lists, machines["step_iterations"], world.future, world.clock.
    """
    slot = task // 2
    is_prefill = task % 2 == PREFILL
    requests = ledger.requests
    machines = ledger.machines
    if is_prefill:
        push(ledger.lists[WAITING, machine], task)
    if is_prefill or requests[slot]["prefill_machine"] != machine:
        enter_present(ledger, machine, slot)
    enqueue(ledger, machine, task)
    running_entries = machines[machine]["running_entries"]
    if running_entries == 0:
        return int(machine) if fits(machines, machine, blocks_needed(ledger, task)) else NOBODY
    limit = ledger.settings[0]["batch_prompt_tokens"]
    tokens = requests[slot]["prompt_tokens"] if is_prefill else 1
    joins = (
        running_entries < ledger.settings[0]["batch_requests"] and machines[machine]["batch_tokens"] + tokens <= limit
    )
    displaces = is_prefill and machines[machine]["prefill_entries"] < running_entries and tokens <= limit
    if joins or displaces:
        cut(machines, world.clock, world.future, machine, now_s)
    return NOBODY


@jit_inline
def use_freed(ledger: Ledger, world: World, machine: int, now_s: float) -> int:
    """Let a machine use freed memory; return it if it is idle and the first of its queue fits.

    Mutates: machines["step_iterations"], world.future, world.clock.
    """
    machines = ledger.machines
    if not queues(ledger, machine):
        return NOBODY
    running_entries = machines[machine]["running_entries"]
    if running_entries == 0:
        first = entry(ledger.lists[QUEUE, machine], 0)
        return int(machine) if fits(machines, machine, blocks_needed(ledger, first)) else NOBODY
    room = running_entries < ledger.settings[0]["batch_requests"]
    if room and machines[machine]["batch_tokens"] < ledger.settings[0]["batch_prompt_tokens"]:
        cut(machines, world.clock, world.future, machine, now_s)
    return NOBODY
