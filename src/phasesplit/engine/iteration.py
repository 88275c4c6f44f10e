"""One iteration: from the running entries of a batch to the tokens that follow.

1. `passes` splits the entries into forward passes: one for all, and before it some for prompts whose tokens are scored.
2. `batch_of` makes a `Batch` of each: rows of any mixture of sequences, prompt chunks and single tokens.
3. `compute` runs them, lets KV leave layer by layer meanwhile, and samples a token for each entry that gives one.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.config import ModelConfig
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.machine_scheduler import RunningEntry
from phasesplit.engine.sampling import sample, scored
from phasesplit.engine.sending import Sending
from phasesplit.engine.sequences import Sequence
from phasesplit.errors import SpecError
from phasesplit.protocol.worker import Scored

Numbers = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Rows to compute. Every row is one token at one position of one sequence.

    The keys and values of a sequence before its first row must be in the cache, and those of its rows get there during
    the iteration: rows of one sequence may stand in any order and anywhere in the batch, but each place in the cache
    may be written by one row only.

    Attributes:
        tokens: Token of each row, [rows] int32.
        positions: Its place in its sequence, from 0, [rows] int32.
        owners: Its sequence, as a row of `tables`, [rows] int32.
        tables: Blocks of each sequence in the cache, first to last, [sequences, width] int32. Entries behind the last
            block that a row needs are not looked at.
        wanted: Rows whose logits are returned, in the order wished, [wanted] int32; may be empty.
    """

    tokens: Numbers
    positions: Numbers
    owners: Numbers
    tables: Numbers
    wanted: Numbers


def check_batch(batch: Batch, config: ModelConfig, blocks: int) -> None:
    """Refuse a batch that would read or write outside of the model or the cache.

    Args:
        batch: The batch.
        config: The model's sizes.
        blocks: Blocks of the cache.

    Raises:
        SpecError: An array has another shape or type than it should, or a number is out of its range.
    """
    rows = batch.tokens.shape[0] if batch.tokens.ndim == 1 else 0
    sequences, width = batch.tables.shape if batch.tables.ndim == 2 else (0, 0)
    if rows == 0:
        raise SpecError.bad("batch, shape of tokens", batch.tokens.shape, "[rows], at least one")
    if sequences == 0 or width == 0:
        raise SpecError.bad("batch, shape of tables", batch.tables.shape, "[sequences, width], at least one each")
    for name in ("positions", "owners"):
        if getattr(batch, name).shape != (rows,):
            raise SpecError.bad(f"batch, shape of {name}", getattr(batch, name).shape, "[rows], as of tokens")
    if batch.wanted.ndim != 1:
        raise SpecError.bad("batch, shape of wanted", batch.wanted.shape, "[wanted]")
    for name in ("tokens", "positions", "owners", "tables", "wanted"):
        if getattr(batch, name).dtype != np.int32 or not getattr(batch, name).flags.c_contiguous:
            raise SpecError.bad(f"batch, {name}", getattr(batch, name).dtype.name, "a contiguous array of int32")
    longest = min(config.context_tokens, width * BLOCK_TOKENS)
    _check_range("tokens", batch.tokens, config.vocab)
    _check_range("positions", batch.positions, longest)
    _check_range("owners", batch.owners, sequences)
    _check_range("wanted", batch.wanted, rows)
    last = np.full(sequences, -1, dtype=np.int32)
    np.maximum.at(last, batch.owners, batch.positions)
    is_used = np.arange(width, dtype=np.int32) <= (last // BLOCK_TOKENS)[:, None]
    _check_range("tables", batch.tables[is_used], blocks)


def _check_range(name: str, values: Numbers, limit: int) -> None:
    if values.size and (values.min() < 0 or values.max() >= limit):
        wrong = values[(values < 0) | (values >= limit)][0]
        raise SpecError.bad(f"batch, {name}", int(wrong), f"0 to {limit - 1}")


_SCORED_ROWS = 128
"""Prompt rows whose logits are all wanted are computed so many at a time: a row of logits is large."""


def passes(running_entries: Several[RunningEntry]) -> Iterator[list[RunningEntry]]:
    """Yield the forward passes of an iteration: one, and before it some for prompts whose tokens are scored."""
    together = [
        running_entry
        for running_entry in running_entries
        if not (running_entry.is_prefill and running_entry.sequence.wants_scores)
    ]
    if len(together) < len(running_entries):
        for running_entry in running_entries:
            if running_entry.is_prefill and running_entry.sequence.wants_scores:
                end = running_entry.first + running_entry.rows
                for first in range(running_entry.first, end, _SCORED_ROWS):
                    rows = min(_SCORED_ROWS, end - first)
                    yield [
                        running_entry._replace(
                            first=first, rows=rows, gives_token=running_entry.gives_token and first + rows == end
                        )
                    ]
    if together:
        yield together


def is_scored(running_entries: Several[RunningEntry]) -> bool:
    """Return whether the logits of all rows of a pass are wanted, see `passes`."""
    return running_entries[0].is_prefill and running_entries[0].sequence.wants_scores


def batch_of(running_entries: Several[RunningEntry]) -> Batch:
    """Return the batch of one forward pass; it wants the last row of each entry that gives a token, or all rows."""
    rows = sum(running_entry.rows for running_entry in running_entries)
    tokens, positions, owners = np.empty(rows, np.int32), np.empty(rows, np.int32), np.empty(rows, np.int32)
    tables = np.zeros(
        (len(running_entries), max(running_entry.sequence.holding.count for running_entry in running_entries)), np.int32
    )
    wanted = []
    start = 0
    for owner, (sequence, first, count, _, gives_token) in enumerate(running_entries):
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
        wanted=np.arange(rows, dtype=np.int32) if is_scored(running_entries) else np.array(wanted, np.int32),
    )


