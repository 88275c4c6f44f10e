"""The least loaded machine of a pool: looked for in a small cluster, at the root of a tournament tree in a large one.

A tree is kept up to date for each load that a pool is asked for at every arrival: the prefill load of prefill, mixed
and unsplit machines, the decode load of decode and mixed machines. The other combinations matter only when load spills
over; `scan` looks at every machine of the pool then. Up to `SCANNED` machines it always does: that costs less than
keeping trees up to date.

`trees[load, pool]` is a complete binary tree in an array: node 1 is the root, node i has the children 2i and 2i + 1,
and the leaf of machine m is node `leaves + m`. A node holds the machine that wins below it, -1 where there is none. The
machine with the lower key wins; `keys[load, m]` is the load, with the machine's rank in the low bits to break ties.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline

PREFILL_LOAD, DECODE_LOAD = 0, 1
"""The two loads: what the rules for prefill and for decode compare."""

NOBODY = -1
"""No machine. As an index it means the last column of `keys`, which holds WORST: nobody loses to everyone, unasked."""
WORST = 1 << 62
SCANNED = 64
"""A cluster of up to so many machines has no trees."""

RANK_BITS = 24
"""Low bits of a key; a rank is below 2^24, a load below 2^39."""


@jit_inline
def winner_of(keys: NDArray[np.int64], load: int, a: int, b: int) -> int:
    """Return which of the machines `a` and `b` (either may be NOBODY) has the lower key."""
    return b if keys[load, b] < keys[load, a] else a


@jit
def replay(trees: NDArray[np.int64], keys: NDArray[np.int64], pool: int, machine: int, first: int, last: int) -> None:
    """Play the matches above a machine's leaf again, after its loads, its rank or its membership changed.

    Args:
        trees: The trees.
        keys: The keys.
        pool: The machine's pool.
        machine: The machine.
        first: First load whose tournament is played.
        last: Last load.

    Mutates: trees[first:last + 1, pool].
    """
    for load in range(first, last + 1):
        node = (trees.shape[2] // 2 + machine) // 2
        while node >= 1:
            winner = winner_of(keys, load, trees[load, pool, 2 * node], trees[load, pool, 2 * node + 1])
            if winner == trees[load, pool, node] and winner != machine:
                break  # another machine won here before and still does: nothing above can have changed
            trees[load, pool, node] = winner
            node //= 2


@jit
def set_member(trees: NDArray[np.int64], keys: NDArray[np.int64], pool: int, machine: int, member: bool) -> None:
    """Let a machine take part in a pool's tournaments, or no longer.

    Mutates: trees[:, pool].
    """
    if trees.shape[2] == 0:
        return
    leaf = trees.shape[2] // 2 + machine
    for load in range(2):
        trees[load, pool, leaf] = machine if member else NOBODY
    replay(trees, keys, pool, machine, PREFILL_LOAD, DECODE_LOAD)


@jit
def scan(members: NDArray[np.int64], keys: NDArray[np.int64], load: int, pool: int) -> int:
    """Return the pool's machine with the least load by looking at all of them, NOBODY if the pool is empty."""
    machine = NOBODY
    for index in range(1, members[pool, 0] + 1):
        machine = winner_of(keys, load, machine, members[pool, index])
    return machine


@jit_inline
def least_loaded(
    members: NDArray[np.int64], keys: NDArray[np.int64], trees: NDArray[np.int64], load: int, pool: int
) -> int:
    """Return the pool's machine with the least load, NOBODY if the pool is empty; there is a tree for this load."""
    if trees.shape[2] == 0:
        return scan(members, keys, load, pool)
    return int(trees[load, pool, 1])


def leaves_for(machines: int) -> int:
    """Return the number of leaves of a tree over so many machines: the next power of two, 0 for a small cluster."""
    return 0 if machines <= SCANNED else 1 << (machines - 1).bit_length()
