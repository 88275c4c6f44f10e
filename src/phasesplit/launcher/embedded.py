"""A worker that computes in its own process: `EmbeddedWorker` makes its parts in this order.

1. The model, its KV memory and the endpoint for transfers.
2. The compiled kernels (`warm_up`).
3. The shortest prompt whose KV leaves layer by layer, from the measured link and the time of prefill (`calibrated`).
4. The engine, its thread, and the worker that the HTTP server sees.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from phasesplit.engine import kernels
from phasesplit.engine.cache import KvCache, blocks_for_bytes, kv_layout
from phasesplit.engine.cached_file import alone, cache_directory
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.engine_events import Event
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Batch, Computes
from phasesplit.engine.kernels import compiling
from phasesplit.engine.loop import Engine
from phasesplit.engine.paced import Paced
from phasesplit.engine.packed import packed_model
from phasesplit.engine.server_worker import Worker
from phasesplit.engine.thread import EngineThread
from phasesplit.engine.tokens import Tokenizer
from phasesplit.engine.wire import Served
from phasesplit.errors import SpecError
from phasesplit.kv_transfer.block_pool import BlockPool, Use
from phasesplit.kv_transfer.calibration import link_text, measure_link
from phasesplit.kv_transfer.chooser import Floats, ruled_tokens, threshold_tokens
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.outgoing import Sent
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.scheduler.rules import Rules

_IMPORTED_S = time.monotonic()
_LEAST_BLOCKS = 4  # to measure a link with


Happened = list[tuple[Callable[[Event], None], Event]]
"""What has happened to requests, each with the function that takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is given at its start.

    Attributes:
        name: Its name, unique in the cluster.
        epoch: Which start of it this is.
        home: The role it comes with: `prefill`, `decode`, `mixed` or `unsplit`.
        model: Path of the model.
        model_name: Name under which clients ask for it.
        kv_bytes: Memory for KV.
        rules: Settings of the machine-level scheduler.
        has_prefix_cache: Whether it keeps the KV of prompts.
        core_share: What it uses of its core at most, 0 to 1.
        sockets: Directory of the Unix sockets over which workers of this host share memory.
        transfer_host: Address at which workers of other hosts reach its KV.
    """

    name: str
    epoch: int
    home: str
    model: Path
    model_name: str
    kv_bytes: int
    rules: Rules
    has_prefix_cache: bool
    core_share: float
    sockets: str
    transfer_host: str


class EmbeddedWorker:
    """A worker's parts, made in order and closed in the opposite one.

    Args:
        settings: What it is given.
        deliver: Takes the engine's events, on the engine's thread.
        say: Called with what takes time.
        key: The cluster's join key, which machines prove to one another before KV moves between them, or None.

    Attributes:
        worker: The worker as its server sees it.

    Raises:
        SpecError: The model or the settings are wrong.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        deliver: Callable[[Happened], None],
        say: Callable[[str], None],
        key: str | None = None,
    ) -> None:
        checkpoint = open_checkpoint(settings.model)
        model = packed_model(checkpoint, cache_directory() / "packed")
        config = model.config
        layout = kv_layout(config, model.identity)
        blocks = blocks_for_bytes(config, settings.kv_bytes)
        if blocks < _LEAST_BLOCKS:
            least_bytes = _LEAST_BLOCKS * layout.layers * layout.block_bytes
            raise SpecError.bad("--kv-memory", settings.kv_bytes, f"{least_bytes} bytes or more for this model")
        try:
            pool, free = SharedPool(layout, blocks), BlockPool(blocks)
        except OSError as problem:
            allowed = f"what this machine has memory for ({problem.strerror})"
            raise SpecError.bad("--kv-memory", settings.kv_bytes, allowed) from None
        info = PeerInfo(machine=settings.name, epoch=settings.epoch, layout=layout, blocks=blocks)
        self._endpoint = KvEndpoint(
            info,
            pool,
            free,
            directory=settings.sockets,
            tcp=(settings.transfer_host, 0),
            secret=key.encode() if key else None,
        )
        cache = KvCache(config, blocks, memory=pool.blocks)
        forward: Computes = Forward(model, cache)
        if settings.core_share < 1.0:
            forward = Paced(forward, settings.core_share)
        warm_up(say)
        link = calibrated(self._endpoint, forward, settings.rules, transport="unix")
        self._endpoint.outgoing.sent = Sent()  # what was sent to measure is no traffic
        engine = Engine(
            forward,
            cache,
            free,
            config,
            settings.rules,
            endpoint=self._endpoint,
            threshold_tokens=link.threshold_tokens,
            token_bytes=lambda token: _text(checkpoint.tokenizer, token),
            prefix_identity=model.identity.encode() if settings.has_prefix_cache else None,
        )
        self._thread = EngineThread(engine, self._endpoint, deliver)
        served = Served(
            models=(settings.model_name,),
            vocab=config.vocab,
            context_tokens=config.context_tokens,
            encode=lambda text, has_start: checkpoint.tokenizer.encode(text, has_start=has_start),
        )
        constant: dict[str, Any] = {
            "model": settings.model_name,
            "layout": asdict(layout),
            "address": self._endpoint.address,
            "block_tokens": layout.block_tokens,
            "threshold_tokens": link.threshold_tokens,
            "link": link.text,
            "start_up_s": round(start_up_s(), 3),
        }
        self.worker = Worker(
            name=settings.name,
            epoch=settings.epoch,
            home=settings.home,
            thread=self._thread,
            load_tokenizer=lambda: checkpoint.tokenizer,
            served=served,
            constant=constant,
            changing=self._transfers,
        )

    def _transfers(self) -> dict[str, Any]:
        """Return what has left so far; the engine's thread writes it, one number at a time."""
        sent = self._endpoint.outgoing.sent
        return {
            "bytes_sent": sent.size_bytes,
            "failed": sent.failed,
            "exposed_s": sent.exposed_s,
            "last_exposed_s": sent.last_exposed_s,
        }

    def start(self) -> None:
        """Start the engine's thread, and load in another one what the first request will need."""
        self._thread.start()
        threading.Thread(target=self._get_rest, name="rest", daemon=True).start()

    def _get_rest(self) -> None:
        """Get what a worker can be ready without: what reads requests, and the tokenizer, for a gateway sends ids."""
        import phasesplit.protocol.completions  # noqa: F401

        _ = self.worker.tokenizer

    def close(self) -> None:
        """End the engine's thread, and close sockets and memory."""
        self._thread.stop(2.0)
        self._endpoint.close()