Logits = NDArray[np.float32]


class Computes(Protocol):
    """What computes iterations, see `forward.Forward`."""

    def run(self, batch: Batch, after_layer: Callable[[int], None] | None = None) -> Logits:
        """Compute one batch and return the logits of its wanted rows, float32 [wanted, vocab]."""
        ...


def compute(
    running_entries: list[RunningEntry], forward: Computes, sending: Sending | None, end_ids: tuple[int, ...]
) -> list[tuple[Sequence, Scored]]:
    """Compute one iteration.

    Args:
        running_entries: What each sequence computes; every sequence has the blocks that it will write to.
        forward: What computes.
        sending: What sends the KV of prompts that goes layer by layer.
        end_ids: The model's own ends of a text.

    Returns:
        The sequences that have a new token, with it; it is not added to them yet.

    Mutates: scores of the prompts whose tokens are scored.
    """
    tokens: list[tuple[Sequence, Scored]] = []
    for together in passes(running_entries):
        after_layer = None if sending is None else sending.before_pass(together)
        logits = forward.run(batch_of(together), after_layer)
        if sending is not None and after_layer is not None:
            sending.after_pass(together)
        if is_scored(together):
            _score(together[0], logits)
            logits = logits[-1:]
        chosen = [running_entry.sequence for running_entry in together if running_entry.gives_token]
        # A scored prompt's last row of a pass gives no token unless it is the prompt's last.
        for sequence, row in zip(chosen, logits, strict=False):
            tokens.append((sequence, sample(row, sequence.request.sampling, sequence.history, end_ids)))
    return tokens


def _score(running_entry: RunningEntry, logits: Logits) -> None:
    """Score the prompt's tokens that come after the rows of a pass; those that were computed before have a score."""
    sequence, count = running_entry.sequence, running_entry.sequence.request.wants_prompt_logprobs or 0
    for position, row in enumerate(logits, running_entry.first):
        if position + 1 == len(sequence.scores) < sequence.prompt_tokens:
            sequence.scores.append(scored(row, int(sequence.ids[position + 1]), count))
