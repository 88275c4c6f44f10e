"""The kernels in plain NumPy, an operation at a time: what the compiled ones equal bit for bit.

They run where compiling is turned off, and are the oracle in tests. Every float32 operation here is one that IEEE 754
defines to the last bit, so equality does not depend on the processor.
"""

import math

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Whole = NDArray[np.int32]

F32, Q8_0, Q4_0, Q4_1 = range(4)
"""Numbers of the kinds of panels."""
PANEL = 64
"""Outputs of a panel: how many of a matrix's rows lie side by side."""
BLOCK_VALUES, WORD_VALUES = 32, 8
"""Inputs of a quantised block, and how many 4-bit values of one output share a 32-bit word, lowest bits first."""
BLOCK_TOKENS = 32
"""Tokens of a KV block: what the inner loops of attention are written for."""
LANES = 16
"""Partial sums of a row's mean square, whatever the width of the processor's vectors."""

LOG2_E = np.float32(1.44269504)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
EXP_LOWEST, EXP_HIGHEST = np.float32(-87.0), np.float32(88.0)
ROUNDER = np.float32(12582912.0)
"""1.5 x 2^23: adding it leaves a float32 rounded to a whole number in its low bits."""
EXP_TERMS = tuple(
    np.float32(term)
    for term in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""Of e^r - 1 - r over r^2, highest power first. Source: expf of the Cephes library (S. Moshier)."""


def fma(a: Values, b: Values | np.float32, c: Values | np.float32) -> Values:
    """Return a x b + c rounded once, as a fused multiply-add does.

    The product of two float32 is exact in float64. The sum is rounded to odd there (an inexact one gets an odd last
    bit), after which rounding to float32 gives what a single rounding would. Source: Boldo and Melquiond, "Emulation of
    a FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, dtype=np.float64)
    total = np.asarray(product + addend)
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    nudge = np.where((error != 0) & np.isfinite(error) & (bits & 1 == 0), away, 0)
    return (bits + nudge).view(np.float64).astype(np.float32)


