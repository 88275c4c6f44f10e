"""The KV cache: its layout is what a transfer promises, and its memory may be somebody else's."""

from pathlib import Path

import numpy as np
import pytest

from forward_runs import Run, run_all
from phasesplit.engine.cache import KvCache, blocks_for_bytes, kv_layout
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.forward import Forward
from phasesplit.engine.packed import packed_model
from phasesplit.errors import SpecError
from phasesplit.kv_transfer.shared_memory import SharedPool

TOKENS = [int(token) for token in np.random.default_rng(8).integers(0, 300, 45)]


@pytest.fixture(scope="module")
def config(tiny_path: Path) -> ModelConfig:
    """Return the tiny model's sizes."""
    return open_checkpoint(tiny_path).config


def test_layout_is_the_memory(config: ModelConfig) -> None:
    """A transfer would copy other bytes than a block has."""
    cache = KvCache(config, 3)
    layout = kv_layout(config, "digest")
    assert cache.pool.shape == (layout.layers, cache.blocks, layout.block_bytes)
    assert (layout.model, layout.dtype, layout.block_tokens) == ("digest", "float32", 32)
    assert cache.values.nbytes == cache.pool.nbytes
    assert cache.pool.ctypes.data % 64 == 0


def test_fresh_memory_is_zero_and_not_resident(config: ModelConfig) -> None:
    """A worker with much room for KV would take that memory before a request comes, or read rubbish from it."""

    def resident_kib() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    before = resident_kib()
    cache = KvCache(config, blocks_for_bytes(config, 1 << 30))
    assert cache.pool.nbytes > 1 << 29
    assert resident_kib() - before < 1 << 14
    assert not cache.pool[:, -1].any()


def test_blocks_for_bytes_is_what_fits(config: ModelConfig) -> None:
    """A pool would be larger than the memory it was given, or leave a block unused."""
    one = KvCache(config, 1).pool.nbytes
    assert [blocks_for_bytes(config, size) for size in (0, one - 1, one, 3 * one + 1)] == [0, 0, 1, 3]


def test_memory_of_a_shared_pool_is_computed_in(config: ModelConfig, tiny_path: Path, tmp_path: Path) -> None:
    """What another process writes into the pool would not be what attention reads."""
    model = packed_model(open_checkpoint(tiny_path), tmp_path)
    shared = SharedPool(kv_layout(config, "digest"), 4)
    here, there = KvCache(config, 4), KvCache(config, 4, shared.blocks)
    first, second = Run(TOKENS, [2, 1], (40, 5)), Run(TOKENS, [0, 3], (40, 5))
    run_all(Forward(model, here), [first])
    there.pool[:, [0, 3]] = here.pool[:, [2, 1]]
    second.logits = first.logits[:40]
    run_all(Forward(model, there), [second])
    assert shared.blocks.any()
    assert (np.array(second.logits) == np.array(first.logits)).all()
    shared.close()


def test_other_memory_is_refused(config: ModelConfig) -> None:
    """The cache would lie over memory of another shape, or over memory that cannot be written."""
    shape = KvCache(config, 2).pool.shape
    fixed = np.zeros(shape, np.uint8)
    fixed.flags.writeable = False
    for memory in (np.zeros(shape, np.int8), np.zeros((*shape[:2], 64), np.uint8), fixed):
        with pytest.raises(SpecError, match="KV cache, memory"):
            KvCache(config, 2, memory)
    with pytest.raises(SpecError, match="KV cache, blocks: got 0"):
        KvCache(config, 0)
