"""The embedded engine as a machine that is timed: its forward pass in this process, without sockets or scheduling.

After `EngineMachine` come the facts that a profile holds next to times: model, KV memory, link, start-up and power.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phasesplit.domain.machine import blocks_for
from phasesplit.domain.model import transformer_parameters
from phasesplit.engine.cache import KvCache, blocks_for_bytes, kv_layout
from phasesplit.engine.cached_file import cache_directory
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Batch
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.packed import PackedModel, packed_model
from phasesplit.errors import PhasesplitError, SpecError
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.calibration import measure_link
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.profiling.adaptive import Bounds
from phasesplit.profiling.fitting import Shape
from phasesplit.profiling.power import PowerMeter

if TYPE_CHECKING:
    from phasesplit.domain.machine import Link
    from phasesplit.io.profile_schema import KvFacts, LinkFacts, ModelFacts, PowerFacts


_LEAST_BLOCKS = 2
_MOST_REQUESTS = 64
_TILED_ROWS = 24
"""Rows go through the kernels in tiles of 6: above four tiles, what the last one costs is little."""
_SEED = 1
_COMPILING_TOKENS = 40
_INTERRUPTED_SHARE = 0.005
"""Of a run's time that its thread did not run: above it, another process had the core."""


def opened(path: Path) -> PackedModel:
    """Return a model as workers of the embedded engine have it.

    Args:
        path: Of the model.

    Raises:
        SpecError: It cannot be read or run.
    """
    return packed_model(open_checkpoint(path), cache_directory() / "packed")


class EngineMachine:
    """Times `Forward.run` over KV that holds random numbers, as much of it as a worker would have.

    A forward pass never waits. Where a run took longer than its thread ran, another process had the core: the time of
    the thread counts then, and it is reported how often.

    Args:
        model: The model.
        kv_bytes: Memory for KV.

    Attributes:
        model: The same.
        blocks: KV blocks.
        bounds: What can be asked for.

    Raises:
        SpecError: The memory is too small.
    """

    def __init__(self, model: PackedModel, kv_bytes: int) -> None:
        self.model = model
        self.blocks = blocks_for_bytes(model.config, kv_bytes)
        if self.blocks < _LEAST_BLOCKS:
            layout = kv_layout(model.config, "")
            least_bytes = _LEAST_BLOCKS * layout.layers * layout.block_bytes
            raise SpecError.bad("--kv-memory", kv_bytes, f"{least_bytes} bytes or more for this model")
        cache = KvCache(model.config, self.blocks)
        # Pages that were never written are all the same page, which would stay in the processor's caches.
        cache.values[:] = np.random.default_rng(_SEED).random(cache.values.shape[2], dtype=np.float32)
        self._forward = Forward(model, cache)
        kv_tokens = self.blocks * BLOCK_TOKENS
        self.bounds = Bounds(
            longest_tokens=min(model.config.context_tokens, kv_tokens),
            kv_tokens=kv_tokens,
            most_prompt_tokens=min(model.config.context_tokens, kv_tokens),
            most_requests=min(_MOST_REQUESTS, self.blocks),
            tiled_rows=_TILED_ROWS,
        )
        self._runs = self._interrupted = 0
        self._asked: tuple[Shape, Batch] | None = None
        for tokens in (1, min(_COMPILING_TOKENS, self.bounds.longest_prompt_tokens)):  # no run may wait for a compiler
            self._forward.run(batch_of(Shape(prompts=1, prompt_tokens=tokens), self.blocks, model.config.vocab))

    @property
    def interrupted_share(self) -> float | None:
        """Share of the runs during which another process had the core; None before the first."""
        return self._interrupted / self._runs if self._runs else None

    def run(self, shape: Shape) -> Sequence[float]:
        """Compute an iteration once and return its seconds."""
        if self._asked is None or self._asked[0] != shape:
            self._asked = shape, batch_of(shape, self.blocks, self.model.config.vocab)
        batch = self._asked[1]
        began_s, thread_began_s = time.perf_counter(), time.thread_time()
        self._forward.run(batch)
        taken_s, thread_s = time.perf_counter() - began_s, time.thread_time() - thread_began_s
        self._runs += 1
        if thread_s < (1 - _INTERRUPTED_SHARE) * taken_s:
            self._interrupted += 1
            return (thread_s,)
        return (taken_s,)


