"""The tiny random model: the same from the same seed, and complete."""

from pathlib import Path

import pytest

from obvious_forward import obvious_logits
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.fetch import TinySizes, tiny_vocabulary, write_tiny_model
from phasesplit.engine.gguf import WRITABLE


def test_same_seed_same_bytes(tmp_path: Path, tiny_path: Path) -> None:
    """A test would compare runs of two different models."""
    write_tiny_model(tmp_path / "a.gguf", seed=0)
    assert (tmp_path / "a.gguf").read_bytes() == tiny_path.read_bytes()
    write_tiny_model(tmp_path / "a.gguf", seed=1)
    assert (tmp_path / "a.gguf").read_bytes() != tiny_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


@pytest.mark.parametrize("kind", WRITABLE)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_kind_and_architecture_opens(tmp_path: Path, kind: str, architecture: str) -> None:
    """A test of the engine could not run on that kind of weights, or on that architecture."""
    sizes = TinySizes(architecture=architecture, layers=1, query_heads=6, kv_heads=3, head_dim=32, is_tied=False)
    write_tiny_model(tmp_path / "m.gguf", kind=kind, sizes=sizes)
    opened = open_checkpoint(tmp_path / "m.gguf")
    assert (opened.config.architecture, opened.config.layers, opened.config.head_dim) == (architecture, 1, 32)
    assert opened.weights.layers[0].query.kind.name == kind
    assert opened.weights.layers[0].query.shape == (192, 64)


def test_any_text_has_tokens(tiny_path: Path) -> None:
    """A test could not send the tiny model the text that it wants to."""
    tokenizer = open_checkpoint(tiny_path).tokenizer
    text = "the rain in Spain, 42 times\n日本 🎉"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert len(tiny_vocabulary()) == len(set(tiny_vocabulary())) == 300


LLAMA_CPP = [
    (
        "llama",
        "def fibonacci(n):",
        [
            176,
            34,
            34,
            10,
            121,
            227,
            267,
            162,
            102,
            243,
            34,
            121,
            131,
            227,
            109,
            183,
            170,
            121,
            227,
            20,
            176,
            126,
            169,
            10,
        ],
    ),
    (
        "llama",
        "Once upon a time",
        [
            10,
            220,
            261,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            196,
            162,
            50,
            50,
            50,
            50,
            222,
        ],
    ),
    (
        "qwen2",
        "def fibonacci(n):",
        [135, 68, 213, 142, 216, 29, 69, 191, 1, 1, 62, 29, 1, 191, 261, 73, 29, 201, 191, 261, 29, 191, 29, 201],
    ),
    (
        "qwen2",
        "Once upon a time",
        [
            142,
            142,
            142,
            142,
            142,
            142,
            142,
            142,
            163,
            163,
            163,
            142,
            142,
            142,
            142,
            26,
            299,
            99,
            26,
            283,
            78,
            27,
            66,
            19,
        ],
    ),
    (
        "qwen3",
        "def fibonacci(n):",
        [76, 124, 209, 42, 116, 168, 44, 172, 18, 18, 18, 18, 33, 104, 233, 115, 208, 259, 32, 115, 208, 229, 208, 208],
    ),
    (
        "qwen3",
        "Once upon a time",
        [201, 17, 169, 177, 151, 48, 252, 17, 208, 151, 48, 56, 169, 151, 159, 154, 17, 48, 56, 17, 189, 17, 48, 151],
    ),
]
"""Greedy tokens of llama.cpp (xllamacpp 2026.10.11549, KV cache in F32) for the tiny models of seed 0."""


@pytest.mark.parametrize(("architecture", "prompt", "expected"), LLAMA_CPP)
def test_means_what_llama_cpp_takes_it_for(tmp_path: Path, architecture: str, prompt: str, expected: list[int]) -> None:
    """Rows, biases, norms or rotation would be read otherwise than llama.cpp reads them."""
    sizes = TinySizes(architecture=architecture, is_tied=architecture == "llama")
    write_tiny_model(tmp_path / "m.gguf", sizes=sizes)
    opened = open_checkpoint(tmp_path / "m.gguf")
    tokens = opened.tokenizer.encode(prompt)
    prompt_tokens = len(tokens)
    while len(tokens) < prompt_tokens + len(expected):
        tokens.append(int(obvious_logits(opened.config, opened.weights, tokens)[-1].argmax()))
    assert tokens[prompt_tokens:] == expected
