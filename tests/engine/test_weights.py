"""Weights under their own names: shapes, order of rows, what is kept as it is, and what tells models apart."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.checkpoint import Weights, file_digest, rotate_half_rows, weights_from_tensors
from phasesplit.engine.config import ModelConfig, config_from_gguf
from phasesplit.engine.fetch import TinySizes, write_tiny_model
from phasesplit.engine.gguf import open_gguf
from phasesplit.engine.quant_blocks import KINDS, Tensor, tensor_from_values
from phasesplit.errors import SpecError

Parts = tuple[ModelConfig, dict[str, Tensor]]


def parts_of(path: Path) -> Parts:
    file = open_gguf(path)
    return config_from_gguf("m", file.metadata, file.tensors), dict(file.tensors)


def weights_of(parts: Parts, *, has_paired_rows: bool = False) -> Weights:
    return weights_from_tensors("m", *parts, has_paired_rows=has_paired_rows)


@pytest.fixture
def parts(tiny_path: Path) -> Parts:
    return parts_of(tiny_path)


def test_shapes(parts: Parts) -> None:
    """A matrix would stand in another's place."""
    weights = weights_of(parts)
    layer = weights.layers[1]
    assert len(weights.layers) == 2
    assert weights.output is weights.embedding
    assert (layer.query.shape, layer.key.shape, layer.value.shape) == ((64, 64), (32, 64), (32, 64))
    assert (layer.output.shape, layer.gate.shape, layer.down.shape) == ((64, 64), (160, 64), (64, 160))
    assert (layer.query_bias, layer.query_norm) == (None, None)
    np.testing.assert_array_equal(layer.up.float32(), parts[1]["blk.1.ffn_up.weight"].float32())
    np.testing.assert_array_equal(layer.ffn_norm, parts[1]["blk.1.ffn_norm.weight"].float32())


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter writes them, row by row: the two halves of a head alternate."""
    head_dim = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * pair + half] = rows[head * head_dim + half * head_dim // 2 + pair]
    return out


def test_rows_of_queries_and_keys_are_put_back(parts: Parts) -> None:
    """Llama's queries and keys would be rotated in wrong pairs: fluent nonsense, and no error."""
    config, tensors = parts
    query, key = tensors["blk.0.attn_q.weight"].float32(), tensors["blk.0.attn_k.weight"].float32()
    tensors["blk.0.attn_q.weight"] = tensor_from_values("blk.0.attn_q.weight", permuted(query, config.query_heads))
    tensors["blk.0.attn_k.weight"] = tensor_from_values("blk.0.attn_k.weight", permuted(key, config.kv_heads))
    layer = weights_of((config, tensors), has_paired_rows=True).layers[0]
    np.testing.assert_array_equal(layer.query.float32(), query)
    np.testing.assert_array_equal(layer.key.float32(), key)
    np.testing.assert_array_equal(layer.value.float32(), tensors["blk.0.attn_v.weight"].float32())


def test_rows_of_vectors_are_put_back() -> None:
    """Biases of queries and keys would not follow their rows."""
    np.testing.assert_array_equal(rotate_half_rows(np.array([0, 2, 1, 3, 4, 6, 5, 7]), 2), np.arange(8))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0", "Q4_1"])
def test_kinds_that_are_kept(tmp_path: Path, kind: str) -> None:
    """A quantised model would be unpacked and take several times its memory, or its rows be put in wrong order."""
    write_tiny_model(tmp_path / "m.gguf", kind=kind)
    parts = parts_of(tmp_path / "m.gguf")
    weights = weights_of(parts, has_paired_rows=True)
    assert {weights.embedding.kind.name, weights.layers[0].query.kind.name} == {kind}
    assert np.shares_memory(weights.layers[0].gate.raw, parts[1]["blk.0.ffn_gate.weight"].raw)
    expected = rotate_half_rows(parts[1]["blk.0.attn_q.weight"].float32(), parts[0].query_heads)
    np.testing.assert_array_equal(weights.layers[0].query.float32(), expected)


