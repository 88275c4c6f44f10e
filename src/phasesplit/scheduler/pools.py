"""Moves between pools: into the mixed pool when load spills over, back when the foreign work is done, home for good."""

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduler.accounts import rank_last, touched
from phasesplit.scheduler.ledger import DECODE, DRAINING, MIXED, POOLS, PREFILL, SERVING, Ledger
from phasesplit.scheduler.published import is_empty
from phasesplit.scheduler.tournament import set_member


@jit_inline
def size(ledger: Ledger, pool: int) -> int:
    """Return how many machines a pool has."""
    return int(ledger.members[pool, 0])


@jit
def enter(ledger: Ledger, machine: int, pool: int) -> None:
    """Append a machine that is in no pool to a pool.

    Mutates: members, machines, counters, trees.
    """
    members = ledger.members
    members[pool, 0] += 1
    members[pool, members[pool, 0]] = machine
    ledger.machines[machine]["pool"] = pool
    rank_last(ledger, machine)
    touched(ledger, machine)
    set_member(ledger.trees, ledger.keys, pool, machine, True)


@jit
def leave(ledger: Ledger, machine: int) -> None:
    """Take a machine out of its pool.

    Mutates: members, trees.
    """
    members = ledger.members
    pool = ledger.machines[machine]["pool"]
    set_member(ledger.trees, ledger.keys, pool, machine, False)
    found = False
    for index in range(1, members[pool, 0] + 1):
        if members[pool, index] == machine:
            found = True
        if found and index < members[pool, 0]:
            members[pool, index] = members[pool, index + 1]
    members[pool, 0] -= 1


@jit
def enlist(ledger: Ledger, machine: int, home: int) -> None:
    """Let a machine that serves in no pool (it was starting, draining or off) enter the pool of a home.

    Mutates: as `enter`, machines["home"] and ["state"].
    """
    ledger.machines[machine]["home"] = home
    ledger.machines[machine]["state"] = SERVING
    enter(ledger, machine, home)


@jit
def retire(ledger: Ledger, machine: int) -> None:
    """Take a serving machine out of its pool: it gets no new request and finishes those it has.

    Mutates: as `leave`, machines["pool"] and ["state"].
    """
    leave(ledger, machine)
    # Out of the mixed pool, `return_home` no longer looks at it.
    ledger.machines[machine]["pool"] = ledger.machines[machine]["home"]
    ledger.machines[machine]["state"] = DRAINING


def is_drained(ledger: Ledger, machine: int) -> bool:
    """Return whether nothing is left of what a machine had: no request, no KV, no transfer to or from it."""
    accounts = (
        "prefill_requests",
        "decode_requests",
        "committed_blocks",
        "used_blocks",
        "running_entries",
        "arriving",
        "departing",
    )
    return not any(ledger.machines[account][machine] for account in accounts)


@jit
def open_pools(ledger: Ledger) -> None:
    """Let every machine enter the pool of its home, in order of number.

    Mutates: as `enter`.
    """
    for machine in range(ledger.machines.size):
        enter(ledger, machine, ledger.machines[machine]["home"])


@jit
def spill_into_mixed(ledger: Ledger, machine: int, now_s: float) -> None:
    """Move a prefill or decode machine into the mixed pool, where it does both phases and keeps its home.

    Mutates: as `enter` and `leave`, machines["mixed_since_s"].
    """
    if ledger.machines[machine]["home"] == PREFILL:
        ledger.counters[0]["prefill_to_mixed"] += 1
    else:
        ledger.counters[0]["decode_to_mixed"] += 1
    leave(ledger, machine)
    enter(ledger, machine, MIXED)
    ledger.machines[machine]["mixed_since_s"] = now_s


@jit_inline
def return_home(ledger: Ledger, machine: int, now_s: float) -> bool:
    """Let a mixed machine go home if its foreign work is done, or change its home if it has been mixed for long.

    Published: it goes when no request at all is present. Default: a decode machine goes when it has no prompt
    any more, a prefill machine when no decode phase is; whatever it still has of its own kind, it finishes at home.
    Returns whether it moved.

    Mutates: as `enter` and `leave`, machines["home"].
    """
    machines = ledger.machines
    if machines[machine]["pool"] != MIXED or machines[machine]["home"] == MIXED:
        return False
    return _leave_mixed(ledger, machine, now_s)


@jit
def _leave_mixed(ledger: Ledger, machine: int, now_s: float) -> bool:
    """Do what `return_home` says with a prefill or decode machine that is in the mixed pool."""
    machines = ledger.machines
    home = machines[machine]["home"]
    if ledger.settings[0]["published"]:
        done = is_empty(ledger, machine)
    elif home == DECODE:
        done = machines[machine]["prefill_requests"] == 0
    else:
        done = machines[machine]["decode_requests"] == 0
    if not done:
        long_mixed = now_s - machines[machine]["mixed_since_s"] >= ledger.settings[0]["repurpose_after_s"]
        if ledger.settings[0]["published"] or not long_mixed or size(ledger, home) == 0:
            return False
        home = DECODE if home == PREFILL else PREFILL
        machines[machine]["home"] = home
        ledger.counters[0]["repurposed"] += 1
    else:
        ledger.counters[0]["returns"] += 1
    leave(ledger, machine)
    enter(ledger, machine, home)
    return True


POOL_NAMES = ("prefill", "decode", "mixed", "unsplit")
"""Names of the pools by number."""

assert len(POOL_NAMES) == POOLS  # noqa: S101 - the two tables are read together
