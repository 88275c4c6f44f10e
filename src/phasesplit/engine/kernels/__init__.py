"""The arithmetic of a forward pass, compiled for the processor at hand, with a twin in plain NumPy of equal bits.

Batch invariant: what comes out for a row depends on that row (and the KV of its sequence) alone, never on how many
rows are computed with it. Every output is one chain of fused multiply-adds in ascending order.
"""

from phasesplit.engine.kernels.calls import (
    add,
    add_bias,
    attend,
    norm_heads,
    rms_norm,
    rope,
    rope_table,
    silu_multiply,
    write_kv,
)
from phasesplit.engine.kernels.compiling import CACHE_IS_WARM, IS_COMPILED
from phasesplit.engine.kernels.warming import warm_up

__all__ = [
    "CACHE_IS_WARM",
    "IS_COMPILED",
    "add",
    "add_bias",
    "attend",
    "norm_heads",
    "rms_norm",
    "rope",
    "rope_table",
    "silu_multiply",
    "warm_up",
    "write_kv",
]
