"""The kernels as Python calls them: shapes are checked here, since compiled code works on raw addresses."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.kernels import attention, plain, rowwise
from phasesplit.engine.kernels.compiling import IS_COMPILED
from phasesplit.engine.kernels.plain import BLOCK_TOKENS, Values, Whole
from phasesplit.engine.kernels.tiles import tiles_address
from phasesplit.errors import SpecError

kernels: Any = rowwise if IS_COMPILED else plain
_of_thread = threading.local()


def _scratch(shape: tuple[int, int]) -> Values:
    """Return an array of this thread's of a shape; what it holds is not known."""
    kept: Values | None = getattr(_of_thread, "scratch", None)
    if kept is None or kept.shape != shape:
        kept = _of_thread.scratch = np.empty(shape, dtype=np.float32)
    return kept


def _check(what: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise SpecError.bad(f"shape of {what}", shape, str(wanted))


def rms_norm(x: Values, weight: Values, eps: float, out: Values) -> None:
    """Write each row of x over the root of its mean square, times weight, to out.

    Args:
        x: [T, W].
        weight: [W].
        eps: Added to the mean square, >= 0.
        out: [T, W], may be x; overwritten.

    Raises:
        SpecError: The shapes do not fit each other.
    """
    _check("weight", weight.shape, x.shape[1:])
    _check("out", out.shape, x.shape)
    kernels.rms_norm(x, weight, np.float32(eps), out)


def norm_heads(qkv: Values, first: int, heads: int, weight: Values, eps: float) -> None:
    """Do to some heads of each row, in place, what `rms_norm` does to a row.

    Args:
        qkv: [T, C]; head i is the columns from i x D.
        first: First head.
        heads: How many.
        weight: [D].
        eps: Added to the mean square, >= 0.

    Raises:
        SpecError: A row does not have these heads.
    """
    start, end = first * len(weight), (first + heads) * len(weight)
    if not 0 <= start <= end <= qkv.shape[1]:
        raise SpecError.bad("width of qkv", qkv.shape[1], f"{end} or more")
    taken = np.ascontiguousarray(qkv[:, start:end]).reshape(-1, len(weight))
    kernels.rms_norm(taken, weight, np.float32(eps), taken)
    qkv[:, start:end] = taken.reshape(len(qkv), -1)


def rope_table(positions: Whole, frequencies: NDArray[np.float64]) -> Values:
    """Return cosines, then sines, of position x frequency, [T, D].

    Args:
        positions: [T].
        frequencies: Angle by which position 1 turns each pair, [D / 2], in radians.
    """
    table = np.empty((len(positions), 2 * len(frequencies)), dtype=np.float32)
    kernels.rope_table(positions, frequencies, table)
    return table


def rope(x: Values, table: Values, heads: int) -> None:
    """Turn value i of each of the first heads of each row with value i + D / 2, in place.

    Args:
        x: [T, C], C >= heads x D.
        table: [T, D], as of `rope_table`.
        heads: How many heads are turned.

    Raises:
        SpecError: The shapes do not fit each other.
    """
    if len(table) != len(x) or table.shape[1] % 2 or not 0 <= heads * table.shape[1] <= x.shape[1]:
        raise SpecError.bad(
            "shape of the rotation table", table.shape, f"[{len(x)}, an even width that fits {x.shape}]"
        )
    kernels.rope(x, table, heads)


def silu_multiply(gate_up: Values, out: Values) -> None:
    """Write gate / (1 + e^-gate) x up to out.

    Args:
        gate_up: [T, 2 F], gate before up.
        out: [T, F]; overwritten.

    Raises:
        SpecError: The shapes do not fit each other.
    """
    _check("out", out.shape, (len(gate_up), gate_up.shape[1] // 2))
    kernels.silu_multiply(gate_up, out)


def add(x: Values, y: Values) -> None:
    """Add y to x in place.

    Args:
        x: [T, W].
        y: [T, W].

    Raises:
        SpecError: The shapes differ.
    """
    _check("y", y.shape, x.shape)
    np.add(x, y, out=x)


def add_bias(x: Values, bias: Values) -> None:
    """Add bias to each row of x in place.

    Args:
        x: [T, N].
        bias: [N].

    Raises:
        SpecError: The shapes do not fit each other.
    """
    _check("bias", bias.shape, x.shape[1:])
    np.add(x, bias, out=x)


def _check_rows(
    qkv: Values, pool: Values, layer: int, tables: Whole, owners: Whole, positions: Whole, heads: int, kv_heads: int
) -> int:
    """Return the width of a head, when every row names a block that is there."""
    rows, columns = qkv.shape
    if heads < 1 or kv_heads < 1 or heads % kv_heads or columns % (heads + 2 * kv_heads):
        raise SpecError.bad("heads and kv_heads", (heads, kv_heads), f"a split of {columns} columns")
    dim: int = columns // (heads + 2 * kv_heads)
    layers, blocks, values = pool.shape
    if values != 2 * kv_heads * dim * BLOCK_TOKENS:
        raise SpecError.bad("values of a block of the pool", values, str(2 * kv_heads * dim * BLOCK_TOKENS))
    if owners.shape != (rows,) or positions.shape != (rows,):
        raise SpecError.bad("shapes of owners and positions", (owners.shape, positions.shape), f"({rows},)")
    if not 0 <= layer < layers:
        raise SpecError.bad("layer", layer, f"0 to {layers - 1}")
    row: int = kernels.misfit(tables, owners, positions, blocks)
    if row >= 0:
        place = (int(owners[row]), int(positions[row]))
        allowed = f"a place in tables of shape {tables.shape} that name blocks 0 to {blocks - 1} up to there"
        raise SpecError.bad(f"owner and position of row {row}", place, allowed)
    return dim


def write_kv(
    qkv: Values, pool: Values, layer: int, tables: Whole, owners: Whole, positions: Whole, heads: int, kv_heads: int
) -> None:
    """Write the keys and values of rows to the places in the pool that their positions have.

    Args:
        qkv: [T, (heads + 2 x kv_heads) x D]: queries, keys, values.
        pool: [layers, blocks, 2 x kv_heads x D x 32]: of each block keys [kv_heads, D, 32], then values
            [kv_heads, 32, D].
        layer: Which of the pool's.
        tables: Blocks of each sequence in order, [S, width].
        owners: Which sequence each row belongs to, [T].
        positions: Place of each row in its sequence, [T].
        heads: Query heads.
        kv_heads: Key and value heads.

    Raises:
        SpecError: The shapes do not fit each other, or a row has no block.
    """
    _check_rows(qkv, pool, layer, tables, owners, positions, heads, kv_heads)
    kernels.write_kv(qkv, pool, layer, tables, owners, positions, heads, kv_heads)


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
    """Write causal attention of each row's queries over its sequence, up to and with its own position, to out.

    A row's result depends on its own queries and on the KV of its own sequence alone. Rows of a sequence that are
    neighbours and ascend by one are computed together.

    Args:
        qkv: [T, (heads + 2 x kv_heads) x D]: queries first; the rest is not read.
        pool: As of `write_kv`, which has run for these rows.
        layer: Which of the pool's.
        tables: Blocks of each sequence in order, [S, width].
        owners: Which sequence each row belongs to, [T].
        positions: Place of each row in its sequence, [T].
        heads: Query heads.
        kv_heads: Key and value heads.
        out: [T, heads x D]; overwritten.

    Raises:
        SpecError: The shapes do not fit each other, or a row has no block.
    """
    dim = _check_rows(qkv, pool, layer, tables, owners, positions, heads, kv_heads)
    _check("out", out.shape, (len(qkv), heads * dim))
    if IS_COMPILED:
        state = _scratch(attention.scratch_shape(heads, dim))
        attention.attend(tiles_address(), qkv, pool, layer, tables, owners, positions, heads, kv_heads, out, state)
    else:
        plain.attend(qkv, pool, layer, tables, owners, positions, heads, kv_heads, out)
