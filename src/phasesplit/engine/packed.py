"""A model's weights in panels, in a file that is written once and mapped by every process that runs the model.

The file holds arrays, each from a multiple of 64 bytes on, and ends with a table of contents in JSON, the table's
SHA-256, its length and a mark. It is written beside its place and renamed, so it is there whole or not at all; one that
is damaged all the same is written anew.
"""

import fcntl
import hashlib
import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from phasesplit.atomic_files import atomic_path
from phasesplit.engine import panels as panels_module
from phasesplit.engine.blocks import KINDS, Tensor, Values
from phasesplit.engine.checkpoint import Checkpoint
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.panels import Matrix, Panels, pack
from phasesplit.errors import SpecError

Precision = Literal["native", "float32"]

_MARK = b"PANELS01"
_ALIGNMENT = 64
_TRAILER_BYTES = 32 + 8 + len(_MARK)
_SAMPLE_BYTES = 256
_LAYER_MATRICES = {
    "qkv": ("query", "key", "value"),
    "attention_output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
_LAYER_VECTORS = ("attention_norm", "ffn_norm", "query_norm", "key_norm")


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The token embedding, its rows as the model's file holds them.

    Attributes:
        table: [vocab, hidden].
    """

    table: Tensor

    def rows(self, tokens: NDArray[np.int32], out: Values) -> None:
        """Write the rows of tokens to out.

        Args:
            tokens: [T], each below the vocabulary's size.
            out: [T, hidden]; overwritten.

        Raises:
            SpecError: A token is not in the vocabulary.
        """
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.table.shape[0]:
            raise SpecError.bad("tokens", int(tokens.max()), f"0 to {self.table.shape[0] - 1}")
        taken = Tensor(self.table.name, self.table.kind, (len(tokens), self.table.shape[1]), self.table.raw[tokens])
        out[:] = taken.float32()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLayer:
    """One transformer layer; what its parts mean is said in `weights.LayerWeights`.

    Attributes:
        attention_norm: [hidden].
        qkv: Queries, keys, values one below the other: [(query_heads + 2 x kv_heads) x head_dim, hidden].
        qkv_bias: One number for each output of `qkv`, or None.
        query_norm: [head_dim], or None.
        key_norm: [head_dim], or None.
        attention_output: [hidden, query_heads x head_dim].
        ffn_norm: [hidden].
        gate_up: Gate above up: [2 x ffn, hidden].
        down: [hidden, ffn].
    """

    attention_norm: Values
    qkv: Matrix
    qkv_bias: Values | None
    query_norm: Values | None
    key_norm: Values | None
    attention_output: Matrix
    ffn_norm: Values
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedModel:
    """A model ready to run.

    Attributes:
        config: Its sizes.
        identity: As of `weights.Weights`.
        precision: `native` (quantised matrices stay quantised) or `float32`; both give the same bits.
        embedding: Rows of tokens.
        layers: First to last.
        output_norm: [hidden].
        output: [vocab, hidden].
        rope_frequencies: [head_dim / 2] float64, in radians a position.
    """

    config: ModelConfig
    identity: str
    precision: Precision
    embedding: Embedding
    layers: tuple[PackedLayer, ...]
    output_norm: Values
    output: Matrix
    rope_frequencies: NDArray[np.float64]


def packed_model(checkpoint: Checkpoint, directory: Path, precision: Precision = "native") -> PackedModel:
    """Return a model with its weights mapped from a file in `directory`, which is written when it is not there.

    Processes that ask for the same model at once write it once; the others wait.

    Args:
        checkpoint: The model.
        directory: Where such files are kept; made when it is not there.
        precision: Whether quantised matrices stay as they are or become float32.

    Raises:
        SpecError: The file cannot be written or read.
    """
    path = directory / f"{checkpoint.weights.identity[:32]}-{precision}-{_layout_digest()}.panels"
    try:
        found = _opened(path)
        if found is None:
            directory.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = _opened(path)
                if found is None:
                    _write(path, checkpoint, precision)
                    found = _opened(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written or read: {error.strerror or error}") from None
    if found is None:
        raise SpecError(f"{path}: changed while it was opened")
    return _model(checkpoint, precision, found)


def _layout_digest() -> str:
    """Return what changes when the layout of panels or of the file may have changed."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(Path(panels_module.__file__).read_bytes())
    return digest.hexdigest()[:12]


class _Contents:
    """An opened file: its arrays by name."""

    def __init__(self, content: mmap.mmap, table: dict[str, Any]) -> None:
        self.content, self.table = content, table

    def array(self, name: str) -> NDArray[Any]:
        entry = self.table[name]
        count = int(np.prod(entry["shape"]))
        found: NDArray[Any] = np.frombuffer(self.content, dtype=entry["dtype"], count=count, offset=entry["at"])
        return found.reshape(entry["shape"])

    def vector(self, name: str) -> NDArray[Any] | None:
        return self.array(name).copy() if name in self.table else None

    def matrix(self, name: str) -> Matrix:
        parts = self.table[name]["parts"]
        return tuple(Panels(data=self.array(f"{name}.{index}"), **part) for index, part in enumerate(parts))


def _opened(path: Path) -> _Contents | None:
    """Return a file's contents, or None where it is not there or is not whole."""
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (FileNotFoundError, ValueError):  # ValueError: it is empty
        return None
    end = len(content) - _TRAILER_BYTES
    if end < 0 or content[-len(_MARK) :] != _MARK:
        return None
    start = end - int.from_bytes(content[end + 32 : end + 40], "little")
    if start < 0 or hashlib.sha256(content[start:end]).digest() != content[end : end + 32]:
        return None
    table: dict[str, Any] = json.loads(content[start:end])
    samples = table.pop("samples")
    contents = _Contents(content, table)
    return contents if samples == _samples(contents) else None


def _samples(contents: _Contents) -> str:
    """Return a digest of both ends of every array: pages that never reached the disk are zeros."""
    digest = hashlib.sha256()
    for name, entry in contents.table.items():
        if "at" in entry:
            flat = contents.array(name).reshape(-1).view(np.uint8)
            digest.update(flat[:_SAMPLE_BYTES].tobytes() + flat[-_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()


def _write(path: Path, checkpoint: Checkpoint, precision: Precision) -> None:
    with atomic_path(path, is_synced=True, is_alone=True) as part, part.open("w+b") as file:
        table = _append_all(file, checkpoint, precision)
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        text = json.dumps({**table, "samples": _samples(_Contents(content, table))}).encode()
        file.write(text + hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + _MARK)


def _append_all(file: BinaryIO, checkpoint: Checkpoint, precision: Precision) -> dict[str, Any]:
    """Write all that the file holds, one matrix in memory at a time, and return its table of contents."""
    weights, table = checkpoint.weights, dict[str, Any]()

    def array(name: str, values: NDArray[Any]) -> None:
        at = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
        file.write(bytes(at - file.tell()))
        file.write(np.ascontiguousarray(values).data)
        table[name] = {"at": at, "dtype": values.dtype.str, "shape": list(values.shape)}

    def matrix(name: str, *tensors: Tensor) -> None:
        packed = pack(*tensors, is_float32=precision == "float32")
        table[name] = {"parts": [{"kind": one.kind, "rows": one.rows, "columns": one.columns} for one in packed]}
        for index, one in enumerate(packed):
            array(f"{name}.{index}", one.data)

    for number, layer in enumerate(weights.layers):
        for name, sources in _LAYER_MATRICES.items():
            matrix(f"{number}.{name}", *(getattr(layer, source) for source in sources))
        for name in _LAYER_VECTORS:
            vector = getattr(layer, name)
            if vector is not None:
                array(f"{number}.{name}", vector)
        biases = [bias for bias in (layer.query_bias, layer.key_bias, layer.value_bias) if bias is not None]
        if biases:
            array(f"{number}.qkv_bias", np.concatenate(biases))
    array("output_norm", weights.output_norm)
    array("rope_frequencies", weights.rope_frequencies)
    array("embedding", weights.embedding.raw)
    matrix("output", weights.output)
    return table


def _model(checkpoint: Checkpoint, precision: Precision, contents: _Contents) -> PackedModel:
    weights, config = checkpoint.weights, checkpoint.config
    embedding = weights.embedding
    vectors = (*_LAYER_VECTORS, "qkv_bias")

    def layer(number: int) -> PackedLayer:
        fields: dict[str, Any] = {name: contents.matrix(f"{number}.{name}") for name in _LAYER_MATRICES}
        fields |= {name: contents.vector(f"{number}.{name}") for name in vectors}
        return PackedLayer(**fields)

    return PackedModel(
        config=config,
        identity=weights.identity,
        precision=precision,
        embedding=Embedding(
            Tensor(embedding.name, KINDS[embedding.kind.name], embedding.shape, contents.array("embedding"))
        ),
        layers=tuple(layer(number) for number in range(config.layers)),
        output_norm=contents.array("output_norm").copy(),
        output=contents.matrix("output"),
        rope_frequencies=contents.array("rope_frequencies").copy(),
    )
