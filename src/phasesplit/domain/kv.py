"""How much memory the KV cache takes and how much of it an instance holds."""

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return the KV blocks that hold so many tokens; the last one may be partly used.

    Args:
        tokens: Tokens, >= 0.
        block_tokens: Tokens of a block, >= 1.
    """
    return -(-tokens // block_tokens)


def kv_capacity_bytes(model: Model, machine: Machine, *, reserved_share: float = 0.0) -> float:
    """Return the memory left for KV cache on an instance: all memory less a reserve and the weights, never below 0.

    Args:
        model: The model.
        machine: The machine.
        reserved_share: Share of the memory kept for activations and the runtime, from 0 (as the published simulator
            has it) to 1; serving engines keep about 0.1.
    """
    return max(machine.hbm_bytes * (1.0 - reserved_share) - model.weights_bytes, 0.0)


def published_kv_bytes_per_token(model: Model) -> float:
    """Return the KV bytes of one token as the published simulator counts them, grouped-query attention ignored.

    2 x bytes per value x layers x hidden: 8 times too much for Llama2-70B, right for BLOOM-176B.

    Source: the published simulator's model description.
    """
    return 2 * model.value_bytes * model.layers * model.hidden
