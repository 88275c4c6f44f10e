"""What is done to each row by itself: norms, rotations, activations, and KV written to its place."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.kernels import emitting as e
from phasesplit.engine.kernels.compiling import compiled
from phasesplit.engine.kernels.plain import BLOCK_TOKENS, Values, Whole
from phasesplit.engine.kernels.plain import LANES as SUMS


@e.intrinsic(["float32"] * 3, "float32")
def _fma(builder: e.Builder, values: Sequence[e.Value]) -> e.Value:
    """Return a x b + c, rounded once."""
    return e.fma(builder, *values)


@e.intrinsic(["float32"], "float32")
def _exponential(builder: e.Builder, values: Sequence[e.Value]) -> e.Value:
    """Return e^x."""
    return e.exponential(builder, values[0])


@e.intrinsic(["whole", "whole"], "float32")
def _sum_of_squares(builder: e.Builder, values: Sequence[e.Value]) -> e.Value:
    """Return the sum of the squares of a row, kept as 16 partial sums whatever the processor's vectors."""
    kind = e.vector(SUMS)
    source, width = e.pointer(builder, values[0]), values[1]

    def step(at: e.Value, sums: list[e.Value]) -> list[e.Value]:
        some = e.load(builder, source, at, kind)
        return [e.fma(builder, some, some, sums[0])]

    def single(at: e.Value, sums: list[e.Value]) -> list[e.Value]:
        one, lane = e.load(builder, source, at, e.F32), builder.and_(at, e.whole(SUMS - 1))
        added = e.fma(builder, one, one, builder.extract_element(sums[0], lane))
        return [builder.insert_element(sums[0], added, lane)]

    whole = builder.and_(width, e.whole(-SUMS))
    sums = e.loop(builder, e.whole(0), whole, SUMS, [e.constant(kind, 0.0)], step)
    return e.folded(builder, e.loop(builder, whole, width, 1, sums, single)[0], builder.fadd)


@compiled
def rms_norm(x: Values, weight: Values, eps: np.float32, out: Values) -> None:
    """Write x [T, W] over the root of its mean square, times weight [W], to out [T, W].

    Mutates: out.
    """
    rows, width = x.shape
    for row in range(rows):
        mean = _sum_of_squares(e.address_of(x) + 4 * row * width, width) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + eps)
        for i in range(width):
            out[row, i] = x[row, i] * scale * weight[i]


@compiled
def rope_table(positions: Whole, frequencies: NDArray[np.float64], out: Values) -> None:
    """Write cosines and then sines of position x frequency to out [T, D], by way of float64.

    Mutates: out.
    """
    half = len(frequencies)
    for row in range(len(positions)):
        for i in range(half):
            angle = positions[row] * frequencies[i]
            out[row, i] = math.cos(angle)
            out[row, half + i] = math.sin(angle)


@compiled
def rope(x: Values, table: Values, heads: int) -> None:
    """Turn value i of each of the first heads of x [T, C] with value i + D / 2, in place.

    Mutates: x.
    """
    rows, dim = table.shape
    half = dim // 2
    for row in range(rows):
        for head in range(heads):
            start = head * dim
            for i in range(half):
                first, second = x[row, start + i], x[row, start + half + i]
                cosine, sine = table[row, i], table[row, half + i]
                x[row, start + i] = _fma(first, cosine, -(second * sine))
                x[row, start + half + i] = _fma(second, cosine, first * sine)


@compiled
def silu_multiply(gate_up: Values, out: Values) -> None:
    """Write gate / (1 + e^-gate) x up to out [T, F].

    Mutates: out.
    """
    rows, width = out.shape
    for row in range(rows):
        for i in range(width):
            gate = gate_up[row, i]
            out[row, i] = gate / (np.float32(1) + _exponential(-gate)) * gate_up[row, width + i]


@compiled
def misfit(tables: Whole, owners: Whole, positions: Whole, blocks: int) -> int:
    """Return the first row for which not every block up to its own is one of the pool's, or -1."""
    sequences, width = tables.shape
    right = 0
    for row in range(len(positions)):
        owner, position = owners[row], positions[row]
        if not (0 <= owner < sequences and 0 <= position < BLOCK_TOKENS * width):
            return row
        if row == 0 or owner != owners[row - 1]:
            right = 0
        end = position // BLOCK_TOKENS + 1
        for index in range(right, end):
            if not 0 <= tables[owner, index] < blocks:
                return row
        right = max(right, end)
    return -1


@compiled
def write_kv(
    qkv: Values, pool: Values, layer: int, tables: Whole, owners: Whole, positions: Whole, heads: int, kv_heads: int
) -> None:
    """Write the keys and values of qkv [T, C] into their blocks.

    Mutates: pool.
    """
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    size = kv_heads * dim
    for row in range(len(positions)):
        block = tables[owners[row], positions[row] // BLOCK_TOKENS]
        slot = positions[row] % BLOCK_TOKENS
        for i in range(size):
            pool[layer, block, i * BLOCK_TOKENS + slot] = qkv[row, heads * dim + i]
        for head in range(kv_heads):
            start = (size + head * dim) * BLOCK_TOKENS + slot * dim
            for i in range(dim):
                pool[layer, block, start + i] = qkv[row, (heads + kv_heads + head) * dim + i]