def batch_of(shape: Shape, blocks: int, vocabulary: int) -> Batch:
    """Return a batch of that shape: every sequence has blocks of its own, the last row of each is wanted.

    Args:
        shape: The shape.
        blocks: Blocks of the cache; sequences share some where it has too few.
        vocabulary: Tokens are below it.
    """
    rows = [_Rows(shape.behind_tokens, shape.prompt_tokens)] * shape.prompts
    rows += [_Rows(shape.context_tokens - 1, 1)] * shape.requests
    counts = np.array([one.count for one in rows])
    width = blocks_for(max(one.first + one.count for one in rows), BLOCK_TOKENS)
    return Batch(
        tokens=np.random.default_rng(_SEED).integers(0, vocabulary, counts.sum()).astype(np.int32),
        positions=np.concatenate([np.arange(one.first, one.first + one.count, dtype=np.int32) for one in rows]),
        owners=np.repeat(np.arange(len(rows), dtype=np.int32), counts),
        tables=(np.arange(len(rows) * width, dtype=np.int32) % blocks).reshape(len(rows), width),
        wanted=(np.cumsum(counts) - 1).astype(np.int32),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    first: int
    count: int


_LINK_BYTES = 64 << 20
_LINK_RUNS, _USUAL_BYTES = 8, 10e6
_START_UP_RUNS = 3
_START_UP_LIMIT_S = 120.0
_FIRST_TOKEN = (
    "import sys; from pathlib import Path;"
    "from phasesplit.profiling.engine_machine import compute_first_token;"
    "compute_first_token(Path(sys.argv[1]))"
)


def model_facts(name: str, model: PackedModel) -> "ModelFacts":
    """Return the model as planner and simulator know models; KV values and weights in the bytes that they take here.

    Args:
        name: Of the model.
        model: The model.
    """
    from phasesplit.io.profile_schema import ModelFacts

    config = model.config
    layout = kv_layout(config, "")
    parameters, active = transformer_parameters(
        layers=config.layers,
        hidden=config.hidden,
        query_heads=config.query_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        feed_forward=config.ffn,
        vocabulary=config.vocab,
        tied_embeddings=config.tied_embeddings,
    )
    matrices = [model.output, *(getattr(layer, name) for layer in model.layers for name in _MATRICES)]
    sizes = {
        "layers": config.layers,
        "hidden": config.hidden,
        "query_heads": config.query_heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "parameters": parameters,
        "active_parameters": active,
        "weights_bytes": sum(part.data.nbytes for matrix in matrices for part in matrix),
        "value_bytes": layout.block_bytes / (2 * config.kv_heads * config.head_dim * layout.block_tokens),
        "max_context_tokens": config.context_tokens,
    }
    return ModelFacts(name=name, digest=model.identity, sizes={key: float(value) for key, value in sizes.items()})


_MATRICES = ("qkv", "attention_output", "gate_up", "down")


def kv_facts(machine: EngineMachine) -> "KvFacts":
    """Return how much KV there is room for."""
    from phasesplit.io.profile_schema import KvFacts

    layout = kv_layout(machine.model.config, "")
    return KvFacts(
        blocks=machine.blocks,
        block_tokens=layout.block_tokens,
        bytes_per_token=layout.layers * layout.block_bytes / layout.block_tokens,
        source="--kv-memory of the profile, whole blocks",
    )


def link_facts(model: PackedModel) -> "LinkFacts":
    """Return how fast KV moves between two workers of this host, through shared memory.

    Raises:
        PhasesplitError: It cannot be measured.
        OSError: The same.
    """
    from phasesplit.io.profile_schema import LinkFacts

    # Other processes only ever make a transfer slower.
    link = min((host_link(model) for _ in range(_LINK_RUNS)), key=_usual_transfer_s)
    return LinkFacts(
        bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        per_layer_s=link.per_layer_s,
        streaming_slowdown=min(link.streaming_slowdown, 1.0),
        source="measured: shared memory of one host, both ends on one core",
    )


def _usual_transfer_s(link: "Link") -> float:
    return link.latency_s + _USUAL_BYTES / link.bytes_per_s


def host_link(model: PackedModel) -> "Link":
    """Return the link between two workers of this host, as workers themselves measure it at their start."""
    layout = kv_layout(model.config, model.identity)
    blocks = max(4, _LINK_BYTES // (layout.layers * layout.block_bytes))
    with tempfile.TemporaryDirectory(prefix="phasesplit-") as folder:
        info = PeerInfo(machine="profile", epoch=1, layout=layout, blocks=blocks)
        endpoint = KvEndpoint(info, SharedPool(layout, blocks), BlockPool(blocks), directory=folder)
        try:
            return measure_link(endpoint, transport="unix")
        finally:
            endpoint.close()


def start_up_s(path: Path) -> float:
    """Return the time from starting a process to its first token, the shortest of a few; caches are warm by then.

    Args:
        path: Of the model.

    Raises:
        SpecError: The process fails.
    """
    taken = []
    for _ in range(_START_UP_RUNS):
        began_s = time.perf_counter()
        # Our own interpreter and a constant; the path is an argument of it.
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-c", _FIRST_TOKEN, str(path)], capture_output=True, text=True, timeout=_START_UP_LIMIT_S
        )
        taken.append(time.perf_counter() - began_s)
        if done.returncode:
            raise SpecError(f"the engine does not start: {(done.stderr.strip().splitlines() or ['no reason'])[-1]}")
    return min(taken)


def compute_first_token(path: Path) -> None:
    """Open a model and compute one token of it."""
    model = opened(path)
    batch = batch_of(Shape(requests=1, context_tokens=1), 1, model.config.vocab)
    Forward(model, KvCache(model.config, 1)).run(batch)


def power_facts(machine: EngineMachine, meter: PowerMeter, sleep: Callable[[float], None] = time.sleep) -> "PowerFacts":
    """Return mean power while idle, over prefill iterations and over decode iterations, of a second each."""
    from phasesplit.io.profile_schema import PowerFacts

    prompt = Shape(prompts=1, prompt_tokens=min(256, machine.bounds.longest_prompt_tokens))
    token = Shape(requests=min(8, machine.bounds.most_requests), context_tokens=min(256, machine.bounds.kv_tokens // 8))
    return PowerFacts(
        idle_w=meter.mean_w(lambda: sleep(0.1)),
        prefill_w=meter.mean_w(lambda: machine.run(prompt)),
        decode_w=meter.mean_w(lambda: machine.run(token)),
        source=meter.source,
    )


def attempted(what: str, unknown: dict[str, str], measure: Callable[[], object]) -> object | None:
    """Return what a measurement gives, or None where it fails, its reason kept in `unknown`."""
    try:
        return measure()
    except (PhasesplitError, OSError, subprocess.SubprocessError) as problem:
        unknown[what] = f"not readable here, because {problem}" if what == "power" else str(problem)
        return None
