"""The embedded engine as a machine that is timed: its forward pass, in this process, without sockets or scheduling."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phasesplit.domain.kv import blocks_for
from phasesplit.engine.batch import Batch
from phasesplit.engine.cache import KvCache, blocks_for_bytes, kv_layout
from phasesplit.engine.cached_file import cache_directory
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.forward import Forward
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.packed import PackedModel, packed_model
from phasesplit.errors import SpecError
from phasesplit.measuring.adaptive import Bounds
from phasesplit.measuring.iterations import Shape

_LEAST_BLOCKS = 2
_MOST_REQUESTS = 64
_TILED_ROWS = 24
"""Rows go through the kernels in tiles of 6: above four tiles, what the last one costs is little."""
_SEED = 1
_COMPILING_TOKENS = 40
_INTERRUPTED_SHARE = 0.005
"""Of a run's time that its thread did not run: above it, another process had the core."""


def opened(path: Path) -> PackedModel:
    """Return a model as workers of the embedded engine have it.

    Args:
        path: Of the model.

    Raises:
        SpecError: It cannot be read or run.
    """
    return packed_model(open_checkpoint(path), cache_directory() / "packed")


class EngineMachine:
    """Times `Forward.run` over KV that holds random numbers, as much of it as a worker would have.

    A forward pass never waits. Where a run took longer than its thread ran, another process had the core: the time of
    the thread counts then, and how often that was is told.

    Args:
        model: The model.
        kv_bytes: Memory for KV.

    Attributes:
        model: The same.
        blocks: KV blocks.
        bounds: What can be asked for.

    Raises:
        SpecError: The memory is too small.
    """

    def __init__(self, model: PackedModel, kv_bytes: int) -> None:
        self.model = model
        self.blocks = blocks_for_bytes(model.config, kv_bytes)
        if self.blocks < _LEAST_BLOCKS:
            layout = kv_layout(model.config, "")
            least_bytes = _LEAST_BLOCKS * layout.layers * layout.block_bytes
            raise SpecError.bad("--kv-memory", kv_bytes, f"{least_bytes} bytes or more for this model")
        cache = KvCache(model.config, self.blocks)
        # Pages that were never written are all the same page, which would stay in the processor's caches.
        cache.values[:] = np.random.default_rng(_SEED).random(cache.values.shape[2], dtype=np.float32)
        self._forward = Forward(model, cache)
        kv_tokens = self.blocks * BLOCK_TOKENS
        self.bounds = Bounds(
            longest_tokens=min(model.config.context_tokens, kv_tokens),
            kv_tokens=kv_tokens,
            most_prompt_tokens=min(model.config.context_tokens, kv_tokens),
            most_requests=min(_MOST_REQUESTS, self.blocks),
            tiled_rows=_TILED_ROWS,
        )
        self._runs = self._interrupted = 0
        self._asked: tuple[Shape, Batch] | None = None
        for tokens in (1, min(_COMPILING_TOKENS, self.bounds.longest_prompt_tokens)):  # no run may wait for a compiler
            self._forward.run(batch_of(Shape(prompts=1, prompt_tokens=tokens), self.blocks, model.config.vocab))

    @property
    def interrupted_share(self) -> float | None:
        """Share of the runs during which another process had the core; None before the first."""
        return self._interrupted / self._runs if self._runs else None

    def run(self, shape: Shape) -> Sequence[float]:
        """Compute an iteration once and return its seconds."""
        if self._asked is None or self._asked[0] != shape:
            self._asked = shape, batch_of(shape, self.blocks, self.model.config.vocab)
        batch = self._asked[1]
        began_s, thread_began_s = time.perf_counter(), time.thread_time()
        self._forward.run(batch)
        taken_s, thread_s = time.perf_counter() - began_s, time.thread_time() - thread_began_s
        self._runs += 1
        if thread_s < (1 - _INTERRUPTED_SHARE) * taken_s:
            self._interrupted += 1
            return (thread_s,)
        return (taken_s,)


def batch_of(shape: Shape, blocks: int, vocabulary: int) -> Batch:
    """Return a batch of that shape: every sequence has blocks of its own, the last row of each is wanted.

    Args:
        shape: The shape.
        blocks: Blocks of the cache; sequences share some where it has too few.
        vocabulary: Tokens are below it.
    """
    rows = [_Rows(shape.behind_tokens, shape.prompt_tokens)] * shape.prompts
    rows += [_Rows(shape.context_tokens - 1, 1)] * shape.requests
    counts = np.array([one.count for one in rows])
    width = blocks_for(max(one.first + one.count for one in rows), BLOCK_TOKENS)
    return Batch(
        tokens=np.random.default_rng(_SEED).integers(0, vocabulary, counts.sum()).astype(np.int32),
        positions=np.concatenate([np.arange(one.first, one.first + one.count, dtype=np.int32) for one in rows]),
        owners=np.repeat(np.arange(len(rows), dtype=np.int32), counts),
        tables=(np.arange(len(rows) * width, dtype=np.int32) % blocks).reshape(len(rows), width),
        wanted=(np.cumsum(counts) - 1).astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    first: int
    count: int
