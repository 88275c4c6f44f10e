"""The forward pass against the obvious one, and what it does at its border."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forward_runs import Run, all_logits, batch_of, greedy_tokens
from obvious_forward import obvious_logits
from phasesplit.engine.cache import KvCache
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.config import RopeScaling
from phasesplit.engine.fetch import TinySizes, write_tiny_model
from phasesplit.engine.forward import Forward
from phasesplit.engine.gguf import WRITABLE
from phasesplit.engine.packed import PackedModel, packed_model
from phasesplit.errors import SpecError

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 300, 70)]
BOUND = 2e-4
"""Of the largest difference between logits, as a share of the largest logit: sums in another order differ by 1e-5."""


@pytest.fixture(scope="module")
def tiny_model(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Return the tiny model, packed."""
    return packed_model(open_checkpoint(tiny_path), tmp_path_factory.mktemp("packed"))


def packed_and_obvious(path: Path, precision: str = "native") -> tuple[PackedModel, Callable[[list[int]], np.ndarray]]:
    opened = open_checkpoint(path)
    model = packed_model(opened, path.parent / "packed", precision)
    return model, lambda tokens: obvious_logits(opened.config, opened.weights, tokens)


def require_close(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(logits - expected).max() < BOUND * np.abs(expected).max()


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_equals_the_obvious_forward(tmp_path: Path, architecture: str, kind: str) -> None:
    """The model would say something else than its weights mean."""
    write_tiny_model(tmp_path / "m.gguf", kind=kind, sizes=TinySizes(architecture=architecture, is_tied=kind == "F32"))
    model, obvious = packed_and_obvious(tmp_path / "m.gguf")
    expected = obvious(TOKENS)
    logits = all_logits(model, TOKENS)
    require_close(logits, expected)
    assert (logits.argmax(axis=1) == expected.argmax(axis=1)).all()


@pytest.mark.parametrize(
    "sizes",
    [
        TinySizes(query_heads=3, kv_heads=3, head_dim=16),
        TinySizes(query_heads=6, kv_heads=1, head_dim=10),
        TinySizes(query_heads=9, kv_heads=3, head_dim=64, hidden=96),
        TinySizes(architecture="qwen2", query_heads=14, kv_heads=2, head_dim=6),
        TinySizes(architecture="qwen3", query_heads=4, kv_heads=2, head_dim=80, hidden=40, ffn=100, layers=1),
    ],
    ids=lambda sizes: f"{sizes.query_heads}-{sizes.kv_heads}-{sizes.head_dim}",
)
def test_any_heads_and_widths(tmp_path: Path, sizes: TinySizes) -> None:
    """A model whose sizes are no multiples of what the kernels like would answer wrongly."""
    write_tiny_model(tmp_path / "m.gguf", sizes=sizes)
    model, obvious = packed_and_obvious(tmp_path / "m.gguf")
    require_close(all_logits(model, TOKENS), obvious(TOKENS))


def test_native_and_float32_panels_mean_the_same(tmp_path: Path) -> None:
    """Unpacking weights ahead would change answers by more than rounding."""
    write_tiny_model(tmp_path / "m.gguf", kind="Q4_1")
    native, obvious = packed_and_obvious(tmp_path / "m.gguf")
    plain, _ = packed_and_obvious(tmp_path / "m.gguf", "float32")
    require_close(all_logits(plain, TOKENS), all_logits(native, TOKENS))
    require_close(all_logits(plain, TOKENS), obvious(TOKENS))


def test_stretched_rotations(tmp_path: Path) -> None:
    """A model with RoPE scaling would be run without it."""
    write_tiny_model(tmp_path / "m.gguf")
    opened = open_checkpoint(tmp_path / "m.gguf")
    config = replace(opened.config, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_context=32))
    weights = replace(opened.weights, rope_frequencies=config.rope_frequencies(), identity="stretched")
    stretched = replace(opened, config=config, weights=weights)
    logits = all_logits(packed_model(stretched, tmp_path / "packed", "native"), TOKENS)
    require_close(logits, obvious_logits(config, weights, TOKENS))
    plain = obvious_logits(opened.config, opened.weights, TOKENS)
    assert np.abs(logits - plain).max() > 100 * BOUND * np.abs(plain).max()


def test_greedy_tokens_equal_the_obvious_ones(tiny_model: PackedModel, tiny_path: Path) -> None:
    """Generating from the cache would drift from computing everything anew at each token."""
    opened = open_checkpoint(tiny_path)
    expected = TOKENS[:20]
    while len(expected) < 60:
        expected.append(int(obvious_logits(opened.config, opened.weights, expected)[-1].argmax()))
    assert greedy_tokens(tiny_model, TOKENS[:20], 40) == expected[20:]


