"""Quantised panels: a tile that unpacks as it goes, for few rows, and unpacking to float32, for many."""

from collections.abc import Callable, Sequence
from typing import Any

from phasesplit.engine.kernels import emitting as e
from phasesplit.engine.kernels.compiling import HAS_AVX512, LANES
from phasesplit.engine.kernels.plain import BLOCK_VALUES, PANEL, Q4_0, Q4_1, Q8_0, WORD_VALUES
from phasesplit.engine.kernels.tiles import ROWS, switched

KINDS = (Q8_0, Q4_0, Q4_1)
BLOCK_BYTES = {Q8_0: 36 * PANEL, Q4_0: 20 * PANEL, Q4_1: 24 * PANEL}
_STARTS = {Q8_0: 4 * PANEL, Q4_0: 4 * PANEL, Q4_1: 8 * PANEL}
"""Where the numbers of a block begin, after its scales."""
_TURNS = BLOCK_VALUES // WORD_VALUES


def _vectors(rows: int) -> int:
    """Return how many vectors side by side leave room for the scales in registers."""
    if HAS_AVX512:  # from 4 rows on scales come from memory as they are needed, which costs nothing
        return 4
    return 2 if rows <= 2 else 1


def _byte_pointer(builder: e.Builder, pointer: e.Value, offset: e.Value) -> e.Value:
    return builder.gep(pointer, [offset], source_etype=e.INT8)


def _four_bits(builder: e.Builder, words: e.Value, index: int, offset: int) -> e.Value:
    """Return 4-bit value number `index` of each word, less an offset, as float32."""
    kind = e.vector(LANES)
    shifts = e.ir.Constant(words.type, [4 * index] * LANES)
    moved = builder.lshr(words, shifts) if index else words
    if HAS_AVX512:  # a look-up in a register, which takes the lowest 4 bits by itself
        table = e.ir.Constant(kind, [float(value - offset) for value in range(16)])
        return e.called(builder, "llvm.x86.avx512.permvar.sf.512", kind, table, moved)
    low = builder.and_(moved, e.ir.Constant(words.type, [15] * LANES))
    return builder.sitofp(builder.sub(low, e.ir.Constant(words.type, [offset] * LANES)), kind)


def _eight_values(
    builder: e.Builder, kind: int, block: e.Value, turn: e.Value, column: e.Value, vectors: int
) -> list[list[e.Value]]:
    """Return values 8 x turn to 8 x turn + 7 of a block, for each a list of vectors side by side."""
    floats, words = e.vector(LANES), e.vector(LANES, e.I32)
    at = builder.mul(column, e.whole(4))
    places = [builder.add(at, e.whole(4 * LANES * group)) for group in range(vectors)]
    scales = [e.load(builder, _byte_pointer(builder, block, place), e.whole(0), floats) for place in places]
    if kind == Q8_0:
        line = builder.add(builder.mul(turn, e.whole(WORD_VALUES * PANEL)), builder.add(column, e.whole(_STARTS[kind])))
        found = []
        for index in range(WORD_VALUES):
            numbers = [
                e.load(
                    builder,
                    _byte_pointer(builder, block, line),
                    e.whole(index * PANEL + group * LANES),
                    e.vector(LANES, e.INT8),
                    element=e.INT8,
                )
                for group in range(vectors)
            ]
            signed = [builder.sitofp(builder.sext(number, words), floats) for number in numbers]
            found.append([builder.fmul(value, scale) for value, scale in zip(signed, scales, strict=True)])
        return found
    line = builder.add(builder.mul(turn, e.whole(4 * PANEL)), e.whole(_STARTS[kind]))
    packed = [
        e.load(builder, _byte_pointer(builder, block, builder.add(line, place)), e.whole(0), words) for place in places
    ]
    if kind == Q4_0:
        return [
            [
                builder.fmul(_four_bits(builder, word, index, 8), scale)
                for word, scale in zip(packed, scales, strict=True)
            ]
            for index in range(WORD_VALUES)
        ]
    least = [
        e.load(builder, _byte_pointer(builder, block, builder.add(place, e.whole(4 * PANEL))), e.whole(0), floats)
        for place in places
    ]
    return [
        [
            e.fma(builder, _four_bits(builder, word, index, 0), scale, low)
            for word, scale, low in zip(packed, scales, least, strict=True)
        ]
        for index in range(WORD_VALUES)
    ]