def _text(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the text of a token, in which stop strings are looked for."""
    return b"" if token in tokenizer.special else tokenizer.token_bytes(token)


def warm_up(say: Callable[[str], None]) -> None:
    """Load all compiled code, the first time after compiling it.

    Of the workers that start at the same time on a cold host one compiles, and the others wait for it.

    Args:
        say: Called with a line where it will take a while.
    """
    if compiling.CACHE_IS_WARM or compiling.CACHE_DIRECTORY is None:
        kernels.warm_up()
        return
    say("compiling once for this version and processor, about 10 s ...")
    with alone(compiling.CACHE_DIRECTORY / "live", say=lambda _: None):
        kernels.warm_up()


class Calibrated(NamedTuple):
    """What was measured.

    Attributes:
        threshold_tokens: Shortest prompt that is sent layer by layer.
        text: The link, for people.
    """

    threshold_tokens: int
    text: str


def calibrated(endpoint: KvEndpoint, forward: Computes, rules: Rules, *, transport: str) -> Calibrated:
    """Measure the link and the prefill phase, in about 0.1 s; nothing else may use either meanwhile.

    The prefill phase is taken to grow with the prompt alone: attention, which grows faster, would make layer-wise
    transfers pay even earlier.

    Args:
        endpoint: The machine's endpoint.
        forward: Its model.
        rules: Their `transfer` and `layerwise_from_tokens` overrule what was measured.
        transport: The way, as the endpoint's address calls it.

    Raises:
        TransferError: A transfer failed, or there is no room for one.
    """
    s_per_token = _prefill_s_per_token(endpoint, forward)

    def prefill_time_s(tokens: Floats) -> Floats:
        return s_per_token * tokens

    link = measure_link(endpoint, transport=transport)
    threshold = ruled_tokens(rules)
    if threshold is None:
        threshold = threshold_tokens(endpoint.info.layout, prefill_time_s, link)
    return Calibrated(threshold, link_text(link, threshold))


def _prefill_s_per_token(endpoint: KvEndpoint, forward: Computes) -> float:
    """Return the seconds that a token of a prompt of one block keeps this thread computing: waiting is left out."""
    tokens = endpoint.info.layout.block_tokens
    own = endpoint.free.hold("calibration", Use.COMPUTE, 1)
    batch = Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        owners=np.zeros(tokens, np.int32),
        tables=np.array([own.blocks], np.int32),
        wanted=np.array([tokens - 1], np.int32),
    )
    since_s = time.thread_time()
    forward.run(batch)
    took_s = time.thread_time() - since_s
    endpoint.free.give(own)
    return took_s / tokens


def start_up_s() -> float:
    """Return the seconds since this process began, where the system does not say since this module was imported.

    Source: Linux, proc(5): the 22nd field of /proc/self/stat, in clock ticks since the boot.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
