"""The record of a request: what happens to it goes through the table of states, and what the table says is done.

A *request* here is one choice of what a client asks for. It works in *attempts*, each with a pair of machines and a key
that both know it by. The legs of an attempt run as tasks that only pass on what the machines report; a report of
an earlier attempt changes nothing. The life of a request, in order:

1. It arrives (`in_flight.InFlightRequests.begin`), and asks the dispatcher for a pair (`LiveRequest.start`).
2. With a pair it has an attempt, whose legs go to the machines (`Attempt.send_legs`).
3. Reports and tokens come in (`LiveRequest.prefill_started`, `token`, `kv_ready`); each becomes an event of the table.
4. `LiveRequest.apply` takes the event to the table, and carries out the actions that the table gives.
5. Where an attempt fails, another follows behind its output or from nothing (`_retry`), or the client gets an error.
6. It ends once (`_end`): what it has reserved is given back, and its owner gets the end.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol, cast

from phasesplit.errors import GatewayError, NoCapacityError, RequestError, TransferError, WorkerError
from phasesplit.gateway.choice_spec import ChoiceSpec, Output
from phasesplit.gateway.clock import Clock, Timer
from phasesplit.gateway.codec import Codec
from phasesplit.gateway.connections import WorkerConnections
from phasesplit.gateway.dispatcher import Dispatcher, Pair, TooLong
from phasesplit.gateway.legs import split_legs, whole_leg
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.meters import Meters, RequestStages
from phasesplit.gateway.request_states import (
    HOLDS_DECODE,
    HOLDS_PREFILL,
    Action,
    Event,
    RequestProgress,
    RequestState,
    release_reason,
    step,
)
from phasesplit.gateway.story import Story
from phasesplit.gateway.worker_client import LegError, WorkerClient
from phasesplit.protocol.answers import AnswerPiece
from phasesplit.protocol.worker import Chunk, PrefillTimes, Scored

_LOG = logging.getLogger(__name__)

_AGAIN_S = 0.25
"""From the failure of a second or later attempt to the next one; the first is tried again at once."""
_END_ANSWER_S = 1.0
"""How long a machine may take to end an answer whose last token is here; its connection is then used again."""
_RETRY_AFTER_S = 1.0
ANSWERS = frozenset({Action.END_WITH_ERROR, Action.ANSWER_4XX, Action.ANSWER_502, Action.ANSWER_503})
"""Actions that answer the client with an error."""

OnPiece = Callable[["LiveRequest", int, AnswerPiece | None], None]
"""Gets each piece of a stream with its attempt, and the end of a request with None."""


class RequestContext(Protocol):
    """What a request needs of the gateway around it."""

    dispatcher: Dispatcher
    workers: WorkerConnections
    codec: Codec
    clock: Clock
    limits: Limits
    meters: Meters
    last_token_s: dict[str, float]

    def enqueue(self, request: "LiveRequest") -> bool:
        """Let a request wait for machines; return whether there is a place in the queue."""

    def attempt_began(self, request: "LiveRequest") -> None:
        """Take note of the key of a new attempt, so that reports of machines find it."""

    def abort(self, machine: str, key: str, why: str) -> None:
        """Let a machine drop what it keeps for an attempt."""

    def retried(self, request: "LiveRequest", *, continues: bool) -> None:
        """Take note that an attempt has been given up, and another will follow."""

    def ended(self, request: "LiveRequest") -> None:
        """Take note that a request has ended."""


class LiveRequest:
    """The one record of a request: one choice of what a client asks for, from the queue to its end.

    Attributes:
        spec: What is asked for.
        progress: Where it is.
        output: What the present attempt has made, behind what is kept of those before it.
        continued: How often another pair has gone on where one was lost.
        error: What its client gets; None unless it failed with a client to answer.
        stages: When it reached what.
        attempts: Its attempts, the present or last one at the end.
        ended_by: The event that ended it, None before.
        story: What has happened to it.
        arrival: Its number in the order of arrivals, from 1; 0 before it has begun.
    """

    def __init__(self, context: RequestContext, spec: ChoiceSpec, on_piece: OnPiece, *, streams: bool) -> None:
        """Make one that has not started.

        Args:
            context: What all requests share.
            spec: What is asked for.
            on_piece: Its owner.
            streams: Whether the owner wants pieces.
        """
        self.spec = spec
        self.progress = RequestProgress()
        self.output = Output(spec, context.codec)
        self.error: Exception | None = None
        self.stages = RequestStages(context.clock.unix_s())
        self.attempts: list[Attempt] = []
        self.ended_by: Event | None = None
        self.arrival = 0
        self.name = f"{spec.number}-{spec.index}"
        self._context, self._on_piece, self._streams = context, on_piece, streams
        self._arrival_s = context.clock.now_s()
        self.story = Story(self.name)
        self.story.add(0.0, "arrived", RequestState.QUEUED, 0, why=f"{len(spec.prompt_ids)} prompt tokens")
        self.continued = 0
        self._emitted = 0  # output tokens of earlier attempts that are kept
        self._assigned_s = 0.0
        self._avoid: set[str] = set()
        self._finish_reason: str | None = None
        self._timer: Timer = context.clock.call_at(self._arrival_s + context.limits.first_token_s, self._check_deadline)

    @property
    def pair(self) -> Pair | None:
        """The machines of the present attempt, or of the last one; None before the first."""
        return self.attempts[-1].pair if self.attempts else None

    @property
    def key(self) -> str:
        """The name by which machines know the present attempt."""
        return f"{self.name}.{self.progress.attempts}"

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return self._context.clock.now_s() - self._arrival_s

    @property
    def outcome(self) -> str:
        """How it ended, in one word, "live" before."""
        if self.progress.state is RequestState.DONE:
            return "completed"
        return "live" if self.ended_by is None else str(self.ended_by)

    def has_open_leg(self, machine: str) -> bool:
        """Return whether a machine has yet to end its answer to the present attempt."""
        return bool(self.attempts) and self.attempts[-1].has_open_leg(machine)

    def is_at(self, attempt: int) -> bool:
        """Return whether an attempt is the present one, and not over: neither given up nor ended."""
        return attempt == self.progress.attempts and self.progress.state in HOLDS_DECODE

    def start(self) -> None:
        """Ask for a pair of machines; does nothing unless it is in the queue."""
        if self.progress.state is not RequestState.QUEUED:
            return
        spec = self.spec
        verdict = self._context.dispatcher.open(
            f"{self.name}.{self.progress.attempts + 1}",
            len(spec.prompt_ids) + self._emitted,
            max(1, spec.most_tokens - self._emitted),
            self._context.clock.now_s(),
            avoid=self._avoid,
            is_retry=self.progress.attempts > 0,
        )
        if isinstance(verdict, Pair):
            self.attempts.append(Attempt(self, verdict, self.progress.attempts + 1))
            self.apply(Event.ASSIGNED)
        elif isinstance(verdict, TooLong):
            param = "prompt" if hasattr(spec.request, "prompt") else "messages"
            too_long = RequestError(verdict.reason, param=param, code="context_length_exceeded")
            self.apply(Event.INPUT_REFUSED, error=too_long)
        # Once machines have failed it, it waits for others; new ones get a 503 and come back later.
        elif self.progress.attempts and self._context.enqueue(self):
            if self.story.entries()[-1].event != "waits":
                self.story.add(self.age_s, "waits", RequestState.QUEUED, self.progress.attempts, why=verdict.reason)
        else:
            no_capacity = NoCapacityError(verdict.reason, retry_after_s=verdict.retry_after_s)
            self.apply(Event.NO_CAPACITY, error=no_capacity)

    def apply(self, event: Event, attempt: int | None = None, *, error: Exception | None = None) -> bool:
        """Let something happen to the request; return whether it changed anything.

        Args:
            event: What happens.
            attempt: The attempt it belongs to, see `states.step`.
            error: Why, where this ends the request or the attempt badly.
        """
        before = self.progress
        self.progress, actions = step(
            before,
            event,
            most_attempts=self._context.limits.attempts,
            attempt=attempt,
            can_resume=self._can_resume,
        )
        changed = Action.ABSORB not in actions
        why = error if event is not Event.ASSIGNED or self.pair is None else _of_pair(self.pair)
        self.story.add(self.age_s, event, self.progress.state, self.progress.attempts, why=why, changed=changed)
        if not changed:
            self._context.meters.absorbed(event)
            return False
        for action in actions:
            self._carry_out(action, before, event, error)
        if self.progress.ended:
            self._end(event)
        return True

    def begin_sending(self, attempt: int) -> bool:
        """Return whether content of an attempt may go to the client, which counts as having content from now on."""
        if attempt != self.progress.attempts or self.progress.state in (
            RequestState.FAILED,
            RequestState.REFUSED,
            RequestState.QUEUED,
        ):
            return self.progress.sent
        if not self.progress.sent and not self.progress.ended:
            self.apply(Event.CONTENT_SENT)
        return True

    def attempt_failed(self, error: LegError, attempt: int, *, is_doubtful: bool = False) -> None:
        """Take note that a machine did not do its part.

        Args:
            error: What it did.
            attempt: The attempt.
            is_doubtful: Whether the output so far may be wrong too; it is dropped unless the client has it already.
        """
        if not self.is_at(attempt) or self.pair is None:
            self.apply(error.event, attempt)
            return
        if error.event is Event.PREFILL_LOST and self.progress.state in (RequestState.WAITING, RequestState.DECODING):
            self.apply(error.event, attempt)  # the decode machine has all it needs
            return
        pair, now_s = self.pair, self._context.clock.now_s()
        blamed = {Event.PREFILL_LOST: {pair.prefill}, Event.DECODE_LOST: {pair.decode}}.get(error.event, set())
        for name in blamed:
            self._context.dispatcher.failed(name, now_s)
        self._avoid |= blamed or {pair.prefill, pair.decode}
        if is_doubtful and not self.progress.sent:
            self.output = Output(self.spec, self._context.codec)
        self.apply(error.event, attempt, error=error)

    def lost(self, side: str, attempt: int) -> None:
        """Take note that a machine of an attempt is gone, or has dropped it."""
        event = Event.PREFILL_LOST if side == "prefill" else Event.DECODE_LOST
        self.apply(event, attempt, error=WorkerError(f"the machine of the {side} phase was lost"))

    def check_stall(self, stall_timeout_s: float) -> None:
        """Give the attempt up if nothing has come of it for too long, though its machines say that they live.

        Args:
            stall_timeout_s: See `in_flight.InFlightRequests.stall_timeout_s`.
        """
        state, last_s = self.progress.state, self.stages.last_token_s
        if state is RequestState.QUEUED and self._emitted and last_s is not None:
            # Half an answer on a screen is looked at; one that is not streamed may wait as long as for its first token.
            limits = self._context.limits
            if self.age_s - last_s > (limits.idle_s if self.progress.sent else limits.first_token_s):
                self.apply(Event.DEADLINE, error=WorkerError("a machine was lost, and no other could go on in time"))
        if self.pair is None or state not in HOLDS_DECODE:
            return
        if last_s is None or state is RequestState.PREFILLING:
            # While its machine gives tokens to others, a prompt only waits for its turn.
            others_s = self._context.last_token_s.get(self.pair.prefill, self._arrival_s) - self._arrival_s
            silent_s = self.age_s - max(others_s, self._assigned_s)
            most_s, event = stall_timeout_s, Event.PREFILL_LOST
        else:
            silent_s, most_s = self.age_s - last_s, self._context.limits.idle_s
            event = Event.TRANSFER_FAILED if state is RequestState.TRANSFERRING else Event.DECODE_LOST
        if silent_s > most_s:
            self.attempt_failed(LegError(f"no token for {silent_s:.3g} s", event), self.progress.attempts)

    def abort(self, machine: str, why: str, attempt: int) -> None:
        """Take note that a machine has dropped what it had of an attempt."""
        is_alone = self.progress.state in (RequestState.WAITING, RequestState.DECODING)
        if self.is_at(attempt) and self.pair is not None and (machine == self.pair.decode or not is_alone):
            self.attempt_failed(LegError(why, Event.TRANSFER_FAILED), attempt)

    def prefill_started(self, attempt: int) -> None:
        """Take note that the prefill phase of an attempt has begun to run."""
        if self.is_at(attempt) and self.progress.state is RequestState.PREFILLING:
            self._context.dispatcher.prefill_started(self.key, self._context.clock.now_s())
            if self.stages.prefill_started_s is None and not self._emitted:
                self.stages.prefill_started_s = self.age_s
        self.apply(Event.PREFILL_STARTED, attempt)

    def prefill_took(self, times: PrefillTimes, attempt: int) -> None:
        """Take note of how long the prefill phase of an attempt took, as its machine reports with the first token.

        It is more exact than the report that the phase began, which may have come late or not at all.
        """
        if self.is_at(attempt) and not self._emitted:
            self.stages.prefill_took(times.prefill_s, self.age_s)

    def kv_ready(self, attempt: int) -> None:
        """Take note that all KV of an attempt is on its decode machine."""
        if self.is_at(attempt) and self.progress.state in (RequestState.PREFILLING, RequestState.TRANSFERRING):
            self._context.dispatcher.kv_ready(self.key, self._context.clock.now_s())
            if self.stages.kv_ready_s is None and not self._emitted:
                self.stages.kv_ready_s = self.age_s
        self.apply(Event.KV_READY, attempt)

    def token(self, token: int, scored: Scored | None, place: int, attempt: int, finish_reason: str | None) -> None:
        """Take a token from a machine, unless the other one has sent it already.

        Args:
            token: Its id.
            scored: Its log-probabilities, where they are wanted.
            place: Its place in the output, from 0.
            attempt: The attempt it belongs to.
            finish_reason: "stop" or "length" if the machine reports it as the last one.
        """
        if not self.is_at(attempt):
            return
        if token >= self._context.codec.vocabulary:
            event = Event.DECODE_LOST if place > self._emitted else Event.PREFILL_LOST
            foreign = LegError(f"a machine made token {token}, which the model does not have", event)
            self.attempt_failed(foreign, attempt, is_doubtful=True)
            return
        made = self.output.ids
        if place < len(made):
            if made[place] != token:
                # What comes after it would continue another text than the client's.
                disagreement = LegError(f"the machines disagree on token {place}", Event.TRANSFER_FAILED)
                self.attempt_failed(disagreement, attempt, is_doubtful=True)
            elif finish_reason is not None and place == len(made) - 1:
                self.no_more_tokens(finish_reason, attempt)
            return
        self.output.push(token, scored)
        self._context.meters.token(self.stages.token(place, self.age_s))
        is_first = place == self._emitted
        if self.pair is not None:
            source = self.pair.prefill if is_first else self.pair.decode
            self._context.last_token_s[source] = self._context.clock.now_s()
        if is_first:
            self._context.dispatcher.first_token(self.key, self._context.clock.now_s())
        event = Event.FIRST_TOKEN if is_first else Event.TOKEN
        if self.output.is_stopped:
            event = Event.STOPPED
        elif finish_reason is not None or self.output.is_last:
            event, self._finish_reason = Event.LAST_TOKEN, finish_reason
        self.apply(event, attempt)

    def no_more_tokens(self, finish_reason: str, attempt: int) -> None:
        """Take note of a machine's report that no further token comes."""
        if self.is_at(attempt):
            self._finish_reason = finish_reason
            self.apply(Event.LAST_TOKEN, attempt)

    def _carry_out(self, action: Action, before: RequestProgress, event: Event, error: Exception | None) -> None:
        key = f"{self.name}.{before.attempts}"
        if action is Action.EMIT:
            # The last token goes out with the end.
            if self._streams and not self.progress.ended:
                self._piece()
        elif action is Action.SEND_LEGS:
            self._assigned_s = self.age_s
            if not self._emitted:
                self.stages.assigned_s = self.age_s
            self._context.attempt_began(self)
            self.attempts[-1].send_legs(self._context.workers)
        elif action is Action.CANCEL_PREFILL or action is Action.CANCEL_DECODE:
            self._call_off(action, key, event)
        elif action is Action.RELEASE_PREFILL or action is Action.RELEASE_DECODE:
            self._release(key, before, event)
        elif action is Action.FINISH:
            self.output.finish(self._finish_reason)
            if self._streams:
                self._piece()
        elif action is Action.REASSIGN or action is Action.CONTINUE:
            self._retry(keeps=action is Action.CONTINUE)
        elif action in ANSWERS:
            self.error = client_error(action, event, error, self._context.limits)

    def _can_resume(self) -> bool:
        # Pieces of a stream that have not been sent are dropped with their attempt, see `begin_sending`.
        has_output = bool(self.output.ids) and (self.progress.sent or not self._streams)
        return has_output and self.spec.can_resume(reports_output=self._context.workers.resumes)

    def _piece(self) -> None:
        piece = self.output.piece()
        if piece is not None:
            self._on_piece(self, self.progress.attempts, piece)

    def _release(self, key: str, before: RequestProgress, event: Event) -> None:
        now_s = self._context.clock.now_s()
        if self.progress.state is RequestState.QUEUED or self.progress.ended:
            made = len(self.output.ids)
            self._context.dispatcher.ended(key, release_reason(before.state, event), now_s, made)
        else:
            self._context.dispatcher.kv_ready(key, now_s)

    def _call_off(self, action: Action, key: str, event: Event) -> None:
        side = "prefill" if action is Action.CANCEL_PREFILL else "decode"
        leg = self.attempts[-1].legs.pop(side, None) if self.attempts else None
        if leg is None:
            return
        if not leg.done() and leg is not asyncio.current_task():
            leg.cancel()
        elif side == "prefill" and self.pair is not None and self.spec.most_tokens - self._emitted > 1:
            # Its answer is here, so there is no connection left to close; what it keeps would stay for the lease.
            self._context.abort(self.pair.prefill, key, str(event))

    def _retry(self, *, keeps: bool) -> None:
        self._context.retried(self, continues=keeps)
        if keeps:
            self.continued += 1
            self._emitted = len(self.output.ids)
        else:
            self.output = Output(self.spec, self._context.codec)
            self._emitted = 0
            self.stages.forget_attempt()
        self._finish_reason = None
        if self.progress.attempts == 1:
            asyncio.get_running_loop().call_soon(self.start)
        else:
            # Whatever failed twice in a row may need a moment: a machine's restart, or news of it.
            self._context.clock.call_at(self._context.clock.now_s() + _AGAIN_S, self.start)

    def _check_deadline(self) -> None:
        end_s = self._arrival_s + self._context.limits.request_s
        if self.output.ids and self._context.clock.now_s() < end_s:
            self._timer = self._context.clock.call_at(end_s, self._check_deadline)
        else:
            self.apply(Event.DEADLINE)

    def _end(self, event: Event) -> None:
        self.ended_by = event
        self._timer.cancel()
        late = self.attempts[-1].legs.get("prefill") if self.attempts else None
        if late is not None and not late.done() and late is not asyncio.current_task():
            late.cancel()
        self._context.ended(self)
        self._on_piece(self, self.progress.attempts, None)


