"""A language model as far as serving it costs memory, bytes and operations."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of a decoder-only transformer.

    Attributes:
        name: As in the command line (`llama2-70b`).
        layers: Number of transformer layers.
        hidden: Width of the residual stream.
        query_heads: Attention query heads.
        kv_heads: Key and value heads; fewer than `query_heads` with grouped-query attention.
        head_dim: Width of one head.
        parameters: All parameters.
        active_parameters: Parameters that one token passes through; fewer than `parameters` for mixtures of experts.
        experts: Experts of each layer, of which the router picks some; 1 for a dense model.
        experts_per_token: How many of them one token passes through.
        weights_bytes: Bytes of weights held on an instance, as served.
        value_bytes: Bytes of one KV value (2 for FP16 and BF16, 1 for FP8).
        max_context_tokens: Longest prompt plus output that the model accepts.
        sources: Field name to where its figure comes from.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    parameters: float
    active_parameters: float
    weights_bytes: float
    value_bytes: float = 2
    experts: int = 1
    experts_per_token: int = 1
    max_context_tokens: int = 131_072
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_bytes_per_token(self) -> float:
        """KV bytes of one token: 2 x bytes per value x layers x KV heads x head width.

        Source: keys and values are each kept once per layer and KV head (Splitwise, section II; grouped-query
        attention, Ainslie et al. 2023).
        """
        return 2 * self.value_bytes * self.layers * self.kv_heads * self.head_dim

    def with_kv_bytes_per_token(self, kv_bytes_per_token: float) -> "Model":
        """Return the same model with the values of its KV as large as a machine keeps them."""
        return replace(self, value_bytes=self.value_bytes * kv_bytes_per_token / self.kv_bytes_per_token)

    def expected_weights_bytes(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the bytes of weights that an iteration over so many tokens reads, experts no token goes to left out.

        With the same chance for every expert, one of `experts` is reached by at least one of n tokens with probability
        1 - (1 - experts_per_token / experts)^n.

        Args:
            tokens: Tokens of the iteration, any shape, >= 0.

        Source: expected number of distinct draws; routing taken as even.
        """
        count = np.asarray(tokens, dtype=np.float64)
        if self.experts <= self.experts_per_token:
            return np.full(count.shape, float(self.weights_bytes))
        unpicked = self.experts - self.experts_per_token
        expert_share = (self.parameters - self.active_parameters) / unpicked * self.experts / self.parameters
        reached = 1.0 - (unpicked / self.experts) ** count
        return self.weights_bytes * (1.0 - expert_share + expert_share * reached)


def transformer_parameters(
    *,
    layers: int,
    hidden: int,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    feed_forward: int,
    vocabulary: int,
    experts: int = 1,
    experts_per_token: int = 1,
    tied_embeddings: bool = False,
) -> tuple[int, int]:
    """Return all parameters and those that one token passes through, of a Llama-style decoder.

    Such a layer has query, key, value and output projections, a gated feed-forward network (three matrices) for each
    expert, a router where there are several, and two norms. Biases and query-key norms (below 0.01 %) are left out.

    Source: architecture of Llama 2 (Touvron et al. 2023) and Mixtral (Jiang et al. 2024).
    """
    attention = 2 * hidden * head_dim * (query_heads + kv_heads)
    router = hidden * experts if experts > 1 else 0
    expert = 3 * hidden * feed_forward
    outside = hidden * vocabulary * (1 if tied_embeddings else 2) + hidden
    shared = outside + layers * (attention + router + 2 * hidden)
    return shared + layers * experts * expert, shared + layers * experts_per_token * expert
