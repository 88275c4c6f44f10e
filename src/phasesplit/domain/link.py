"""How long moving a KV cache takes, and how much of it the user waits for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.model import Model

if TYPE_CHECKING:
    from phasesplit.domain.machine import Machine

Floats = NDArray[np.float64]

HANDSHAKE_S = 0.5e-3
"""Before the first and after the last byte: agree on blocks, signal completion. Source: assumed."""

STREAMING_SLOWDOWN = 0.189
"""Share of the streaming time by which prefill computes longer while its KV cache streams out.

Source: arXiv 2507.03114: 18.9 % on average, 40 % at worst.
"""

_MEASURED_LAYERS = 75
_EXPOSED_BASE_S = 2e-3
_EXPOSED_BYTES = 1.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way of KV from a machine, all network cards of a machine used as one.

    Between machines of two types the smaller bandwidth counts, and of all else the sender's: it sends, and chooses how.

    Attributes:
        bytes_per_s: Bandwidth in one direction, > 0.
        latency_s: Fixed time of any transfer, >= 0.
        per_layer_s: Time that each layer adds to a layer-wise transfer and that no computing hides, >= 0.
        streaming_slowdown: Share of the streaming time by which a layer-wise transfer makes prefill longer.
    """

    bytes_per_s: float
    latency_s: float = HANDSHAKE_S
    per_layer_s: float = 0.0
    streaming_slowdown: float = STREAMING_SLOWDOWN

    def scaled(self, factor: float) -> "Link":
        """Return a link with so many times the bandwidth; its fixed times and its slowdown stay."""
        return replace(self, bytes_per_s=self.bytes_per_s * factor)


def link_from(machine: "Machine") -> Link:
    """Return the way of KV from machines of a type: as it was measured, else as it follows from their network cards.

    The time exposed after overlap that the paper measured does not depend on the prompt's size: 8 ms over 8 x 200 Gb/s
    and 5 ms over 8 x 400 Gb/s. The straight line in 1 / bandwidth through both (2 ms + 1.2 GB / bandwidth), less the
    handshake, is spread over the 75 layers that its two models have on average.

    Source: Splitwise section VI (exposed times); the line through them: ours.
    """
    if machine.link is not None:
        return machine.link
    exposed_s = _EXPOSED_BASE_S + _EXPOSED_BYTES / machine.nic_bytes_per_s
    return Link(bytes_per_s=machine.nic_bytes_per_s, per_layer_s=(exposed_s - HANDSHAKE_S) / _MEASURED_LAYERS)


def serialized_time_s(kv_bytes: ArrayLike, bytes_per_s: float, latency_s: float = 0.0) -> Floats:
    """Return the time of a transfer that starts when prefill ends: all of it is exposed.

    Args:
        kv_bytes: Bytes to move, any shape, >= 0.
        bytes_per_s: Bandwidth, > 0.
        latency_s: Fixed part, >= 0.
    """
    return latency_s + np.asarray(kv_bytes, dtype=np.float64) / bytes_per_s


def layerwise_exposed_s(
    kv_bytes: ArrayLike, layers: int, prompt_s: ArrayLike, bytes_per_s: float, latency_s: float = 0.0
) -> Floats:
    """Return what is left of a layer-wise transfer when prefill ends.

    Each layer's KV cache leaves when the layer is computed. A link that keeps up has only the last layer left. One
    that does not has been busy since the end of the first layer: left is the whole transfer less that time.

    Args:
        kv_bytes: Bytes to move, >= 0.
        layers: Layers of the model, >= 1, equal in bytes and time.
        prompt_s: Time of prefill, >= 0; broadcasts with `kv_bytes`.
        bytes_per_s: Bandwidth, > 0.
        latency_s: Fixed part, >= 0.

    Source: Splitwise section IV (layer-wise transfer); the two cases follow from a first-in-first-out link.
    """
    whole_s = np.asarray(kv_bytes, dtype=np.float64) / bytes_per_s
    overlapped_s = np.asarray(prompt_s, dtype=np.float64) * (layers - 1) / layers
    return latency_s + np.maximum(whole_s / layers, whole_s - overlapped_s)


def layerwise_slowdown_s(kv_bytes: ArrayLike, prompt_s: ArrayLike, link: Link) -> Floats:
    """Return by how much streaming makes prefill longer: a share of the time in which both go on."""
    whole_s = np.asarray(kv_bytes, dtype=np.float64) / link.bytes_per_s
    return link.streaming_slowdown * np.minimum(whole_s, np.asarray(prompt_s, dtype=np.float64))


def layerwise_delay_s(kv_bytes: ArrayLike, layers: int, prompt_s: ArrayLike, link: Link) -> Floats:
    """Return by how much a layer-wise transfer delays the second token: slowdown, cost per layer, exposed rest."""
    slowdown_s = layerwise_slowdown_s(kv_bytes, prompt_s, link)
    streaming_s = np.asarray(prompt_s, dtype=np.float64) + slowdown_s
    exposed_s = layerwise_exposed_s(kv_bytes, layers, streaming_s, link.bytes_per_s, link.latency_s)
    return slowdown_s + layers * link.per_layer_s + exposed_s


def layerwise_threshold_tokens(
    model: Model,
    prompt_time_s: Callable[[Floats], Floats],
    link: Link,
    *,
    kv_bytes_per_token: float | None = None,
    limit_tokens: int = 131_072,
) -> int:
    """Return the smallest prompt whose second token comes sooner with a layer-wise than with a serialized transfer.

    Between DGX H100 this gives 526 tokens for BLOOM-176B, where the paper switches at 512; for Llama2-70B 918 with the
    published KV size and 7,338 with the true one, which is 8 times smaller: its serialized transfers stay short.

    Args:
        model: The model.
        prompt_time_s: Prompt tokens, float64 (n,), to the time of prefill (`PhaseTimes.prompt_time_s`).
        link: The link.
        kv_bytes_per_token: By default the model's.
        limit_tokens: Largest prompt looked at, returned plus 1 where none is better.

    Source: the choice by size is Splitwise section IV; choosing by the second token's delay: ours.
    """

    def first_better(tokens: Floats) -> int:
        kv_bytes = tokens * (kv_bytes_per_token or model.kv_bytes_per_token)
        layerwise_s = layerwise_delay_s(kv_bytes, model.layers, prompt_time_s(tokens), link)
        better = layerwise_s < serialized_time_s(kv_bytes, link.bytes_per_s, link.latency_s)
        return int(np.argmax(better)) if better.any() else -1

    # A coarse look finds the interval, a fine one the prompt: a hundred times fewer points than all prompts.
    coarse = np.unique(np.geomspace(1, limit_tokens, 400).round())
    found = first_better(coarse)
    if found <= 0:
        return limit_tokens + 1 if found < 0 else 1
    fine = np.arange(coarse[found - 1] + 1, coarse[found] + 1)
    return int(fine[first_better(fine)])
