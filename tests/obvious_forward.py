"""The forward pass of a Llama-family model in plain NumPy: no cache, no batch, float32, one line for each formula.

It shares no code with the engine's own, and is what that is compared with.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.checkpoint import Weights
from phasesplit.engine.config import ModelConfig

Values = NDArray[np.float32]


def _rms_norm(x: Values, weight: Values, eps: float) -> Values:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight


def _rotated(x: Values, frequencies: NDArray[np.float64]) -> Values:
    """Turn value i of each head with value i + head_dim / 2, by position times frequency i."""
    angles = np.arange(len(x))[:, None, None] * frequencies
    cosine, sine = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


def obvious_logits(config: ModelConfig, weights: Weights, tokens: list[int]) -> Values:
    """Return the logits after each of the tokens, [tokens, vocab]."""
    count, shared = len(tokens), config.query_heads // config.kv_heads
    future = np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)
    x = weights.embedding.float32()[tokens]
    for layer in weights.layers:
        normed = _rms_norm(x, layer.attention_norm, config.rms_eps)
        heads = []
        for matrix, bias, norm, number in (
            (layer.query, layer.query_bias, layer.query_norm, config.query_heads),
            (layer.key, layer.key_bias, layer.key_norm, config.kv_heads),
            (layer.value, layer.value_bias, None, config.kv_heads),
        ):
            projected = normed @ matrix.float32().T + (0 if bias is None else bias)
            split = projected.reshape(count, number, config.head_dim)
            heads.append(split if norm is None else _rms_norm(split, norm, config.rms_eps))
        query, key = (_rotated(one, weights.rope_frequencies) for one in heads[:2])
        key, value = np.repeat(key, shared, axis=1), np.repeat(heads[2], shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.float32(np.sqrt(config.head_dim)) + future
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", shares, value).reshape(count, -1) @ layer.output.float32().T
        normed = _rms_norm(x, layer.ffn_norm, config.rms_eps)
        gate = normed @ layer.gate.float32().T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ layer.up.float32().T)) @ layer.down.float32().T
    logits: Values = _rms_norm(x, weights.output_norm, config.rms_eps) @ weights.output.float32().T
    return logits
