"""The weights of a model: every matrix and vector under its own name, its shape checked against the model's sizes."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.blocks import Tensor, Values, tensor_from_values
from phasesplit.engine.config import ModelConfig
from phasesplit.errors import SpecError

_ROPE_DIVISORS = "rope_freqs.weight"
_SAMPLE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One transformer layer. Matrices are [outputs, inputs] of a kind the engine keeps; vectors are float32.

    Attributes:
        attention_norm: RMSNorm before attention, [hidden].
        query: [query_heads x head_dim, hidden]; rows of a head in the order of rotate-half (value i turns with value
            i + head_dim / 2), from every kind of file.
        key: [kv_heads x head_dim, hidden], rows as of `query`.
        value: [kv_heads x head_dim, hidden].
        output: [hidden, query_heads x head_dim].
        query_bias: [query_heads x head_dim], or None.
        key_bias: [kv_heads x head_dim], or None.
        value_bias: [kv_heads x head_dim], or None.
        query_norm: RMSNorm of each head's query, [head_dim], or None.
        key_norm: RMSNorm of each head's key, [head_dim], or None.
        ffn_norm: RMSNorm before the feed-forward layer, [hidden].
        gate: [ffn, hidden].
        up: [ffn, hidden].
        down: [hidden, ffn].
    """

    attention_norm: Values
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Values | None
    key_bias: Values | None
    value_bias: Values | None
    query_norm: Values | None
    key_norm: Values | None
    ffn_norm: Values
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All weights of a model.

    Attributes:
        embedding: [vocab, hidden].
        layers: First to last.
        output_norm: RMSNorm after the last layer, [hidden].
        output: [vocab, hidden]; the very object `embedding` where the two are tied.
        rope_frequencies: Angle by which position 1 turns each pair, [head_dim / 2] float64, scaling included.
        identity: 64 hexadecimal digits over names, kinds, shapes and a sample of the bytes of every tensor: it tells
            two models apart without reading them whole. It does not protect against somebody who tries to be taken for
            another model; `file_digest` does.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    output_norm: Values
    output: Tensor
    rope_frequencies: NDArray[np.float64]
    identity: str


class _Shelf:
    """Tensors by name, each taken once and checked."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self.tensors, self.taken = where, tensors, set[str]()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise SpecError(f"{self.where}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise SpecError.bad(f"{self.where}, shape of {name!r}", tensor.shape, str(shape))
        self.taken.add(name)
        return tensor

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        tensor = self.take(name, rows, columns)
        return tensor if tensor.kind.is_kept else tensor_from_values(name, tensor.float32())

    def vector(self, name: str, length: int) -> Values:
        return self.take(name, length).float32()

    def left(self) -> list[str]:
        """Return what no one took, without the tables that the sizes already give."""
        return sorted(name for name in self.tensors.keys() - self.taken if not name.endswith(".inv_freq"))


def rotate_half_rows(rows: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """Return rows whose pairs lie side by side, as GGUF keeps Llama's, with pairs half a head apart.

    Args:
        rows: [heads x head_dim, ...]: row 2 i + j of a head is its value i + j x head_dim / 2.
        heads: Number of heads.

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, undone.
    """
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def weights_from_tensors(
    where: str, config: ModelConfig, tensors: Mapping[str, Tensor], *, has_paired_rows: bool
) -> Weights:
    """Return a model's weights.

    Kinds that the engine does not compute on become F32; the others stay views of the file, except for queries and keys
    that have to be put in order.

    Args:
        where: The file or directory, for messages.
        config: The model's sizes.
        tensors: GGUF name to tensor, all that the model has.
        has_paired_rows: Whether the rows of queries and keys lie as GGUF keeps them for the architecture llama.

    Raises:
        SpecError: A tensor is missing, has another shape than the sizes say, or is not known.
    """
    shelf = _Shelf(where, tensors)
    embedding = shelf.matrix("token_embd.weight", config.vocab, config.hidden)
    layers = tuple(_layer(shelf, config, index, has_paired_rows) for index in range(config.layers))
    output_norm = shelf.vector("output_norm.weight", config.hidden)
    if config.tied_embeddings:
        output = embedding
        shelf.taken.add("output.weight")  # some files repeat it
    else:
        output = shelf.matrix("output.weight", config.vocab, config.hidden)
    divisors = shelf.vector(_ROPE_DIVISORS, config.head_dim // 2) if _ROPE_DIVISORS in tensors else None
    if divisors is not None and not (np.isfinite(divisors) & (divisors > 0)).all():
        raise SpecError(f"{where}: tensor {_ROPE_DIVISORS!r} has values that are not positive numbers")
    if shelf.left():
        raise SpecError(f"{where}: has {len(shelf.left())} tensors that are not known, first {shelf.left()[0]!r}")
    return Weights(
        embedding=embedding,
        layers=layers,
        output_norm=output_norm,
        output=output,
        rope_frequencies=config.rope_frequencies(divisors),
        identity=_identity(config, tensors.values()),
    )


def _layer(shelf: _Shelf, config: ModelConfig, index: int, has_paired_rows: bool) -> LayerWeights:
    start = f"blk.{index}."
    hidden, head_dim, ffn = config.hidden, config.head_dim, config.ffn
    widths = {"q": config.query_heads * head_dim, "k": config.kv_heads * head_dim, "v": config.kv_heads * head_dim}
    heads = {"q": config.query_heads, "k": config.kv_heads}

    def projection(part: str) -> Tensor:
        matrix = shelf.matrix(f"{start}attn_{part}.weight", widths[part], hidden)
        if not (has_paired_rows and part in heads):
            return matrix
        return replace(matrix, raw=rotate_half_rows(matrix.raw, heads[part]).view(np.uint8))

    def bias(part: str) -> Values | None:
        if not config.qkv_bias:
            return None
        values = shelf.vector(f"{start}attn_{part}.bias", widths[part])
        return rotate_half_rows(values, heads[part]).view(np.float32) if has_paired_rows and part in heads else values

    def head_norm(part: str) -> Values | None:
        return shelf.vector(f"{start}attn_{part}_norm.weight", head_dim) if config.qk_norm else None

    return LayerWeights(
        attention_norm=shelf.vector(f"{start}attn_norm.weight", hidden),
        query=projection("q"),
        key=projection("k"),
        value=projection("v"),
        output=shelf.matrix(f"{start}attn_output.weight", hidden, widths["q"]),
        query_bias=bias("q"),
        key_bias=bias("k"),
        value_bias=bias("v"),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
        ffn_norm=shelf.vector(f"{start}ffn_norm.weight", hidden),
        gate=shelf.matrix(f"{start}ffn_gate.weight", ffn, hidden),
        up=shelf.matrix(f"{start}ffn_up.weight", ffn, hidden),
        down=shelf.matrix(f"{start}ffn_down.weight", hidden, ffn),
    )


def _identity(config: ModelConfig, tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(repr(config).encode())
    for tensor in sorted(tensors, key=lambda one: one.name):
        flat = tensor.raw.reshape(-1)
        digest.update(f"{tensor.name} {tensor.kind.name} {tensor.shape} ".encode())
        digest.update(flat[:_SAMPLE_BYTES].tobytes() + flat[-_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()


def file_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files one after the other, in hexadecimal, reading each once in small pieces.

    Raises:
        SpecError: One cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()
