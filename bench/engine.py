"""How fast the engine's kernels are, against the lower bounds of one core, measured in the same run.

Run with `python bench/engine.py [MODEL.gguf]`; without a model, matrices of the default model's shapes are made up. A
product cannot be faster than reading its weights once, nor than its multiplications at the rate of OpenBLAS; the share
is of the slower of the two. Times are of the processor, not of the clock on the wall, and figures the best of several
rounds in which lower bounds and kernels take turns, because a shared machine changes from second to second.
"""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.kernels import CACHE_IS_WARM, attend, warm_up
from phasesplit.engine.packed import Matrix, multiply, pack
from phasesplit.engine.quant_blocks import KINDS, Tensor
from speed import about_machine

Values = NDArray[np.float32]

ROWS = (1, 4, 16, 64, 512)
GOALS = {("float32", 1): 0.75, ("native", 1): 0.40, ("float32", 16): 0.65, ("native", 16): 0.65}
GOALS |= {(precision, rows): 0.95 for precision in ("float32", "native") for rows in (512,)}
SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
"""Of a layer of SmolLM2-135M: outputs and inputs."""
LAYERS = 30
HEAD = (49152, 576)
HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS = 9, 3, 64, 32
ROUNDS = 7


def main() -> None:
    """Print all tables."""
    about_machine()
    began = time.perf_counter()
    warm_up()
    print(f"kernels {'loaded' if CACHE_IS_WARM else 'compiled'} in {time.perf_counter() - began:.2f} s")
    floors = measured_floors()
    print(
        f"floors of one core: {floors.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{floors.flops / 1e9:.0f} GFLOP/s sgemm (OpenBLAS, 512 rows)"
    )
    tensors = list(model_tensors(Path(sys.argv[1])) if len(sys.argv) > 1 else made_up_tensors())
    for precision in ("native", "float32"):
        products([pack(*group, is_float32=precision == "float32") for group in tensors], precision)
    attention()


@dataclass(frozen=True)
class LowerBounds:
    """What one core does at most.

    Attributes:
        read_bytes_per_s: Reading memory in order.
        flops: float32 operations a second of OpenBLAS, 512 rows by the model's widest matrix.
    """

    read_bytes_per_s: float
    flops: float


