"""What goes into a naive simulation by the default rules and what comes out: section 1 of docs/rules.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeAlias

from naive.parts import Knots, interpolate

if TYPE_CHECKING:
    from naive.default_flows import Flow
    from naive.default_machine import Machine

Role: TypeAlias = Literal["prefill", "decode", "mixed", "unsplit"]


@dataclass(frozen=True)
class Rules:
    """The settings, with the names and the spelling that people write."""

    prefill_placement: str = "jsq-tokens"
    decode_placement: str = "jsq-kv"
    batching: str = "whole"
    unsplit_batching: str = "chunked"
    batch_prompt_tokens: int = 2048
    batch_requests: int = 512
    spill_tokens: int = 8192
    elastic: bool = True
    preemption_limit: int = 4
    repurpose_after_s: float = 60.0
    block_tokens: int = 16
    kv_headroom: float = 0.01
    hbm_share: float = 0.9
    seed: int = 0

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class Times:
    """How long iterations take."""

    prefill_knots: Knots
    decode_knots: Knots
    prefill_pair_s: float = 0.0
    decode_context_s: float = 0.0

    def iteration_s(self, chunks: Sequence[tuple[int, int]], contexts: Sequence[int]) -> float:
        """Return an iteration's time: prompts by (tokens computed, tokens before them), decode tasks by context."""
        requests = len(contexts)
        context_s = self.decode_context_s * sum(contexts)
        decode_s = max(interpolate(self.decode_knots, requests), 0.0)
        prompt_tokens = sum(tokens for tokens, _ in chunks)
        if prompt_tokens == 0:
            return decode_s + context_s
        linear_s = max(interpolate(self.prefill_knots, prompt_tokens + requests), 0.0)
        if requests:
            linear_s = max(linear_s, decode_s)
        pairs = sum(tokens * tokens / 2 + tokens * before for tokens, before in chunks)
        return linear_s + self.prefill_pair_s * pairs + context_s


@dataclass(frozen=True)
class Card:
    """A machine's network card in each direction, and what the transfers it sends cost."""

    bytes_per_s: float
    serialized_latency_s: float
    layerwise_latency_s: float
    layerwise_from_tokens: float
    streaming_slowdown: float


@dataclass(frozen=True)
class Model:
    """Bytes of KV cache per token and of weights, and the number of layers."""

    kv_bytes_per_token: float
    weights_bytes: float
    layers: int


@dataclass(frozen=True)
class Build:
    """One machine to build."""

    role: Role
    times: Times
    card: Card
    hbm_bytes: float


@dataclass(frozen=True)
class Arrival:
    """One request of the trace; rules see the expected output, not the true one."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    expected_tokens: int


@dataclass(eq=False)
class Request:
    """A request, where it is and what became of it; an instant is -1 until it is known."""

    number: int
    arrival: Arrival
    rules: Rules
    refused: bool = False
    emitted_s: list[float] = field(default_factory=list)
    """When each token was emitted."""
    phase: Literal["prefill", "decode"] = "prefill"
    computed: int = 0
    """Tokens that its present prefill phase has computed."""
    chunk: int = 0
    """Tokens that its prefill phase computes in the present iteration."""
    held_blocks: int = 0
    """On the machine where it is."""
    arriving_blocks: int = 0
    """Held on its decode machine while its KV is on the way."""
    passed_over: int = 0
    """Batches that were formed without its waiting decode task; when they are many, it goes first."""
    preemptions: int = 0
    flow: Flow | None = None
    streamed: bool = False
    assigned: Machine | None = None
    """Its prefill machine as chosen at arrival."""
    prefill_machine: Machine | None = None
    """Where its prefill phase is computed now: after an eviction on the decode machine."""
    decode_machine: Machine | None = None
    prefill_start_s: float = -1.0
    kv_ready_s: float = -1.0
    decode_start_s: float = -1.0

    @property
    def emitted(self) -> int:
        return len(self.emitted_s)

    @property
    def done(self) -> bool:
        return self.emitted == self.arrival.output_tokens

    @property
    def context(self) -> int:
        """Tokens so far, which a prefill phase computes and a decode phase attends to."""
        return self.arrival.prompt_tokens + self.emitted

    @property
    def prefill_blocks(self) -> int:
        """What its prefill phase reserves."""
        return self.rules.blocks(self.context + 1)

    @property
    def first_blocks(self) -> int:
        """What is committed for it on a prefill machine."""
        return self.rules.blocks(self.arrival.prompt_tokens + 1)

    @property
    def expected_blocks(self) -> int:
        """What is committed for it on its decode machine."""
        return self.rules.blocks(self.arrival.prompt_tokens + self.arrival.expected_tokens)

    @property
    def gap_max_s(self) -> float:
        return max((after - before for before, after in pairwise(self.emitted_s)), default=0.0)


@dataclass
class Counters:
    """Sums over a run; those from `awaiting_room_waited` on are only for seeing what a case comes to."""

    steps: int = 0
    iterations: int = 0
    task_iterations: int = 0
    preemptions: int = 0
    evictions: int = 0
    prefill_to_mixed: int = 0
    decode_to_mixed: int = 0
    returns: int = 0
    repurposed: int = 0
    one_machine: int = 0
    layerwise: int = 0
    serialized: int = 0
    recomputed: int = 0
    awaiting_room_waited: int = 0
    awaiting_room_cuts: int = 0
    arrival_cuts: int = 0
    both_to_least_loaded: int = 0
    prompt_queued_static: int = 0
    tokens_queued_static: int = 0
    prompts_evicted: int = 0
    chunks_continued: int = 0
    streams_without_room: int = 0
    rebuilt: int = 0


@dataclass
class Result:
    """Requests in order of the trace, and counters."""

    requests: list[Request]
    counters: Counters = field(default_factory=Counters)