def test_kinds_that_become_float32(parts: Parts) -> None:
    """A K-quant would reach a kernel that cannot compute on it."""
    config, tensors = parts
    rng = np.random.default_rng(4)
    kind = KINDS["Q6_K"]
    config = replace(config, ffn=256)
    for index in range(config.layers):
        for name, rows in (("ffn_gate", 256), ("ffn_up", 256), ("ffn_down", 64)):
            full = f"blk.{index}.{name}.weight"
            tensors[full] = tensor_from_values(full, np.zeros((rows, 320 - rows), dtype=np.float32))
    raw = rng.integers(0, 60, (64, kind.block_bytes), dtype=np.uint8)
    down = Tensor(name="blk.1.ffn_down.weight", kind=kind, shape=(64, 256), raw=raw)
    tensors[down.name] = down
    kept = weights_of((config, tensors)).layers[1].down
    assert kept.kind.name == "F32"
    np.testing.assert_array_equal(kept.float32(), down.float32())


@pytest.mark.parametrize(("architecture", "has_bias", "has_norm"), [("qwen2", True, False), ("qwen3", False, True)])
def test_biases_and_norms(tmp_path: Path, architecture: str, has_bias: bool, has_norm: bool) -> None:
    """Qwen's biases or norms of heads would be left out."""
    write_tiny_model(tmp_path / "m.gguf", sizes=TinySizes(architecture=architecture, is_tied=False))
    config, tensors = parts_of(tmp_path / "m.gguf")
    weights = weights_of((config, tensors))
    layer = weights.layers[0]
    assert (layer.query_bias is not None, layer.query_norm is not None) == (has_bias, has_norm)
    assert weights.output is not weights.embedding
    if layer.key_bias is not None:
        np.testing.assert_array_equal(layer.key_bias, tensors["blk.0.attn_k.bias"].float32())
    if layer.key_norm is not None:
        np.testing.assert_array_equal(layer.key_norm, tensors["blk.0.attn_k_norm.weight"].float32())


def test_divisors_of_the_rotation(parts: Parts) -> None:
    """A Llama 3 file in GGUF, which keeps its scaling as a tensor, would be run without it."""
    config, tensors = parts
    divisors = np.array([1, 1, 2, 2, 4, 4, 8, 8], dtype=np.float32)
    tensors["rope_freqs.weight"] = tensor_from_values("rope_freqs.weight", divisors)
    np.testing.assert_allclose(weights_of(parts).rope_frequencies, config.rope_frequencies() / divisors)
    tensors["rope_freqs.weight"] = tensor_from_values("rope_freqs.weight", 0 * divisors)
    with pytest.raises(SpecError, match="not positive numbers"):
        weights_of(parts)


def test_what_does_not_fit_is_refused(parts: Parts) -> None:
    """A model with a part missing, of another shape, or not known would be run without it."""
    config, tensors = parts
    short = tensor_from_values("blk.1.ffn_up.weight", np.zeros((64, 160), dtype=np.float32))
    with pytest.raises(SpecError, match=r"shape of 'blk.1.ffn_up.weight': got \(64, 160\), allowed is .*\(160, 64\)"):
        weights_of((config, tensors | {"blk.1.ffn_up.weight": short}))
    with pytest.raises(SpecError, match=r"has 1 tensors that are not known, first 'blk.0.attn_output.bias'"):
        weights_of((config, tensors | {"blk.0.attn_output.bias": short}))
    with pytest.raises(SpecError, match=r"tensor 'blk.2.attn_norm.weight' is missing"):
        weights_of((replace(config, layers=3), tensors))


def test_identity_tells_models_apart(tmp_path: Path, parts: Parts) -> None:
    """Two machines with different weights would exchange KV, or two with the same ones refuse to."""
    write_tiny_model(tmp_path / "other.gguf", seed=1)
    write_tiny_model(tmp_path / "same.gguf", seed=0)
    ours = weights_of(parts).identity
    assert weights_of(parts_of(tmp_path / "same.gguf")).identity == ours
    assert weights_of(parts_of(tmp_path / "other.gguf")).identity != ours
    assert weights_of((replace(parts[0], rope_theta=5.0), parts[1])).identity != ours


def test_digest_of_files(tmp_path: Path) -> None:
    """A downloaded model would be compared with its published digest by another rule."""
    (tmp_path / "a").write_bytes(b"x" * 3_000_000)
    (tmp_path / "b").write_bytes(b"y")
    assert file_digest([tmp_path / "a", tmp_path / "b"]) == hashlib.sha256(b"x" * 3_000_000 + b"y").hexdigest()
    with pytest.raises(SpecError, match="cannot be read"):
        file_digest([tmp_path / "absent"])
