"""From the lanes of an iteration to the rows of forward passes."""

from collections.abc import Iterator
from collections.abc import Sequence as Several

import numpy as np

from phasesplit.engine.batch import Batch
from phasesplit.engine.bookings import Lane

_SCORED_ROWS = 128
"""Prompt rows whose logits are all wanted are computed so many at a time: a row of logits is large."""


def passes(lanes: Several[Lane]) -> Iterator[list[Lane]]:
    """Yield the forward passes of an iteration: one, and before it some for prompts whose tokens are scored."""
    together = [lane for lane in lanes if not (lane.is_prompt and lane.sequence.wants_scores)]
    if len(together) < len(lanes):
        for lane in lanes:
            if lane.is_prompt and lane.sequence.wants_scores:
                end = lane.first + lane.rows
                for first in range(lane.first, end, _SCORED_ROWS):
                    rows = min(_SCORED_ROWS, end - first)
                    yield [lane._replace(first=first, rows=rows, gives_token=lane.gives_token and first + rows == end)]
    if together:
        yield together


def is_scored(lanes: Several[Lane]) -> bool:
    """Return whether the logits of all rows of a pass are wanted, see `passes`."""
    return lanes[0].is_prompt and lanes[0].sequence.wants_scores


def batch_of(lanes: Several[Lane]) -> Batch:
    """Return the batch of one forward pass; it wants the last row of each lane that gives a token, or all rows."""
    rows = sum(lane.rows for lane in lanes)
    tokens, positions, owners = np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32)
    tables = np.zeros((len(lanes), max(lane.sequence.holding.count for lane in lanes)), np.int32)
    wanted = []
    start = 0
    for owner, (sequence, first, count, _, gives_token) in enumerate(lanes):
        end = start + count
        tokens[start:end] = sequence.ids[first : first + count]
        positions[start:end] = first if count == 1 else np.arange(first, first + count)
        owners[start:end] = owner
        holding = sequence.holding
        tables[owner, : holding.count] = holding.table[: holding.count]
        if gives_token:
            wanted.append(end - 1)
        start = end
    return Batch(
        tokens=tokens,
        positions=positions,
        owners=owners,
        tables=tables,
        wanted=np.arange(rows, dtype=np.int32) if is_scored(lanes) else np.array(wanted, np.int32),
    )
