"""What one iteration of the engine computes: rows of any mixture of sequences, prompt chunks and single tokens."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.config import ModelConfig
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.errors import SpecError

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
