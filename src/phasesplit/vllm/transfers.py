"""Requests whose KV leaves or comes in, as the model's thread and the thread that moves KV both see them.

A field has one thread that writes it, named beside it; the other only reads.
"""

from dataclasses import dataclass, field

from phasesplit.vllm.orders import Send, Take


@dataclass(slots=True, eq=False)
class StagedSend:
    """A request whose KV leaves.

    Attributes:
        order: What was ordered.
        is_offered: The other machine has blocks for it. [mover]
        is_over: The transfer has ended, well or badly. [mover]
        slots: Staging slots that hold its KV; None before it was staged and after it is over. [model's thread before
            `blocks` is set, then mover]
        sent: One behind the last block that was given to the mover. [model's thread]
        blocks: vLLM's blocks, kept for us once the prompt phase is over; None before. [mover]
        is_given_up: Nobody waits for it any more. [mover]
    """

    order: Send
    is_offered: bool = False
    is_over: bool = False
    slots: tuple[int, ...] | None = None
    sent: int = 0
    blocks: tuple[int, ...] | None = None
    is_given_up: bool = False


@dataclass(slots=True, eq=False)
class StagedReceive:
    """A request that waits for KV. All of it belongs to the mover.

    Attributes:
        order: What was ordered.
        is_expected: Staging slots are held for it, and offered.
    """

    order: Take
    is_expected: bool = False


@dataclass(slots=True)
class Ended:
    """Transfers that have ended since the last look, by vLLM's names of the requests.

    Attributes:
        sent: Nothing reads their blocks any more.
        received: Nothing writes to their blocks any more.
        failed: Those of `received` whose KV is not there.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.sent or self.received)
