"""The clock of the parts that touch sockets, and how long they wait for what."""

from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
"""Returns the instant in seconds; never goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long each thing may take.

    Attributes:
        lease_s: Time that reserved blocks live without a word of their sender, > 0.
        heartbeat_s: Time between the sender's words, below `lease_s`, > 0.
        answer_s: Time for a machine to answer a greeting, or to say one after it has connected, > 0. A machine answers
            between two iterations, so it is longer than the longest one.
        transfer_s: Time from the order, and again from its opening, to the completion of a transfer, > 0.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 5.0
    answer_s: float = 10.0
    transfer_s: float = 120.0
