"""Sizes and switches of models, from both kinds of file."""

import math
from typing import Any

import numpy as np
import pytest

from phasesplit.engine.config import ModelConfig, RopeScaling, config_from_gguf, config_from_hf
from phasesplit.errors import SpecError

SMOLLM2: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.rope.freq_base": 100_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49_152,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 128_000,
    "eos_token_id": [128_001, 128_008, 128_009],
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
"""Llama-3.2-1B-Instruct."""


def of_hf(**changes: object) -> ModelConfig:
    return config_from_hf("config.json", LLAMA | changes)


def of_gguf(tensors: tuple[str, ...] = (), **changes: object) -> ModelConfig:
    named = {f"llama.{key}".replace("__", "."): value for key, value in changes.items()}
    return config_from_gguf("m.gguf", SMOLLM2 | named, tensors)


def test_smollm2_from_gguf() -> None:
    """The default model would be run at other sizes than its own."""
    assert of_gguf() == ModelConfig(
        architecture="llama", layers=30, hidden=576, query_heads=9, kv_heads=3, head_dim=64, ffn=1536, vocab=49_152,
        rope_theta=100_000.0, rms_eps=1e-5, tied_embeddings=True, context_tokens=8192, bos_token_id=1,
        stop_token_ids=(2,),
    )  # fmt: skip


def test_llama3_from_hf() -> None:
    """A Llama 3 directory would be run at other sizes, or without its scaled rotation, or never stop."""
    scaling = RopeScaling(kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    assert of_hf() == ModelConfig(
        architecture="llama", layers=16, hidden=2048, query_heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128_256,
        rope_theta=500_000.0, rope_scaling=scaling, rms_eps=1e-5, tied_embeddings=True, context_tokens=131_072,
        bos_token_id=128_000, stop_token_ids=(128_001, 128_008, 128_009),
    )  # fmt: skip


def test_switches_come_from_the_tensors() -> None:
    """GGUF says nowhere but in its tensors that a model has biases, norms of heads, or its own output matrix."""
    config = of_gguf(("output.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"))
    assert (config.tied_embeddings, config.qkv_bias, config.qk_norm) == (False, True, True)
    assert (of_gguf().qkv_bias, of_gguf().qk_norm) == (False, False)


@pytest.mark.parametrize(
    ("kind", "switches"),
    [("llama", (False, False)), ("mistral", (False, False)), ("qwen2", (True, False)), ("qwen3", (False, True))],
)
def test_switches_come_from_the_model_type(kind: str, switches: tuple[bool, bool]) -> None:
    """A Qwen model would be run without its biases or its norms."""
    config = of_hf(model_type=kind)
    assert (config.qkv_bias, config.qk_norm) == switches


def test_window_shortens_the_context() -> None:
    """Full attention would be computed over texts where the model was trained on a window."""
    assert of_hf(model_type="mistral", sliding_window=4096).context_tokens == 4096
    assert of_hf(model_type="mistral", sliding_window=None).context_tokens == 131_072
    assert of_hf(model_type="qwen2", sliding_window=4096, use_sliding_window=False).context_tokens == 131_072
    assert of_hf(model_type="qwen2", sliding_window=4096, use_sliding_window=True).context_tokens == 4096
    assert of_gguf(attention__sliding_window=1024).context_tokens == 1024


def test_stop_tokens_of_generation_config() -> None:
    """A chat model whose config.json knows only the end of a text would not stop at the end of its answer."""
    config = config_from_hf("config.json", LLAMA | {"eos_token_id": 5}, {"eos_token_id": [5, 7]})
    assert config.stop_token_ids == (5, 7)


def test_newer_layout_of_rope() -> None:
    """A config written by transformers 5 would get the default theta."""
    newer = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}, "rope_scaling": None}
    config = of_hf(**newer)
    assert (config.rope_theta, config.rope_scaling) == (7.0, RopeScaling(kind="linear", factor=2.0))
    assert of_hf(rope_scaling={"type": "linear", "factor": 4.0}).rope_scaling.factor == 4.0


