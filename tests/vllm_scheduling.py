"""vLLM's own scheduler and KV manager over the connector's halves; in place of a model, hashes.

The KV of a position, and the token behind it, follow from all tokens up to it. So a block that holds anything else when
it is read, and an output that differs, show that KV was lost, mixed up or read too early.
"""

import hashlib
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.vllm.connector_machine import worker_half
from phasesplit.vllm.settings import Settings
from phasesplit.vllm.staging import Device, HostDevice

BLOCK_TOKENS, LAYERS, LONGEST_TOKENS, WORDS = 4, 3, 96, 50
LAYOUT = KvLayout(
    model="m", layers=LAYERS, kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK_TOKENS, block_layout="test"
)
LEAST_STAGING_BYTES = 2 * LAYERS * LAYOUT.block_bytes * (LONGEST_TOKENS // BLOCK_TOKENS)
_TOKEN_BYTES = LAYOUT.block_bytes // BLOCK_TOKENS
TIMEOUTS = {"lease_s": 1.0, "heartbeat_s": 0.1, "answer_s": 5.0, "transfer_s": 2.0}


def _hash(*parts: Any) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()


class Text:
    """A prompt and what comes behind it.

    Attributes:
        tokens: All of them.
    """

    def __init__(self, prompt: Sequence[int], most: int) -> None:
        self.tokens, self._prefixes, prefix = list(prompt), list[bytes](), b""
        for place in range(len(prompt) + most + 2):
            if place == len(self.tokens):
                self.tokens.append(int.from_bytes(_hash("next", prefix), "little") % WORDS)
            prefix = _hash(prefix, self.tokens[place])
            self._prefixes.append(prefix)

    def kv(self, position: int, layer: int) -> NDArray[np.uint8]:
        """Return what a layer holds of a position."""
        return np.frombuffer(_hash("kv", self._prefixes[position], layer) * (_TOKEN_BYTES // 8), np.uint8)


class LateDevice(HostDevice):
    """Copies out behind the caller's back, as a GPU does: some when they are asked for, the rest at the step's end."""

    def __init__(self, layers: Sequence[NDArray[np.uint8]], staging: NDArray[np.uint8]) -> None:
        super().__init__(layers, staging)
        self._copies: deque[Callable[[], None]] = deque()
        self._asked, self._lock = 0, threading.RLock()

    def gather(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> Callable[[], bool]:  # type: ignore[override]
        """See `Device.gather`."""
        ended, copy, out_of = [False], super().gather, (layer, tuple(blocks), tuple(slots))

        def run() -> None:
            copy(*out_of)
            ended[0] = True

        def is_done() -> bool:
            with self._lock:
                self._asked += 1
                if self._asked % 8 == 0:  # now and then a GPU is quick
                    self.order_after_copies()
            return ended[0]

        with self._lock:
            self._copies.append(run)
        return is_done

    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """See `Device.scatter`."""
        with self._lock:
            self.order_after_copies()
            super().scatter(slots, blocks)

    def order_after_copies(self) -> None:
        """See `Device.order_after_copies`."""
        with self._lock:
            while self._copies:
                self._copies.popleft()()


class Machine:
    """One machine, stepped by hand.

    Attributes:
        name: Its name.
        outputs: Tokens that came out, by request.
        counts: Transfers that have ended, by how, and preemptions.
    """

    def __init__(
        self, name: str, directory: Path, model: str, *, blocks: int, budget_tokens: int, most_running: int,
        is_async: bool, is_late: bool, threshold_tokens: int, staging_bytes: int,
    ) -> None:  # fmt: skip
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self.name = name
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self._is_async = is_async
        self._scheduler = _scheduler(name, model, blocks, budget_tokens, most_running, is_async=is_async)
        self._kv = np.zeros((LAYERS, blocks, LAYOUT.block_bytes), np.uint8)
        kind: Callable[..., Device] = LateDevice if is_late else HostDevice

        def device(pool: SharedPool) -> Device:
            return kind(list(self._kv), pool.blocks)

        settings = Settings(
            machine=name, epoch=1, sockets=str(directory), timeouts=TIMEOUTS, threshold_tokens=threshold_tokens,
            staging_bytes=staging_bytes,
        )  # fmt: skip
        self.worker = worker_half(settings, LAYOUT, LONGEST_TOKENS, device)
        self._in_flight: deque[tuple[Any, Any]] = deque()
        self._texts: dict[str, tuple[Text, int]] = {}
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.counts: Counter[str] = Counter()
        self._free_blocks = self._free()

    @property
    def address(self) -> dict[str, Any]:
        """Where it takes KV."""
        return self.worker._transfers._endpoint.address

    @property
    def live(self) -> list[str]:
        """Requests that have not ended."""
        return [name for name, request in self._scheduler.requests.items() if not request.is_finished()]

    def add(self, name: str, prompt: Sequence[int], most: int, params: dict[str, Any]) -> None:
        """Take a request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=most, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params}
        )
        self._texts[name] = Text(prompt, most), len(prompt)
        self._scheduler.add_request(
            Request(
                request_id=name, prompt_token_ids=list(prompt), sampling_params=sampling, pooling_params=None,
                block_hasher=self._hasher,
            )
        )  # fmt: skip

    def abort(self, name: str) -> None:
        """End a request as a client that goes away does."""
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def drop(self, key: str) -> None:
        """End a transfer as the gateway does."""
        transfers = self.worker._transfers
        transfers.do(lambda: transfers.sends.abort_key(key, "dropped"))

    def step(self) -> None:
        """Schedule and compute a step; an engine that schedules ahead gets the output of the one before only then."""
        self._in_flight.append(self._compute(self._scheduler.schedule()))
        while len(self._in_flight) > self._is_async:
            self._read()

    def require_right_outputs(self) -> None:
        """Compare what came out with what follows from the prompts."""
        for name, output in self.outputs.items():
            text, prompt_tokens = self._texts[name]
            assert output == text.tokens[prompt_tokens : prompt_tokens + len(output)], (self.name, name)

    def held(self) -> dict[str, int]:
        """Return what is still held, by where; nothing once every request has ended."""
        transfers, half = self.worker._transfers, self._scheduler.connector._scheduler
        found = {
            "vLLM's blocks": self._free_blocks - self._free(),
            "slots for KV that leaves": self.worker._slots.used,
            "slots for KV that comes": transfers._endpoint.free.used,
            "leaving": len(self.worker._sends) + len(transfers.sends._sends),
            "coming": len(transfers.receives._receives),
            "orders": len(transfers._endpoint.outgoing._orders),
            "scheduler": sum(
                map(len, (half._sending, half._awaiting, half._receiving, half._started, half._not_started))
            ),
        }
        return {place: count for place, count in found.items() if count}

    def close(self) -> None:
        """End it."""
        self.worker.close()

    def _free(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def _compute(self, ordered: Any) -> tuple[Any, Any]:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.worker.begin(ordered.kv_connector_metadata.step)
        self.counts["preempted"] += len(ordered.preempted_req_ids or ())
        known = ordered.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in ordered.scheduled_new_reqs}
        computed |= zip(known.req_ids, known.num_computed_tokens, strict=True)
        blocks = {name: self._scheduler.kv_cache_manager.get_block_ids(name)[0] for name in computed}
        parts = [
            (name, position, position >= done)
            for name, done in computed.items()
            for position in range(done + ordered.num_scheduled_tokens[name])
        ]
        for layer in range(LAYERS if computed else 0):
            # Attention reads when all of the step is written: requests share blocks that one of them computes.
            for name, position, is_new in parts:
                if is_new:
                    self._part(layer, blocks[name], position)[:] = self._texts[name][0].kv(position, layer)
            for name, position, _ in parts:
                is_right = self._part(layer, blocks[name], position) == self._texts[name][0].kv(position, layer)
                assert is_right.all(), (self.name, name, layer, position, computed[name])
            self.worker.layer_computed(layer)
        self.worker.end()
        ended = self.worker.take_ended()
        for kind, names in (("sent", ended.sent), ("came", ended.received - ended.failed), ("missed", ended.failed)):
            self.counts[kind] += len(names)
        sampled = [
            [] if self._scheduler.requests[name].is_prefill_chunk
            else [self._texts[name][0].tokens[done + ordered.num_scheduled_tokens[name]]]
            for name, done in computed.items()
        ]  # fmt: skip
        return ordered, ModelRunnerOutput(
            req_ids=list(computed),
            req_id_to_index={name: place for place, name in enumerate(computed)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=KVConnectorOutput(
                finished_sending=ended.sent, finished_recving=ended.received, failed_recving=ended.failed
            ),
        )

    def _part(self, layer: int, blocks: Sequence[int], position: int) -> NDArray[np.uint8]:
        first = position % BLOCK_TOKENS * _TOKEN_BYTES
        return self._kv[layer, blocks[position // BLOCK_TOKENS], first : first + _TOKEN_BYTES]

    def _read(self) -> None:
        for outputs in self._scheduler.update_from_output(*self._in_flight.popleft()).values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids


def _scheduler(name: str, model: str, blocks: int, budget_tokens: int, most_running: int, *, is_async: bool) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    whole = VllmConfig(
        model_config=ModelConfig(
            model=model, dtype="float32", skip_tokenizer_init=True, max_model_len=LONGEST_TOKENS
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=most_running, max_num_batched_tokens=budget_tokens, max_model_len=LONGEST_TOKENS,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=is_async,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PhaseSplitConnector", kv_connector_module_path="phasesplit.vllm.connector",
            kv_role="kv_both", kv_load_failure_policy="recompute",
            kv_connector_extra_config={"machine": name, "epoch": 1},
        ),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip
    # What vLLM makes of these on a CPU when it starts is undone: small blocks make for many cases.
    whole.cache_config.block_size, whole.cache_config.num_gpu_blocks = BLOCK_TOKENS, blocks
    whole.scheduler_config.async_scheduling = is_async
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return (AsyncScheduler if is_async else Scheduler)(
        vllm_config=whole, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(whole),
        block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, log_stats=True,
    )  # fmt: skip
