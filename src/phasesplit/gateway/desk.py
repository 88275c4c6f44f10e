"""What the choices of one gateway share, and where reports of machines find the choice they are about."""

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phasesplit.gateway.attempt import Attempt
from phasesplit.gateway.choice import Choice, run
from phasesplit.gateway.clock import Clock
from phasesplit.gateway.codec import Codec
from phasesplit.gateway.connections import WorkerConnections
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.meters import Meters
from phasesplit.gateway.states import Event
from phasesplit.gateway.story import Stories, Story
from phasesplit.gateway.verdicts import Lost

_LOG = logging.getLogger(__name__)

_SLOWEST_TOKENS_PER_S = 100.0
"""Prompt tokens per second that are believed of machines that have computed none yet."""
_PATIENCE = 3.0
"""By how much an iteration may take longer than the rate so far says."""

Record = dict[str, Any]


class Desk:
    """The choices that are served now.

    Attributes:
        dispatcher: Chooses machines, and books what they hold.
        workers: The machines.
        codec: The model's.
        clock: The gateway's.
        limits: The gateway's.
        meters: What is counted.
        log_ended: Returns why the log of decisions has ended early, nothing while it has not.
        last_token_s: When a machine last gave a token to anybody.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        workers: WorkerConnections,
        codec: Codec,
        clock: Clock,
        limits: Limits,
        meters: Meters,
        records: Callable[[Record], object] | None = None,
        log_ended: Callable[[], str] = str,
    ) -> None:
        """Begin without choices, and let the machines report here.

        `records` is called with one JSON object for each choice that has ended; all else is an attribute.
        """
        self.dispatcher, self.workers, self.codec = dispatcher, workers, codec
        self.clock, self.limits, self.meters = clock, limits, meters
        self.log_ended = log_ended
        self.last_token_s: dict[str, float] = {}
        self._records = records
        self._live: dict[Choice, None] = {}
        self._by_key: dict[str, tuple[Choice, int]] = {}
        self._on_machine: dict[str, set[str]] = {}
        self._queue: deque[Choice] = deque()
        self._begun = 0
        self._stories = Stories()
        self._orders: set[asyncio.Task[None]] = set()
        workers.report_to(self)

    @property
    def live(self) -> tuple[Choice, ...]:
        """The choices that have not ended, oldest first."""
        return tuple(self._live)

    @property
    def queued(self) -> int:
        """Choices that wait for a pair of machines."""
        return len(self._queue)

    @property
    def waiting(self) -> tuple[Choice, ...]:
        """The choices that wait for a pair of machines, oldest first."""
        return tuple(self._queue)

    @property
    def patience_s(self) -> float:
        """How long a prompt's machine may give no token to anybody before another one is tried.

        Prompts that are pending may all be in one iteration, which gives nothing until its end.
        """
        wait_s = self.dispatcher.wait_s()
        if wait_s is None:
            wait_s = self.dispatcher.pending_prompt_tokens / _SLOWEST_TOKENS_PER_S
        return self.limits.attempt_s + _PATIENCE * wait_s

    def story(self, name: str) -> list[Story]:
        """Return what has happened to the choices of a request, or to one of them; nothing where it is not known.

        Args:
            name: See `Stories.of`.
        """
        return self._stories.of(name, (choice.story for choice in self._live))

    def begin(self, choice: Choice) -> None:
        """Take a new choice in, and ask for its machines."""
        self._begun += 1
        choice.arrival = self._begun
        self._live[choice] = None
        choice.start()

    def enqueue(self, choice: Choice) -> bool:
        """Let a choice wait for machines, in the order of arrivals; return whether there is a place in the queue.

        A choice that waits already keeps its place.
        """
        if choice in self._queue:
            return True
        if len(self._queue) >= self.limits.queued_requests:
            return False
        insort(self._queue, choice, key=_arrival)
        return True

    def retry_queued(self) -> None:
        """Let those that wait for machines ask again, oldest first, until one finds none."""
        while self._queue:
            oldest = self._queue[0]
            oldest.start()
            if self._queue and self._queue[0] is oldest:
                return  # those behind it would only be placed before it

    def check_stalls(self) -> None:
        """Give up the attempts whose machines live, but have told nothing for too long."""
        patience_s = self.patience_s
        for choice in self.live:
            choice.look_for_stall(patience_s)

    def send_legs(self, choice: Choice) -> dict[str, asyncio.Task[None]]:
        """Send the legs of a choice's new attempt to its pair; return the tasks by side."""
        pair, number = choice.pair, choice.progress.attempts
        self._dequeue(choice)
        if pair is None:
            return {}
        self._by_key[choice.key] = (choice, number)
        for name in (pair.prompt, pair.token):
            self._on_machine.setdefault(name, set()).add(choice.key)
        attempt = Attempt(choice, pair)
        prompt_worker, token_worker = self.workers.client(pair.prompt), self.workers.client(pair.token)
        if prompt_worker is None or token_worker is None:
            return {"token": run(attempt.gone(), choice, number)}
        prompt, token = attempt.bodies(self.workers.address(pair.token))
        legs = {}
        if prompt is not None:
            legs["prompt"] = run(attempt.prompt_leg(prompt_worker, prompt), choice, number)
        if token is not None:
            legs["token"] = run(attempt.token_leg(token_worker, token), choice, number)
        return legs

    def abort(self, machine: str, key: str, why: str) -> None:
        """Let a machine drop what it keeps for an attempt; nobody waits for its answer."""
        task = asyncio.get_running_loop().create_task(self.workers.abort(machine, key, why))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    def retried(self, choice: Choice, *, continues: bool) -> None:
        """Take note that a choice's attempt has been given up, and another will follow, behind its output or anew."""
        self._forget(choice)
        self.meters.retries += 1
        self.meters.continued += continues

    def ended(self, choice: Choice) -> None:
        """Take note that a choice has ended."""
        self._live.pop(choice, None)
        self._dequeue(choice)
        self._forget(choice)
        self.meters.ended(choice)
        self._stories.keep(choice.story)
        if self._records is not None:
            try:
                self._records(record(choice))
            except Exception:
                # The client's answer does not depend on somebody's full disk.
                _LOG.exception("the record of %s is lost", choice.name)

    def _dequeue(self, choice: Choice) -> None:
        if choice in self._queue:
            self._queue.remove(choice)

    def _forget(self, choice: Choice) -> None:
        """Forget the present attempt of a choice."""
        if self._by_key.pop(choice.key, None) is not None and choice.pair is not None:
            for name in (choice.pair.prompt, choice.pair.token):
                self._on_machine[name].discard(choice.key)

    # Reports of machines

    def lost(self, lost: Iterable[Lost]) -> None:
        """Tell the choices whose machines are gone."""
        for key, side in lost:
            choice, attempt = self._by_key.get(key, (None, 0))
            if choice is not None:
                choice.lost(side, attempt)

    def keys_on(self, machine: str) -> set[str]:
        """Return the attempts whose answer a machine has yet to end."""
        keys = self._on_machine.get(machine, ())
        return {key for key in keys if self._by_key[key][0].has_open_leg(machine)}

    def on_event(self, machine: str, report: Mapping[str, Any]) -> None:
        """Take a machine's report about one attempt."""
        for name, tell in (("prompt_started", Choice.prompt_started), ("kv_ready", Choice.kv_ready)):
            if name in report:
                choice, attempt = self._by_key.get(str(report[name]), (None, 0))
                if choice is None:
                    self.meters.absorbed(Event(name))
                else:
                    tell(choice, attempt)
        if "gone" in report and report.get("why") not in ("completed", "aborted"):
            choice, attempt = self._by_key.get(str(report["gone"]), (None, 0))
            if choice is not None:
                choice.let_go(machine, str(report.get("why")), attempt)


def _arrival(choice: Choice) -> int:
    return choice.arrival


def record(choice: Choice) -> Record:
    """Return what a finished choice leaves for those who compare it with a prediction."""
    order, pair = choice.order, choice.pair
    return {
        "request": order.number,
        "choice": order.index,
        "model": order.request.model,
        "outcome": choice.outcome,
        "finish_reason": choice.output.finish_reason,
        "prompt_tokens": len(order.prompt_ids),
        "output_tokens": len(choice.output.ids),
        "attempts": choice.progress.attempts,
        "continued": choice.continued,
        "prompt_machine": pair.prompt if pair else None,
        "token_machine": pair.token if pair else None,
        "ended_s": choice.age_s,
    } | choice.stages.record()
