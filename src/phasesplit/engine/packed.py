"""A model's weights in panels, in a file that is written once and mapped by every process that runs the model.

The file holds arrays, each from a multiple of 64 bytes on, and ends with a table of contents in JSON, the table's
SHA-256, its length and a mark. It is written next to its place and renamed, so it is there whole or not at all; a
damaged one is written again.

Panels are matrices as the product wants them: 64 outputs side by side, so that one load gives a vector of neighbours. A
matrix [N, K] becomes ceil(N / 64) panels, the last filled up with zeros. Of each:

F32: values [K, 64].
Q8_0: for every 32 inputs, scales [64] float32, then numbers [32, 64] int8.
Q4_0: for every 32 inputs, scales [64] float32, then words [4, 64] uint32; each word has 8 inputs of one output, the
    first in its lowest 4 bits.
Q4_1: as Q4_0, with minima [64] float32 after the scales.

Scales are float32 because the loop would otherwise convert them again for each row. What the numbers stand for is
float32, rounded once, as in `quant_blocks`: quantised and float32 panels of the same tensor give the same bits.
"""

import fcntl
import hashlib
import json
import mmap
import threading
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from phasesplit.atomic_files import atomic_path
from phasesplit.engine.checkpoint import Checkpoint
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.kernels import plain
from phasesplit.engine.kernels.compiling import IS_COMPILED
from phasesplit.engine.kernels.matrix import multiply as compiled_multiply
from phasesplit.engine.kernels.matrix import scratch_values
from phasesplit.engine.kernels.plain import BLOCK_VALUES, F32, PANEL, Q4_0, Q4_1, Q8_0, WORD_VALUES
from phasesplit.engine.kernels.tiles import tiles_address
from phasesplit.engine.quant_blocks import KINDS, Tensor, Values
from phasesplit.errors import SpecError

