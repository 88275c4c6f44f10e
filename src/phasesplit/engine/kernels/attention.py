"""Causal attention over paged KV, a block of 32 tokens at a time; keys and values lie so that the tile takes them.

What was summed so far is scaled down whenever a block has a larger score, so one pass over a sequence is enough. Rows
that follow each other in a sequence (a prompt chunk) share a tile; a row by itself takes the blocks outside and the
heads inside, so that memory is read in order. Both do the same to each row, block after block.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from phasesplit.engine.kernels import emitting as e
from phasesplit.engine.kernels.compiling import compiled, part
from phasesplit.engine.kernels.plain import BLOCK_TOKENS, Values, Whole
from phasesplit.engine.kernels.tiles import product

TILE_ROWS = 48
"""Rows (a query of one head each) that pass over the blocks together: their state stays in the nearest cache."""
_EXTRA = 2 * BLOCK_TOKENS + 16


def scratch_shape(heads: int, dim: int) -> tuple[int, int]:
    """Return the shape of the float32 array that `attend` needs in addition to its arguments.

    A row of it holds a query [dim], what was summed [dim], scores [32], sums of shares [32], the largest score.
    """
    return max(TILE_ROWS, heads), 2 * dim + _EXTRA


@e.intrinsic(["whole", "whole"], "float32")
def _absorb(builder: e.Builder, values: Sequence[e.Value]) -> e.Value:
    """Turn scores [32] into shares, count those after `limit` as none, and return what the sums before shrink by.

    The sums of shares [32] and the largest score so far lie behind the scores and are brought up to date.
    """
    kind = e.vector(BLOCK_TOKENS)
    places = e.vector(BLOCK_TOKENS, e.I32)

    def body(builder: e.Builder, given: list[e.Value]) -> e.Value:
        row, last = given
        sums_at, most_at = e.whole(BLOCK_TOKENS), e.whole(2 * BLOCK_TOKENS)
        order = e.ir.Constant(places, list(range(BLOCK_TOKENS)))
        seen = builder.icmp_signed("<=", order, e.splat(builder, builder.trunc(last, e.I32), places))
        lowest = e.constant(kind, float("-inf"))
        masked = builder.select(seen, e.load(builder, row, e.whole(0), kind), lowest)
        largest = e.folded(builder, masked, partial(e.larger, builder))
        before = e.load(builder, row, most_at, e.F32)
        known, larger, follow = builder.block, *(builder.append_basic_block(name) for name in ("larger", "follow"))
        builder.cbranch(builder.fcmp_ordered(">", largest, before), larger, follow)
        builder.position_at_end(larger)
        smaller = e.exponential(builder, builder.fsub(before, largest))
        builder.branch(follow)
        builder.position_at_end(follow)
        most, shrink = builder.phi(e.F32), builder.phi(e.F32)
        for phi, old, new in ((most, before, largest), (shrink, e.constant(e.F32, 1.0), smaller)):
            phi.add_incoming(old, known)
            phi.add_incoming(new, larger)
        shares = e.exponential(builder, builder.fsub(masked, e.splat(builder, most, kind)))
        shares = builder.select(seen, shares, e.constant(kind, 0.0))
        sums = e.load(builder, row, sums_at, kind)
        e.store(builder, e.fma(builder, sums, e.splat(builder, shrink, kind), shares), row, sums_at)
        e.store(builder, shares, row, e.whole(0))
        e.store(builder, most, row, most_at)
        return shrink

    function = e.function(builder.module, "absorb", e.F32, [e.POINTER, e.I64], body)
    return builder.call(function, [e.pointer(builder, values[0]), values[1]])


@e.intrinsic(["whole"], "float32")
def _sum_of_shares(builder: e.Builder, values: Sequence[e.Value]) -> e.Value:
    """Return the sum of sums [32]."""
    sums = e.load(builder, e.pointer(builder, values[0]), e.whole(0), e.vector(BLOCK_TOKENS))
    return e.folded(builder, sums, builder.fadd)


@part
def _begin(
    state: Values,
    first: int,
    qkv: Values,
    row: int,
    column: int,
    count: int,
    dim: int,
) -> None:
    """Take `count` heads' queries of a row, from a column on, into the state.

    Mutates: state.
    """
    scale = np.float32(1 / np.sqrt(np.float64(dim)))
    for head in range(count):
        for i in range(dim):
            state[first + head, i] = qkv[row, column + head * dim + i] * scale
            state[first + head, dim + i] = np.float32(0)
        for i in range(BLOCK_TOKENS):
            state[first + head, 2 * dim + BLOCK_TOKENS + i] = np.float32(0)
        state[first + head, 2 * dim + 2 * BLOCK_TOKENS] = np.float32(-np.inf)


@part
def _absorb_rows(state: Values, first: int, count: int, shared: int, position: int) -> None:
    """Turn the scores of rows into shares, and scale down what they summed before where that is due.

    Args:
        state: As of `scratch_shape`.
        first: First row.
        count: Rows.
        shared: Rows of the same token, which lie together.
        position: Place of the first row's token, counted from the block's first.

    Mutates: state.
    """
    stride = state.shape[1]
    dim = (stride - _EXTRA) // 2
    scores = e.address_of(state) + 4 * (first * stride + 2 * dim)
    for index in range(count):
        shrink = _absorb(scores + 4 * index * stride, position + index // shared)
        if shrink != np.float32(1):
            for i in range(dim, 2 * dim):
                state[first + index, i] *= shrink


@part
def _finish(
    state: Values,
    first: int,
    out: Values,
    row: int,
    column: int,
    count: int,
    dim: int,
) -> None:
    """Write `count` heads' results to a row of out, from a column on.

    Mutates: out.
    """
    stride = state.shape[1]
    for head in range(count):
        sums = e.address_of(state) + 4 * ((first + head) * stride + 2 * dim + BLOCK_TOKENS)
        total = _sum_of_shares(sums)
        for i in range(dim):
            out[row, column + head * dim + i] = state[first + head, dim + i] / total


@part
def _block_address(pool: Values, layer: int, block: int) -> int:
    """Return where a block of a layer begins."""
    address: int = e.address_of(pool) + 4 * pool.shape[2] * (layer * pool.shape[1] + block)
    return address


@part
def _alone(
    tiles: int,
    qkv: Values,
    pool: Values,
    layer: int,
    table: Whole,
    position: int,
    heads: int,
    kv_heads: int,
    row: int,
    out: Values,
    state: Values,
) -> None:
    """Compute one row, blocks outside and heads inside.

    Mutates: out, state.
    """
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    shared, size = heads // kv_heads, 4 * dim * BLOCK_TOKENS
    _begin(state, 0, qkv, row, 0, heads, dim)
    rows, stride = e.address_of(state), state.shape[1]
    scores = rows + 8 * dim
    for index in range(position // BLOCK_TOKENS + 1):
        keys = _block_address(pool, layer, table[index])
        values = keys + kv_heads * size
        for head in range(kv_heads):
            line = 4 * head * shared * stride
            product(
                tiles, rows + line, stride, shared, keys + head * size, BLOCK_TOKENS, dim, scores + line, stride,
                BLOCK_TOKENS, 0,
            )  # fmt: skip
        _absorb_rows(state, 0, heads, heads, position - index * BLOCK_TOKENS)
        for head in range(kv_heads):
            line = 4 * head * shared * stride
            product(
                tiles, scores + line, stride, shared, values + head * size, dim, BLOCK_TOKENS, rows + 4 * dim + line,
                stride, dim, 1,
            )  # fmt: skip
    _finish(state, 0, out, row, 0, heads, dim)


@part
def _together(
    tiles: int,
    qkv: Values,
    pool: Values,
    layer: int,
    table: Whole,
    position: int,
    heads: int,
    kv_heads: int,
    row: int,
    tokens: int,
    out: Values,
    state: Values,
) -> None:
    """Compute some rows that follow each other in a sequence, the first of them at `position`.

    Mutates: out, state.
    """
    dim = qkv.shape[1] // (heads + 2 * kv_heads)
    shared, size = heads // kv_heads, 4 * dim * BLOCK_TOKENS
    stride = state.shape[1]
    for head in range(kv_heads):
        for token in range(tokens):
            _begin(state, token * shared, qkv, row + token, head * shared * dim, shared, dim)
        for index in range((position + tokens - 1) // BLOCK_TOKENS + 1):
            keys = _block_address(pool, layer, table[index]) + head * size
            # Tokens before the block have nothing to do with it: passing it would not even leave their zeros' signs.
            first = max(0, index * BLOCK_TOKENS - position)
            count, rows = (tokens - first) * shared, e.address_of(state) + 4 * first * shared * stride
            scores = rows + 8 * dim
            product(tiles, rows, stride, count, keys, BLOCK_TOKENS, dim, scores, stride, BLOCK_TOKENS, 0)
            _absorb_rows(state, first * shared, count, shared, position + first - index * BLOCK_TOKENS)
            product(
                tiles, scores, stride, count, keys + kv_heads * size, dim, BLOCK_TOKENS, rows + 4 * dim, stride, dim, 1
            )
        for token in range(tokens):
            _finish(state, token * shared, out, row + token, head * shared * dim, shared, dim)


@compiled
def attend(
    tiles: int,
    qkv: Values,
    pool: Values,
    layer: int,
    tables: Whole,
    owners: Whole,
    positions: Whole,
    heads: int,
    kv_heads: int,
    out: Values,
    state: Values,
) -> None:
    """Write causal attention of the queries of qkv [T, C] over the blocks of their sequences to out [T, H x D].

    Mutates: out, state.
    """
    rows, most = len(positions), max(1, TILE_ROWS // (heads // kv_heads))
    row = 0
    while row < rows:
        tokens = 1
        while (
            tokens < most
            and row + tokens < rows
            and owners[row + tokens] == owners[row]
            and positions[row + tokens] == positions[row] + tokens
        ):
            tokens += 1
        table = tables[owners[row]]
        if tokens == 1:
            _alone(tiles, qkv, pool, layer, table, positions[row], heads, kv_heads, row, out, state)
        else:
            _together(tiles, qkv, pool, layer, table, positions[row], heads, kv_heads, row, tokens, out, state)
        row += tokens
