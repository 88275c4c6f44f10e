"""The measured link, and the choice that follows from it."""

from dataclasses import replace

import numpy as np
import pytest

from phasesplit.domain.machine import Link, layerwise_threshold_tokens
from phasesplit.errors import TransferError
from phasesplit.io.catalog import load_model
from phasesplit.kv_transfer.chooser import Mode, choose, fit_link, threshold_tokens
from phasesplit.kv_transfer.layout import KvLayout


def test_link_is_found_again_from_its_times() -> None:
    """Latency or bandwidth would be taken for the other, or noise of large transfers spoil the latency."""
    sizes = np.array([1e4, 1e5, 1e6, 1e7, 1e8])
    noise = np.array([1.01, 0.99, 1.01, 0.99, 1.01])
    link = fit_link(sizes, (200e-6 + sizes / 2e9) * noise)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.02)
    assert link.latency_s == pytest.approx(200e-6, rel=0.03)


@pytest.mark.parametrize(
    ("sizes", "times"), [([1e6], [1e-3]), ([1e6, 1e6], [1e-3, 1e-3]), ([1e6, 2e6], [2e-3, 1e-3]), ([1, 2], [0, 1])]
)
def test_times_that_make_no_link_are_refused(sizes: list[float], times: list[float]) -> None:
    """A link of no, or of endless, bandwidth would decide how KV travels."""
    with pytest.raises(TransferError):
        fit_link(sizes, times)


def test_threshold_is_the_planners() -> None:
    """The live cluster would switch at another prompt than the one that was planned with."""
    model = load_model("llama2-70b")
    link = Link(bytes_per_s=1e11, latency_s=1e-3, per_layer_s=1e-5, streaming_slowdown=0.0)

    def prefill_time_s(tokens: np.ndarray) -> np.ndarray:
        return 1e-4 * tokens

    layout = KvLayout(
        model="llama2-70b", layers=model.layers, kv_heads=8, head_dim=128, dtype="float16", block_tokens=16,
        block_layout="any",
    )  # fmt: skip
    threshold = threshold_tokens(layout, prefill_time_s, link)
    assert threshold == layerwise_threshold_tokens(
        model, prefill_time_s, link, kv_bytes_per_token=model.layers * 2 * 8 * 128 * 2
    )
    assert threshold < threshold_tokens(replace(layout, dtype="float8_e4m3"), prefill_time_s, link)
    assert choose(threshold - 1, threshold) is Mode.SERIALIZED
    assert choose(threshold, threshold) is Mode.LAYERWISE
