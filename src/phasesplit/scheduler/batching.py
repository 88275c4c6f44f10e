"""Machine-level scheduling with whole prompts: which tasks form the next iteration, by the paper's rule.

Prompts go first, in order of arrival, up to a token budget; then decode fills the batch. A decode task that
finds no place is preempted and keeps its KV; one that was preempted often enough goes before everything else. What
`published` does otherwise is which lists it reads and when it counts, never the passes.
"""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import count_of, fits, fits_with_headroom, tokens_to_compute, use_blocks
from phasesplit.scheduler.ledger import (
    CHOSEN,
    ENTRY_TASK,
    NO_TASK,
    PREEMPTED,
    PREFILL,
    PRESENT,
    QUEUE,
    READY,
    WAITING,
    Ledger,
)
from phasesplit.scheduler.published import (
    count_passed_over,
    enqueue,
    first_unfinished,
    head_is_aged,
    only_candidate,
    output_blocks,
    queues,
)
from phasesplit.scheduler.queues import (
    entry,
    give_chunk,
    growth,
    join,
    length,
    make_room,
    move_entry,
    prefill_blocks,
    push,
    remove,
    settle,
)

_PASSED_OVER = (PREEMPTED, READY)
"""Where decode tasks are that a batch has left out."""

_RUNNING_ENTRIES, _NOTHING = -1, -2
_PASSES = (PREEMPTED, READY, WAITING, PREEMPTED, _RUNNING_ENTRIES, READY)
_QUEUE_PASSES = (QUEUE, _NOTHING, WAITING, PREEMPTED, _RUNNING_ENTRIES, PRESENT)
_AGED_PASSES = 2
"""Where each pass of a build takes tasks from; the first two take only those that were passed over often enough.

The second row is for the one queue of the published rules."""

_TAKEN, _FULL, _TWICE, _NO_MEMORY = range(4)


@jit_inline
def blocks_needed(ledger: Ledger, task: int) -> int:
    """Return the KV blocks that a task must still reserve to enter a batch.

    A decode task holds what it needs and grows block by block; the published rules reserve its whole output.
    """
    slot = task // 2
    requests = ledger.requests
    if task % 2 == PREFILL:
        return 0 if requests[slot]["prefill_held"] else prefill_blocks(ledger, slot)
    return output_blocks(ledger, slot) if ledger.settings[0]["published"] else 0