PANEL_KINDS = {"F32": F32, "Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
"""Kinds of panels; tensors of other kinds become F32."""
_BYTES_A_BLOCK = {F32: 128 * PANEL, Q8_0: 36 * PANEL, Q4_0: 20 * PANEL, Q4_1: 24 * PANEL}
"""Of 32 inputs of a panel."""

_ROWS_AT_ONCE = 64 * PANEL
"""Of a matrix that is packed: what is needed in addition to the panels does not grow with the model's vocabulary."""

Bytes = NDArray[np.uint8]
_of_thread = threading.local()


@dataclass(frozen=True, slots=True, eq=False)
class Panels:
    """A matrix in panels.

    Attributes:
        kind: One of `KINDS`.
        rows: Outputs, N.
        columns: Inputs, K; a multiple of 32 unless the kind is F32.
        data: The panels one after the other, 1-dimensional.
        address: Of the first byte of `data`, which compiled code is handed.

    Raises:
        SpecError: `data` is not as long as the other fields say.
    """

    kind: str
    rows: int
    columns: int
    data: Bytes
    address: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = -(-self.rows // PANEL) * self.columns
        length = values * _BYTES_A_BLOCK[PANEL_KINDS[self.kind]] // BLOCK_VALUES
        if self.data.shape != (length,) or not self.data.flags.c_contiguous or self.data.dtype != np.uint8:
            raise SpecError.bad(f"panels of {self.rows} x {self.columns}", self.data.shape, f"({length},) bytes")
        object.__setattr__(self, "address", self.data.ctypes.data)


Matrix = tuple[Panels, ...]
"""Matrices one below the other, all with the same inputs."""


def multiply(x: Values, matrix: Matrix, out: Values) -> None:
    """Write x times the transpose of a matrix to out; row m depends on row m of x alone, bit for bit.

    Args:
        x: [M, K], C-contiguous.
        matrix: [N, K].
        out: [M, N], C-contiguous; overwritten.

    Raises:
        SpecError: The shapes do not fit each other.
    """
    outputs = sum(panels.rows for panels in matrix)
    if out.shape != (len(x), outputs):
        raise SpecError.bad("shape of out", out.shape, str((len(x), outputs)))
    at = 0
    for panels in matrix:
        if x.shape[1] != panels.columns:
            raise SpecError.bad("width of x", x.shape[1], f"{panels.columns}, the matrix's inputs")
        kind = PANEL_KINDS[panels.kind]
        if IS_COMPILED:
            scratch = _scratch(scratch_values(panels.rows, panels.columns))
            compiled_multiply(tiles_address(), x, kind, panels.address, panels.rows, out, at, scratch)
        else:
            plain.multiply(x, kind, panels.data, panels.rows, out, at)
        at += panels.rows


def _scratch(values: int) -> Values:
    """Return an array of this thread's, at least so long."""
    kept: Values | None = getattr(_of_thread, "scratch", None)
    if kept is None or len(kept) < values:
        kept = _of_thread.scratch = np.empty(values, dtype=np.float32)
    return kept


def pack(*tensors: Tensor, is_float32: bool = False) -> Matrix:
    """Return matrices, one below the other, in panels; neighbours of the same kind become one.

    Args:
        *tensors: [outputs, inputs] each, with the same inputs.
        is_float32: Whether quantised ones become F32 too.

    Raises:
        SpecError: One is not a matrix, or has other inputs than the first.
    """
    for tensor in tensors:
        if len(tensor.shape) != 2 or tensor.shape[1] != tensors[0].shape[1]:
            raise SpecError.bad(f"shape of {tensor.name!r}", tensor.shape, f"(outputs, {tensors[0].shape[-1]})")
    kinds = ["F32" if is_float32 or tensor.kind.name not in PANEL_KINDS else tensor.kind.name for tensor in tensors]
    by_kind = groupby(zip(kinds, tensors, strict=True), key=lambda pair: pair[0])
    return tuple(_pack(kind, [tensor for _, tensor in pairs]) for kind, pairs in by_kind)


def _pack(kind: str, tensors: list[Tensor]) -> Panels:
    rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
    panel_bytes = columns * _BYTES_A_BLOCK[PANEL_KINDS[kind]] // BLOCK_VALUES
    data = np.empty(-(-rows // PANEL) * panel_bytes, dtype=np.uint8)
    for start in range(0, rows, _ROWS_AT_ONCE):
        some = _rows(tensors, start, start + _ROWS_AT_ONCE)
        if kind == "F32":
            values = np.concatenate([tensor.float32() for tensor in some])
            packed = _side_by_side(values, 1).reshape(-1).view(np.uint8)
        else:
            raw = np.concatenate([tensor.raw for tensor in some])
            packed = _pack_blocks(kind, raw.reshape(len(raw), columns // BLOCK_VALUES, -1))
        at = start // PANEL * panel_bytes
        data[at : at + len(packed)] = packed
    return Panels(kind=kind, rows=rows, columns=columns, data=data)


def _rows(tensors: list[Tensor], start: int, end: int) -> list[Tensor]:
    """Return rows of matrices one below the other, from `start` to before `end` or the last."""
    found, passed = [], 0
    for tensor in tensors:
        low, high = max(start - passed, 0), min(end - passed, tensor.shape[0])
        if low < high:
            found.append(replace(tensor, shape=(high - low, tensor.shape[1]), raw=tensor.raw[low:high]))
        passed += tensor.shape[0]
    return found


def _side_by_side(values: NDArray[np.generic], inner: int) -> NDArray[np.generic]:
    """Return [N, B x inner] as [N / 64, B, inner, 64], filled up with zeros."""
    rows, columns = values.shape
    filled = np.zeros((-(-rows // PANEL) * PANEL, columns), dtype=values.dtype)
    filled[:rows] = values
    return np.ascontiguousarray(filled.reshape(-1, PANEL, columns // inner, inner).transpose(0, 2, 3, 1))


def _pack_blocks(kind: str, raw: Bytes) -> Bytes:
    """Return quantised blocks [N, K / 32, bytes of a block] as panels."""
    halves = 2 if kind == "Q4_1" else 1
    scales = np.ascontiguousarray(raw[:, :, : 2 * halves]).view("<f2").astype(np.float32)
    numbers = np.ascontiguousarray(raw[:, :, 2 * halves :])
    if kind != "Q8_0":
        # ggml keeps values 0 to 15 in low halves of bytes and 16 to 31 in high halves; here 8 neighbours share a word.
        nibbles = np.concatenate([numbers & np.uint8(15), numbers >> np.uint8(4)], axis=2)
        numbers = nibbles[:, :, 0::2] | (nibbles[:, :, 1::2] << np.uint8(4))
    inner = BLOCK_VALUES if kind == "Q8_0" else BLOCK_VALUES // WORD_VALUES
    words = np.ascontiguousarray(numbers).view(np.uint8 if kind == "Q8_0" else "<u4").reshape(len(raw), -1)
    parts = [_side_by_side(scales.reshape(len(raw), -1), halves), _side_by_side(words, inner)]
    flat = [part.view(np.uint8).reshape(*part.shape[:2], -1) for part in parts]
    return np.concatenate(flat, axis=2).reshape(-1)


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
    """One transformer layer; what its parts mean is said in `checkpoint.LayerWeights`.

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
        identity: As of `checkpoint.Weights`.
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
