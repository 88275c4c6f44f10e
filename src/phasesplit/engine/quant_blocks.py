"""Tensors as files hold them: plain numbers, or rows of quantised blocks, and what float32 values they stand for.

Source of every block layout: ggml (ggml-common.h and ggml-quants.c); `tests/engine/test_blocks.py` checks each against
the gguf package, which its authors publish.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]

_LOW, _HIGH = np.uint8(0x0F), np.uint8(4)


def _halves(blocks: Bytes, at: int) -> Values:
    """Return one float16 of every block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """Return 4-bit values, the low halves of each `width` bytes before their high halves."""
    groups = packed.reshape(len(packed), -1, 1, width)
    return np.concatenate([groups & _LOW, groups >> _HIGH], axis=2).reshape(len(packed), -1)


def _fifth_bits(packed: Bytes) -> Bytes:
    """Return 32 bits, lowest first, each moved to the place above a nibble."""
    return np.unpackbits(packed, axis=1, bitorder="little") << _HIGH


def _f32(blocks: Bytes) -> Values:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: Bytes) -> Values:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: Bytes) -> Values:
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(blocks: Bytes) -> Values:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _halves(blocks, 0)


def _q4_0(blocks: Bytes) -> Values:
    return (_nibbles(blocks[:, 2:], 16).astype(np.float32) - np.float32(8)) * _halves(blocks, 0)


def _q4_1(blocks: Bytes) -> Values:
    return _nibbles(blocks[:, 4:], 16).astype(np.float32) * _halves(blocks, 0) + _halves(blocks, 2)


def _q5_0(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return (values.astype(np.float32) - np.float32(16)) * _halves(blocks, 0)


def _q5_1(blocks: Bytes) -> Values:
    values = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return values.astype(np.float32) * _halves(blocks, 0) + _halves(blocks, 2)


def _k_scales(blocks: Bytes) -> tuple[Values, Values]:
    """Return scale and minimum of the 8 sub-blocks, kept in 6 bits each, shape [blocks, 8, 1]."""
    packed = blocks[:, 4:16].reshape(len(blocks), 3, 4)
    scale, least, rest = packed[:, 0], packed[:, 1], packed[:, 2]
    six, top = np.uint8(0x3F), np.uint8(0x30)
    scales = np.concatenate([scale & six, (rest & _LOW) | ((scale >> np.uint8(2)) & top)], axis=1)
    minima = np.concatenate([least & six, (rest >> _HIGH) | ((least >> np.uint8(2)) & top)], axis=1)
    return (
        (_halves(blocks, 0) * scales.astype(np.float32))[:, :, None],
        (_halves(blocks, 2) * minima.astype(np.float32))[:, :, None],
    )


def _q4_k(blocks: Bytes) -> Values:
    scales, minima = _k_scales(blocks)
    values = _nibbles(blocks[:, 16:], 32).reshape(len(blocks), 8, 32)
    return (scales * values.astype(np.float32) - minima).reshape(len(blocks), 256)


def _q5_k(blocks: Bytes) -> Values:
    scales, minima = _k_scales(blocks)
    shifts = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = ((blocks[:, None, 16:48] >> shifts) & np.uint8(1)) << _HIGH
    values = _nibbles(blocks[:, 48:], 32).reshape(len(blocks), 8, 32) | fifth
    return (scales * values.astype(np.float32) - minima).reshape(len(blocks), 256)


def _q6_k(blocks: Bytes) -> Values:
    low = _nibbles(blocks[:, :128], 64).reshape(len(blocks), 8, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8).reshape(1, 1, 4, 1)
    top = (blocks[:, 128:192].reshape(len(blocks), 2, 1, 32) >> shifts) & np.uint8(3)
    values = low | (top.reshape(len(blocks), 8, 32) << _HIGH)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32) * _halves(blocks, 208)
    centred = values.reshape(len(blocks), 16, 16).astype(np.float32) - np.float32(32)
    return (scales[:, :, None] * centred).reshape(len(blocks), 256)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How the values of a tensor lie in memory.

    Attributes:
        name: As ggml names it.
        number: ggml's number of the type, as in GGUF files.
        block_values: Values of one block, which lie in one row.
        block_bytes: Bytes of one block.
        unpack: Blocks, [blocks, block_bytes] uint8, to their values, [blocks, block_values] float32.
        is_kept: Whether the engine computes on it as it is; the others become F32 when weights are loaded.
    """

    name: str
    number: int
    block_values: int
    block_bytes: int
    unpack: Callable[[Bytes], Values]
    is_kept: bool


KINDS = {
    kind.name: kind
    for kind in (
        BlockFormat("F32", 0, 1, 4, _f32, True),
        BlockFormat("F16", 1, 1, 2, _f16, True),
        BlockFormat("Q4_0", 2, 32, 18, _q4_0, True),
        BlockFormat("Q4_1", 3, 32, 20, _q4_1, True),
        BlockFormat("Q5_0", 6, 32, 22, _q5_0, False),
        BlockFormat("Q5_1", 7, 32, 24, _q5_1, False),
        BlockFormat("Q8_0", 8, 32, 34, _q8_0, True),
        BlockFormat("Q4_K", 12, 256, 144, _q4_k, False),
        BlockFormat("Q5_K", 13, 256, 176, _q5_k, False),
        BlockFormat("Q6_K", 14, 256, 210, _q6_k, False),
        BlockFormat("BF16", 30, 1, 2, _bf16, True),
    )
}
"""Every kind that can be read, by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor, its bytes as the file holds them.

    Attributes:
        name: As GGUF names it (`blk.0.attn_q.weight`), whatever file it came from.
        kind: How its values lie in memory.
        shape: Its lengths, rows first; the last one is contiguous.
        raw: Its bytes, [rows, bytes of a row] uint8, where rows is the product of all lengths but the last. A view of
            the mapped file, read-only, where nothing had to be changed.
    """

    name: str
    kind: BlockFormat
    shape: tuple[int, ...]
    raw: Bytes

    def float32(self) -> Values:
        """Return its values as a new array of `shape`; NaN and infinity come through as they are."""
        blocks = np.ascontiguousarray(self.raw).reshape(-1, self.kind.block_bytes)
        with np.errstate(invalid="ignore", over="ignore"):
            return self.kind.unpack(blocks).reshape(self.shape)


def tensor_from_values(name: str, values: Values) -> Tensor:
    """Return float32 values as a tensor of kind F32.

    Args:
        name: As GGUF names it.
        values: Of any shape with at least one axis.
    """
    plain = np.ascontiguousarray(values, dtype="<f4")
    raw = plain.reshape(-1, plain.shape[-1]).view(np.uint8)
    return Tensor(name=name, kind=KINDS["F32"], shape=plain.shape, raw=raw)