@jit_inline
def form_whole(ledger: Ledger, machine: int, now_s: float) -> int:
    """Form the next batch of a machine by the whole-prefill rule; return the first running entry that is new in it.

    Mutates: running_entries, lists, requests, machines, counters, keys, trees.
    """
    first_new = ledger.machines[machine]["running_entries"]
    candidate = _only_candidate(ledger, machine)
    if candidate != NO_TASK:
        ledger.counters[0]["builds"] += 1
        if _verdict(ledger, machine, candidate, first_new, first_new, 0) == _TAKEN:
            _admit(ledger, machine, candidate, now_s)
    elif not _unchanged(ledger, machine):
        first_new = (
            _append(ledger, machine, now_s) if _only_joiners(ledger, machine) else _rebuild(ledger, machine, now_s)
        )
    if ledger.settings[0]["published"]:
        count_passed_over(ledger, machine)
        return int(first_new)
    while make_room(ledger, machine, now_s) and ledger.machines[machine]["running_entries"] == 0:
        # Everyone who ran had to go, which freed memory for those who did not: they, or the evicted, run now.
        first_new = _rebuild(ledger, machine, now_s)
    for kind in _PASSED_OVER:
        for index in range(length(ledger.lists[kind, machine])):
            ledger.requests[entry(ledger.lists[kind, machine], index) // 2]["decode_count"] += 1
    return int(min(first_new, ledger.machines[machine]["running_entries"]))


@jit_inline
def _unchanged(ledger: Ledger, machine: int) -> bool:
    """Nothing waits here, so the running tasks go on."""
    if ledger.settings[0]["published"]:
        return not queues(ledger, machine)
    return (
        length(ledger.lists[WAITING, machine]) == 0
        and length(ledger.lists[PREEMPTED, machine]) == 0
        and length(ledger.lists[READY, machine]) == 0
    )


@jit_inline
def _only_candidate(ledger: Ledger, machine: int) -> int:
    """Return the task that is all a batch could gain, so that no pass has to look further; NO_TASK in other cases.

    That is a prompt alone on an idle machine, or a decode task alone behind whatever runs, unless it was passed over so
    often that it might displace something.
    """
    if ledger.settings[0]["published"]:
        return only_candidate(ledger, machine)
    lists = ledger.lists
    waiting = length(lists[WAITING, machine])
    if waiting + length(lists[READY, machine]) != 1 or length(lists[PREEMPTED, machine]) > 0:
        return NO_TASK
    if waiting == 1:
        return entry(lists[WAITING, machine], 0) if ledger.machines[machine]["running_entries"] == 0 else NO_TASK
    return entry(lists[READY, machine], 0)


@jit_inline
def _only_joiners(ledger: Ledger, machine: int) -> bool:
    """Only decode tasks wait here, and they may join behind the running ones but not displace them."""
    if length(ledger.lists[WAITING, machine]) > 0 or length(ledger.lists[PREEMPTED, machine]) > 0:
        return False
    return bool(ledger.settings[0]["published"] == 0) or not head_is_aged(ledger, machine)


@jit
def _append(ledger: Ledger, machine: int, now_s: float) -> int:
    """The last pass alone: let waiting decode tasks join behind the running ones; return the first new entry."""
    ledger.counters[0]["builds"] += 1
    running_entries = ledger.machines[machine]["running_entries"]
    taken = 0
    extra = 0
    kind = PRESENT if ledger.settings[0]["published"] else READY
    for index in range(length(ledger.lists[kind, machine])):
        task = entry(ledger.lists[kind, machine], index)
        if kind == PRESENT:
            task = first_unfinished(ledger, task)
        if ledger.requests[task // 2]["running"]:
            continue
        verdict = _verdict(ledger, machine, task, running_entries + taken, running_entries + taken, extra)
        if verdict in (_FULL, _NO_MEMORY):
            break
        extra += blocks_needed(ledger, task)
        ledger.running_entries[CHOSEN, machine, taken] = task
        taken += 1
    for index in range(taken):
        _admit(ledger, machine, ledger.running_entries[CHOSEN, machine, index], now_s)
    return int(running_entries)


@jit
def _rebuild(ledger: Ledger, machine: int, now_s: float) -> int:
    """All passes; return the first new running entry.

    The first two take tasks that were passed over as often as the limit says. The published rules look for them in the
    queue instead, and stop at the first that was not.
    """
    limit = ledger.settings[0]["preemption_limit"]
    ledger.counters[0]["builds"] += 1
    taken, tokens, extra = 0, 0, 0
    for turn in range(len(_PASSES)):
        kind = _QUEUE_PASSES[turn] if ledger.settings[0]["published"] else _PASSES[turn]
        if kind == _NOTHING:
            continue
        aged = turn < _AGED_PASSES
        size = (
            ledger.machines[machine]["running_entries"]
            if kind == _RUNNING_ENTRIES
            else length(ledger.lists[kind, machine])
        )
        for index in range(size):
            if kind == _RUNNING_ENTRIES:
                task = ledger.running_entries[ENTRY_TASK, machine, index]
            else:
                task = entry(ledger.lists[kind, machine], index)
            if kind == PRESENT:
                task = first_unfinished(ledger, task)
            if aged and count_of(ledger, task) < limit:
                if kind == QUEUE:
                    break
                continue
            if kind == PRESENT and ledger.requests[task // 2]["stamp"] == ledger.counters[0]["builds"]:
                continue
            verdict = _verdict(ledger, machine, task, taken, tokens, extra)
            if verdict == _FULL or (verdict == _NO_MEMORY and (kind in (WAITING, PRESENT))):
                break
            if verdict != _TAKEN:
                continue
            extra += blocks_needed(ledger, task)
            tokens += tokens_to_compute(ledger.requests, task // 2) if task % 2 == PREFILL else 1
            ledger.requests[task // 2]["stamp"] = ledger.counters[0]["builds"]
            ledger.running_entries[CHOSEN, machine, taken] = task
            taken += 1
    _preempt_unchosen(ledger, machine, now_s)
    first_new = ledger.machines[machine]["running_entries"]
    for index in range(taken):
        if ledger.requests[ledger.running_entries[CHOSEN, machine, index] // 2]["running"] == 0:
            _admit(ledger, machine, ledger.running_entries[CHOSEN, machine, index], now_s)
    return int(first_new)


@jit_inline
def _verdict(ledger: Ledger, machine: int, task: int, taken: int, tokens: int, extra: int) -> int:
    """Say whether a task may enter a batch that holds so many tasks and tokens and needs so many extra blocks."""
    if taken >= ledger.settings[0]["batch_requests"]:
        return _FULL
    more = tokens_to_compute(ledger.requests, task // 2) if task % 2 == PREFILL else 1
    if taken > 0 and tokens + more > ledger.settings[0]["batch_prompt_tokens"]:
        return _FULL
    if ledger.requests[task // 2]["stamp"] == ledger.counters[0]["builds"]:
        return _TWICE
    need = blocks_needed(ledger, task)
    if need > 0 and not fits_with_headroom(ledger.settings, ledger.machines, machine, extra + need):
        return _NO_MEMORY
    return _TAKEN


@jit
def _preempt_unchosen(ledger: Ledger, machine: int, now_s: float) -> None:
    """Preempt the running tasks that the batch being formed leaves out; they keep their KV."""
    kept = 0
    machines = ledger.machines
    for running_entry in range(machines[machine]["running_entries"]):
        task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
        slot = task // 2
        if ledger.requests[slot]["stamp"] == ledger.counters[0]["builds"]:
            move_entry(ledger, machine, running_entry, kept)
            kept += 1
            continue
        settle(ledger, machine, running_entry, now_s)
        ledger.requests[slot]["preemptions"] += 1
        ledger.counters[0]["preemptions"] += 1
        if ledger.settings[0]["published"]:
            enqueue(ledger, machine, task)
        push(ledger.lists[PREEMPTED, machine], task)
    machines[machine]["running_entries"] = kept


@jit
def _admit(ledger: Ledger, machine: int, task: int, now_s: float) -> None:
    """Let a chosen task leave its lists, reserve what it needs and join."""
    slot = task // 2
    need = blocks_needed(ledger, task)
    if ledger.settings[0]["published"]:
        remove(ledger.lists[QUEUE, machine], task)
    if task % 2 == PREFILL:
        remove(ledger.lists[WAITING, machine], task)
        ledger.requests[slot]["prefill_held"] = 1
    else:
        if not remove(ledger.lists[PREEMPTED, machine], task):
            remove(ledger.lists[READY, machine], task)
        ledger.requests[slot]["decode_held"] = 1
    if need > 0:
        use_blocks(ledger.machines, machine, need, now_s)
        ledger.requests[slot]["blocks"] += need
    join(ledger, machine, task)
    if task % 2 == PREFILL:
        running_entry = ledger.machines[machine]["running_entries"] - 1
        give_chunk(ledger, machine, running_entry, tokens_to_compute(ledger.requests, slot))


@jit
def form_chunked(ledger: Ledger, machine: int, now_s: float) -> int:
    """Form the next batch with chunked prompts; return the first running entry that is new in it.

    Every decode task runs; the rest of the token budget goes to prompts already begun, then to waiting ones in order
    of arrival, each admitted once its whole KV fits. Source: Agrawal et al. 2024, "Taming Throughput-Latency Tradeoff
    in LLM Inference with Sarathi-Serve", section 4; the default of vLLM's engine since its version 1.

    Mutates: running_entries, lists, requests, machines, counters, keys, trees.
    """
    machines = ledger.machines
    settings = ledger.settings
    first_new = machines[machine]["running_entries"]
    evicted = True
    while evicted:
        while (
            length(ledger.lists[READY, machine]) > 0
            and machines[machine]["running_entries"] < settings[0]["batch_requests"]
        ):
            _admit(ledger, machine, entry(ledger.lists[READY, machine], 0), now_s)
        # Where everyone who ran had to go, that freed memory for ready tasks: they run now.
        evicted = make_room(ledger, machine, now_s) and machines[machine]["running_entries"] == 0
        first_new = min(first_new, machines[machine]["running_entries"])
    budget = (
        settings[0]["batch_prompt_tokens"] - machines[machine]["running_entries"] + machines[machine]["prefill_entries"]
    )
    machines[machine]["batch_tokens"] = machines[machine]["running_entries"] - machines[machine]["prefill_entries"]
    machines[machine]["pair_tokens"] = 0.0
    if machines[machine]["prefill_entries"] > 0:
        for running_entry in range(machines[machine]["running_entries"]):
            task = ledger.running_entries[ENTRY_TASK, machine, running_entry]
            if task % 2 == PREFILL:
                slot = task // 2
                tokens = min(max(budget, 0), tokens_to_compute(ledger.requests, slot))
                give_chunk(ledger, machine, running_entry, tokens)
                budget -= tokens
    growing = growth(ledger, machine, 1) if length(ledger.lists[WAITING, machine]) > 0 else 0
    while (
        budget > 0
        and length(ledger.lists[WAITING, machine]) > 0
        and machines[machine]["running_entries"] < settings[0]["batch_requests"]
    ):
        task = entry(ledger.lists[WAITING, machine], 0)
        slot = task // 2
        need = prefill_blocks(ledger, slot)
        if not (
            fits_with_headroom(ledger.settings, ledger.machines, machine, need)
            and fits(machines, machine, need + growing)
        ):
            break
        remove(ledger.lists[WAITING, machine], task)
        use_blocks(ledger.machines, machine, need, now_s)
        ledger.requests[slot]["blocks"] = need
        ledger.requests[slot]["prefill_held"] = 1
        join(ledger, machine, task)
        tokens = min(budget, tokens_to_compute(ledger.requests, slot))
        give_chunk(ledger, machine, machines[machine]["running_entries"] - 1, tokens)
        budget -= tokens
    return int(first_new)
