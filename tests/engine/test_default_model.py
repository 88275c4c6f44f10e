"""The default model: what it says, that its bits do not depend on how it is run, and the memory that it takes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forward_runs import Run, all_logits, greedy_tokens, run_all
from phasesplit.engine.cache import KvCache
from phasesplit.engine.checkpoint import Checkpoint, open_checkpoint
from phasesplit.engine.forward import Forward
from phasesplit.engine.kernels import IS_COMPILED, warm_up
from phasesplit.engine.packed import PackedModel, packed_model

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="the interpreted kernels take minutes for this model")

RNG = np.random.default_rng(9)
TOKENS = [int(token) for token in RNG.integers(1_000, 40_000, 150)]
OTHERS = [[int(token) for token in RNG.integers(1_000, 40_000, count)] for count in (3, 70)]
MOST_RESIDENT_KIB = 400 * 1024

LLAMA_CPP = [
    ("The capital of France is", "7042 30 198 198 504 2988 314 42 216 34 32 33 40 29 32 33 29 34 34 216 33 34 42 33"),
    (
        "def fibonacci(n):",
        "472 585 304 1758 216 32 42 448 1003 216 33 472 1003 304 1672 3987 46477 24 94 731 216 33 25 198",
    ),
    (
        "Explain what a cache is to a child.",
        "198 198 49 13842 314 253 940 2678 338 7821 4540 13399 940 281 253 970 338 2518 327 3758 25880 282 338 940",
    ),
    (
        "La capitale de l'Italie est",
        "16520 26411 385 6337 287 23 419 26411 385 6337 367 216 33 32 32 32 28 265 23 381 425 9143 3804 367",
    ),
]
"""Greedy tokens of llama.cpp (xllamacpp 2026.10.11549) for this model, its weights and its KV cache in F32."""

LONG_PROMPT = """
import sys
from dataclasses import replace
from pathlib import Path

from forward_runs import Run, batch_of
from phasesplit.engine.cache import KvCache
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.forward import Forward
from phasesplit.engine.packed import packed_model

model = packed_model(open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2]))
batch = batch_of([Run([7] * 1024, range(32), ())], [range(1024)])
Forward(model, KvCache(model.config, 4096)).run(replace(batch, wanted=batch.wanted[-1:]))
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""
"""Prints how many KiB were resident at most: weights, code and 1,024 tokens of a cache that has room for 131,072."""


@pytest.fixture(scope="module")
def opened(default_model_path: Path) -> Checkpoint:
    """Return the default model."""
    return open_checkpoint(default_model_path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the packed model is kept."""
    return tmp_path_factory.mktemp("packed")


@pytest.fixture(scope="module")
def model(opened: Checkpoint, directory: Path) -> PackedModel:
    """Return the default model, packed."""
    return packed_model(opened, directory)


@pytest.mark.parametrize(("prompt", "expected"), LLAMA_CPP)
def test_says_what_llama_cpp_says(opened: Checkpoint, model: PackedModel, prompt: str, expected: str) -> None:
    """The first answer that a newcomer sees would be nonsense."""
    tokens = [int(token) for token in expected.split()]
    assert greedy_tokens(model, opened.tokenizer.encode(prompt), len(tokens)) == tokens


def test_same_bits_in_chunks_and_in_company(model: PackedModel) -> None:
    """The split cluster would answer otherwise than one machine."""
    whole = all_logits(model, TOKENS)
    ours = Run(TOKENS, [11, 2, 7, 5, 0], (33, 64, 1))
    others = [Run(OTHERS[0], [1], (2, 1)), Run(OTHERS[1], [3, 4, 6], (40, 1))]
    run_all(Forward(model, KvCache(model.config, 12)), [others[0], ours, others[1]], width=8)
    assert (np.array(ours.logits) == whole).all()


def test_a_long_prompt_fits_into_little_memory(default_model_path: Path, model: PackedModel, directory: Path) -> None:
    """Two workers would not fit into a small machine."""
    command = [sys.executable, "-c", LONG_PROMPT, str(default_model_path), str(directory)]
    support = str(Path(__file__).parents[1])
    warm_up()
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": support}
    )
    assert int(done.stdout) < MOST_RESIDENT_KIB
