"""The driver of one choice: what happens to it goes through the table of states, and what the table says is done.

A choice works in *attempts*, each with a pair of machines and a key that both know it by. The legs of an attempt run as
tasks that do nothing but tell the choice what the machines say; a report of an earlier attempt changes nothing.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from phasesplit.errors import NoCapacityError, RequestError, WorkerError
from phasesplit.gateway.clock import Timer
from phasesplit.gateway.failures import ANSWERS, client_error
from phasesplit.gateway.order import Order
from phasesplit.gateway.output import Output
from phasesplit.gateway.stages import Stages
from phasesplit.gateway.states import HOLDS_TOKEN, Action, Event, Progress, State, release_reason, step
from phasesplit.gateway.story import Story
from phasesplit.gateway.verdicts import Pair, TooLong
from phasesplit.gateway.worker import LegError
from phasesplit.protocol.answers import Piece
from phasesplit.protocol.worker import PromptTimes, Scored

if TYPE_CHECKING:
    from phasesplit.gateway.desk import Desk

_LOG = logging.getLogger(__name__)

_AGAIN_S = 0.25
"""From the failure of a second or later attempt to the next one; the first is tried again at once."""

Hear = Callable[["Choice", int, Piece | None], None]
"""Told of each piece of a stream with its attempt, and of the end of a choice with None."""


class Choice:
    """One choice from the queue to its end.

    Attributes:
        order: What is asked for.
        progress: Where it is.
        output: What the present attempt has made, behind what is kept of those before it.
        continued: How often another pair has gone on where one was lost.
        error: What its client is told; None unless it failed with a client to tell.
        stages: When it reached what.
        pair: The machines of the present attempt, or of the last one.
        ended_by: The event that ended it, None before.
        story: What has happened to it.
        arrival: Its number in the order of arrivals, from 1; 0 before it has begun.
    """

    def __init__(self, desk: "Desk", order: Order, hear: Hear, *, streams: bool) -> None:
        """Make a choice that has not started.

        Args:
            desk: What all choices share.
            order: What is asked for.
            hear: Its owner.
            streams: Whether the owner wants pieces.
        """
        self.order = order
        self.progress = Progress()
        self.output = Output(order, desk.codec)
        self.error: Exception | None = None
        self.stages = Stages(desk.clock.unix_s())
        self.pair: Pair | None = None
        self.ended_by: Event | None = None
        self.arrival = 0
        self.name = f"{order.number}-{order.index}"
        self._desk, self._hear, self._streams = desk, hear, streams
        self._arrival_s = desk.clock.now_s()
        self.story = Story(self.name)
        self.story.add(0.0, "arrived", State.QUEUED, 0, why=f"{len(order.prompt_ids)} prompt tokens")
        self.continued = 0
        self._emitted = 0  # output tokens of earlier attempts that are kept
        self._assigned_s = 0.0
        self._avoid: set[str] = set()
        self._legs: dict[str, asyncio.Task[None]] = {}
        self._word: str | None = None
        self._timer: Timer = desk.clock.call_at(self._arrival_s + desk.limits.first_token_s, self._look_at_the_clock)

    @property
    def key(self) -> str:
        """The name by which machines know the present attempt."""
        return f"{self.name}.{self.progress.attempts}"

    @property
    def age_s(self) -> float:
        """Seconds since its arrival."""
        return self._desk.clock.now_s() - self._arrival_s

    @property
    def outcome(self) -> str:
        """How it ended, in one word, "live" before."""
        if self.progress.state is State.DONE:
            return "completed"
        return "live" if self.ended_by is None else str(self.ended_by)

    def has_open_leg(self, machine: str) -> bool:
        """Return whether a machine has yet to end its answer to the present attempt."""
        pair = self.pair
        return pair is not None and any(
            not leg.done() and machine == (pair.prompt if side == "prompt" else pair.token)
            for side, leg in self._legs.items()
        )

    def is_at(self, attempt: int) -> bool:
        """Return whether an attempt is the present one, and not over: neither given up nor ended."""
        return attempt == self.progress.attempts and self.progress.state in HOLDS_TOKEN

    def start(self) -> None:
        """Ask for a pair of machines; does nothing unless the choice is in the queue."""
        if self.progress.state is not State.QUEUED:
            return
        order = self.order
        verdict = self._desk.dispatcher.open(
            f"{self.name}.{self.progress.attempts + 1}",
            len(order.prompt_ids) + self._emitted,
            max(1, order.most_tokens - self._emitted),
            self._desk.clock.now_s(),
            avoid=self._avoid,
            is_retry=self.progress.attempts > 0,
        )
        if isinstance(verdict, Pair):
            self.pair = verdict
            self.tell(Event.ASSIGNED)
        elif isinstance(verdict, TooLong):
            param = "prompt" if hasattr(order.request, "prompt") else "messages"
            too_long = RequestError(verdict.reason, param=param, code="context_length_exceeded")
            self.tell(Event.INPUT_REFUSED, error=too_long)
        # Once machines have failed it, it waits for others; new ones are told to come back.
        elif self.progress.attempts and self._desk.enqueue(self):
            if self.story.entries()[-1].event != "waits":
                self.story.add(self.age_s, "waits", State.QUEUED, self.progress.attempts, why=verdict.reason)
        else:
            no_capacity = NoCapacityError(verdict.reason, retry_after_s=verdict.retry_after_s)
            self.tell(Event.NO_CAPACITY, error=no_capacity)

    def tell(self, event: Event, attempt: int | None = None, *, error: Exception | None = None) -> bool:
        """Let something happen to the choice; return whether it changed anything.

        Args:
            event: What happens.
            attempt: The attempt it belongs to, see `states.step`.
            error: Why, where this ends the choice or the attempt badly.
        """
        before = self.progress
        self.progress, actions = step(
            before,
            event,
            most_attempts=self._desk.limits.attempts,
            attempt=attempt,
            can_resume=self._can_resume,
        )
        changed = Action.ABSORB not in actions
        why = error if event is not Event.ASSIGNED or self.pair is None else _of_pair(self.pair)
        self.story.add(self.age_s, event, self.progress.state, self.progress.attempts, why=why, changed=changed)
        if not changed:
            self._desk.meters.absorbed(event)
            return False
        for action in actions:
            self._carry_out(action, before, event, error)
        if self.progress.ended:
            self._end(event)
        return True

    def claim(self, attempt: int) -> bool:
        """Return whether content of an attempt may go to the client, which counts as having content from now on."""
        if attempt != self.progress.attempts or self.progress.state in (State.FAILED, State.REFUSED, State.QUEUED):
            return self.progress.sent
        if not self.progress.sent and not self.progress.ended:
            self.tell(Event.CONTENT_SENT)
        return True

    def fault(self, error: LegError, attempt: int, *, is_doubtful: bool = False) -> None:
        """Take note that a machine did not do its part.

        Args:
            error: What it did.
            attempt: The attempt.
            is_doubtful: Whether the output so far may be wrong too; it is dropped unless the client has it already.
        """
        if not self.is_at(attempt) or self.pair is None:
            self.tell(error.event, attempt)
            return
        if error.event is Event.PROMPT_LOST and self.progress.state in (State.WAITING, State.DECODING):
            self.tell(error.event, attempt)  # the token machine has all it needs
            return
        pair, now_s = self.pair, self._desk.clock.now_s()
        blamed = {Event.PROMPT_LOST: {pair.prompt}, Event.TOKEN_LOST: {pair.token}}.get(error.event, set())
        for name in blamed:
            self._desk.dispatcher.failed(name, now_s)
        self._avoid |= blamed or {pair.prompt, pair.token}
        if is_doubtful and not self.progress.sent:
            self.output = Output(self.order, self._desk.codec)
        self.tell(error.event, attempt, error=error)

    def lost(self, side: str, attempt: int) -> None:
        """Take note that a machine of an attempt is gone, or has let go of it."""
        event = Event.PROMPT_LOST if side == "prompt" else Event.TOKEN_LOST
        self.tell(event, attempt, error=WorkerError(f"the machine of the {side} phase was lost"))

    def look_for_stall(self, patience_s: float) -> None:
        """Give the attempt up if nothing has come of it for too long, though its machines say that they live.

        Args:
            patience_s: See `Desk.patience_s`.
        """
        state, last_s = self.progress.state, self.stages.last_token_s
        if state is State.QUEUED and self._emitted and last_s is not None:
            # Half an answer on a screen is looked at; one that is not streamed may wait as long as for its first token.
            limits = self._desk.limits
            if self.age_s - last_s > (limits.idle_s if self.progress.sent else limits.first_token_s):
                self.tell(Event.DEADLINE, error=WorkerError("a machine was lost, and no other could go on in time"))
        if self.pair is None or state not in HOLDS_TOKEN:
            return
        if last_s is None or state is State.PREFILLING:
            # While its machine gives tokens to others, a prompt only waits for its turn.
            heard_s = self._desk.last_token_s.get(self.pair.prompt, self._arrival_s) - self._arrival_s
            silent_s = self.age_s - max(heard_s, self._assigned_s)
            most_s, event = patience_s, Event.PROMPT_LOST
        else:
            silent_s, most_s = self.age_s - last_s, self._desk.limits.idle_s
            event = Event.TRANSFER_FAILED if state is State.TRANSFERRING else Event.TOKEN_LOST
        if silent_s > most_s:
            self.fault(LegError(f"no token for {silent_s:.3g} s", event), self.progress.attempts)

    def let_go(self, machine: str, why: str, attempt: int) -> None:
        """Take note that a machine has dropped what it had of an attempt."""
        is_alone = self.progress.state in (State.WAITING, State.DECODING)
        if self.is_at(attempt) and self.pair is not None and (machine == self.pair.token or not is_alone):
            self.fault(LegError(why, Event.TRANSFER_FAILED), attempt)

    def prompt_started(self, attempt: int) -> None:
        """Take note that the prompt phase of an attempt has begun to run."""
        if self.is_at(attempt) and self.progress.state is State.PREFILLING:
            self._desk.dispatcher.prompt_started(self.key, self._desk.clock.now_s())
            if self.stages.prompt_started_s is None and not self._emitted:
                self.stages.prompt_started_s = self.age_s
        self.tell(Event.PROMPT_STARTED, attempt)

    def prompt_took(self, times: PromptTimes, attempt: int) -> None:
        """Take a machine's word, which comes with the first token, how long the prompt phase of an attempt took.

        It is the better one: the report that the phase began may have come late, or not at all.
        """
        if self.is_at(attempt) and not self._emitted:
            self.stages.prompt_took(times.prompt_s, self.age_s)

    def kv_ready(self, attempt: int) -> None:
        """Take note that all KV of an attempt is on its token machine."""
        if self.is_at(attempt) and self.progress.state in (State.PREFILLING, State.TRANSFERRING):
            self._desk.dispatcher.kv_ready(self.key, self._desk.clock.now_s())
            if self.stages.kv_ready_s is None and not self._emitted:
                self.stages.kv_ready_s = self.age_s
        self.tell(Event.KV_READY, attempt)

    def token(self, token: int, scored: Scored | None, place: int, attempt: int, word: str | None) -> None:
        """Take a token from a machine, unless the other one has told it already.

        Args:
            token: Its id.
            scored: Its log-probabilities, where they are wanted.
            place: Its place in the output, from 0.
            attempt: The attempt it belongs to.
            word: "stop" or "length" if it is the last by the machine's own word.
        """
        if not self.is_at(attempt):
            return
        if token >= self._desk.codec.vocabulary:
            event = Event.TOKEN_LOST if place > self._emitted else Event.PROMPT_LOST
            foreign = LegError(f"a machine made token {token}, which the model does not have", event)
            self.fault(foreign, attempt, is_doubtful=True)
            return
        made = self.output.ids
        if place < len(made):
            if made[place] != token:
                # What comes after it would continue another text than the client's.
                disagreement = LegError(f"the machines disagree on token {place}", Event.TRANSFER_FAILED)
                self.fault(disagreement, attempt, is_doubtful=True)
            elif word is not None and place == len(made) - 1:
                self.last_word(word, attempt)
            return
        self.output.push(token, scored)
        self._desk.meters.token(self.stages.token(place, self.age_s))
        is_first = place == self._emitted
        if self.pair is not None:
            self._desk.last_token_s[self.pair.prompt if is_first else self.pair.token] = self._desk.clock.now_s()
        if is_first:
            self._desk.dispatcher.first_token(self.key, self._desk.clock.now_s())
        event = Event.FIRST_TOKEN if is_first else Event.TOKEN
        if self.output.is_stopped:
            event = Event.STOPPED
        elif word is not None or self.output.is_last:
            event, self._word = Event.LAST_TOKEN, word
        self.tell(event, attempt)

    def last_word(self, word: str, attempt: int) -> None:
        """Take a machine's word that no further token comes."""
        if self.is_at(attempt):
            self._word = word
            self.tell(Event.LAST_TOKEN, attempt)

    def _carry_out(self, action: Action, before: Progress, event: Event, error: Exception | None) -> None:
        key = f"{self.name}.{before.attempts}"
        if action is Action.EMIT:
            # The last token goes out with the end.
            if self._streams and not self.progress.ended:
                self._piece()
        elif action is Action.SEND_LEGS:
            self._assigned_s = self.age_s
            if not self._emitted:
                self.stages.assigned_s = self.age_s
            self._legs = self._desk.send_legs(self)
        elif action is Action.CANCEL_PROMPT or action is Action.CANCEL_TOKEN:
            self._call_off(action, key, event)
        elif action is Action.RELEASE_PROMPT or action is Action.RELEASE_TOKEN:
            self._release(key, before, event)
        elif action is Action.FINISH:
            self.output.finish(self._word)
            if self._streams:
                self._piece()
        elif action is Action.REASSIGN or action is Action.CONTINUE:
            self._again(keeps=action is Action.CONTINUE)
        elif action in ANSWERS:
            self.error = client_error(action, event, error, self._desk.limits)

    def _can_resume(self) -> bool:
        # Pieces of a stream that have not been sent are dropped with their attempt, see `claim`.
        has_output = bool(self.output.ids) and (self.progress.sent or not self._streams)
        return has_output and self.order.can_resume(tells_output=self._desk.workers.resumes)

    def _piece(self) -> None:
        piece = self.output.piece()
        if piece is not None:
            self._hear(self, self.progress.attempts, piece)

    def _release(self, key: str, before: Progress, event: Event) -> None:
        now_s = self._desk.clock.now_s()
        if self.progress.state is State.QUEUED or self.progress.ended:
            made = len(self.output.ids)
            self._desk.dispatcher.ended(key, release_reason(before.state, event), now_s, made)
        else:
            self._desk.dispatcher.kv_ready(key, now_s)

    def _call_off(self, action: Action, key: str, event: Event) -> None:
        side = "prompt" if action is Action.CANCEL_PROMPT else "token"
        leg = self._legs.pop(side, None)
        if leg is None:
            return
        if not leg.done() and leg is not asyncio.current_task():
            leg.cancel()
        elif side == "prompt" and self.pair is not None and self.order.most_tokens - self._emitted > 1:
            # Its answer is here, so there is no connection left to close; what it keeps would stay for the lease.
            self._desk.abort(self.pair.prompt, key, str(event))

    def _again(self, *, keeps: bool) -> None:
        self._desk.retried(self, continues=keeps)
        if keeps:
            self.continued += 1
            self._emitted = len(self.output.ids)
        else:
            self.output = Output(self.order, self._desk.codec)
            self._emitted = 0
            self.stages.forget_attempt()
        self._word = None
        if self.progress.attempts == 1:
            asyncio.get_running_loop().call_soon(self.start)
        else:
            # Whatever failed twice in a row may need a moment: a machine's restart, or news of it.
            self._desk.clock.call_at(self._desk.clock.now_s() + _AGAIN_S, self.start)

    def _look_at_the_clock(self) -> None:
        end_s = self._arrival_s + self._desk.limits.request_s
        if self.output.ids and self._desk.clock.now_s() < end_s:
            self._timer = self._desk.clock.call_at(end_s, self._look_at_the_clock)
        else:
            self.tell(Event.DEADLINE)

    def _end(self, event: Event) -> None:
        self.ended_by = event
        self._timer.cancel()
        late = self._legs.get("prompt")
        if late is not None and not late.done() and late is not asyncio.current_task():
            late.cancel()
        self._desk.ended(self)
        self._hear(self, self.progress.attempts, None)


def _of_pair(pair: Pair) -> str:
    return f"machine {pair.token}" if pair.same else f"prompt machine {pair.prompt}, token machine {pair.token}"


def run(leg: Coroutine[Any, Any, None], choice: Choice, attempt: int) -> asyncio.Task[None]:
    """Return a leg as a task; a bug in it ends the choice."""

    def look(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            _LOG.error("a bug ends request %s", choice.key, exc_info=bug)
            choice.tell(Event.CANCELLED, attempt, error=bug if isinstance(bug, Exception) else None)

    task = asyncio.get_running_loop().create_task(leg)
    task.add_done_callback(look)
    return task
