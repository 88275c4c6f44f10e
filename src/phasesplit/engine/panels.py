"""Matrices as the product wants them: 64 outputs side by side, so that one load gives a vector of neighbours.

A matrix [N, K] becomes ceil(N / 64) panels, the last filled up with zeros. Of each:

F32: values [K, 64].
Q8_0: for every 32 inputs, scales [64] float32, then numbers [32, 64] int8.
Q4_0: for every 32 inputs, scales [64] float32, then words [4, 64] uint32; each word has 8 inputs of one output, the
    first in its lowest 4 bits.
Q4_1: as Q4_0, with minima [64] float32 after the scales.

Scales are float32 because the loop would otherwise convert them again for each row. What the numbers stand for is
float32, rounded once, as in `blocks`: quantised and float32 panels of the same tensor give the same bits.
"""

import threading
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.blocks import Tensor, Values
from phasesplit.engine.kernels import plain
from phasesplit.engine.kernels.compiling import IS_COMPILED
from phasesplit.engine.kernels.matrix import multiply as compiled_multiply
from phasesplit.engine.kernels.matrix import scratch_values
from phasesplit.engine.kernels.plain import BLOCK_VALUES, F32, PANEL, Q4_0, Q4_1, Q8_0, WORD_VALUES
from phasesplit.engine.kernels.tiles import tiles_address
from phasesplit.errors import SpecError

KINDS = {"F32": F32, "Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
"""Kinds of panels; tensors of other kinds become F32."""
_BYTES_A_BLOCK = {F32: 128 * PANEL, Q8_0: 36 * PANEL, Q4_0: 20 * PANEL, Q4_1: 24 * PANEL}
"""Of 32 inputs of a panel."""

_ROWS_AT_ONCE = 64 * PANEL
"""Of a matrix that is packed: what is needed beside the panels does not grow with the model's vocabulary."""

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
        length = values * _BYTES_A_BLOCK[KINDS[self.kind]] // BLOCK_VALUES
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
        kind = KINDS[panels.kind]
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
    kinds = ["F32" if is_float32 or tensor.kind.name not in KINDS else tensor.kind.name for tensor in tensors]
    by_kind = groupby(zip(kinds, tensors, strict=True), key=lambda pair: pair[0])
    return tuple(_pack(kind, [tensor for _, tensor in pairs]) for kind, pairs in by_kind)


def _pack(kind: str, tensors: list[Tensor]) -> Panels:
    rows, columns = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
    panel_bytes = columns * _BYTES_A_BLOCK[KINDS[kind]] // BLOCK_VALUES
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
