"""What a gateway and a machine send one another: the parts of an answer, and where KV comes from or goes to."""

from dataclasses import dataclass
from typing import NamedTuple


class Scored(NamedTuple):
    """A token, and what the model thinks of its place.

    Attributes:
        token: Its id.
        logprob: Natural logarithm of its probability, <= 0; None where nobody asked, and for a prompt's first token.
        top: The likeliest ids at its place with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class PrefillTimes(NamedTuple):
    """How long a prompt took on the machine that computed it.

    Attributes:
        queued_s: From its arrival there until its computation began, in seconds.
        prefill_s: From there until its first token was out, in seconds.
    """

    queued_s: float
    prefill_s: float


class Chunk(NamedTuple):
    """What a machine adds to a choice at once.

    Attributes:
        tokens: The new ids, possibly none in the last chunk.
        scored: Their log-probabilities; empty where nobody asked.
        finish_reason: "stop" or "length" as the machine says, None where it goes on.
        prompt_scored: The prompt's log-probabilities; empty where nobody asked.
        times: How long the prompt took, with its first token, where the machine tells.
    """

    tokens: tuple[int, ...]
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None
    prompt_scored: tuple[Scored, ...] = ()
    times: PrefillTimes | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a machine can be reached for KV.

    Attributes:
        boot_id: Of its host; equal ones share memory.
        unix: Path of its socket on that host, or None.
        tcp: Host and port, or None.
    """

    boot_id: str
    unix: str | None
    tcp: tuple[str, int] | None


@dataclass(frozen=True, slots=True)
class SendKv:
    """This machine computes the prompt and sends the KV away.

    Attributes:
        key: Name of the transfer, the same on both sides.
        peer: Name of the machine that takes it.
        peer_epoch: Its epoch, >= 0.
        address: Where it is.
    """

    key: str
    peer: str
    peer_epoch: int
    address: Address


@dataclass(frozen=True, slots=True)
class TakeKv:
    """This machine takes the KV of a prompt and goes on from it.

    Attributes:
        key: Name of the transfer, the same on both sides.
        peer: Name of the machine that sends it.
        peer_epoch: Its epoch, >= 0.
    """

    key: str
    peer: str
    peer_epoch: int
