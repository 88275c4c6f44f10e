"""Sequences run through the engine's forward pass, cut up and mixed as a test likes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.cache import KvCache
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Batch
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.packed import PackedModel

Floats = NDArray[np.float32]


@dataclass
class Run:
    """One sequence on its way through a forward pass.

    Attributes:
        tokens: All of it.
        blocks: Where its KV goes.
        chunks: How many of its tokens each iteration computes; the last number goes on until the end.
        logits: Those after each token computed so far.
    """

    tokens: Sequence[int]
    blocks: Sequence[int]
    chunks: Sequence[int]
    logits: list[Floats] = field(default_factory=list)

    def next_rows(self, iteration: int) -> range:
        """Return positions to compute now."""
        first = len(self.logits)
        count = self.chunks[min(iteration, len(self.chunks) - 1)]
        return range(first, min(first + count, len(self.tokens)))


def batch_of(runs: Sequence[Run], rows: Sequence[range], width: int | None = None) -> Batch:
    """Return the batch in which each sequence computes some of its positions, all logits wanted."""
    width = width or max(len(run.blocks) for run in runs)
    tables = np.full((len(runs), width), -1, dtype=np.int32)
    for index, run in enumerate(runs):
        tables[index, : len(run.blocks)] = run.blocks
    flat = [(run.tokens[at], at, index) for index, run in enumerate(runs) for at in rows[index]]
    tokens, positions, owners = (np.array(column, dtype=np.int32) for column in zip(*flat, strict=True))
    wanted = np.arange(len(flat), dtype=np.int32)
    return Batch(tokens=tokens, positions=positions, owners=owners, tables=tables, wanted=wanted)


def run_all(forward: Forward, runs: Sequence[Run], width: int | None = None) -> None:
    """Compute all sequences together, an iteration after the other, until each is at its end."""
    iteration = 0
    while any(len(run.logits) < len(run.tokens) for run in runs):
        rows = [run.next_rows(iteration) for run in runs]
        logits = forward.run(batch_of(runs, rows, width))
        owners = [run for run, part in zip(runs, rows, strict=True) for _ in part]
        for run, row in zip(owners, logits, strict=True):
            run.logits.append(row.copy())
        iteration += 1


def all_logits(model: PackedModel, tokens: Sequence[int], chunks: Sequence[int] = (1 << 20,)) -> Floats:
    """Return the logits after each of the tokens, [tokens, vocab], from a cache of their own."""
    blocks = -(-len(tokens) // BLOCK_TOKENS)
    run = Run(tokens, range(blocks), chunks)
    run_all(Forward(model, KvCache(model.config, blocks)), [run])
    return np.array(run.logits)


def greedy_tokens(model: PackedModel, prompt: Sequence[int], count: int, banned: Sequence[int] = ()) -> list[int]:
    """Return the likeliest next tokens that are not banned, one after the other."""
    blocks = range(-(-(len(prompt) + count) // BLOCK_TOKENS))
    forward = Forward(model, KvCache(model.config, len(blocks)))
    tokens = list(prompt)
    first = 0
    while len(tokens) < len(prompt) + count:
        logits = forward.run(batch_of([Run(tokens, blocks, ())], [range(first, len(tokens))]))
        first = len(tokens)
        logits[-1, list(banned)] = -np.inf
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]
