"""Kernels made ready before they are needed: compiled at the very first start, later loaded from disk."""

import numpy as np

from phasesplit.engine.kernels import calls, matrix
from phasesplit.engine.kernels.compiling import IS_COMPILED
from phasesplit.engine.kernels.plain import BLOCK_TOKENS, F32, PANEL
from phasesplit.engine.kernels.tiles import tiles_address


def warm_up() -> None:
    """Compile or load every kernel, where they are compiled at all; `CACHE_IS_WARM` tells which it will be."""
    if not IS_COMPILED:
        return
    row, weight, table = np.ones((1, 6), np.float32), np.ones(2, np.float32), np.zeros((1, 1), np.int32)
    place, pool = np.zeros(1, np.int32), np.zeros((1, 1, 2 * 2 * BLOCK_TOKENS), np.float32)
    calls.norm_heads(row, 0, 2, weight, 1e-5)
    calls.rope(row, calls.rope_table(place, np.ones(1)), 2)
    calls.silu_multiply(row, np.empty((1, 3), np.float32))
    calls.write_kv(row, pool, 0, table, place, place, 1, 1)
    calls.attend(row, pool, 0, table, place, place, 1, 1, np.empty((1, 2), np.float32))
    panel, scratch = np.zeros(6 * PANEL, np.float32), np.empty(matrix.scratch_values(1, 6), np.float32)
    out = np.empty((1, 1), np.float32)
    matrix.multiply(tiles_address(), row, F32, panel.ctypes.data, 1, out, 0, scratch)
