"""The connector in vLLM's scheduler: which requests send KV or wait for it, and what each step has to do about that.

1. `arrived`: the request's `kv_transfer_params` are read. A `SendOrder` goes out with the next step, long before the
   prompt is computed, so that both machines prepare the transfer.
2. `awaited_tokens`, `allocated`: a request of the decode machine gets its blocks and waits. Its `ReceiveOrder` goes
   out.
3. `step`: everything that was ordered since the last step, and the blocks that this step makes final, as plain values:
   vLLM holds the scheduler and the model in different processes, and only `StepOrders` passes from one to the other.
4. `finished`: vLLM keeps the blocks of a computed prompt until its KV has left; other ends abort the transfer.

vLLM's objects are seen through the few attributes named here, so that this can be tested without vLLM. The parameters
come from outside: a mistake in them is logged, and the request is served whole.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from phasesplit.domain.machine import blocks_for
from phasesplit.protocol.completions import OpenTransferFields
from phasesplit.protocol.openai_errors import of_validation

BlockIds = Callable[[str], Sequence[int]]
"""From vLLM's name of a request to its blocks."""

_log = logging.getLogger(__name__)
_SERVED_WHOLE = "kv_transfer_params: %s; the request is served whole"
_COMPUTED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""Ends of a request that leave KV worth sending. Source: vllm/v1/request.py, RequestStatus."""


@dataclass(frozen=True, slots=True)
class SendOrder:
    """A request whose KV will leave once its prompt is computed.

    Attributes:
        request: vLLM's name of the request.
        key: What both machines call it.
        peer: Machine that takes the KV.
        peer_epoch: Its epoch.
        address: Where it is, as `kv_transfer.outgoing.Address`.
        tokens: Tokens of the prompt, >= 1.
    """

    request: str
    key: str
    peer: str
    peer_epoch: int
    address: Mapping[str, Any]
    tokens: int


@dataclass(frozen=True, slots=True)
class ReceiveOrder:
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
        receives: Requests that wait for KV, new ones.
        pieces: Prompts of this step.
        computed: Requests whose prefill is over; vLLM keeps their blocks until they are reported as sent.
        aborted: Requests that ended before.
        started: Keys of requests served whole whose prefill begins.
        computes: Whether the step computes anything.
    """

    sends: tuple[SendOrder, ...] = ()
    receives: tuple[ReceiveOrder, ...] = ()
    pieces: tuple[PromptPiece, ...] = ()
    computed: tuple[tuple[str, tuple[int, ...]], ...] = ()
    aborted: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    computes: bool = True


class KvParams(NamedTuple):
    """The `kv_transfer_params` of a split request.

    Attributes:
        sends: Its KV goes to another machine; False: it comes from one.
        key: What both machines call the request.
        peer: The other machine.
        peer_epoch: Its epoch.
        address: Where it is; empty where KV comes.
    """

    sends: bool
    key: str
    peer: str
    peer_epoch: int
    address: Mapping[str, Any]


def read_kv_params(params: object) -> KvParams | None:
    """Return the parameters of a split request; None of one that is served whole, or whose parameters are wrong.

    Args:
        params: Its `kv_transfer_params`: a mapping, or whatever else a client may have sent.
    """
    if not isinstance(params, Mapping) or not _is_split(params):
        return None
    try:
        fields = OpenTransferFields.model_validate(dict(params))
    except ValidationError as error:
        _log.warning(_SERVED_WHOLE, of_validation(error))
        return None
    key, peer, epoch, address = fields.key, fields.peer, fields.peer_epoch, fields.address
    if key is None or peer is None or epoch is None or (fields.do_remote_decode and not address):
        needed = {"key": key, "peer": peer, "peer_epoch": epoch, "address": address}
        _log.warning(
            _SERVED_WHOLE, f"{next(name for name, value in needed.items() if not value and value != 0)} is required"
        )
        return None
    return KvParams(bool(fields.do_remote_decode), key, peer, epoch, address or {})


def key_of_whole(params: object) -> str | None:
    """Return the key of a request that is served whole; None of a split request, and if there is no key.

    Args:
        params: As for `read_kv_params`.
    """
    if not isinstance(params, Mapping) or _is_split(params):
        return None
    try:
        return OpenTransferFields.model_validate({"key": params.get("key")}).key
    except ValidationError:
        return None


def _is_split(params: Mapping[str, Any]) -> bool:
    return bool(params.get("do_remote_decode") or params.get("do_remote_prefill"))


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
        """Its `kv_transfer_params`: a mapping, or whatever else a client sent."""

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
        self._started: set[str] = set()
        self._not_started: dict[str, str] = {}  # keys of requests served whole
        self._awaiting: dict[str, KvParams] = {}
        self._receiving: set[str] = set()
        self._sends: list[SendOrder] = []
        self._receives: list[ReceiveOrder] = []
        self._computed: list[tuple[str, tuple[int, ...]]] = []
        self._aborted: list[str] = []

    def arrived(self, request: Request) -> None:
        """Record a new request; one whose KV will leave is ordered at once, long before it is scheduled."""
        name, tokens = request.request_id, request.num_prompt_tokens
        params = read_kv_params(request.kv_transfer_params)
        if params is None:
            key = key_of_whole(request.kv_transfer_params)
            if key is not None:
                self._not_started[name] = key
            return
        if params.sends:
            self._sending[name] = tokens
            self._sends.append(SendOrder(name, params.key, params.peer, params.peer_epoch, params.address, tokens))
        else:
            self._awaiting[name] = params

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
        """Record that a request has its blocks.

        Args:
            request: The request.
            blocks: All of its blocks.
            awaited: Tokens that come from another machine.
        """
        params = self._awaiting.pop(request.request_id, None) if awaited else None
        if params is None:
            return
        tokens = request.num_prompt_tokens
        self._receiving.add(request.request_id)
        self._receives.append(
            ReceiveOrder(
                request.request_id,
                params.key,
                params.peer,
                tokens,
                tuple(blocks[: self._blocks_for(tokens)]),
                (tokens - awaited) // self._block_tokens,
            )
        )

    def step(
        self, scheduled: Mapping[str, int], computed: Iterable[tuple[str, int]], block_ids: BlockIds
    ) -> StepOrders:
        """Return what a step has to do, once.

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
            pieces.append(PromptPiece(name, tuple(block_ids(name)), final, name not in self._started))
            self._started.add(name)
        step = StepOrders(
            tuple(self._sends),
            tuple(self._receives),
            tuple(pieces),
            tuple(self._computed),
            tuple(self._aborted),
            tuple(self._not_started.pop(name) for name in scheduled if name in self._not_started),
            any(scheduled.values()),
        )
        for handed_out in (self._sends, self._receives, self._computed, self._aborted):
            handed_out.clear()
        return step

    def finished(self, request: Request, blocks: Sequence[int]) -> bool:
        """Record the end of a request; return whether its blocks are still needed.

        Args:
            request: The request.
            blocks: Its blocks.
        """
        name = request.request_id
        self._started.discard(name)
        self._not_started.pop(name, None)
        self._awaiting.pop(name, None)
        if name in self._receiving:
            self._receiving.discard(name)
            self._aborted.append(name)
        tokens = self._sending.pop(name, None)
        if tokens is None:
            return False
        if request.status.name in _COMPUTED and len(blocks) >= self._blocks_for(tokens):
            self._computed.append((name, tuple(blocks[: self._blocks_for(tokens)])))
            return True
        self._aborted.append(name)
        return False

    def _blocks_for(self, tokens: int) -> int:
        return blocks_for(tokens, self._block_tokens)
