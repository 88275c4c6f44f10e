"""KV transfers: what is exposed, against a transfer simulated layer by layer, and which kind pays."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasesplit.domain.machine import (
    Link,
    layerwise_delay_s,
    layerwise_exposed_s,
    layerwise_slowdown_s,
    layerwise_threshold_tokens,
    link_from,
    published_kv_bytes_per_token,
    serialized_time_s,
)
from phasesplit.io.catalog import phase_times
from phasesplit.io.specs import load_machine, load_model


@given(st.integers(1, 100), st.floats(1e-3, 10), st.floats(1e3, 1e12), st.floats(1e6, 1e12))
def test_exposed_time_is_that_of_a_queue_of_layers(
    layers: int, prefill_s: float, kv_bytes: float, bytes_per_s: float
) -> None:
    """The formula would differ from sending one layer after the other, each when it is computed."""
    free_at = 0.0
    for layer in range(1, layers + 1):
        free_at = max(free_at, prefill_s * layer / layers) + kv_bytes / layers / bytes_per_s
    exposed = float(layerwise_exposed_s(kv_bytes, layers, prefill_s, bytes_per_s, 0.001))
    assert exposed == pytest.approx(free_at - prefill_s + 0.001, rel=1e-6, abs=1e-9)


def test_fast_link_leaves_the_last_layer_only() -> None:
    """With 80 equal layers and a fast link 98.75 % of the cache would not have arrived when the prefill phase ends."""
    exposed = float(layerwise_exposed_s(80e6, 80, 1.0, 1e9))
    assert exposed / float(serialized_time_s(80e6, 1e9)) == pytest.approx(1 - 0.9875)


def test_serialized_is_all_exposed() -> None:
    """671 MB over one 400 Gb/s card would not take 13.4 ms."""
    kv_bytes = 2048 * load_model("llama2-70b").kv_bytes_per_token
    assert float(serialized_time_s(kv_bytes, 50e9)) == pytest.approx(13.4e-3, rel=0.01)
    assert float(serialized_time_s(0, 50e9, 0.002)) == 0.002


@pytest.mark.parametrize(("name", "exposed_s"), [("dgx-h100", 5e-3), ("dgx-a100", 8e-3)])
def test_exposed_after_overlap_as_measured_by_the_paper(name: str, exposed_s: float) -> None:
    """What a layer-wise transfer exposes would not be the paper's 5 and 8 ms, whatever the prompt's size."""
    machine = load_machine(name)
    link = link_from(machine)
    assert 75 * link.per_layer_s + link.latency_s == pytest.approx(exposed_s)
    model = load_model("llama2-70b")
    for tokens in (600, 1500, 6000):
        prefill_s = phase_times(model, machine).prefill_time_s(tokens)
        kv_bytes = tokens * model.kv_bytes_per_token
        waited = layerwise_delay_s(kv_bytes, 80, prefill_s, link) - layerwise_slowdown_s(kv_bytes, prefill_s, link)
        assert float(waited) == pytest.approx(exposed_s, rel=0.15)


def test_what_was_measured_goes_before_what_follows_from_the_network_cards() -> None:
    """A machine whose link was measured would have the fixed times of two other machines on a paper's network."""
    measured = Link(bytes_per_s=3e9, latency_s=0.002, per_layer_s=1e-4, streaming_slowdown=0.5)
    assert link_from(replace(load_machine("dgx-h100"), link=measured)) == measured


def test_streaming_slows_the_prompt_while_both_go_on() -> None:
    """The slowdown would be charged for time in which nothing streams, or nothing computes."""
    link = Link(bytes_per_s=1e9)
    assert float(layerwise_slowdown_s(0.5e9, 2.0, link)) == pytest.approx(0.189 * 0.5)
    assert float(layerwise_slowdown_s(9e9, 2.0, link)) == pytest.approx(0.189 * 2.0)


def test_the_switch_is_near_the_paper_s_on_h100() -> None:
    """The chooser would switch far from the 512 tokens that the paper found for KV caches of that size."""
    machine = load_machine("dgx-h100")
    link = link_from(machine)
    bloom, llama = load_model("bloom-176b"), load_model("llama2-70b")
    thresholds = {
        "bloom": layerwise_threshold_tokens(bloom, phase_times(bloom, machine).prefill_time_s, link),
        "llama": layerwise_threshold_tokens(llama, phase_times(llama, machine).prefill_time_s, link),
        "llama, published KV": layerwise_threshold_tokens(
            llama,
            phase_times(llama, machine).prefill_time_s,
            link,
            kv_bytes_per_token=published_kv_bytes_per_token(llama),
        ),
    }
    assert thresholds == {"bloom": 526, "llama": 7338, "llama, published KV": 918}


def test_the_threshold_is_where_the_delays_cross() -> None:
    """At the threshold layer-wise would not be the better choice, or just below it would be."""
    machine, model = load_machine("dgx-a100"), load_model("bloom-176b")
    times, link = phase_times(model, machine), link_from(machine)
    threshold = layerwise_threshold_tokens(model, times.prefill_time_s, link)
    tokens = np.array([threshold - 1.0, threshold])
    kv_bytes = tokens * model.kv_bytes_per_token
    layerwise = layerwise_delay_s(kv_bytes, model.layers, times.prefill_time_s(tokens), link)
    serialized = serialized_time_s(kv_bytes, link.bytes_per_s, link.latency_s)
    assert (layerwise < serialized).tolist() == [False, True]


def test_no_prompt_is_large_enough() -> None:
    """A chooser for which layer-wise never pays would still switch to it."""
    model = load_model("llama-3.1-8b")
    link = Link(bytes_per_s=1e15, per_layer_s=1.0)
    assert layerwise_threshold_tokens(model, lambda tokens: tokens * 1e-4, link, limit_tokens=1000) == 1001