def exponential(x: Values) -> Values:
    """Return e^x to about one unit in the last place, for x clipped to -87 to 88."""
    x = np.where(x < EXP_LOWEST, EXP_LOWEST, np.where(x > EXP_HIGHEST, EXP_HIGHEST, x))
    shifted = fma(x, LOG2_E, ROUNDER)
    power = shifted - ROUNDER
    rest = fma(-power, LN2_LOW, fma(-power, LN2_HIGH, x))
    series = np.full_like(rest, EXP_TERMS[0])
    for term in EXP_TERMS[1:]:
        series = fma(series, rest, term)
    near = fma(series, rest * rest, rest) + np.float32(1)
    scale = ((shifted.view(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.asarray(near * scale, dtype=np.float32)


def accumulate(x: Values, w: Values, out: Values) -> None:
    """Add x [M, K] times w [K, N] to out [M, N]: one fused multiply-add after the other, k ascending."""
    total = out.copy()
    for k in range(len(w)):
        total = fma(x[:, k, None], w[k][None, :], total)
    out[:] = total


def rms_norm(x: Values, weight: Values, eps: np.float32, out: Values) -> None:
    """Write x [T, W] over the root of its mean square, times weight [W], to out [T, W]."""
    rows, width = x.shape
    sums = np.zeros((rows, LANES), dtype=np.float32)
    for start in range(0, width, LANES):
        part = x[:, start : start + LANES]
        sums[:, : part.shape[1]] = fma(part, part, sums[:, : part.shape[1]])
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    mean = sums / np.float32(width)
    scale = np.float32(1) / np.sqrt(mean + eps)
    out[:] = x * scale * weight


def rope_table(positions: Whole, frequencies: NDArray[np.float64], out: Values) -> None:
    """Write cosines and then sines of position x frequency to out [T, D], by way of float64."""
    half = len(frequencies)
    for row, position in enumerate(positions.tolist()):
        for i, frequency in enumerate(frequencies.tolist()):
            out[row, i] = math.cos(position * frequency)
            out[row, half + i] = math.sin(position * frequency)


def rope(x: Values, table: Values, heads: int) -> None:
    """Turn value i of each of the first `heads` heads of x [T, C] with value i + D / 2, in place."""
    rows, dim = table.shape
    half = dim // 2
    turned = x[:, : heads * dim].reshape(rows, heads, dim)
    cosine, sine = table[:, None, :half], table[:, None, half:]
    first, second = turned[..., :half].copy(), turned[..., half:].copy()
    turned[..., :half] = fma(first, cosine, -(second * sine))
    turned[..., half:] = fma(second, cosine, first * sine)
    x[:, : heads * dim] = turned.reshape(rows, -1)


def silu_multiply(gate_up: Values, out: Values) -> None:
    """Write gate / (1 + e^-gate) x up to out [T, F]; gate_up [T, 2 F] holds gate before up."""
    gate, up = gate_up[:, : out.shape[1]], gate_up[:, out.shape[1] :]
    out[:] = gate / (np.float32(1) + exponential(-gate)) * up


def misfit(tables: Whole, owners: Whole, positions: Whole, blocks: int) -> int:
    """Return the first row for which not every block up to its own is one of the pool's, or -1."""
    for row, (owner, position) in enumerate(zip(owners.tolist(), positions.tolist(), strict=True)):
        if not (0 <= owner < len(tables) and 0 <= position < BLOCK_TOKENS * tables.shape[1]):
            return row
        needed = tables[owner, : position // BLOCK_TOKENS + 1]
        if not 0 <= needed.min() <= needed.max() < blocks:
            return row
    return -1


def write_kv(
    qkv: Values, pool: Values, layer: int, tables: Whole, owners: Whole, positions: Whole, heads: int, kv_heads: int
) -> None:
    """Write the keys and values of qkv [T, C] into their blocks."""
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    size = kv_heads * dim
    for row, position in enumerate(positions.tolist()):
        block = pool[layer, tables[owners[row], position // BLOCK_TOKENS]]
        slot = position % BLOCK_TOKENS
        key, value = np.split(qkv[row, heads * dim :], 2)
        block[: size * BLOCK_TOKENS].reshape(size, BLOCK_TOKENS)[:, slot] = key
        block[size * BLOCK_TOKENS :].reshape(kv_heads, BLOCK_TOKENS, dim)[:, slot] = value.reshape(kv_heads, dim)


def attend(
    qkv: Values,
    pool: Values,
    layer: int,
    tables: Whole,
    owners: Whole,
    positions: Whole,
    heads: int,
    kv_heads: int,
    out: Values,
) -> None:
    """Write causal attention of the queries of qkv [T, C] over the blocks of their sequences to out [T, H x D].

    Blocks are taken in ascending order. What was summed so far is scaled down whenever a larger score appears; each of
    the 32 places of a block has its own sum of shares, and these are added last place first half onto second half.
    """
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    size, shared = kv_heads * dim, heads // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    for row, position in enumerate(positions.tolist()):
        query = (qkv[row, : heads * dim] * scale).reshape(kv_heads, shared, dim)
        for head in range(kv_heads):
            total = np.zeros((shared, dim), dtype=np.float32)
            sums = np.zeros((shared, BLOCK_TOKENS), dtype=np.float32)
            most = np.full((shared, 1), -np.inf, dtype=np.float32)
            for index in range(position // BLOCK_TOKENS + 1):
                block = pool[layer, tables[owners[row], index]]
                keys = block[: size * BLOCK_TOKENS].reshape(kv_heads, dim, BLOCK_TOKENS)[head]
                values = block[size * BLOCK_TOKENS :].reshape(kv_heads, BLOCK_TOKENS, dim)[head]
                scores = np.zeros((shared, BLOCK_TOKENS), dtype=np.float32)
                accumulate(query[head], keys, scores)
                scores[:, position - index * BLOCK_TOKENS + 1 :] = -np.inf
                larger = np.maximum(most, scores.max(axis=1, keepdims=True))
                shrink = exponential(most - larger)
                shares = np.where(scores == -np.inf, np.float32(0), exponential(scores - larger))
                sums = fma(sums, shrink, shares)
                total = total * shrink
                accumulate(shares, values, total)
                most = larger
            while sums.shape[1] > 1:
                half = sums.shape[1] // 2
                sums = sums[:, :half] + sums[:, half:]
            start = head * shared * dim
            out[row, start : start + shared * dim] = (total / sums).reshape(-1)


def unpacked(kind: int, data: NDArray[np.uint8], panels: int, columns: int) -> Values:
    """Return the values of panels, [panels, columns, 64]; `packed.PANEL_KINDS` says how they lie."""
    if kind == F32:
        return data.view(np.float32).reshape(panels, columns, PANEL)
    blocks = data.reshape(panels * columns // BLOCK_VALUES, -1)
    scales = blocks[:, : 4 * PANEL].view(np.float32)[:, None, :]
    if kind == Q8_0:
        values = blocks[:, 4 * PANEL :].view(np.int8).reshape(-1, BLOCK_VALUES, PANEL).astype(np.float32)
        return np.asarray(values * scales).reshape(panels, columns, PANEL)
    start = 4 * PANEL if kind == Q4_0 else 8 * PANEL
    words = blocks[:, start:].view(np.uint32).reshape(-1, BLOCK_VALUES // WORD_VALUES, 1, PANEL)
    shifts = np.arange(0, 4 * WORD_VALUES, 4, dtype=np.uint32).reshape(1, 1, WORD_VALUES, 1)
    values = (words >> shifts & np.uint32(15)).reshape(-1, BLOCK_VALUES, PANEL).astype(np.float32)
    if kind == Q4_0:
        return np.asarray((values - np.float32(8)) * scales).reshape(panels, columns, PANEL)
    least = blocks[:, 4 * PANEL : 8 * PANEL].view(np.float32)[:, None, :]
    return fma(values, scales, least).reshape(panels, columns, PANEL)


def multiply(x: Values, kind: int, data: NDArray[np.uint8], rows: int, out: Values, at: int) -> None:
    """Write x [M, K] times the transpose of a matrix in panels to columns `at` to `at` + rows of out [M, *]."""
    weights = unpacked(kind, data, -(-rows // PANEL), x.shape[1])
    for index, panel in enumerate(weights):
        width = min(PANEL, rows - index * PANEL)
        total = np.zeros((len(x), width), dtype=np.float32)
        accumulate(x, panel[:, :width], total)
        out[:, at + index * PANEL : at + index * PANEL + width] = total
