"""Two machines without vLLM: the connector's halves over arrays, and a step by step stand-in for vLLM's scheduler."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.vllm.connector_machine import worker_half
from phasesplit.vllm.scheduler_half import SchedulerHalf, StepOrders
from phasesplit.vllm.settings import Settings
from phasesplit.vllm.staging import HostDevice

LAYERS, BLOCKS, BLOCK_TOKENS, LONGEST_TOKENS = 3, 24, 4, 32
TIMEOUTS = {"lease_s": 2.0, "heartbeat_s": 0.2, "answer_s": 2.0, "transfer_s": 2.0}


def layout(**changed: Any) -> KvLayout:
    """Return a small layout, with some fields changed."""
    fields = {
        "model": "m", "layers": LAYERS, "kv_heads": 1, "head_dim": 8, "dtype": "float32",
        "block_tokens": BLOCK_TOKENS, "block_layout": "test",
    }  # fmt: skip
    return KvLayout(**(fields | changed))


def _nothing(layer: int) -> None:
    """Do nothing between layers."""


@dataclass(eq=False)
class Request:
    """A request as vLLM's scheduler holds it."""

    request_id: str
    num_prompt_tokens: int
    kv_transfer_params: object
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    blocks: tuple[int, ...] = ()


class Half:
    """One machine: both halves of its connector, and KV blocks that are arrays."""

    def __init__(self, name: str, directory: Path, *, seed: int, **settings: Any) -> None:
        kv_layout, key = settings.pop("layout", layout()), settings.pop("key", None)
        self.name, self.epoch = name, 1
        random = np.random.default_rng(seed)
        self.kv: NDArray[np.uint8] = random.integers(0, 256, (LAYERS, BLOCKS, kv_layout.block_bytes), np.uint8)
        self.scheduler = SchedulerHalf(BLOCK_TOKENS)
        given = Settings(
            machine=name, epoch=1, sockets=str(directory), timeouts=TIMEOUTS, **({"threshold_tokens": 1} | settings)
        )
        self.worker = worker_half(
            given, kv_layout, LONGEST_TOKENS, lambda pool: HostDevice(list(self.kv), pool.blocks), key=key
        )
        self.slots, self.endpoint = self.worker._slots, self.worker._transfers._endpoint
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()

    def step(
        self, computed: dict[str, tuple[int, int]] | None = None, blocks: dict[str, tuple[int, ...]] | None = None,
        between_layers: Callable[[int], None] = _nothing,
    ) -> StepOrders:  # fmt: skip
        """Run one step: for each request the tokens computed before, and those that this step computes."""
        computed = computed or {}
        scheduled = {name: tokens for name, (_, tokens) in computed.items()}
        before = [(name, done) for name, (done, _) in computed.items()]
        step = self.scheduler.step(scheduled, before, lambda name: (blocks or {})[name])
        self.worker.begin(step)
        for layer in range(LAYERS if computed else 0):
            between_layers(layer)
            self.worker.layer_computed(layer)
        self.worker.end()
        ended = self.worker.take_ended()
        self.sent |= ended.sent
        self.received |= ended.received
        self.failed |= ended.failed
        return step

    def until(self, is_so: Callable[[], bool], *others: "Half", within_s: float = 60.0) -> None:
        """Run empty steps until something holds."""
        end_s = time.monotonic() + within_s
        while not is_so():
            assert time.monotonic() < end_s, "it does not come about"
            for half in (self, *others):
                half.step()

    def is_clean(self) -> bool:
        """Return whether no staging slot is taken."""
        return not self.slots.used and not self.endpoint.free.used

    def prefill_leg(self, key: str, tokens: int, to: "Half", changed: dict[str, Any] | None = None) -> Request:
        """Return a new request whose KV goes to another machine."""
        wants = {
            "do_remote_decode": True, "key": key, "peer": to.name, "peer_epoch": to.epoch,
            "address": to.endpoint.address,
        }  # fmt: skip
        request = Request(f"p.{key}", tokens, wants | (changed or {}))
        self.scheduler.arrived(request)
        return request

    def decode_leg(self, key: str, tokens: int, by: "Half", blocks: tuple[int, ...], cached: int = 0) -> Request:
        """Return a new request that waits, with its blocks, for KV of another machine."""
        request = Request(
            f"d.{key}", tokens, {"do_remote_prefill": True, "key": key, "peer": by.name, "peer_epoch": by.epoch}
        )
        self.scheduler.arrived(request)
        awaited = self.scheduler.awaited_tokens(request, cached)
        self.scheduler.allocated(request, blocks, awaited)
        return request

    def finish(self, request: Request, blocks: tuple[int, ...], status: str = "FINISHED_LENGTH_CAPPED") -> bool:
        """Let a request end; return whether its blocks are kept."""
        request.status = SimpleNamespace(name=status)
        return self.scheduler.finished(request, blocks)

    def close(self) -> None:
        """End it."""
        self.worker.close()
