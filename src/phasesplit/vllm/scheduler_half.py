"""The connector in vLLM's scheduler: which requests send KV or wait for it, and what each step has to do about that.

It sees vLLM's objects through the few attributes named here, so that it can be tested without vLLM.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from phasesplit.domain.kv import blocks_for
from phasesplit.vllm.orders import Piece, Send, Step, Take
from phasesplit.vllm.wishes import Wishes, key_of_whole, read_wishes

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

    def step(self, scheduled: Mapping[str, int], computed: Iterable[tuple[str, int]], block_ids: BlockIds) -> Step:
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
            pieces.append(Piece(name, tuple(block_ids(name)), final, name not in self._begun))
            self._begun.add(name)
        step = Step(
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
