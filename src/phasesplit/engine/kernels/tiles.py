"""The tile: a few rows of x times some columns of w, all sums in registers.

It takes its rows and columns as numbers but has a version of its own for each, so that nothing spills: 6 rows by 64
columns where vectors have 16 lanes, 6 by 16 where they have fewer.
"""

import functools
from collections.abc import Sequence
from typing import Any

from phasesplit.engine.kernels import emitting as e
from phasesplit.engine.kernels.compiling import HAS_AVX512, LANES, callable_address

ROWS = 6
"""Most rows of a tile."""
WIDEST, WIDER = (4, 2) if HAS_AVX512 or LANES == 4 else (2, 1)
"""Vectors side by side in a tile; a narrower matrix has one, and what is left of it goes a column at a time."""
WIDTHS = tuple(dict.fromkeys((WIDEST * LANES, WIDER * LANES, LANES, 1)))
"""Columns that tiles have, widest first."""
_UNROLLED = 4
_ARGUMENTS = 10


def _emit_tile(builder: e.Builder, arguments: list[e.Value], rows: int, width: int) -> None:
    """Write x [rows, k] w [k, width], added to out or in its place, one fused multiply-add after the other."""
    x, x_stride, w, w_stride, inner, out, out_stride, adds = arguments
    lanes = LANES if width >= LANES else 1
    kind, groups = e.vector(lanes), range(width // lanes)
    x_rows = [builder.mul(x_stride, e.whole(row)) for row in range(rows)]
    x_rows = [builder.gep(x, [offset], source_etype=e.F32) for offset in x_rows]
    places = [
        builder.add(builder.mul(out_stride, e.whole(row)), e.whole(group * lanes))
        for row in range(rows)
        for group in groups
    ]
    fresh, old, begin = (builder.append_basic_block(name) for name in ("fresh", "old", "begin"))
    builder.cbranch(adds, old, fresh)
    builder.position_at_end(fresh)
    builder.branch(begin)
    builder.position_at_end(old)
    loaded = [e.load(builder, out, place, kind) for place in places]
    builder.branch(begin)
    builder.position_at_end(begin)
    sums = []
    for value in loaded:
        start = builder.phi(kind)
        start.add_incoming(e.constant(kind, 0.0), fresh)
        start.add_incoming(value, old)
        sums.append(start)

    def step(k: e.Value, totals: list[e.Value], times: int) -> list[e.Value]:
        line = builder.gep(w, [builder.mul(k, w_stride)], source_etype=e.F32)
        for _ in range(times):
            columns = [e.load(builder, line, e.whole(group * lanes), kind) for group in groups]
            for row, source in enumerate(x_rows):
                factor = e.splat(builder, e.load(builder, source, k, e.F32), kind)
                for group in groups:
                    at = row * len(groups) + group
                    totals[at] = e.fma(builder, factor, columns[group], totals[at])
            k = builder.add(k, e.whole(1))
            line = builder.gep(line, [w_stride], source_etype=e.F32)
        return totals

    whole_turns = builder.and_(inner, e.whole(-_UNROLLED))
    sums = e.loop(builder, e.whole(0), whole_turns, _UNROLLED, sums, lambda k, now: step(k, now, _UNROLLED))
    sums = e.loop(builder, whole_turns, inner, 1, sums, lambda k, now: step(k, now, 1))
    for value, place in zip(sums, places, strict=True):
        e.store(builder, value, out, place)


def switched(builder: e.Builder, value: e.Value, versions: dict[int, Any], arguments: list[e.Value]) -> None:
    """Write a call of the version that a number names; a number without one calls nothing."""
    after = builder.append_basic_block("after")
    choice = builder.switch(value, after)
    for number, version in versions.items():
        block = builder.append_basic_block(f"version{number}")
        choice.add_case(e.whole(number), block)
        builder.position_at_end(block)
        builder.call(version, arguments)
        builder.branch(after)
    builder.position_at_end(after)


@e.intrinsic(["whole"] * _ARGUMENTS, "nothing")
def _tile(builder: e.Builder, values: Sequence[e.Value]) -> None:
    """Compute a tile of 1 to `ROWS` rows and one of `WIDTHS` columns; strides are in values, addresses in bytes."""
    kinds = [e.POINTER, e.I64, e.POINTER, e.I64, e.I64, e.POINTER, e.I64, e.ir.IntType(1)]
    height, columns, x_at, x_step, w_at, w_step, length, out_at, out_step, flag = values
    versions = {
        count * 128 + wide: e.function(
            builder.module,
            f"tile_{count}x{wide}",
            e.ir.VoidType(),
            kinds,
            functools.partial(_emit_tile, rows=count, width=wide),
        )
        for count in range(1, ROWS + 1)
        for wide in WIDTHS
    }
    number = builder.add(builder.mul(height, e.whole(128)), columns)
    arguments = [
        e.pointer(builder, x_at), x_step, e.pointer(builder, w_at), w_step, length,
        e.pointer(builder, out_at), out_step, builder.icmp_signed("!=", flag, e.whole(0)),
    ]  # fmt: skip
    switched(builder, number, versions, arguments)


def _in_tiles(
    x: int,
    x_stride: int,
    rows: int,
    w: int,
    w_stride: int,
    inner: int,
    out: int,
    out_stride: int,
    columns: int,
    adds: int,
) -> None:
    """Compute x [rows, inner] w [inner, columns], added to out or in its place.

    Mutates: out.
    """
    count = (rows + ROWS - 1) // ROWS
    for index in range(count):
        first = rows * index // count
        height = rows * (index + 1) // count - first
        column = 0
        for width in WIDTHS:
            while columns - column >= width:
                _tile(
                    height, width, x + 4 * first * x_stride, x_stride, w + 4 * column, w_stride, inner,
                    out + 4 * (first * out_stride + column), out_stride, adds,
                )  # fmt: skip
                column += width


@functools.cache
def tiles_address() -> int:
    """Return where the compiled tiles begin: they are compiled once, and called through this by all that use them."""
    return callable_address(_in_tiles, _ARGUMENTS)


@e.intrinsic(["whole"] * (_ARGUMENTS + 1), "nothing")
def product(builder: e.Builder, values: Sequence[e.Value]) -> None:
    """Compute x [rows, inner] w [inner, columns] in the tiles at an address, the first argument.

    The others are x, its stride, rows, w, its stride, inner, out, its stride, columns, and whether to add to out.
    Strides are in values, addresses in bytes.
    """
    kind = e.ir.FunctionType(e.ir.VoidType(), [e.I64] * _ARGUMENTS)
    builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
