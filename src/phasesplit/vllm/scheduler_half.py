"""The connector in vLLM's scheduler: which requests send KV or wait for it, and what each step has to do about that.

It sees vLLM's objects through the few attributes named here, so that it can be tested without vLLM.

What vLLM's scheduler orders from the processes that compute: plain values, sent along with each step.

vLLM holds the scheduler and the model in different processes, and only this passes from the one to the other.

What a request says of its KV, read: `kv_transfer_params` comes from outside, and a mistake there ends no engine.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from phasesplit.domain.machine import blocks_for
from phasesplit.protocol.completions import OpenTransferFields
from phasesplit.protocol.openai_errors import of_validation


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
class PromptPiece:
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
class StepOrders:
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
    pieces: tuple[PromptPiece, ...] = ()
    computed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    given_up: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    computes: bool = True


_log = logging.getLogger(__name__)
_WHOLE = "kv_transfer_params: %s; the request is served whole"


class Wishes(NamedTuple):
    """What becomes of a request's KV.

    Attributes:
        leaves: It goes to another machine; False: it comes from one.
        key: What both machines call the request.
        peer: The other machine.
        peer_epoch: Its epoch.
        address: Where it is; empty where KV comes.
    """

    leaves: bool
    key: str
    peer: str
    peer_epoch: int
    address: Mapping[str, Any]


def read_wishes(params: object) -> Wishes | None:
    """Return what a request says of its KV, None where it is to be served whole, or says it wrong.

    Args:
        params: Its `kv_transfer_params`: a mapping, or whatever else a client may have sent.
    """
    if not isinstance(params, Mapping) or not _is_split(params):
        return None
    try:
        fields = OpenTransferFields.model_validate(dict(params))
    except ValidationError as error:
        _log.warning(_WHOLE, of_validation(error))
        return None
    key, peer, epoch, address = fields.key, fields.peer, fields.peer_epoch, fields.address
    if key is None or peer is None or epoch is None or (fields.do_remote_decode and not address):
        needed = {"key": key, "peer": peer, "peer_epoch": epoch, "address": address}
        _log.warning(_WHOLE, f"{next(name for name, value in needed.items() if not value and value != 0)} is required")
        return None
    return Wishes(bool(fields.do_remote_decode), key, peer, epoch, address or {})


def key_of_whole(params: object) -> str | None:
    """Return what its sender calls a request that is to be served whole; None of others, and where it does not say.

    Args:
        params: As for `read_wishes`.
    """
    if not isinstance(params, Mapping) or _is_split(params):
        return None
    try:
        return OpenTransferFields.model_validate({"key": params.get("key")}).key
    except ValidationError:
        return None


def _is_split(params: Mapping[str, Any]) -> bool:
    return bool(params.get("do_remote_decode") or params.get("do_remote_prefill"))


BlockIds = Callable[[str], Sequence[int]]
"""From vLLM's name of a request to its blocks."""

_COMPUTED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""Ends of a request that leave KV worth sending. Source: vllm/v1/request.py, RequestStatus."""


class Status(Protocol):
    """The status of a request."""

    @property
    def name(self) -> str:
        """Its name."""


class Request(Protocol):
    """What is read of a request of vLLM."""

    @property
    def request_id(self) -> str:
        """Its name."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of its prompt."""

    @property
    def kv_transfer_params(self) -> object:
        """What its sender says of its KV: a mapping, or whatever else it sent."""

    @property
    def status(self) -> Status:
        """Where it is."""


class SchedulerHalf:
    """The connector's half in the scheduler.

    Args:
        block_tokens: Tokens of a block, >= 1.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._sending: dict[str, int] = {}  # tokens of the prompt
        self._begun: set[str] = set()
        self._unbegun: dict[str, str] = {}  # keys of requests served whole
        self._awaiting: dict[str, Wishes] = {}
        self._taken: set[str] = set()
        self._sends: list[Send] = []
        self._takes: list[Take] = []
        self._computed: list[tuple[str, tuple[int, ...]]] = []
        self._given_up: list[str] = []

    def arrived(self, request: Request) -> None:
        """Take note of a new request; one whose KV will leave is announced at once, long before its turn comes."""
        name, tokens = request.request_id, request.num_prompt_tokens
        wishes = read_wishes(request.kv_transfer_params)
        if wishes is None:
            key = key_of_whole(request.kv_transfer_params)
            if key is not None:
                self._unbegun[name] = key
            return
        if wishes.leaves:
            self._sending[name] = tokens
            self._sends.append(Send(name, wishes.key, wishes.peer, wishes.peer_epoch, wishes.address, tokens))
        else:
            self._awaiting[name] = wishes

    def awaited_tokens(self, request: Request, computed: int) -> int:
        """Return how many tokens of a prompt come from another machine; 0 of a request that has had its KV.

        Args:
            request: The request.
            computed: Tokens that are in the prefix cache.
        """
        # A request that lost its blocks afterwards is computed here: the other machine has nothing of it any more.
        awaits = request.request_id in self._awaiting
        return max(0, request.num_prompt_tokens - computed) if awaits else 0

    def allocated(self, request: Request, blocks: Sequence[int], awaited: int) -> None:
        """Take note that a request has its blocks.

        Args:
            request: The request.
            blocks: All of its blocks.
            awaited: Tokens that come from another machine.
        """
        wishes = self._awaiting.pop(request.request_id, None) if awaited else None
        if wishes is None:
            return
        tokens = request.num_prompt_tokens
        self._taken.add(request.request_id)
        self._takes.append(
            Take(
                request.request_id,
                wishes.key,
                wishes.peer,
                tokens,
                tuple(blocks[: self._blocks_for(tokens)]),
                (tokens - awaited) // self._block_tokens,
            )
        )

    def step(
        self, scheduled: Mapping[str, int], computed: Iterable[tuple[str, int]], block_ids: BlockIds
    ) -> StepOrders:
        """Return what a step has to do, and forget that it was to be done.

        Args:
            scheduled: Tokens that the step computes, by request.
            computed: Tokens that are computed already, by request.
            block_ids: The requests' blocks.
        """
        pieces = []
        for name, done in computed:
            tokens = self._sending.get(name)
            if tokens is None or done >= tokens:
                continue
            end = done + scheduled[name]
            # A block that is not full is final only with the last token of the prompt.
            final = self._blocks_for(tokens) if end >= tokens else end // self._block_tokens
            pieces.append(PromptPiece(name, tuple(block_ids(name)), final, name not in self._begun))
            self._begun.add(name)
        step = StepOrders(
            tuple(self._sends),
            tuple(self._takes),
            tuple(pieces),
            tuple(self._computed),
            tuple(self._given_up),
            tuple(self._unbegun.pop(name) for name in scheduled if name in self._unbegun),
            any(scheduled.values()),
        )
        for done_with in (self._sends, self._takes, self._computed, self._given_up):
            done_with.clear()
        return step

    def finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """Take note of the end of a request; return whether its blocks are still needed.

        Args:
            request: The request.
            blocks: Its blocks.
        """
        name = request.request_id
        self._begun.discard(name)
        self._unbegun.pop(name, None)
        self._awaiting.pop(name, None)
        if name in self._taken:
            self._taken.discard(name)
            self._given_up.append(name)
        tokens = self._sending.pop(name, None)
        if tokens is None:
            return False
        if request.status.name in _COMPUTED and len(blocks) >= self._blocks_for(tokens):
            self._computed.append((name, tuple(blocks[: self._blocks_for(tokens)])))
            return True
        self._given_up.append(name)
        return False

    def _blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self._block_tokens)
