"""What vLLM's scheduler orders from the processes that compute: plain values, sent along with each step.

vLLM holds the scheduler and the model in different processes, and only this passes from the one to the other.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Send:
    """A request whose KV will leave once its prompt is computed.

    Attributes:
        request: vLLM's name of the request.
        key: What both machines call it.
        peer: Machine that takes the KV.
        peer_epoch: Its epoch.
        address: Where it is, as `transfer.links.Address`.
        tokens: Tokens of the prompt, >= 1.
    """

    request: str
    key: str
    peer: str
    peer_epoch: int
    address: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True, slots=True)
class Take:
    """A request that waits, with its blocks, for KV from another machine.

    Attributes:
        request: vLLM's name of the request.
        key: What both machines call it.
        peer: Machine that sends the KV.
        tokens: Tokens of the prompt, >= 1.
        blocks: vLLM's blocks; the i-th is for the i-th block of the prompt.
        first: First of them that is to be filled; those before are in the prefix cache already.
    """

    request: str
    key: str
    peer: str
    tokens: int
    blocks: tuple[int, ...]
    first: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step computes of a prompt whose KV will leave.

    Attributes:
        request: vLLM's name of the request.
        blocks: vLLM's blocks of the request.
        end: One behind the last block that is final after this step.
        is_first: Prefill begins with it.
    """

    request: str
    blocks: tuple[int, ...]
    end: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that is ordered with one step.

    Attributes:
        sends: Requests whose KV will leave, new ones.
        takes: Requests that wait for KV, new ones.
        pieces: Prompts of this step.
        computed: Requests whose prefill is over; vLLM keeps their blocks until they are reported as sent.
        given_up: Requests that ended before.
        started: Keys of requests served whole whose prefill begins.
        computes: Whether the step computes anything.
    """

    sends: tuple[Send, ...] = ()
    takes: tuple[Take, ...] = ()
    pieces: tuple[Piece, ...] = ()
    computed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    given_up: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    computes: bool = True
