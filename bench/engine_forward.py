"""How fast the embedded engine is: prefill and decode phase of the default model on one core, against what is possible.

Run with `python bench/engine_forward.py [MODEL.gguf]` (by default the default model, fetched if need be). The floor is
measured in the same run: OpenBLAS sgemm for arithmetic, one large dot product for reading memory. Of the prefill phase
it counts the arithmetic that one wanted row needs (the last layer needs only KV of the others); of a step of the decode
phase the larger of arithmetic and of reading weights and KV once. llama.cpp and torch run next to it where they are
installed.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when NumPy loads

import importlib.util
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phasesplit.engine.cache import KvCache
from phasesplit.engine.checkpoint import Checkpoint, open_checkpoint
from phasesplit.engine.fetch import TinySizes, write_tiny_model
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Batch
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.packed import PackedModel, packed_model
from speed import about_machine

PROMPTS = (64, 512, 1_518, 4_096)
BATCHES = (1, 4, 16, 32)
CONTEXT = 512
STEPS = 12
PREFILL_GOALS = {512: 0.95, 4_096: 0.85}
STEP_GOALS = {("float32", 1): 0.75, ("native", 1): 0.40, ("native", 16): 0.65, ("float32", 16): 0.65}


def main() -> None:
    """Print all tables."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    about_machine()
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else fetched()
    opened = open_checkpoint(path)
    flops_per_s, bytes_per_s = sgemm_flops_per_s(), read_bytes_per_s()
    print(f"floor:   sgemm {flops_per_s / 1e9:.0f} GFLOP/s, reading {bytes_per_s / 1e9:.1f} GB/s, one core")
    with tempfile.TemporaryDirectory() as directory:
        for precision in ("native", "float32"):
            model = packed_model(opened, Path(directory), precision)
            bench = Bench(model, flops_per_s, bytes_per_s)
            bench.prompt_table()
            bench.step_table()
            bench.overhead()
    if importlib.util.find_spec("xllamacpp"):
        llamacpp_tables(path)
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        torch_tables(opened)


def fetched() -> Path:
    """Return the default model."""
    from phasesplit.engine.fetch import default_model

    return default_model(say=print)


def sgemm_flops_per_s() -> float:
    """Return the best rate of a square product in float32."""
    a, b = (np.random.default_rng(seed).random((1024, 1024), dtype=np.float32) for seed in (1, 2))
    out = np.empty_like(a)
    return 2 * 1024**3 / best_s(lambda: np.matmul(a, b, out=out), 8)


def read_bytes_per_s() -> float:
    """Return the best rate of reading memory that no cache holds."""
    values = np.ones(64 << 20, dtype=np.float32)
    return values.nbytes / best_s(lambda: np.dot(values, values), 8)


def best_s(action: Callable[[], object], rounds: int) -> float:
    """Return how long the shortest of some runs took."""
    return min(times_s(action, rounds))


def times_s(action: Callable[[], object], rounds: int) -> list[float]:
    """Return how long this thread computed in each run, after one that is not counted: what others do counts less."""
    action()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return times


def rows_of(tokens_each: int, sequences: int, first: int, width: int) -> Batch:
    """Return a batch of so many tokens of each sequence, the last of each wanted; every sequence has its own blocks."""
    count = tokens_each * sequences
    return Batch(
        tokens=np.random.default_rng(1).integers(1_000, 20_000, count).astype(np.int32),
        positions=np.tile(np.arange(first, first + tokens_each, dtype=np.int32), sequences),
        owners=np.repeat(np.arange(sequences, dtype=np.int32), tokens_each),
        tables=np.arange(sequences * width, dtype=np.int32).reshape(sequences, width),
        wanted=np.arange(tokens_each - 1, count, tokens_each, dtype=np.int32),
    )


