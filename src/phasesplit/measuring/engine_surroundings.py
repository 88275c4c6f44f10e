"""What a profile of the embedded engine says besides times: KV memory, the link, start-up, power, the model."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.domain.model import transformer_parameters
from phasesplit.engine.cache import KvCache, kv_layout
from phasesplit.engine.forward import Forward
from phasesplit.engine.packed import PackedModel
from phasesplit.errors import PhasesplitError, SpecError
from phasesplit.measuring.engine_machine import EngineMachine, batch_of, opened
from phasesplit.measuring.iterations import Shape
from phasesplit.measuring.power import PowerMeter
from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.calibration import measure_link
from phasesplit.transfer.endpoint import KvEndpoint
from phasesplit.transfer.layout import PeerInfo
from phasesplit.transfer.shared_memory import SharedPool

if TYPE_CHECKING:
    from phasesplit.domain.link import Link
    from phasesplit.files.profile_schema import KvFacts, LinkFacts, ModelFacts, PowerFacts

_LINK_BYTES = 64 << 20
_LINK_RUNS, _USUAL_BYTES = 8, 10e6
_START_UP_RUNS = 3
_START_UP_LIMIT_S = 120.0
_FIRST_TOKEN = (
    "import sys; from pathlib import Path;"
    "from phasesplit.measuring.engine_surroundings import compute_first_token;"
    "compute_first_token(Path(sys.argv[1]))"
)


def model_facts(name: str, model: PackedModel) -> "ModelFacts":
    """Return the model as planner and simulator know models; KV values and weights in the bytes that they take here.

    Args:
        name: Of the model.
        model: The model.
    """
    from phasesplit.files.profile_schema import ModelFacts

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
    from phasesplit.files.profile_schema import KvFacts

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
    from phasesplit.files.profile_schema import LinkFacts

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
    """Return mean power while idle, over prompt iterations and over token iterations, of a second each."""
    from phasesplit.files.profile_schema import PowerFacts

    prompt = Shape(prompts=1, prompt_tokens=min(256, machine.bounds.longest_prompt_tokens))
    token = Shape(requests=min(8, machine.bounds.most_requests), context_tokens=min(256, machine.bounds.kv_tokens // 8))
    return PowerFacts(
        idle_w=meter.mean_w(lambda: sleep(0.1)),
        prompt_w=meter.mean_w(lambda: machine.run(prompt)),
        token_w=meter.mean_w(lambda: machine.run(token)),
        source=meter.source,
    )


def attempted(what: str, unknown: dict[str, str], measure: Callable[[], object]) -> object | None:
    """Return what a measurement gives, or None where it fails, its reason kept in `unknown`."""
    try:
        return measure()
    except (PhasesplitError, OSError, subprocess.SubprocessError) as problem:
        unknown[what] = f"not readable here, because {problem}" if what == "power" else str(problem)
        return None
