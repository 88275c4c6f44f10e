"""The two legs of an attempt, each a task that tells the choice what its machine says."""

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any, cast

from phasesplit.errors import WorkerError
from phasesplit.gateway.choice import Choice
from phasesplit.gateway.legs import split_legs, whole_leg
from phasesplit.gateway.states import HOLDS_PROMPT, Event, State
from phasesplit.gateway.verdicts import Pair
from phasesplit.gateway.worker import LegError, WorkerClient
from phasesplit.protocol.worker import Chunk

_GOODBYE_S = 1.0
"""How long a machine may take to end an answer whose last token is here; its connection is then used again."""


class Attempt:
    """One attempt of a choice."""

    def __init__(self, choice: Choice, pair: Pair) -> None:
        """Make the attempt that the choice is at.

        Args:
            choice: The choice.
            pair: Its machines.
        """
        self._choice, self._pair = choice, pair
        self._number = choice.progress.attempts
        self._emitted = tuple(choice.output.ids)
        # Where the prompt's log-probabilities are wanted, nothing is told before they are here.
        self._prompt_told = asyncio.Event()

    def bodies(self, address: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the bodies of the prompt leg and the token leg; None for a leg that there is not.

        Args:
            address: Where the token machine takes KV.
        """
        order, pair, key = self._choice.order, self._pair, self._choice.key
        if pair.same:
            body = whole_leg(
                order.request, order.index, order.prompt_ids, most_tokens=order.most_tokens, seed=order.seed,
                emitted=self._emitted,
            )  # fmt: skip
            return None, body | {"kv_transfer_params": {"key": key, "epoch": pair.token_epoch}}
        legs = split_legs(
            order.request,
            order.index,
            order.prompt_ids,
            most_tokens=order.most_tokens,
            seed=order.seed,
            emitted=self._emitted,
            prompt_transfer={
                "do_remote_decode": True, "key": key, "peer": pair.token, "peer_epoch": pair.token_epoch,
                "epoch": pair.prompt_epoch, "address": dict(address),
            },
            token_transfer={
                "do_remote_prefill": True, "key": key, "peer": pair.prompt, "peer_epoch": pair.prompt_epoch,
                "epoch": pair.token_epoch,
            },
        )  # fmt: skip
        if legs.token is None:
            return legs.prompt | {"kv_transfer_params": {"key": key, "epoch": pair.prompt_epoch}}, None
        return legs.prompt, legs.token

    async def gone(self) -> None:
        """Tell that a machine of the pair has left in the meantime."""
        error = WorkerError("a machine left just now")
        self._choice.tell(Event.WORKER_REFUSED, self._number, error=error)

    async def prompt_leg(self, worker: WorkerClient, body: Mapping[str, Any]) -> None:
        """Run the prompt leg."""
        try:
            chunk = await worker.prompt_leg(body)
            if not chunk.tokens:
                raise LegError("the machine of the prompt phase answered without a token", Event.PROMPT_LOST)
        except LegError as error:
            self._choice.fault(error, self._number)
            return
        self._hear_times(chunk)
        self._hear_prompt(chunk)
        # Its "length" is that of the leg, which is one token.
        self._token(chunk, 0, 0, "stop" if chunk.finish_reason == "stop" else None)

    async def token_leg(self, worker: WorkerClient, body: Mapping[str, Any]) -> None:
        """Run the token leg, or the one leg of a request that one machine serves whole."""
        place = 0
        try:
            async with aclosing(cast(Any, worker.token_leg(body))) as chunks:
                async for chunk in chunks:
                    if not place:
                        await self._begin(chunk)
                    self._hear(chunk, place)
                    place += len(chunk.tokens)
                    if not self._choice.is_at(self._number):
                        if chunk.finish_reason is not None and self._choice.progress.state is State.DONE:
                            await self._goodbye(chunks)
                        return
        except LegError as error:
            self._choice.fault(error, self._number)
            return
        self._choice.fault(LegError("the token phase's answer ended in the middle", Event.TOKEN_LOST), self._number)

    async def _begin(self, chunk: Chunk) -> None:
        self._hear_times(chunk)
        if self._pair.same:
            self._choice.prompt_started(self._number)
            self._hear_prompt(chunk)
        elif self._choice.order.request.scores_prompt and not self._emitted:
            await self._prompt_told.wait()

    def _hear_times(self, chunk: Chunk) -> None:
        if chunk.times is not None:
            self._choice.prompt_took(chunk.times, self._number)

    def _hear_prompt(self, chunk: Chunk) -> None:
        if self._choice.is_at(self._number):
            self._choice.output.begin(chunk.prompt_scored)
            self._prompt_told.set()

    def _hear(self, chunk: Chunk, place: int) -> None:
        if not self._choice.is_at(self._number):
            return
        if not place:
            self._choice.output.begin(())
        if not place and chunk.tokens and self._choice.progress.state in HOLDS_PROMPT and not self._pair.same:
            # No token leaves a machine before its KV is whole.
            self._choice.kv_ready(self._number)
        last = len(chunk.tokens) - 1
        for offset in range(len(chunk.tokens)):
            self._token(chunk, offset, place + offset, chunk.finish_reason if offset == last else None)
        if not place and chunk.tokens and self._pair.same:
            self._choice.kv_ready(self._number)
        if not chunk.tokens and chunk.finish_reason is not None:
            self._choice.last_word(chunk.finish_reason, self._number)

    def _token(self, chunk: Chunk, offset: int, place: int, word: str | None) -> None:
        scored = chunk.scored[offset] if chunk.scored else None
        self._choice.token(chunk.tokens[offset], scored, len(self._emitted) + place, self._number, word)

    @staticmethod
    async def _goodbye(chunks: Any) -> None:
        try:
            async with asyncio.timeout(_GOODBYE_S):
                async for _ in chunks:
                    pass
        except (TimeoutError, LegError):
            return