def best(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the shortest time of a call, in seconds."""
    times_s = []
    for _ in range(rounds):
        began = time.thread_time()
        call()
        times_s.append(time.thread_time() - began)
    return min(times_s)


_READ = np.ones(1 << 25, np.int64)  # 256 MiB, every page its own: untouched pages are all the same zeros
_WIDE = [np.ones(shape, np.float32) for shape in ((512, 576), (576, 3072), (512, 3072))]


def measured_floors() -> LowerBounds:
    """Return the floors as they are now."""
    x, w, out = _WIDE
    return LowerBounds(
        read_bytes_per_s=_READ.nbytes / best(lambda: _READ.max(), 3),
        flops=2 * x.size * w.shape[1] / best(lambda: np.matmul(x, w, out=out), 5),
    )


def beside_floors(call: Callable[[], object], rounds: int = ROUNDS) -> tuple[float, LowerBounds]:
    """Return the shortest time of a call, in seconds, and the best floors, measured in turns."""
    took_s, found = [], []
    for _ in range(rounds):
        found.append(measured_floors())
        took_s.append(best(call, 1))
    read, flops = max(one.read_bytes_per_s for one in found), max(one.flops for one in found)
    return min(took_s), LowerBounds(read_bytes_per_s=read, flops=flops)


def made_up_tensors() -> Iterable[list[Tensor]]:
    """Yield the default model's matrices with random numbers: Q4_1, and the output matrix Q8_0."""
    rng = np.random.default_rng(0)

    def quantised(kind: str, rows: int, columns: int) -> Tensor:
        blocks = rng.integers(0, 256, (rows * columns // 32, KINDS[kind].block_bytes), dtype=np.uint8)
        scales = 2 if kind == "Q4_1" else 1
        blocks[:, : 2 * scales] = np.full((len(blocks), scales), 0.01, np.float16).view(np.uint8)
        return Tensor("made up", KINDS[kind], (rows, columns), blocks.reshape(rows, -1))

    for _ in range(LAYERS):
        for rows, columns in SHAPES.values():
            yield [quantised("Q4_1", rows, columns)]
    yield [quantised("Q8_0", *HEAD)]


def model_tensors(path: Path) -> Iterable[list[Tensor]]:
    """Yield a model's matrices, those with the same input together."""
    weights = open_checkpoint(path).weights
    for layer in weights.layers:
        yield from ([layer.query, layer.key, layer.value], [layer.output], [layer.gate, layer.up], [layer.down])
    yield [weights.output]


def products(matrices: list[Matrix], precision: str) -> None:
    """Print the products of one iteration with every matrix of the model, once each."""
    size_bytes = sum(part.data.nbytes for matrix in matrices for part in matrix)
    weights = sum(part.rows * part.columns for matrix in matrices for part in matrix)
    print(f"\nproducts with all matrices, {precision}: {weights / 1e6:.0f} M weights in {size_bytes / 1e6:.0f} MB")
    print("  rows        ms     GB/s  GFLOP/s  of the floor  goal")
    for rows in ROWS:
        rounds = 3 if rows == max(ROWS) else ROUNDS
        inputs = {columns: random(rows, columns) for columns in {matrix[0].columns for matrix in matrices}}
        outputs = {width: np.empty((rows, width), np.float32) for width in {width_of(matrix) for matrix in matrices}}
        pairs = [(inputs[matrix[0].columns], matrix, outputs[width_of(matrix)]) for matrix in matrices]
        took_s, floors = beside_floors(partial(multiply_all, pairs), rounds)
        share = max(size_bytes / floors.read_bytes_per_s, 2 * weights * rows / floors.flops) / took_s
        goal = GOALS.get((precision, rows))
        print(
            f"  {rows:4} {took_s * 1e3:9.2f} {size_bytes / took_s / 1e9:8.1f} {2 * weights * rows / took_s / 1e9:8.1f}"
            f" {share:13.0%}  {'' if goal is None else f'{goal:.0%}'}"
        )


def multiply_all(pairs: list[tuple[Values, Matrix, Values]]) -> None:
    """Compute a product with every matrix."""
    for x, matrix, out in pairs:
        multiply(x, matrix, out)


def width_of(matrix: Matrix) -> int:
    """Return a matrix's outputs."""
    return sum(part.rows for part in matrix)


def random(*shape: int) -> Values:
    """Return standard normal numbers."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def attention() -> None:
    """Print attention of one layer: prompt chunks against the rate of sgemm, single tokens against reading the KV."""
    print("\nattention of one layer")
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for first in (0, 1536, 3584):
        tokens, blocks = 512, (first + 512) // BLOCK_TOKENS
        pool = random(1, blocks, 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS)
        positions = np.arange(first, first + tokens, dtype=np.int32)
        table = np.arange(blocks, dtype=np.int32)[None].copy()
        arguments = (random(tokens, width), pool, 0, table, np.zeros(tokens, np.int32), positions, HEADS, KV_HEADS)
        out = np.empty((tokens, HEADS * HEAD_DIM), np.float32)
        took_s, floors = beside_floors(partial(attend, *arguments, out))
        work = 4 * HEAD_DIM * HEADS * int((positions + 1).sum())
        rate, share = work / took_s / 1e9, work / took_s / floors.flops
        print(f"  prompt {first:5} to {first + tokens:5}  {took_s * 1e3:7.2f} ms  {rate:5.1f} GFLOP/s  {share:4.0%}")
    for batch, context in ((1, 512), (16, 512), (32, 512), (1, 4096)):
        blocks, layers = context // BLOCK_TOKENS, 8
        pool = random(layers, batch * blocks, 2 * KV_HEADS * HEAD_DIM * BLOCK_TOKENS)
        table = np.arange(batch * blocks, dtype=np.int32).reshape(batch, blocks)
        row = np.arange(batch, dtype=np.int32)
        positions = np.full(batch, context - 1, np.int32)
        query, out = random(batch, width), np.empty((batch, HEADS * HEAD_DIM), np.float32)

        def all_layers(
            pool: Values = pool,
            table: NDArray[np.int32] = table,
            row: NDArray[np.int32] = row,
            positions: NDArray[np.int32] = positions,
            query: Values = query,
            out: Values = out,
        ) -> None:
            for layer in range(len(pool)):
                attend(query, pool, layer, table, row, positions, HEADS, KV_HEADS, out)

        took_s, floors = beside_floors(all_layers)
        rate, share = pool.nbytes / took_s / 1e9, pool.nbytes / took_s / floors.read_bytes_per_s
        print(
            f"  {batch:2} tokens at {context:5}      {took_s / layers * 1e6:7.0f} us  {rate:5.1f} GB/s     {share:4.0%}"
        )


if __name__ == "__main__":
    main()
