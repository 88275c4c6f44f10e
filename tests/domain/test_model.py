"""Sizes of models: KV bytes, parameters, bytes of weights an iteration reads."""

from dataclasses import replace

import numpy as np
import pytest

from phasesplit.domain.machine import kv_capacity_bytes, published_kv_bytes_per_token
from phasesplit.domain.model import transformer_parameters
from phasesplit.io.specs import known_models, load_machine, load_model

# model: feed-forward width, vocabulary (config.json of each)
LLAMA_STYLE = {
    "llama2-70b": (28_672, 32_000),
    "llama-3.1-8b": (14_336, 128_256),
    "llama-3.1-70b": (28_672, 128_256),
    "qwen3-32b": (25_600, 151_936),
    "mixtral-8x7b": (14_336, 32_000),
}


@pytest.mark.parametrize(("name", "expected"), [("bloom-176b", 4_014_080), ("llama2-70b", 327_680)])
def test_kv_bytes_per_token(name: str, expected: int) -> None:
    """A wrong KV size would over- or underfill every machine and misjudge every transfer."""
    assert load_model(name).kv_bytes_per_token == expected


def test_published_kv_ignores_grouped_queries() -> None:
    """The published look-up would not reproduce its results if its known mistake were corrected here."""
    assert published_kv_bytes_per_token(load_model("llama2-70b")) == 2_621_440
    assert published_kv_bytes_per_token(load_model("bloom-176b")) == 4_014_080


@pytest.mark.parametrize("name", LLAMA_STYLE)
def test_parameters_counted_from_sizes(name: str) -> None:
    """Parameters of a config.json would be miscounted: those of known models come out more than 1 % off."""
    model = load_model(name)
    feed_forward, vocabulary = LLAMA_STYLE[name]
    parameters, active = transformer_parameters(
        layers=model.layers,
        hidden=model.hidden,
        query_heads=model.query_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        feed_forward=feed_forward,
        vocabulary=vocabulary,
        experts=model.experts,
        experts_per_token=model.experts_per_token,
    )
    assert parameters == pytest.approx(model.parameters, rel=0.001)
    assert active == pytest.approx(model.active_parameters, rel=0.001)


def test_tied_embeddings_count_once() -> None:
    """A model with tied embeddings would be counted with a second table that it does not have."""
    sizes = {
        "layers": 2, "hidden": 8, "query_heads": 2, "kv_heads": 1, "head_dim": 4, "feed_forward": 16, "vocabulary": 100,
    }  # fmt: skip
    untied, _ = transformer_parameters(**sizes)
    tied, _ = transformer_parameters(**sizes, tied_embeddings=True)
    assert untied - tied == 800


def test_mixture_reads_only_the_experts_reached() -> None:
    """A mixture of experts would stream the wrong bytes: at one token, at many, or in between (against drawing)."""
    mixtral = load_model("mixtral-8x7b")
    few, some, many = mixtral.expected_weights_bytes([1, 3, 10_000])
    assert few == pytest.approx(mixtral.weights_bytes * mixtral.active_parameters / mixtral.parameters)
    assert many == pytest.approx(mixtral.weights_bytes)
    generator = np.random.default_rng(0)
    drawn = [len({int(e) for _ in range(3) for e in generator.permutation(8)[:2]}) for _ in range(4000)]
    shared = few - (many - few) / 6 * 2
    assert some == pytest.approx(shared + (many - few) / 6 * float(np.mean(drawn)), rel=0.01)


def test_dense_model_reads_all_weights() -> None:
    """A dense model would stream fewer bytes than it has."""
    model = load_model("llama2-70b")
    assert (model.expected_weights_bytes([1, 64]) == model.weights_bytes).all()
    everything_active = replace(load_model("mixtral-8x7b"), experts_per_token=8)
    assert float(everything_active.expected_weights_bytes(1)) == everything_active.weights_bytes


def test_kv_capacity() -> None:
    """Memory for KV cache would not be what the weights and the reserve leave, or below zero."""
    model, machine = load_model("bloom-176b"), load_machine("dgx-h100")
    assert kv_capacity_bytes(model, machine) == 687_194_767_360 - 329e9
    assert kv_capacity_bytes(model, machine, reserved_share=0.1) == pytest.approx(687_194_767_360 * 0.9 - 329e9)
    assert kv_capacity_bytes(model, replace(machine, hbm_bytes=1e9)) == 0


@pytest.mark.parametrize("name", known_models())
def test_every_figure_names_its_source(name: str) -> None:
    """A shipped figure could not be checked by its reader."""
    model = load_model(name)
    fields = {"layers", "hidden", "query_heads", "kv_heads", "head_dim", "parameters", "active_parameters"}
    assert fields | {"weights_bytes", "value_bytes", "max_context_tokens"} <= set(model.sources)
    assert model.weights_bytes == pytest.approx(2 * model.parameters, rel=0.07)