def _rows_times_panel(builder: e.Builder, arguments: list[e.Value], kind: int, rows: int) -> None:
    """Write x [rows, K] times a panel [K, 64] to out."""
    x, x_stride, panel, blocks, out, out_stride = arguments
    vectors, floats = _vectors(rows), e.vector(LANES)
    x_rows = [builder.gep(x, [builder.mul(x_stride, e.whole(row))], source_etype=e.F32) for row in range(rows)]

    def columns(column: e.Value, _: list[e.Value]) -> list[e.Value]:
        def block_step(number: e.Value, totals: list[e.Value]) -> list[e.Value]:
            block = _byte_pointer(builder, panel, builder.mul(number, e.whole(BLOCK_BYTES[kind])))

            def turn_step(turn: e.Value, totals: list[e.Value]) -> list[e.Value]:
                k = builder.add(builder.mul(number, e.whole(BLOCK_VALUES)), builder.mul(turn, e.whole(WORD_VALUES)))
                for index, values in enumerate(_eight_values(builder, kind, block, turn, column, vectors)):
                    for row, source in enumerate(x_rows):
                        place = builder.add(k, e.whole(index))
                        factor = e.splat(builder, e.load(builder, source, place, e.F32), floats)
                        for group, value in enumerate(values):
                            at = row * vectors + group
                            totals[at] = e.fma(builder, factor, value, totals[at])
                return totals

            return e.loop(builder, e.whole(0), e.whole(_TURNS), 1, totals, turn_step)

        zeros = [e.constant(floats, 0.0)] * (rows * vectors)
        sums = e.loop(builder, e.whole(0), blocks, 1, zeros, block_step)
        for at, value in enumerate(sums):
            row, group = divmod(at, vectors)
            line = builder.add(builder.mul(out_stride, e.whole(row)), builder.add(column, e.whole(group * LANES)))
            e.store(builder, value, out, line)
        return []

    e.loop(builder, e.whole(0), e.whole(PANEL), vectors * LANES, [], columns)


def _unpacked_panel(builder: e.Builder, arguments: list[e.Value], kind: int) -> None:
    """Write the values of some blocks of a panel to out [32 x blocks, 64]."""
    panel, blocks, out = arguments
    vectors = _vectors(1)

    def block_step(number: e.Value, _: list[e.Value]) -> list[e.Value]:
        block = _byte_pointer(builder, panel, builder.mul(number, e.whole(BLOCK_BYTES[kind])))

        def columns(column: e.Value, _: list[e.Value]) -> list[e.Value]:
            def turn_step(turn: e.Value, _: list[e.Value]) -> list[e.Value]:
                k = builder.add(builder.mul(number, e.whole(BLOCK_VALUES)), builder.mul(turn, e.whole(WORD_VALUES)))
                for index, values in enumerate(_eight_values(builder, kind, block, turn, column, vectors)):
                    line = builder.add(builder.mul(builder.add(k, e.whole(index)), e.whole(PANEL)), column)
                    for group, value in enumerate(values):
                        e.store(builder, value, out, builder.add(line, e.whole(group * LANES)))
                return []

            return e.loop(builder, e.whole(0), e.whole(_TURNS), 1, [], turn_step)

        return e.loop(builder, e.whole(0), e.whole(PANEL), vectors * LANES, [], columns)

    e.loop(builder, e.whole(0), blocks, 1, [], block_step)


def _version(builder: e.Builder, name: str, arguments: list[Any], body: Callable[..., None], *fixed: int) -> Any:
    return e.function(
        builder.module, name, e.ir.VoidType(), arguments, lambda inside, given: body(inside, given, *fixed)
    )


@e.intrinsic(["whole"] * 8, "nothing")
def quantised_tile(builder: e.Builder, values: Sequence[e.Value]) -> None:
    """Compute 1 to `ROWS` rows of x times a panel; strides are in values, addresses in bytes."""
    kinds = [e.POINTER, e.I64, e.POINTER, e.I64, e.POINTER, e.I64]
    number_of_kind, height, x_at, x_step, panel_at, length, out_at, out_step = values
    versions = {
        one * 8 + count: _version(builder, f"quantised_{one}_{count}", kinds, _rows_times_panel, one, count)
        for one in KINDS
        for count in range(1, ROWS + 1)
    }
    arguments = [
        e.pointer(builder, x_at), x_step, e.pointer(builder, panel_at), length,
        e.pointer(builder, out_at), out_step,
    ]  # fmt: skip
    switched(builder, builder.add(builder.mul(number_of_kind, e.whole(8)), height), versions, arguments)


@e.intrinsic(["whole"] * 4, "nothing")
def unpack(builder: e.Builder, values: Sequence[e.Value]) -> None:
    """Write the values of some blocks of a panel to out [32 x blocks, 64]."""
    kinds = [e.POINTER, e.I64, e.POINTER]
    versions = {one: _version(builder, f"unpacked_{one}", kinds, _unpacked_panel, one) for one in KINDS}
    arguments = [e.pointer(builder, values[1]), values[2], e.pointer(builder, values[3])]
    switched(builder, values[0], versions, arguments)