def test_plain_and_linear_frequencies() -> None:
    """Position would turn the pairs of a head by other angles than the model was trained with."""
    plain = of_gguf().rope_frequencies()
    assert plain.shape == (32,)
    assert plain[0] == 1.0
    assert plain[16] == pytest.approx(100_000.0**-0.5)
    linear = of_gguf(rope__scaling__type="linear", rope__scaling__factor=4.0).rope_frequencies()
    np.testing.assert_allclose(linear, plain / 4)
    np.testing.assert_allclose(of_gguf().rope_frequencies(np.full(32, 2, dtype=np.float32)), plain / 2)


def test_llama3_frequencies() -> None:
    """The scaled rotation of Llama 3 would differ from the published rule, here written pair by pair."""
    frequencies = of_hf().rope_frequencies()
    for index, found in enumerate(frequencies):
        plain = 500_000.0 ** (-2 * index / 64)
        wave = 2 * math.pi / plain
        if wave < 8192 / 4.0:
            expected = plain
        elif wave > 8192 / 1.0:
            expected = plain / 32.0
        else:
            smooth = (8192 / wave - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * plain / 32.0 + smooth * plain
        assert found == pytest.approx(expected, rel=1e-12), index


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model_type": "gpt_bigcode"}, "allowed is llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "got None, allowed is llama"),
        ({"model_type": ["llama"]}, "got 'a list'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "2048"}, "a whole number"),
        ({"num_hidden_layers": 0}, "a whole number from 1"),
        ({"num_hidden_layers": 1 << 40}, "a whole number from 1"),
        ({"num_key_value_heads": 5}, "a divisor of the 32 query heads"),
        ({"head_dim": 63}, "an even number"),
        ({"rms_norm_eps": float("nan")}, "a positive number"),
        ({"rope_theta": -1}, "a positive number"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "got 'yarn', allowed is default, none, linear, llama3",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": 4}, "a mapping"),
        ({"rope_scaling": LLAMA["rope_scaling"] | {"high_freq_factor": 1.0}}, "more than low_freq_factor"),
        ({"hidden_act": "gelu"}, "allowed is 'silu'"),
        ({"attention_bias": True}, "allowed is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"eos_token_id": 128_256}, "a token id from 0 to 128255"),
    ],
)
def test_wrong_hf_configs_are_refused(changes: dict[str, object], why: str) -> None:
    """A model would be run as one that it is not, or its mistake shown as a traceback."""
    with pytest.raises(SpecError) as caught:
        of_hf(**changes)
    assert why in str(caught.value)
    assert str(caught.value).startswith("config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"general.architecture": "gpt2"}, "allowed is llama, qwen2, qwen3 (Llama, SmolLM2, Mistral"),
        ({"general.architecture": np.arange(9)}, "got 'a ndarray'"),
        ({"llama.attention.head_count": np.arange(30)}, "a whole number"),
        ({"llama.attention.value_length": 32}, "allowed is 64"),
        ({"llama.rope.dimension_count": 32}, "allowed is 64"),
        ({"llama.expert_count": 8}, "allowed is 0"),
        ({"split.count": 3}, "allowed is 0 or 1"),
        ({"llama.rope.scaling.type": "yarn"}, "allowed is none, linear"),
        ({"llama.rope.freq_base": float("inf")}, "a positive number"),
        ({"tokenizer.ggml.bos_token_id": 49_152}, "a token id from 0 to 49151"),
        ({"tokenizer.ggml.eos_token_id": np.arange(2)}, "a token id"),
    ],
)
def test_wrong_gguf_metadata_is_refused(changes: dict[str, object], why: str) -> None:
    """A model would be run as one that it is not, or its mistake shown as a traceback."""
    with pytest.raises(SpecError) as caught:
        config_from_gguf("m.gguf", SMOLLM2 | changes, ())
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
