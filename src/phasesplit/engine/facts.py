"""What an engine reports of itself."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """A snapshot of an engine.

    Attributes:
        context_tokens: Longest prompt plus output that it serves.
        capacity_blocks: KV blocks that it has.
        used_blocks: Blocks that are held or promised.
        block_tokens: Tokens of a block.
        held: KV blocks of each request that has some, by its key.
        kept_blocks: Blocks of earlier prompts that nobody uses, which go when others need them.
        waiting_prompts: Requests whose prefill has not begun.
        running: Requests in the batch.
        pending_tokens: Prompt tokens still to be computed, and one for each decode.
        steps: Iterations so far.
        tokens: Output tokens computed so far.
        layerwise: Prompts whose KV left layer by layer.
        serialized: Prompts whose KV left in one go.
        evictions: How often KV had to go for lack of memory.
        is_draining: It takes no more requests.
    """

    context_tokens: int
    capacity_blocks: int
    used_blocks: int
    block_tokens: int
    held: dict[str, int] = field(default_factory=dict)
    kept_blocks: int = 0
    waiting_prompts: int = 0
    running: int = 0
    pending_tokens: int = 0
    steps: int = 0
    tokens: int = 0
    layerwise: int = 0
    serialized: int = 0
    evictions: int = 0
    is_draining: bool = False
