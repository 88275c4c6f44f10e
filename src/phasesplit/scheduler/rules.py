"""The settings of the scheduler: closed enums and one frozen record that both drivers read."""

from dataclasses import dataclass
from enum import IntEnum

from phasesplit.errors import SpecError


class Placement(IntEnum):
    """How the cluster-level scheduler picks a machine of a pool."""

    ROUND_ROBIN = 0
    RANDOM = 1
    TWO_CHOICES = 2
    """The less loaded of two machines drawn at random, by the load of `JSQ_TOKENS` (prefill) or `JSQ_KV` (decode)."""
    JSQ_REQUESTS = 3
    JSQ_TOKENS = 4
    JSQ_KV = 5
    CUSTOM = 6
    """A Python function given to `simulate(place=...)` decides both machines."""


class Batching(IntEnum):
    """How the machine-level scheduler forms the next iteration."""

    WHOLE = 0
    """Whole prompts first, then decode: the paper's rule."""
    CHUNKED = 1
    """Decode first, then prompt chunks into what is left of the token budget: as today's engines do it."""


class Transfer(IntEnum):
    """When the KV cache leaves the prefill machine."""

    AUTO = 0
    """Layer by layer from `layerwise_from_tokens` prompt tokens on, serialized below."""
    SERIALIZED = 1
    """All of it, after prefill."""
    LAYERWISE = 2
    """Layer by layer, while the prompt is still being computed."""


NAMES: dict[type[IntEnum], dict[str, IntEnum]] = {
    kind: {member.name.lower().replace("_", "-"): member for member in kind} for kind in (Placement, Batching, Transfer)
}
"""Each enum's members by the names that people write (`jsq-tokens`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the scheduler does; the defaults are meant to be right, `Rules.as_published()` to be comparable.

    Attributes:
        published: Follow the published simulator exactly, its defects included: whole-output KV reservation by the true
            length, the published look-up of times, transfers that neither overlap nor contend. All other fields but the
            limits are then fixed by it.
        prefill_placement: Rule for the machine of prefill, and for both phases of an unsplit cluster.
        decode_placement: Rule for the machine of decode.
        batching: Rule of prefill, decode and mixed machines.
        unsplit_batching: Rule of unsplit machines.
        batch_prompt_tokens: Prompt tokens that a whole-prompt batch holds at most (a longer prompt runs alone), and the
            token budget of an iteration with chunked prompts; >= 1.
        batch_requests: Requests in a batch at most, 1 to 4,096.
        spill_tokens: A prefill machine with a queue takes no request that lifts its pending tokens above this; >= 0.
        elastic: Machines move into the mixed pool and back as load shifts. False (static pools): none ever changes its
            pool, and a request that no pool takes queues where there is least to do.
        preemption_limit: A decode task that was passed over this often goes before everything else; >= 0.
        repurpose_after_s: A machine this long in the mixed pool changes its home to the other phase; > 0.
        block_tokens: Tokens per KV block, a power of two, 1 to 4,096.
        kv_headroom: Share of KV blocks kept free when requests are admitted to a machine that runs others, [0, 0.5].
        hbm_share: Share of accelerator memory that weights and KV may fill, (0, 1].
        transfer: When KV leaves the prefill machine.
        layerwise_from_tokens: Shortest prompt sent layer by layer under `Transfer.AUTO`; None: follows from the link.
        streaming_slowdown: Extra prefill time per second of streaming while computing, >= 0; None: the link's default.
        seed: Of the draws of randomised rules.
    """

    published: bool = False
    prefill_placement: Placement = Placement.JSQ_TOKENS
    decode_placement: Placement = Placement.JSQ_KV
    batching: Batching = Batching.WHOLE
    unsplit_batching: Batching = Batching.CHUNKED
    batch_prompt_tokens: int = 2_048
    batch_requests: int = 512
    spill_tokens: int = 8_192
    elastic: bool = True
    preemption_limit: int = 4
    repurpose_after_s: float = 60.0
    block_tokens: int = 16
    kv_headroom: float = 0.01
    hbm_share: float = 0.9
    transfer: Transfer = Transfer.AUTO
    layerwise_from_tokens: int | None = None
    streaming_slowdown: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _require(
            "batch_prompt_tokens", self.batch_prompt_tokens, 1 <= self.batch_prompt_tokens <= 1 << 20, "1 to 1,048,576"
        )
        _require("batch_requests", self.batch_requests, 1 <= self.batch_requests <= 4_096, "1 to 4,096")
        _require("spill_tokens", self.spill_tokens, 0 <= self.spill_tokens <= 1 << 40, "a whole number from 0 to 2^40")
        _require("preemption_limit", self.preemption_limit, 0 <= self.preemption_limit <= 1 << 20, "0 to 1,048,576")
        _require("repurpose_after_s", self.repurpose_after_s, self.repurpose_after_s > 0, "a time > 0 in seconds")
        power = self.block_tokens & (self.block_tokens - 1) == 0
        _require(
            "block_tokens", self.block_tokens, power and 1 <= self.block_tokens <= 4_096, "a power of two, 1 to 4,096"
        )
        _require("kv_headroom", self.kv_headroom, 0 <= self.kv_headroom <= 0.5, "a share from 0 to 0.5")
        _require("hbm_share", self.hbm_share, 0 < self.hbm_share <= 1, "a share above 0, at most 1")
        _require("seed", self.seed, 0 <= self.seed < 1 << 63, "a whole number from 0 to 2^63 - 1")
        if self.layerwise_from_tokens is not None:
            shortest = self.layerwise_from_tokens
            _require("layerwise_from_tokens", shortest, 0 <= shortest <= 1 << 40, "a whole number from 0 to 2^40")
        if self.streaming_slowdown is not None:
            slowdown = self.streaming_slowdown
            _require("streaming_slowdown", slowdown, 0 <= slowdown <= 10, "a factor from 0 to 10")

    @classmethod
    def as_published(cls) -> "Rules":
        """Return the published simulator's rules (setting `published`)."""
        return cls(published=True, unsplit_batching=Batching.WHOLE, block_tokens=1, kv_headroom=0.0, hbm_share=1.0)


def _require(field: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise SpecError.bad(f"rules, field {field}", value, allowed)
