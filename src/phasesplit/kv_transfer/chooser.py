"""Serialized or layer by layer: what the link measured says for a prompt of this size."""

from collections.abc import Callable
from enum import Enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.machine import Link, layerwise_threshold_tokens
from phasesplit.domain.model import Model
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.layout import ITEM_BYTES, KvLayout
from phasesplit.scheduler.rules import Rules, Transfer

Floats = NDArray[np.float64]
_SLOWEST_BYTES_PER_S = 1.0
_NEVER_TOKENS = 1 << 31


class Mode(Enum):
    """When the KV of a layer leaves."""

    SERIALIZED = "serialized"  # all of it when the prefill phase has ended
    LAYERWISE = "layerwise"  # each layer as soon as it is final


def fit_link(sizes_bytes: ArrayLike, times_s: ArrayLike, *, per_layer_s: float = 0.0, slowdown: float = 0.0) -> Link:
    """Return the straight line through measured transfers: latency plus size / bandwidth.

    Errors are weighed by their share of the time, so that small transfers set the latency.

    Args:
        sizes_bytes: Sizes of transfers, (n,), at least two different ones.
        times_s: Their times, (n,), > 0.
        per_layer_s: Measured cost that each layer adds to a layer-wise transfer, >= 0.
        slowdown: Measured share of the streaming time by which the prefill phase gets longer, >= 0.

    Raises:
        TransferError: Fewer than two different sizes, or times that do not grow with them.

    Source: least squares; weights: ours.
    """
    sizes, times = np.asarray(sizes_bytes, np.float64), np.asarray(times_s, np.float64)
    if len(np.unique(sizes)) < 2 or sizes.shape != times.shape or not (times > 0).all():
        raise TransferError("a link needs the times, above 0, of transfers of at least two sizes")
    weighted = np.stack([1 / times, sizes / times], axis=1)
    latency_s, s_per_byte = np.linalg.lstsq(weighted, np.ones_like(times), rcond=None)[0]
    if not 0 < s_per_byte <= 1 / _SLOWEST_BYTES_PER_S:
        raise TransferError("times of transfers do not grow with their sizes: measure larger ones")
    return Link(
        bytes_per_s=float(1 / s_per_byte),
        latency_s=max(0.0, float(latency_s)),
        per_layer_s=per_layer_s,
        streaming_slowdown=slowdown,
    )


def threshold_tokens(layout: KvLayout, prefill_time_s: Callable[[Floats], Floats], link: Link) -> int:
    """Return the smallest prompt that is sent layer by layer: the planner's, for the KV that really moves.

    Args:
        layout: The model's KV on the machines.
        prefill_time_s: Prompt tokens, float64 (n,), to the time of the prefill phase.
        link: The link, as measured (`fit_link`, `calibration.measure_link`).

    Source: `domain.machine.layerwise_threshold_tokens`.
    """
    # The rule looks at layers and KV alone, so the sizes of everything else stay open.
    model = Model(
        name=layout.model,
        layers=layout.layers,
        hidden=0,
        query_heads=0,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        parameters=0,
        active_parameters=0,
        weights_bytes=0,
        value_bytes=ITEM_BYTES[layout.dtype],
    )
    return layerwise_threshold_tokens(model, prefill_time_s, link)


def ruled_tokens(rules: Rules) -> int | None:
    """Return the smallest prompt that rules send layer by layer, None where they leave it to the link.

    Args:
        rules: Of which `transfer` and `layerwise_from_tokens` count.
    """
    if rules.transfer is Transfer.AUTO:
        return rules.layerwise_from_tokens
    return 0 if rules.transfer is Transfer.LAYERWISE else _NEVER_TOKENS


def choose(prompt_tokens: int, threshold: int) -> Mode:
    """Return how a prompt's KV travels.

    Args:
        prompt_tokens: Tokens of the prompt, >= 1.
        threshold: Result of `threshold_tokens` or `ruled_tokens`.
    """
    return Mode.LAYERWISE if prompt_tokens >= threshold else Mode.SERIALIZED
