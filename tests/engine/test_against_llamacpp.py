"""The default model against llama.cpp, which shares no code with the engine: the same greedy tokens.

Runs where the extra `llamacpp` is installed (`make test-extras`) and the default model has been fetched.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from forward_runs import greedy_tokens
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.gguf import open_gguf, write_gguf
from phasesplit.engine.packed import packed_model

llamacpp: Any = pytest.importorskip("xllamacpp", reason="needs the extra llamacpp")

NEW_TOKENS = 64
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea,",
    "Explain what a cache is to a child.",
    "1, 2, 3, 5, 8, 13,",
    "Water boils at",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\ndef softmax(x):\n",
    "The three laws of motion are:\n1.",
    "Q: Who wrote Hamlet?\nA:",
    "SELECT name, price FROM",
    "In 1969, two astronauts",
    "La capitale de l'Italie est",
    "A recipe for pancakes:\n- 2 eggs\n-",
    "To be, or not to be,",
    '{"name": "Ada", "age":',
    "The largest planet of the solar system",
    "She opened the door and saw",
    "Photosynthesis is the process by which",
    "x^2 - 5x + 6 = 0, so x =",
]


def llama_cpp_tokens(path: Path) -> list[list[int]]:
    """Return its greedy tokens for each prompt, none of which ends a text; KV is float32 and attention plain."""
    settings = llamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = str(path), 512, 1, False
    settings.cpuparams.n_threads = 1  # its threads wait by spinning, which takes minutes where cores are shared
    settings.flash_attn_type = llamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cache_type_k = settings.cache_type_v = llamacpp.ggml_type.GGML_TYPE_F32
    server = llamacpp.Server(settings)
    answers = []
    for prompt in PROMPTS:
        body = {"prompt": prompt, "n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True, "ignore_eos": True}
        request = urllib.request.Request(  # noqa: S310 (its own address, on this machine)
            f"{server.listening_address}/completion",
            json.dumps(body | {"cache_prompt": False}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            answers.append(json.load(answer)["tokens"])
    return answers


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_those_of_llama_cpp(default_model_path: Path, tmp_path: Path) -> None:
    """The engine would compute another model than the one in the file."""
    source = open_gguf(default_model_path)
    plain = {name: ("F32", tensor.float32()) for name, tensor in source.tensors.items()}
    write_gguf(tmp_path / "plain.gguf", dict(source.metadata), plain)  # llama.cpp rounds activations for other kinds
    expected = llama_cpp_tokens(tmp_path / "plain.gguf")
    opened = open_checkpoint(default_model_path)
    model = packed_model(opened, tmp_path)
    ends = model.config.stop_token_ids
    ours = [greedy_tokens(model, opened.tokenizer.encode(prompt), NEW_TOKENS, ends) for prompt in PROMPTS]
    different = [prompt for prompt, one, other in zip(PROMPTS, ours, expected, strict=True) if one != other]
    assert not different