def test_layers_are_final_when_announced(tiny_model: PackedModel) -> None:
    """A layer's KV would be sent away before it is what a later iteration reads."""
    cache = KvCache(tiny_model.config, 12)
    tokens = TOKENS * 5  # more than go through a layer at a time
    run = Run(tokens, [11, 0, *range(9, 0, -1)], ())
    seen: list[np.ndarray] = []

    def keep(layer: int) -> None:
        assert layer == len(seen)
        seen.append(cache.pool[layer].copy())

    Forward(tiny_model, cache).run(batch_of([run], [range(len(tokens))]), keep)
    assert len(seen) == tiny_model.config.layers
    assert (np.array(seen) == cache.pool).all()
    assert all(layer[run.blocks].any(axis=1).all() and not layer[10].any() for layer in seen)


def test_only_wanted_rows_come_back_in_the_order_wished(tiny_model: PackedModel) -> None:
    """Logits of another request's row would be sampled from."""
    expected = all_logits(tiny_model, TOKENS)
    batch = batch_of([Run(TOKENS, range(3), ())], [range(len(TOKENS))])
    forward = Forward(tiny_model, KvCache(tiny_model.config, 3))
    wanted = np.array([69, 3, 3, 40], dtype=np.int32)
    assert (forward.run(replace(batch, wanted=wanted)) == expected[wanted]).all()
    assert forward.run(replace(batch, wanted=wanted[:0])).shape == (0, tiny_model.config.vocab)


def test_more_rows_than_a_tile(tiny_model: PackedModel, tiny_path: Path) -> None:
    """A long prompt would come out wrong where the feed-forward part goes from one tile of rows to the next."""
    opened = open_checkpoint(tiny_path)
    tokens = [int(token) for token in np.random.default_rng(6).integers(0, 300, 600)]
    require_close(all_logits(tiny_model, tokens), obvious_logits(opened.config, opened.weights, tokens))


WRONG: list[tuple[dict[str, np.ndarray], str]] = [
    ({"tokens": np.array([0, 300], np.int32)}, "batch, tokens: got 300, allowed is 0 to 299"),
    ({"tokens": np.array([-1, 0], np.int32)}, "batch, tokens: got -1, allowed is 0 to 299"),
    ({"positions": np.array([0, 64], np.int32)}, "batch, positions: got 64, allowed is 0 to 63"),
    ({"positions": np.array([0], np.int32)}, "batch, shape of positions: got (1,), allowed is [rows], as of tokens"),
    ({"owners": np.array([0, 1], np.int32)}, "batch, owners: got 1, allowed is 0 to 0"),
    ({"wanted": np.array([2], np.int32)}, "batch, wanted: got 2, allowed is 0 to 1"),
    ({"wanted": np.array([[1]], np.int32)}, "batch, shape of wanted: got (1, 1), allowed is [wanted]"),
    ({"tables": np.array([[4, 0]], np.int32)}, "batch, tables: got 4, allowed is 0 to 3"),
    ({"tables": np.array([0, 1], np.int32)}, "batch, shape of tables: got (2,), allowed is [sequences, width]"),
    ({"tokens": np.array([], np.int32)}, "batch, shape of tokens: got (0,), allowed is [rows], at least one"),
    ({"tokens": np.array([0, 1])}, "batch, tokens: got 'int64', allowed is a contiguous array of int32"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[next(iter(change)) for change, _ in WRONG])
def test_a_wrong_batch_is_refused(tiny_model: PackedModel, change: dict[str, np.ndarray], message: str) -> None:
    """A mistake of the loop would read or write memory that is not the model's."""
    forward = Forward(tiny_model, KvCache(tiny_model.config, 4))
    batch = batch_of([Run([5, 6], [0, 1], ())], [range(2)])
    with pytest.raises(SpecError) as caught:
        forward.run(replace(batch, **change))
    assert str(caught.value).startswith(message)
    assert not forward.cache.pool.any()


def test_table_entries_that_no_row_needs_may_be_anything(tiny_model: PackedModel) -> None:
    """A table would have to be filled up with blocks that a request does not own."""
    batch = batch_of([Run([5, 6], [0], ())], [range(2)], width=9)
    assert batch.tables[0, 8] == -1
    forward = Forward(tiny_model, KvCache(tiny_model.config, 1))
    assert forward.run(batch).shape == (2, tiny_model.config.vocab)
