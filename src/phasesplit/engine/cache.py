"""The paged KV cache: keys and values of every layer in blocks of so many tokens, in one pool."""

import math
import mmap

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.config import ModelConfig
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.errors import SpecError
from phasesplit.kv_transfer.layout import KvLayout

BLOCK_LAYOUT = "k:head,dim,token v:head,token,dim"
"""Order of the numbers of a block. Keys are turned so that scores and sums both run along contiguous numbers."""

_DTYPE = "float32"


class KvCache:
    """A pool of KV blocks, zero where nothing was written, which keeps a stale value from being infinite or no number.

    A block of one layer holds the keys [kv_heads, head_dim, block_tokens] and then the values
    [kv_heads, block_tokens, head_dim], all float32, of `kernels.plain.BLOCK_TOKENS` tokens.

    Args:
        config: The model's sizes.
        blocks: How many blocks of each layer, >= 1.
        memory: Where the pool lies, [layers, blocks, block_bytes] uint8, contiguous, writable and zero (memory that
            another process writes to, say); by default new memory, of which only what is used becomes resident.

    Attributes:
        pool: All blocks, [layers, blocks, block_bytes] uint8.
        values: The same memory, [layers, blocks, block_bytes / 4] float32.

    Raises:
        SpecError: The sizes are not allowed, or `memory` has other ones.
    """

    def __init__(self, config: ModelConfig, blocks: int, memory: NDArray[np.uint8] | None = None) -> None:
        if blocks < 1:
            raise SpecError.bad("KV cache, blocks", blocks, "1 or more")
        shape = (config.layers, blocks, kv_layout(config, "").block_bytes)
        if memory is None:
            # Pages of a mapping are zero and cost nothing until they are written, and they start on a cache line.
            memory = np.frombuffer(
                mmap.mmap(-1, math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8
            ).reshape(shape)
        if memory.shape != shape or memory.dtype != np.uint8:
            raise SpecError.bad("KV cache, memory", f"{memory.dtype} {memory.shape}", f"uint8 {shape}")
        if not (memory.flags.c_contiguous and memory.flags.writeable):
            raise SpecError("KV cache, memory: must be contiguous and writable")
        self.pool = memory
        self.values: NDArray[np.float32] = memory.view(np.float32)

    @property
    def blocks(self) -> int:
        """Blocks of each layer."""
        return int(self.pool.shape[1])


def kv_layout(config: ModelConfig, model_digest: str) -> KvLayout:
    """Return how the blocks of a model look, which a machine that takes them over has to agree to.

    Args:
        config: The model's sizes.
        model_digest: Digest of the weights.
    """
    return KvLayout(
        model=model_digest,
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=_DTYPE,
        block_tokens=BLOCK_TOKENS,
        block_layout=BLOCK_LAYOUT,
    )


def blocks_for_bytes(config: ModelConfig, size_bytes: int) -> int:
    """Return how many blocks of every layer fit into so many bytes, 0 or more."""
    return size_bytes // (config.layers * kv_layout(config, "").block_bytes)
