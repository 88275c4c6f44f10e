"""Engines in this process: with a forward pass that checks the KV it reads, or with a real one, alone or as a pair."""

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from invariants import check_blocks, check_machine
from phasesplit.engine.cache import KvCache, kv_layout
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.engine_events import Event, Failed, Finished, KvLeft, PromptScored, Refused, Token
from phasesplit.engine.iteration import Batch, Computes
from phasesplit.engine.loop import Engine
from phasesplit.engine.sampling import Sampling
from phasesplit.engine.wire import WorkerRequest
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import TransferTimeouts
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.protocol.worker import Address, Scored, SendKv, TakeKv
from phasesplit.scheduler.rules import Batching, Rules
from waiting import eventually

BLOCK = 32
TINY = ModelConfig(
    architecture="llama", layers=2, hidden=8, query_heads=1, kv_heads=1, head_dim=2, ffn=8, vocab=300,
    rope_theta=1e4, rms_eps=1e-5, context_tokens=2048, stop_token_ids=(2,),
)  # fmt: skip
GREEDY = Sampling(temperature=0.0)
TURNS = 20_000


class StandIn:
    """Writes each token and its place as its KV; logits depend on all the KV that a row reads, which must be right."""

    def __init__(self, config: ModelConfig, cache: KvCache) -> None:
        self._config, self._values = config, cache.values
        self.rows: list[int] = []

    def run(self, batch: Batch, after_layer: Callable[[int], None] | None = None) -> NDArray[np.float32]:
        self.rows.append(len(batch.tokens))
        blocks = batch.tables[batch.owners, batch.positions // BLOCK]
        for layer in range(self._config.layers):
            for block, position, token in zip(blocks, batch.positions, batch.tokens, strict=True):
                self._values[layer, block, position % BLOCK] = token
                self._values[layer, block, BLOCK + position % BLOCK] = position
            if after_layer is not None:
                after_layer(layer)
        return np.array([self._logits(batch, row) for row in batch.wanted], np.float32).reshape(-1, self._config.vocab)

    def _logits(self, batch: Batch, row: int) -> NDArray[np.float32]:
        count = int(batch.positions[row]) + 1
        table = batch.tables[batch.owners[row], : -(-count // BLOCK)]
        seen = self._values[:, table, : 2 * BLOCK].reshape(self._config.layers, -1, 2, BLOCK)
        tokens, places = (seen[:, :, part].reshape(self._config.layers, -1)[:, :count] for part in (0, 1))
        assert (places == np.arange(count)).all(), "KV of another place"
        assert (tokens == tokens[0]).all(), "layers do not agree"
        digest = blake2b(tokens[0].tobytes(), digest_size=8).digest()
        return np.random.default_rng(int.from_bytes(digest)).standard_normal(self._config.vocab).astype(np.float32)


class Machine:
    """An engine with its memory, and an endpoint if it has a name."""

    def __init__(
        self,
        name: str = "",
        *,
        blocks: int = 200,
        config: ModelConfig = TINY,
        forward: Callable[[ModelConfig, KvCache], Computes] = StandIn,
        batching: Batching = Batching.CHUNKED,
        batch_prompt_tokens: int = 2_048,
        epoch: int = 1,
        way: str = "shared-memory",
        folder: str = "",
        timeouts: TransferTimeouts | None = None,
        **options: Any,
    ) -> None:
        layout = kv_layout(config, "tiny")
        self.name, self.epoch, self.blocks = name, epoch, blocks
        self.memory = SharedPool(layout, blocks)
        self.free = BlockPool(blocks)
        cache = KvCache(config, blocks, memory=self.memory.blocks)
        self.endpoint = None
        if name:
            self.endpoint = KvEndpoint(
                PeerInfo(machine=name, epoch=epoch, layout=layout),
                self.memory,
                self.free,
                directory=folder if way == "shared-memory" else None,
                tcp=("127.0.0.1", 0) if way == "tcp" else None,
                timeouts=timeouts or TransferTimeouts(),
                poison=forward is StandIn,  # not-a-number, which kernels multiply by zero
            )
        rules = Rules(
            batching=batching, unsplit_batching=batching, batch_prompt_tokens=batch_prompt_tokens, block_tokens=BLOCK
        )
        self.forward = forward(config, cache)
        self.engine = Engine(
            self.forward, cache, self.free, config, rules, endpoint=self.endpoint, poison=True,
            token_bytes=lambda token: bytes([97 + token % 26]), **options,
        )  # fmt: skip

    def close(self) -> None:
        """Give back every handle, once the books of the blocks agree."""
        self.require_consistent()
        if self.endpoint is not None:
            self.endpoint.close()
        self.memory.close()

    def require_empty(self) -> None:
        """Fail unless nothing is held or booked any more."""
        facts = self.engine.facts()
        assert facts.held == {}
        assert (facts.used_blocks, facts.running, facts.waiting_prompts, facts.pending_tokens) == (0, 0, 0, 0)
        assert self.free.free + facts.kept_blocks == self.blocks
        machine = self.engine._scheduler.ledger.machines
        for name in ("committed_blocks", "prefill_requests", "decode_requests", "pending_output_tokens", "arriving"):
            assert machine[name].tolist() == [0, 0], name
        assert machine["departing"].tolist() == [0, 0]

    def require_consistent(self) -> None:
        """Fail unless the ledger's accounts are those of its requests, and cover every block that is really held."""
        check_machine(self.engine._scheduler.ledger, 0)
        leases = self.endpoint.incoming._receiver.leases if self.endpoint is not None else None
        check_blocks(self.free, leases, self.engine._scheduler.ledger)


class Received:
    """The events of a request."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def tokens(self) -> list[Scored]:
        return [event.scored for event in self.events if isinstance(event, Token)]

    @property
    def ids(self) -> list[int]:
        return [scored.token for scored in self.tokens]

    @property
    def scores(self) -> tuple[Scored, ...] | None:
        return next((event.scores for event in self.events if isinstance(event, PromptScored)), None)

    @property
    def finished(self) -> Finished | None:
        return next((event for event in self.events if isinstance(event, Finished)), None)

    @property
    def bad(self) -> list[Event]:
        return [event for event in self.events if isinstance(event, Failed | Refused)]

    def has(self, kind: type[Event]) -> bool:
        return any(isinstance(event, kind) for event in self.events)


def asked(prompt_ids: Iterable[int], max_tokens: int = 8, sampling: Sampling = GREEDY, **fields: Any) -> WorkerRequest:
    """Return a request."""
    ids = tuple(prompt_ids)
    return WorkerRequest(model="tiny", prompt_ids=ids, max_tokens=max_tokens, sampling=sampling, **fields)


def turn(*machines: Machine) -> bool:
    """Let each machine do one step and tell what happened; return whether any computed."""
    busy = False
    for machine in machines:
        busy |= machine.engine.step()
        for on_event, event in machine.engine.take_events():
            on_event(event)
        machine.require_consistent()
    return busy


def turn_until(holds: Callable[[], bool], *machines: Machine) -> None:
    """Take turns until something holds."""
    eventually(holds, lambda: turn(*machines) or time.sleep(0.0005))


def served(machine: Machine, request: WorkerRequest, key: str = "whole") -> Received:
    """Serve one request whole."""
    received = Received()
    machine.engine.submit(key, request, received)
    turn_until(lambda: received.finished is not None or bool(received.bad), machine)
    return received


class Pair:
    """A prefill machine and a decode machine."""

    def __init__(self, way: str = "shared-memory", **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.prefill = Machine("p", way=way, folder=self.folder.name, **options)
        self.decode = Machine("t", way=way, folder=self.folder.name, **options)
        self.machines = (self.prefill, self.decode)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_: object) -> None:
        for machine in self.machines:
            machine.close()
        self.folder.cleanup()

    def submit(self, request: WorkerRequest, key: str = "r.0") -> tuple[Received, Received]:
        """Send both legs of a request; return the events of each."""
        legs = Received(), Received()
        self.submit_decode(request, key, legs[1])
        self.submit_prefill(request, key, legs[0])
        return legs

    def submit_prefill(self, request: WorkerRequest, key: str, received: Received) -> None:
        """Send the prefill leg, as the gateway derives it."""
        assert self.decode.endpoint is not None
        where = self.decode.endpoint.address
        address = Address(where["boot_id"], where["unix"], tuple(where["tcp"]) if where["tcp"] else None)
        sampling = replace(request.sampling, min_tokens=min(request.resumed_tokens + 1, request.sampling.min_tokens))
        transfer = SendKv(key, "t", self.decode.epoch, address)
        self.prefill.engine.submit(key, replace(request, max_tokens=1, sampling=sampling, transfer=transfer), received)

    def submit_decode(self, request: WorkerRequest, key: str, received: Received) -> None:
        """Send the decode leg, as the gateway derives it."""
        transfer = TakeKv(key, "p", self.prefill.epoch)
        fields = {"echo": False, "prompt_logprobs": None, "transfer": transfer}
        self.decode.engine.submit(key, replace(request, **fields), received)

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Take turns until something holds."""
        turn_until(holds, *self.machines)

    def settle(self) -> None:
        """Take turns until nothing is held, and demand that nothing is booked."""
        self.run_until(lambda: all(not machine.engine.facts().held for machine in self.machines))
        turn(*self.machines)
        for machine in self.machines:
            machine.require_empty()


def served_split(pair: Pair, request: WorkerRequest, key: str = "r.0") -> tuple[Received, Received]:
    """Serve one request by a pair."""
    prefill, decode = pair.submit(request, key)
    pair.run_until(lambda: prefill.has(KvLeft) and (decode.finished is not None or bool(decode.bad)))
    return prefill, decode
