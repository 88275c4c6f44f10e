"""A tiny random model, made from a seed: for tests, and for a first run where there is no network.

It has every part of a model of the Llama family at small sizes, and writes nonsense.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.blocks import Values
from phasesplit.engine.gguf_writer import Entry, write_gguf
from phasesplit.engine.tokens import letters_of_bytes

_MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "a t", "Ġ s", "e n", "o r", "i s", "a n", "e s")
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GAIN = 4.0
"""Of what a layer adds to the residual stream: at 1, the last token is mostly its own successor."""
_ARCHITECTURES_WITH_BIAS, _ARCHITECTURES_WITH_HEAD_NORM = ("qwen2",), ("qwen3",)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model.

    Attributes:
        architecture: `llama`, `qwen2` (biases) or `qwen3` (norms of heads).
        layers: Transformer layers.
        hidden: Width of the residual stream; a multiple of 32 where the kind is quantised.
        query_heads: Attention query heads.
        kv_heads: Key and value heads, a divisor of `query_heads`.
        head_dim: Width of one head, even.
        ffn: Width of the feed-forward layer, a multiple of 32 where the kind is quantised.
        context_tokens: Longest prompt plus output.
        is_tied: Whether the output matrix is the token embedding.
    """

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 160
    context_tokens: int = 2048
    is_tied: bool = True


def tiny_vocabulary() -> list[str]:
    """Return its tokens: three special ones, the 256 bytes, the merges, then words that no text becomes, 300 in all."""
    merged = [merge.replace(" ", "") for merge in _MERGES]
    words = [*_CONTROL, *letters_of_bytes(), *merged]
    return words + [f"<|unused_{index}|>" for index in range(300 - len(words))]


def write_tiny_model(path: Path, *, seed: int = 0, kind: str = "F32", sizes: TinySizes | None = None) -> None:
    """Write a tiny random model as a GGUF file; the same arguments give the same bytes.

    Args:
        path: Where; an existing file is replaced.
        seed: Of the weights.
        kind: Of the matrices, one of `gguf_writer.WRITABLE`.
        sizes: Its sizes; by default 2 layers of width 64.

    Raises:
        OSError: It cannot be written.
    """
    sizes = sizes or TinySizes()
    tensors = _tensors(np.random.default_rng(seed), kind, sizes)
    write_gguf(path, _metadata(sizes), tensors)


def _metadata(sizes: TinySizes) -> dict[str, Entry]:
    words = tiny_vocabulary()
    start = f"{sizes.architecture}."
    kinds: NDArray[np.int32] = np.array([3 if word.startswith("<|") else 1 for word in words], dtype=np.int32)
    return {
        "general.architecture": sizes.architecture,
        "general.name": "phasesplit tiny random model",
        f"{start}block_count": sizes.layers,
        f"{start}context_length": sizes.context_tokens,
        f"{start}embedding_length": sizes.hidden,
        f"{start}feed_forward_length": sizes.ffn,
        f"{start}attention.head_count": sizes.query_heads,
        f"{start}attention.head_count_kv": sizes.kv_heads,
        f"{start}attention.key_length": sizes.head_dim,
        f"{start}attention.value_length": sizes.head_dim,
        f"{start}rope.dimension_count": sizes.head_dim,
        f"{start}rope.freq_base": 10_000.0,
        f"{start}attention.layer_norm_rms_epsilon": 1e-5,
        f"{start}vocab_size": len(words),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _tensors(rng: np.random.Generator, kind: str, sizes: TinySizes) -> dict[str, tuple[str, Values]]:
    """Return random tensors, scaled so that activations keep their size and the answers vary."""
    hidden, ffn = sizes.hidden, sizes.ffn
    queries, keys = sizes.query_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    vocab = len(tiny_vocabulary())

    def matrix(rows: int, columns: int, gain: float = 1.0) -> tuple[str, Values]:
        return kind, (gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(length: int, middle: float) -> tuple[str, Values]:
        return "F32", (middle + 0.1 * rng.standard_normal(length)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab, hidden)}
    for layer in range(sizes.layers):
        start = f"blk.{layer}."
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{start}attn_{part}.weight"] = matrix(width, hidden)
            if sizes.architecture in _ARCHITECTURES_WITH_BIAS:
                tensors[f"{start}attn_{part}.bias"] = vector(width, 0.0)
            if sizes.architecture in _ARCHITECTURES_WITH_HEAD_NORM and part != "v":
                tensors[f"{start}attn_{part}_norm.weight"] = vector(sizes.head_dim, 1.0)
        tensors[f"{start}attn_norm.weight"] = vector(hidden, 1.0)
        tensors[f"{start}attn_output.weight"] = matrix(hidden, queries, _GAIN)
        tensors[f"{start}ffn_norm.weight"] = vector(hidden, 1.0)
        tensors[f"{start}ffn_gate.weight"] = matrix(ffn, hidden)
        tensors[f"{start}ffn_up.weight"] = matrix(ffn, hidden)
        tensors[f"{start}ffn_down.weight"] = matrix(hidden, ffn, _GAIN)
    tensors["output_norm.weight"] = vector(hidden, 1.0)
    if not sizes.is_tied:
        tensors["output.weight"] = matrix(vocab, hidden)
    return tensors
