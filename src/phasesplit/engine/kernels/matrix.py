"""The product with a matrix in panels: a panel stays near the core while all rows pass over it."""

from phasesplit.engine.kernels import emitting as e
from phasesplit.engine.kernels.compiling import compiled
from phasesplit.engine.kernels.plain import BLOCK_VALUES, F32, PANEL, Q4_0, Q8_0, Values
from phasesplit.engine.kernels.quantised import BLOCK_BYTES, quantised_tile, unpack
from phasesplit.engine.kernels.tiles import ROWS, product

CHUNK = 1024
"""Most inputs taken at once: 256 KiB of a panel in float32, a part of the second-level cache of any processor."""
DIRECT_ROWS = 18
"""Up to so many rows, quantised panels are unpacked in registers, for each tile anew: from three tiles on, unpacking
once costs less."""
_Q8_0_BYTES, _Q4_0_BYTES, _Q4_1_BYTES = BLOCK_BYTES.values()


def scratch_values(rows: int, columns: int) -> int:
    """Return how many float32 `multiply` needs in addition to its arguments, for a matrix [rows, columns]."""
    return PANEL * (ROWS + (columns if rows % PANEL else min(columns, CHUNK)))


@compiled
def multiply(tiles: int, x: Values, kind: int, panels: int, rows: int, out: Values, at: int, scratch: Values) -> None:
    """Write x [M, K] times the transpose of a matrix in panels to columns `at` to `at` + rows of out.

    Args:
        tiles: Address of the tiles.
        x: [M, K] float32.
        kind: Number of the kind of panels.
        panels: Their address.
        rows: Outputs of the matrix.
        out: [M, at + rows or more] float32.
        at: First column written.
        scratch: `scratch_values` float32.

    Mutates: out, scratch.
    """
    count, columns = x.shape
    x_at, edge = e.address_of(x), e.address_of(scratch)
    room = edge + 4 * PANEL * ROWS
    stride = out.shape[1]
    block_bytes = _Q8_0_BYTES if kind == Q8_0 else _Q4_0_BYTES if kind == Q4_0 else _Q4_1_BYTES
    panel_bytes = 4 * PANEL * columns if kind == F32 else columns // BLOCK_VALUES * block_bytes
    direct = (count + ROWS - 1) // ROWS
    for panel in range((rows + PANEL - 1) // PANEL):
        source = panels + panel * panel_bytes
        width = min(PANEL, rows - panel * PANEL)
        begin = at + panel * PANEL
        target = e.address_of(out) + 4 * begin
        if kind != F32 and count <= DIRECT_ROWS and width == PANEL:
            for index in range(direct):
                first = count * index // direct
                height = count * (index + 1) // direct - first
                quantised_tile(
                    kind, height, x_at + 4 * first * columns, columns, source, columns // BLOCK_VALUES,
                    target + 4 * first * stride, stride,
                )  # fmt: skip
            continue
        chunks = (columns + CHUNK - 1) // CHUNK if width == PANEL else 1
        blocks = (columns + BLOCK_VALUES - 1) // BLOCK_VALUES
        for chunk in range(chunks):
            start = BLOCK_VALUES * (blocks * chunk // chunks)
            end = min(columns, BLOCK_VALUES * (blocks * (chunk + 1) // chunks))
            weights = source + 4 * PANEL * start
            if kind != F32:
                weights = room
                unpack(kind, source + start // BLOCK_VALUES * block_bytes, (end - start) // BLOCK_VALUES, room)
            if width == PANEL:
                product(
                    tiles, x_at + 4 * start, columns, count, weights, PANEL, end - start, target, stride, PANEL,
                    1 if chunk else 0,
                )  # fmt: skip
                continue
            for row in range(count):
                product(tiles, x_at + 4 * row * columns, columns, 1, weights, PANEL, columns, edge, PANEL, PANEL, 0)
                for column in range(width):
                    out[row, begin + column] = scratch[column]
