"""What a Llama-family model is made of, from GGUF metadata or from a Hugging Face config.json."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Values of general.architecture that are read; Mistral and SmolLM2 files say llama."""
HF_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Values of model_type that are read; SmolLM2 says llama, Qwen2.5 says qwen2."""

_LARGEST = 1 << 24
"""Of any size: a larger one is a corrupt file."""
_LONGEST_CONTEXT = 1 << 24
_FAMILY = " (Llama, SmolLM2, Mistral, Qwen2, Qwen2.5, Qwen3)"
_GGUF_SCALINGS = ("none", "linear")
_HF_SCALINGS = {"default": "none", "none": "none", "linear": "linear", "llama3": "llama3"}
_LLAMA3_FIELDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those of the pre-training.

    Attributes:
        kind: `none`, `linear` (every frequency divided by `factor`) or `llama3` (only slow ones, with a ramp between).
        factor: By how much, > 0.
        low_freq_factor: llama3: waves longer than `original_context` / this are divided by `factor`.
        high_freq_factor: llama3: waves shorter than `original_context` / this stay as they are.
        original_context: llama3: context of the pre-training, in tokens.
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def divisors(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each frequency is divided by, of the same shape, > 0.

        Args:
            frequencies: Rotary frequencies before scaling, in radians a token, > 0.

        Source: transformers, modeling_rope_utils.py, `_compute_llama3_parameters`.
        """
        if self.kind == "none":
            return np.ones_like(frequencies)
        if self.kind == "linear":
            return np.full_like(frequencies, self.factor)
        turns = self.original_context * frequencies / (2 * math.pi)
        ramp = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)
        return 1.0 / ((1.0 - ramp) / self.factor + ramp)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder-only transformer of the Llama family.

    Attributes:
        architecture: `llama`, `mistral`, `qwen2` or `qwen3`, as the file names it.
        layers: Transformer layers.
        hidden: Width of the residual stream.
        query_heads: Attention query heads, a multiple of `kv_heads`.
        kv_heads: Key and value heads.
        head_dim: Width of one head, even; `query_heads` x `head_dim` may differ from `hidden`.
        ffn: Width of the feed-forward layer.
        vocab: Rows of the token embedding.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: How they are stretched. GGUF files of Llama 3 carry the divisors as a tensor instead.
        rms_eps: Added to the mean square in RMSNorm.
        qkv_bias: Whether queries, keys and values have biases.
        qk_norm: Whether each head's query and key pass an RMSNorm before the rotation.
        tied_embeddings: Whether the output matrix is the token embedding.
        context_tokens: Longest prompt plus output; no longer than the sliding window, where the model has one, since
            within it full attention is the same.
        bos_token_id: Token that starts a text, where there is one.
        stop_token_ids: Tokens that end an answer.
    """

    architecture: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    rope_scaling: RopeScaling = RopeScaling()
    rms_eps: float
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    context_tokens: int
    bos_token_id: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def rope_frequencies(self, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
        """Return the angle by which position 1 turns each pair of values of a head, shape [head_dim / 2], in radians.

        Args:
            divisors: What to divide each frequency by, shape [head_dim / 2]; by default as `rope_scaling` says.

        Source: RoFormer (Su et al. 2021), section 3.2.2.
        """
        plain = self.rope_theta ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        return plain / (self.rope_scaling.divisors(plain) if divisors is None else divisors.astype(np.float64))


class _Fields:
    """Values of a metadata mapping, checked as they are taken."""

    def __init__(self, where: str, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def place(self, name: str) -> str:
        return f"{self.where}, {self.prefix}{name}"

    def get(self, name: str) -> Any:
        return self.values.get(self.prefix + name)

    def bad(self, name: str, value: object, allowed: str) -> SpecError:
        """Return the error for a value, with what does not fit a line (an array, a long text) shortened."""
        is_plain = value is None or isinstance(value, int | float | str)
        shown = value if is_plain else f"a {type(value).__name__}"
        return SpecError.bad(self.place(name), shown[:80] if isinstance(shown, str) else shown, allowed)

    def choice(self, name: str, allowed: Collection[str], default: str | None = None, note: str = "") -> str:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            raise self.bad(name, value, ", ".join(allowed) + note)
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 1, most: int = _LARGEST) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise SpecError(f"{self.where}: {self.prefix}{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.bad(name, value, f"a whole number from {least} to {most}")
        return value

    def positive(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise SpecError(f"{self.where}: {self.prefix}{name} is missing")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.bad(name, value, "a positive number")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.bad(name, value, "true or false")
        return value

    def must_be(self, name: str, *allowed: object) -> None:
        """Refuse a feature of the model that the engine does not compute."""
        value = self.get(name)
        if isinstance(value, np.ndarray) or value not in allowed:
            raise self.bad(name, value, " or ".join(repr(one) for one in allowed if one is not None))

    def part(self, name: str) -> "_Fields":
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(name, value, "a mapping")
        return _Fields(self.place(name), value or {})

    def tokens(self, *names: str, vocab: int) -> tuple[int, ...]:
        """Return the token ids under some names, each a number, a list of numbers or absent."""
        found: list[int] = []
        for name in names:
            value = self.get(name)
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise self.bad(name, token, f"a token id from 0 to {vocab - 1}")
                found.append(token)
        return tuple(dict.fromkeys(found))


def _checked(where: str, config: ModelConfig) -> ModelConfig:
    if config.query_heads % config.kv_heads:
        raise SpecError.bad(f"{where}, KV heads", config.kv_heads, f"a divisor of the {config.query_heads} query heads")
    if config.head_dim % 2:
        raise SpecError.bad(f"{where}, head width", config.head_dim, "an even number")
    return config


def config_from_gguf(where: str, metadata: Mapping[str, Any], tensors: Collection[str]) -> ModelConfig:
    """Return the model that a GGUF file describes.

    Args:
        where: The file, for messages.
        metadata: Its metadata.
        tensors: Names of its tensors, which show what the metadata does not: biases, norms of heads, tied embeddings.

    Raises:
        SpecError: The architecture or a feature of it is not supported, or a value is missing or not allowed.
    """
    architecture = _Fields(where, metadata).choice("general.architecture", GGUF_ARCHITECTURES, note=_FAMILY)
    own = _Fields(where, metadata, f"{architecture}.")
    vocabulary = _Fields(where, metadata, "tokenizer.ggml.")
    hidden, query_heads = own.whole("embedding_length"), own.whole("attention.head_count")
    kv_heads = own.whole("attention.head_count_kv", query_heads)
    head_dim = own.whole("attention.key_length", max(hidden // query_heads, 1))
    own.must_be("attention.value_length", None, head_dim)
    own.must_be("rope.dimension_count", None, head_dim)
    own.must_be("expert_count", None, 0)
    _Fields(where, metadata).must_be("split.count", None, 0, 1)
    scaling = own.choice("rope.scaling.type", _GGUF_SCALINGS, "none")
    listed = metadata.get("tokenizer.ggml.tokens")
    vocab = len(listed) if isinstance(listed, list) else own.whole("vocab_size")
    context = own.whole("context_length", most=_LONGEST_CONTEXT)
    bos = vocabulary.tokens("bos_token_id", vocab=vocab)
    config = ModelConfig(
        architecture=architecture,
        layers=own.whole("block_count"),
        hidden=hidden,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=own.whole("feed_forward_length"),
        vocab=vocab,
        rope_theta=own.positive("rope.freq_base", 10_000.0),
        rope_scaling=RopeScaling(kind=scaling, factor=own.positive("rope.scaling.factor", 1.0)),
        rms_eps=own.positive("attention.layer_norm_rms_epsilon"),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tied_embeddings="output.weight" not in tensors,
        context_tokens=min(context, own.whole("attention.sliding_window", context, least=0) or context),
        bos_token_id=bos[0] if bos else None,
        stop_token_ids=vocabulary.tokens("eos_token_id", "eot_token_id", vocab=vocab),
    )
    return _checked(where, config)


def config_from_hf(where: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Return the model that a Hugging Face config.json describes.

    Args:
        where: The file, for messages.
        config: Its content.
        generation: Content of generation_config.json next to it, whose end-of-text tokens are added.

    Raises:
        SpecError: The architecture or a feature of it is not supported, or a value is missing or not allowed.
    """
    own = _Fields(where, config)
    kind = own.choice("model_type", HF_MODEL_TYPES, note=_FAMILY)
    own.must_be("hidden_act", None, "silu")
    own.must_be("attention_bias", None, False)
    own.must_be("mlp_bias", None, False)
    own.must_be("partial_rotary_factor", None, 1.0)
    own.must_be("quantization_config", None)
    hidden, query_heads, vocab = (own.whole(name) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    context = own.whole("max_position_embeddings", 2048 if kind == "llama" else 32_768, most=_LONGEST_CONTEXT)
    is_windowed = kind == "mistral" or own.switch("use_sliding_window")
    window = own.whole("sliding_window", context, most=_LONGEST_CONTEXT) if is_windowed else context
    bos = own.tokens("bos_token_id", vocab=vocab)
    stops = own.tokens("eos_token_id", vocab=vocab)
    if generation:
        stops += _Fields(f"{where} (generation_config.json)", generation).tokens("eos_token_id", vocab=vocab)
    theta, scaling = _hf_rope(own)
    return _checked(
        where,
        ModelConfig(
            architecture=kind,
            layers=own.whole("num_hidden_layers"),
            hidden=hidden,
            query_heads=query_heads,
            kv_heads=own.whole("num_key_value_heads", query_heads),
            head_dim=own.whole("head_dim", max(hidden // query_heads, 1)),
            ffn=own.whole("intermediate_size"),
            vocab=vocab,
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=own.positive("rms_norm_eps", 1e-6),
            qkv_bias=kind == "qwen2",
            qk_norm=kind == "qwen3",
            tied_embeddings=own.switch("tie_word_embeddings"),
            context_tokens=min(context, window),
            bos_token_id=bos[0] if bos else None,
            stop_token_ids=tuple(dict.fromkeys(stops)),
        ),
    )


def _hf_rope(own: _Fields) -> tuple[float, RopeScaling]:
    """Return theta and scaling, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    has_both = own.get("rope_parameters") is not None
    given = own.part("rope_parameters" if has_both else "rope_scaling")
    theta = (given if has_both else own).positive("rope_theta", 10_000.0)
    older = "type" if given.get("rope_type") is None else "rope_type"
    name = _HF_SCALINGS[given.choice(older, _HF_SCALINGS, "default")]
    if name == "none":
        return theta, RopeScaling()
    factor = given.positive("factor")
    if name == "linear":
        return theta, RopeScaling(kind=name, factor=factor)
    low, high, original = (given.positive(field) for field in _LLAMA3_FIELDS)
    if high <= low:
        raise given.bad("high_freq_factor", high, f"more than low_freq_factor {low}")
    return theta, RopeScaling(
        kind=name, factor=factor, low_freq_factor=low, high_freq_factor=high, original_context=int(original)
    )