class Bench:
    """Figures of one model at one precision.

    Args:
        model: The weights.
        flops_per_s: What the core computes at best.
        bytes_per_s: What it reads at best.
    """

    def __init__(self, model: PackedModel, flops_per_s: float, bytes_per_s: float) -> None:
        self.model, self.flops_per_s, self.bytes_per_s = model, flops_per_s, bytes_per_s
        matrices = [
            panels
            for layer in model.layers
            for matrix in (layer.qkv, layer.attention_output, layer.gate_up, layer.down)
            for panels in matrix
        ]
        self.layer_values = sum(panels.rows * panels.columns for panels in matrices) // len(model.layers)
        self.head_values = sum(panels.rows * panels.columns for panels in model.output)
        self.weight_bytes = sum(panels.data.nbytes for panels in (*matrices, *model.output))

    def prefill_floor_s(self, tokens: int) -> float:
        """Return the time that the arithmetic of a prompt takes at the rate of sgemm."""
        config = self.model.config
        kv_values = 2 * config.kv_heads * config.head_dim * config.hidden
        pairs = tokens * (tokens + 1) / 2
        attention = 4 * pairs * config.query_heads * config.head_dim
        whole = (config.layers - 1) * (2 * tokens * self.layer_values + attention)
        last = 2 * tokens * kv_values + 2 * (self.layer_values - kv_values) + attention / pairs * tokens
        return (whole + last + 2 * self.head_values) / self.flops_per_s

    def step_floor_s(self, sequences: int, context: int) -> float:
        """Return the time that a step of the decode phase takes at least."""
        config = self.model.config
        kv_values = 2 * config.layers * config.kv_heads * config.head_dim * context
        attention = 4 * config.layers * config.query_heads * config.head_dim * context
        flops = sequences * (2 * (config.layers * self.layer_values + self.head_values) + attention)
        size_bytes = self.weight_bytes + sequences * 4 * kv_values
        return max(flops / self.flops_per_s, size_bytes / self.bytes_per_s)

    def prompt_table(self) -> None:
        """Print the speed of prompts computed in one iteration."""
        print(f"\nprefill, {self.model.precision}\n{'tokens':>8} {'tokens/s':>9} {'of sgemm':>9} {'goal':>6}")
        for tokens in PROMPTS:
            width = -(-tokens // BLOCK_TOKENS)
            forward = Forward(self.model, KvCache(self.model.config, width))
            batch = rows_of(tokens, 1, 0, width)
            took = best_s(lambda forward=forward, batch=batch: forward.run(batch), 2 if tokens > 600 else 6)
            goal = f"{PREFILL_GOALS[tokens]:.0%}" if tokens in PREFILL_GOALS else ""
            print(f"{tokens:>8,} {tokens / took:>9.0f} {self.prefill_floor_s(tokens) / took:>9.0%} {goal:>6}")

    def step_table(self) -> None:
        """Print the time of one step of the decode phase."""
        print(f"\ndecode, {self.model.precision}, context {CONTEXT}")
        print(f"{'batch':>8} {'best ms':>9} {'median':>9} {'of floor':>9} {'goal':>6}")
        for sequences in BATCHES:
            forward, step = self.at_context(sequences)
            times = times_s(lambda forward=forward, step=step: forward.run(step), STEPS)
            share = self.step_floor_s(sequences, CONTEXT) / min(times)
            goal = STEP_GOALS.get((self.model.precision, sequences))
            median = 1e3 * statistics.median(times)
            wished = "" if goal is None else f"{goal:.0%}"
            print(f"{sequences:>8} {1e3 * min(times):>9.1f} {median:>9.1f} {share:>9.0%} {wished:>6}")

    def at_context(self, sequences: int) -> tuple[Forward, Batch]:
        """Return sequences whose KV is there, and the step that computes one more token of each."""
        width = CONTEXT // BLOCK_TOKENS + 1
        forward = Forward(self.model, KvCache(self.model.config, sequences * width))
        forward.cache.values[:] = np.random.default_rng(2).random(forward.cache.values.shape[2], dtype=np.float32)
        return forward, rows_of(1, sequences, CONTEXT - 1, width)

    def overhead(self) -> None:
        """Print what is not arithmetic in a step: a step of as many layers of next to no width."""
        sizes = TinySizes(layers=self.model.config.layers, hidden=32, query_heads=1, kv_heads=1, head_dim=32, ffn=32)
        with tempfile.TemporaryDirectory() as directory:
            write_tiny_model(Path(directory) / "tiny.gguf", kind="Q4_1", sizes=sizes)
            tiny = packed_model(open_checkpoint(Path(directory) / "tiny.gguf"), Path(directory), self.model.precision)
            forward = Forward(tiny, KvCache(tiny.config, 1))
            batch = replace(rows_of(1, 1, 5, 1), tokens=np.zeros(1, dtype=np.int32))
            took = best_s(lambda: forward.run(batch), 200)
        print(f"of which calls between kernels: {1e3 * took:.2f} ms")


def llamacpp_tables(path: Path) -> None:
    """Print what llama.cpp does with the same file, on one core."""
    import xllamacpp

    settings: Any = xllamacpp.CommonParams()
    settings.model.path, settings.warmup, settings.n_batch, settings.n_ubatch = str(path), False, 4_096, 512
    settings.n_ctx, settings.n_parallel = (CONTEXT + 128) * max(BATCHES), max(BATCHES)
    settings.kv_unified = True
    settings.verbosity = -1
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)

    def timings(tokens: int, answer_tokens: int) -> dict[str, float]:
        prompt = np.random.default_rng(time.perf_counter_ns()).integers(1_000, 20_000, tokens).tolist()
        body = {"prompt": prompt, "n_predict": answer_tokens, "cache_prompt": False, "ignore_eos": True}
        request = urllib.request.Request(  # noqa: S310
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            found: dict[str, float] = json.load(answer)["timings"]
            return found

    print("\nllama.cpp, the same file, one thread")
    for tokens in PROMPTS:
        best = max(timings(tokens, 1)["prompt_per_second"] for _ in range(2))
        print(f"{tokens:>8,} {best:>9.0f} tokens/s")
    for sequences in BATCHES:
        # Prompts end one after the other: the last to end steps with all the others, for as long as they go on.
        with ThreadPoolExecutor(sequences) as pool:
            found = list(pool.map(lambda _: timings(CONTEXT - 20, 40), range(sequences)))
        print(f"{sequences:>8} {min(one['predicted_per_token_ms'] for one in found):>9.1f} ms a step")


def torch_tables(opened: Checkpoint) -> None:
    """Print what torch does with a model of the same sizes in float32, on one core."""
    import torch
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = opened.config
    sizes = LlamaConfig(
        vocab_size=config.vocab,
        hidden_size=config.hidden,
        intermediate_size=config.ffn,
        num_hidden_layers=config.layers,
        num_attention_heads=config.query_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_tokens,
        tie_word_embeddings=config.tied_embeddings,
    )
    model = LlamaForCausalLM(sizes).eval()
    print("\ntorch, random weights of the same sizes, float32, one thread")
    with torch.inference_mode():
        for tokens in PROMPTS:
            ids = torch.randint(0, config.vocab, (1, tokens))
            took = best_s(lambda ids=ids: model(ids, logits_to_keep=1), 2)
            print(f"{tokens:>8,} {tokens / took:>9.0f} tokens/s")
        for sequences in BATCHES:
            cache = DynamicCache()
            model(torch.randint(0, config.vocab, (sequences, CONTEXT - 1)), past_key_values=cache, logits_to_keep=1)
            ids = torch.randint(0, config.vocab, (sequences, 1))
            took = best_s(lambda ids=ids, cache=cache: model(ids, past_key_values=cache), STEPS)
            print(f"{sequences:>8} {1e3 * took:>9.1f} ms a step")


if __name__ == "__main__":
    main()
