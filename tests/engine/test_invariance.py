"""The same sequence gives the same bits, however it is cut up, whatever it is computed with, wherever its KV lies."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forward_runs import Run, all_logits, batch_of, run_all
from phasesplit.engine.cache import KvCache
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.fetch import TinySizes, write_tiny_model
from phasesplit.engine.forward import Forward
from phasesplit.engine.packed import PackedModel, packed_model

RNG = np.random.default_rng(7)
TOKENS = [int(token) for token in RNG.integers(0, 300, 101)]
OTHERS = [[int(token) for token in RNG.integers(0, 300, count)] for count in (1, 33, 64, 90)]
MODELS = {
    "llama-Q4_1": TinySizes(query_heads=6, kv_heads=3, head_dim=16),
    "qwen3-F32": TinySizes(architecture="qwen3", head_dim=18, hidden=72, ffn=100),
    "qwen2-Q8_0": TinySizes(architecture="qwen2", is_tied=False),
}

BITS = """
import sys
from pathlib import Path

from forward_runs import all_logits
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.packed import packed_model

path, *tokens = sys.argv[1:]
model = packed_model(open_checkpoint(Path(path)), Path(path).parent)
print(all_logits(model, [int(token) for token in tokens], (30, 1)).tobytes().hex())
"""
"""Prints the bits of the logits of the tokens that follow the model's path."""


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    """Return tiny models of several kinds, packed."""
    directory = tmp_path_factory.mktemp("invariance")
    kind = request.param.split("-")[1]
    write_tiny_model(directory / "m.gguf", kind=kind, sizes=MODELS[request.param])
    return packed_model(open_checkpoint(directory / "m.gguf"), directory)


@pytest.fixture(scope="module")
def whole(model: PackedModel) -> bytes:
    """Return the bits of the logits of all tokens, computed in one iteration alone."""
    return all_logits(model, TOKENS).tobytes()


def in_company(model: PackedModel, *, chunks: tuple[int, ...], order: int, width: int | None = None) -> bytes:
    """Return the bits of the logits of `TOKENS` among other sequences, its blocks and theirs drawn by `order`."""
    blocks = np.random.default_rng(order).permutation(20).tolist()
    ours = Run(TOKENS, blocks[:4], chunks)
    others = [Run(tokens, blocks[4 + 3 * at : 7 + 3 * at], (5, 40, 1)) for at, tokens in enumerate(OTHERS)]
    runs = [*others[:order], ours, *others[order:]]
    run_all(Forward(model, KvCache(model.config, 20)), runs, width)
    return np.array(ours.logits).tobytes()


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 64])
def test_chunks(model: PackedModel, whole: bytes, chunk: int) -> None:
    """A prompt computed in chunks, or token by token, would be answered otherwise than one computed whole."""
    assert all_logits(model, TOKENS, (chunk,)).tobytes() == whole


@pytest.mark.parametrize("order", [0, 1, 4])
def test_others_and_blocks(model: PackedModel, whole: bytes, order: int) -> None:
    """An answer would depend on who else is served, or on which blocks of the cache were free."""
    assert in_company(model, chunks=(50, 1), order=order) == whole


def test_width_of_tables(model: PackedModel, whole: bytes) -> None:
    """An answer would depend on how long the longest other request may become."""
    assert in_company(model, chunks=(1 << 20,), order=2, width=61) == whole


def test_what_was_in_the_blocks_before(model: PackedModel, whole: bytes) -> None:
    """An answer would depend on whose keys and values lay in its blocks before."""
    forward = Forward(model, KvCache(model.config, 4))
    run_all(forward, [Run([7] * 128, [3, 2, 1, 0], (128,))])
    again = Run(TOKENS, [0, 1, 2, 3], (60, 41))
    run_all(forward, [again])
    assert np.array(again.logits).tobytes() == whole


def test_rows_in_any_order(model: PackedModel, whole: bytes) -> None:
    """An answer would depend on the order in which an iteration lists its rows."""
    rows = np.random.default_rng(3).permutation(len(TOKENS)).astype(np.int32)
    batch = batch_of([Run(TOKENS, range(4), ())], [range(len(TOKENS))])
    mixed = replace(
        batch,
        tokens=batch.tokens[rows],
        positions=batch.positions[rows],
        owners=batch.owners[rows],
        wanted=np.argsort(rows).astype(np.int32),
    )
    logits = Forward(model, KvCache(model.config, 4)).run(mixed)
    assert logits.tobytes() == whole


def test_two_halves_on_two_machines(model: PackedModel, whole: bytes) -> None:
    """A request whose prefill phase ran elsewhere would be answered otherwise than one that stayed."""
    here, there = Forward(model, KvCache(model.config, 4)), Forward(model, KvCache(model.config, 9))
    first = Run(TOKENS[:70], [0, 1, 2], (70,))
    run_all(here, [first])
    there.cache.pool[:, [8, 5, 6]] = here.cache.pool[:, :3]
    second = Run(TOKENS, [8, 5, 6, 1], (1,), list(first.logits))
    run_all(there, [second])
    assert np.array(second.logits).tobytes() == whole


@pytest.mark.parametrize("name", MODELS)
def test_compiled_or_not(tmp_path: Path, name: str) -> None:
    """A machine whose processor the kernels are not written for would answer otherwise than the others."""
    write_tiny_model(tmp_path / "m.gguf", kind=name.split("-")[1], sizes=replace(MODELS[name], layers=1))
    command = [sys.executable, "-c", BITS, str(tmp_path / "m.gguf"), *map(str, TOKENS[:40])]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PHASESPLIT_JIT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    model = packed_model(open_checkpoint(tmp_path / "m.gguf"), tmp_path)
    assert bytes.fromhex(done.stdout) == all_logits(model, TOKENS[:40]).tobytes()
