"""A worker put together: the model, its KV memory, the transfers, the engine and its thread."""

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasesplit.engine.cache import KvCache, blocks_for_bytes, kv_layout
from phasesplit.engine.cached_file import cache_directory
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.events import Event
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Computes
from phasesplit.engine.loop import Engine
from phasesplit.engine.paced import Paced
from phasesplit.engine.packed import packed_model
from phasesplit.engine.server_worker import Worker
from phasesplit.engine.thread import EngineThread
from phasesplit.engine.tokens import Tokenizer
from phasesplit.engine.wire import Served
from phasesplit.errors import SpecError
from phasesplit.scheduling.rules import Rules
from phasesplit.serving.calibrating import calibrated
from phasesplit.serving.start_up import start_up_s
from phasesplit.serving.warming import warm_up
from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.endpoint import KvEndpoint
from phasesplit.transfer.layout import PeerInfo
from phasesplit.transfer.outgoing import Sent
from phasesplit.transfer.shared_memory import SharedPool

Happened = list[tuple[Callable[[Event], None], Event]]
"""What has happened to requests, and who is to be told of each."""

_LEAST_BLOCKS = 4  # to measure a link with


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a worker is told at its start.

    Attributes:
        name: Its name, unique in the cluster.
        epoch: Which start of it this is.
        home: The role it comes with: `prompt`, `token`, `mixed` or `unsplit`.
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
        settings: What it is told.
        deliver: Takes the engine's events, on the engine's thread.
        say: Told what takes time.
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
        """Start the engine's thread, and get beside it what the first request will need."""
        self._thread.start()
        threading.Thread(target=self._get_rest, name="rest", daemon=True).start()

    def _get_rest(self) -> None:
        """Get what a worker can be ready without: what reads requests, and the tokenizer, for a gateway sends ids."""
        import phasesplit.protocol.completions  # noqa: F401

        _ = self.worker.tokenizer

    def close(self) -> None:
        """End the engine's thread, and let go of sockets and memory."""
        self._thread.stop(2.0)
        self._endpoint.close()


def _text(tokenizer: Tokenizer, token: int) -> bytes:
    """Return the text of a token, in which stop strings are looked for."""
    return b"" if token in tokenizer.special else tokenizer.token_bytes(token)
