"""Ordered lists of a machine, kept in the ledger: push, insert and remove anywhere, in place.

A list is a window into its storage, so taking from the front costs nothing; the window moves back to the start when it
has reached the end. Every function takes the list itself, `ledger.lists[kind, machine]`.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduling.ledger import FIRST, HEAD, LENGTH


@jit_inline
def length(row: NDArray[np.int64]) -> int:
    """Return how many entries a list has."""
    return int(row[LENGTH])


@jit_inline
def entry(row: NDArray[np.int64], index: int) -> int:
    """Return the entry at `index`, 0 <= index < length."""
    return int(row[FIRST + row[HEAD] + index])


@jit
def insert(row: NDArray[np.int64], index: int, value: int) -> None:
    """Insert `value` so that it stands at `index`, 0 <= index <= length.

    Mutates: row.
    """
    head = row[HEAD]
    size = row[LENGTH]
    if FIRST + head + size == row.size:
        for i in range(size):
            row[FIRST + i] = row[FIRST + head + i]
        row[HEAD] = head = 0
    base = FIRST + head
    for i in range(size, index, -1):
        row[base + i] = row[base + i - 1]
    row[base + index] = value
    row[LENGTH] = size + 1


@jit_inline
def push(row: NDArray[np.int64], value: int) -> None:
    """Append `value`.

    Mutates: row.
    """
    insert(row, row[LENGTH], value)


@jit
def remove(row: NDArray[np.int64], value: int) -> bool:
    """Remove the first entry equal to `value`; return whether there was one.

    Mutates: row.
    """
    base = FIRST + row[HEAD]
    size = row[LENGTH]
    for index in range(size):
        if row[base + index] != value:
            continue
        if index == 0:
            row[HEAD] += 1
        else:
            for i in range(index, size - 1):
                row[base + i] = row[base + i + 1]
        row[LENGTH] = size - 1
        if size == 1:
            row[HEAD] = 0
        return True
    return False