class Attempt:
    """One attempt of a request: a pair of machines, and a leg to each.

    Attributes:
        pair: Its machines, and the key that both know it by.
        legs: The tasks that follow its machines' answers, by side: "prefill", "decode".
    """

    def __init__(self, request: "LiveRequest", pair: Pair, number: int) -> None:
        """Make one that has not begun.

        Args:
            request: The request.
            pair: Its machines.
            number: The number of the attempt, from 1.
        """
        self._request, self.pair = request, pair
        self._number = number
        self.legs: dict[str, asyncio.Task[None]] = {}
        self._emitted = tuple(request.output.ids)
        # Where the prompt's log-probabilities are wanted, nothing is sent before they are here.
        self._prompt_scored = asyncio.Event()

    def has_open_leg(self, machine: str) -> bool:
        """Return whether a machine has yet to end its answer."""
        return any(
            not leg.done() and machine == (self.pair.prefill if side == "prefill" else self.pair.decode)
            for side, leg in self.legs.items()
        )

    def send_legs(self, workers: WorkerConnections) -> None:
        """Send its legs to its machines."""
        prefill_worker, decode_worker = workers.client(self.pair.prefill), workers.client(self.pair.decode)
        if prefill_worker is None or decode_worker is None:
            self.legs = {"decode": run(self.gone(), self._request, self._number)}
            return
        prefill, decode = self.bodies(workers.address(self.pair.decode))
        if prefill is not None:
            self.legs["prefill"] = run(self.prefill_leg(prefill_worker, prefill), self._request, self._number)
        if decode is not None:
            self.legs["decode"] = run(self.decode_leg(decode_worker, decode), self._request, self._number)

    def bodies(self, address: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the bodies of the prefill leg and the decode leg; None for a leg that there is not.

        Args:
            address: Where the decode machine takes KV.
        """
        spec, pair, key = self._request.spec, self.pair, self.pair.key
        if pair.same:
            body = whole_leg(
                spec.request, spec.index, spec.prompt_ids, most_tokens=spec.most_tokens, seed=spec.seed,
                emitted=self._emitted,
            )  # fmt: skip
            return None, body | {"kv_transfer_params": {"key": key, "epoch": pair.decode_epoch}}
        legs = split_legs(
            spec.request,
            spec.index,
            spec.prompt_ids,
            most_tokens=spec.most_tokens,
            seed=spec.seed,
            emitted=self._emitted,
            prefill_transfer={
                "do_remote_decode": True, "key": key, "peer": pair.decode, "peer_epoch": pair.decode_epoch,
                "epoch": pair.prefill_epoch, "address": dict(address),
            },
            decode_transfer={
                "do_remote_prefill": True, "key": key, "peer": pair.prefill, "peer_epoch": pair.prefill_epoch,
                "epoch": pair.decode_epoch,
            },
        )  # fmt: skip
        if legs.decode is None:
            return legs.prefill | {"kv_transfer_params": {"key": key, "epoch": pair.prefill_epoch}}, None
        return legs.prefill, legs.decode

    async def gone(self) -> None:
        """Report that a machine of the pair has left in the meantime."""
        error = WorkerError("a machine left just now")
        self._request.apply(Event.WORKER_REFUSED, self._number, error=error)

    async def prefill_leg(self, worker: WorkerClient, body: Mapping[str, Any]) -> None:
        """Run the prefill leg."""
        try:
            chunk = await worker.prefill_leg(body)
            if not chunk.tokens:
                raise LegError("the machine of the prefill phase answered without a token", Event.PREFILL_LOST)
        except LegError as error:
            self._request.attempt_failed(error, self._number)
            return
        self._on_times(chunk)
        self._on_prompt(chunk)
        # Its "length" is that of the leg, which is one token.
        self._token(chunk, 0, 0, "stop" if chunk.finish_reason == "stop" else None)

    async def decode_leg(self, worker: WorkerClient, body: Mapping[str, Any]) -> None:
        """Run the decode leg, or the one leg of a request that one machine serves whole."""
        place = 0
        try:
            async with aclosing(cast(Any, worker.decode_leg(body))) as chunks:
                async for chunk in chunks:
                    if not place:
                        await self._begin(chunk)
                    self._on_chunk(chunk, place)
                    place += len(chunk.tokens)
                    if not self._request.is_at(self._number):
                        if chunk.finish_reason is not None and self._request.progress.state is RequestState.DONE:
                            await self._end_answer(chunks)
                        return
        except LegError as error:
            self._request.attempt_failed(error, self._number)
            return
        self._request.attempt_failed(
            LegError("the decode phase's answer ended in the middle", Event.DECODE_LOST), self._number
        )

    async def _begin(self, chunk: Chunk) -> None:
        self._on_times(chunk)
        if self.pair.same:
            self._request.prefill_started(self._number)
            self._on_prompt(chunk)
        elif self._request.spec.request.scores_prompt and not self._emitted:
            await self._prompt_scored.wait()

    def _on_times(self, chunk: Chunk) -> None:
        if chunk.times is not None:
            self._request.prefill_took(chunk.times, self._number)

    def _on_prompt(self, chunk: Chunk) -> None:
        if self._request.is_at(self._number):
            self._request.output.begin(chunk.prompt_scored)
            self._prompt_scored.set()

    def _on_chunk(self, chunk: Chunk, place: int) -> None:
        if not self._request.is_at(self._number):
            return
        if not place:
            self._request.output.begin(())
        if not place and chunk.tokens and self._request.progress.state in HOLDS_PREFILL and not self.pair.same:
            # No token leaves a machine before its KV is whole.
            self._request.kv_ready(self._number)
        last = len(chunk.tokens) - 1
        for offset in range(len(chunk.tokens)):
            self._token(chunk, offset, place + offset, chunk.finish_reason if offset == last else None)
        if not place and chunk.tokens and self.pair.same:
            self._request.kv_ready(self._number)
        if not chunk.tokens and chunk.finish_reason is not None:
            self._request.no_more_tokens(chunk.finish_reason, self._number)

    def _token(self, chunk: Chunk, offset: int, place: int, finish_reason: str | None) -> None:
        scored = chunk.scored[offset] if chunk.scored else None
        self._request.token(chunk.tokens[offset], scored, len(self._emitted) + place, self._number, finish_reason)

    @staticmethod
    async def _end_answer(chunks: Any) -> None:
        try:
            async with asyncio.timeout(_END_ANSWER_S):
                async for _ in chunks:
                    pass
        except (TimeoutError, LegError):
            return


def _of_pair(pair: Pair) -> str:
    return f"machine {pair.decode}" if pair.same else f"prefill machine {pair.prefill}, decode machine {pair.decode}"


def run(leg: Coroutine[Any, Any, None], request: LiveRequest, attempt: int) -> asyncio.Task[None]:
    """Return a leg as a task; a bug in it ends the request."""

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            _LOG.error("a bug ends request %s", request.key, exc_info=bug)
            request.apply(Event.CANCELLED, attempt, error=bug if isinstance(bug, Exception) else None)

    task = asyncio.get_running_loop().create_task(leg)
    task.add_done_callback(look)
    return task


def client_error(action: Action, event: Event, cause: Exception | None, limits: Limits) -> Exception:
    """Return the error that a client gets.

    Args:
        action: One of `ANSWERS`.
        event: What happened.
        cause: What is known of why; an error that is not a GatewayError is our bug, and answered as such.
        limits: The gateway's.
    """
    if isinstance(cause, RequestError | NoCapacityError) or (cause is not None and not isinstance(cause, GatewayError)):
        return cause
    why = str(cause) if cause is not None else _reason_text(event, limits)
    if isinstance(cause, LegError) and event is Event.INPUT_REFUSED:
        return RequestError(why, status=cause.machine_status, param=cause.param, code=cause.code)
    if action is Action.ANSWER_503:
        return NoCapacityError(why, retry_after_s=_RETRY_AFTER_S)
    if event is Event.TRANSFER_FAILED:
        return TransferError(f"the KV cache did not arrive whole: {why}")
    return WorkerError(why)


def _reason_text(event: Event, limits: Limits) -> str:
    if event is Event.DEADLINE:
        return f"not in time: the first token is due in {limits.first_token_s:g} s, the last in {limits.request_s:g} s"
    return "the gateway is shutting down" if event is Event.CANCELLED else f"the request failed: {event}"
