"""The requests in flight: what they share, who waits in which order, and which one a machine reports about."""

import asyncio
import logging
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phasesplit.gateway.clock import Clock
from phasesplit.gateway.codec import Codec
from phasesplit.gateway.connections import WorkerConnections
from phasesplit.gateway.dispatcher import Dispatcher, Lost
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.live_request import LiveRequest
from phasesplit.gateway.meters import Meters
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.story import Stories, Story

_LOG = logging.getLogger(__name__)

_SLOWEST_TOKENS_PER_S = 100.0
"""Prompt tokens per second that are believed of machines that have computed none yet."""
_SLOWER = 3.0
"""By how much an iteration may take longer than the rate so far says."""

Record = dict[str, Any]


class InFlightRequests:
    """The requests that are served now.

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
        """Begin without requests, and let the machines report here.

        `records` is called with one JSON object for each request that has ended; all else is an attribute.
        """
        self.dispatcher, self.workers, self.codec = dispatcher, workers, codec
        self.clock, self.limits, self.meters = clock, limits, meters
        self.log_ended = log_ended
        self.last_token_s: dict[str, float] = {}
        self._records = records
        self._live: dict[LiveRequest, None] = {}
        self._by_key: dict[str, tuple[LiveRequest, int]] = {}
        self._on_machine: dict[str, set[str]] = {}
        self._queue: deque[LiveRequest] = deque()
        self._begun = 0
        self._stories = Stories()
        self._orders: set[asyncio.Task[None]] = set()
        workers.report_to(self)

    @property
    def live(self) -> tuple[LiveRequest, ...]:
        """The requests that have not ended, oldest first."""
        return tuple(self._live)

    @property
    def queued(self) -> int:
        """Requests that wait for a pair of machines."""
        return len(self._queue)

    @property
    def waiting(self) -> tuple[LiveRequest, ...]:
        """The requests that wait for a pair of machines, oldest first."""
        return tuple(self._queue)

    @property
    def stall_timeout_s(self) -> float:
        """How long a prompt's machine may give no token to anybody before another one is tried.

        Prompts that are pending may all be in one iteration, which gives nothing until its end.
        """
        wait_s = self.dispatcher.wait_s()
        if wait_s is None:
            wait_s = self.dispatcher.pending_prompt_tokens / _SLOWEST_TOKENS_PER_S
        return self.limits.attempt_s + _SLOWER * wait_s

    def story(self, name: str) -> list[Story]:
        """Return what has happened to the choices of a request, or to one of them; nothing where it is not known.

        Args:
            name: See `Stories.of`.
        """
        return self._stories.of(name, (request.story for request in self._live))

    def begin(self, request: LiveRequest) -> None:
        """Take a new request in, and ask for its machines."""
        self._begun += 1
        request.arrival = self._begun
        self._live[request] = None
        request.start()

    def enqueue(self, request: LiveRequest) -> bool:
        """Let a request wait for machines, in the order of arrivals; return whether there is a place in the queue.

        A request that waits already keeps its place.
        """
        if request in self._queue:
            return True
        if len(self._queue) >= self.limits.queued_requests:
            return False
        insort(self._queue, request, key=_arrival)
        return True

    def retry_queued(self) -> None:
        """Let those that wait for machines ask again, oldest first, until one finds none."""
        while self._queue:
            oldest = self._queue[0]
            oldest.start()
            if self._queue and self._queue[0] is oldest:
                return  # those behind it would only be placed before it

    def check_stalls(self) -> None:
        """Give up the attempts whose machines live, but have sent nothing for too long."""
        stall_timeout_s = self.stall_timeout_s
        for request in self.live:
            request.check_stall(stall_timeout_s)

    def attempt_began(self, request: LiveRequest) -> None:
        """Take note of the key of a request's new attempt, so that reports of machines find it."""
        self._dequeue(request)
        if (pair := request.pair) is None:
            return
        self._by_key[request.key] = (request, request.progress.attempts)
        for name in (pair.prefill, pair.decode):
            self._on_machine.setdefault(name, set()).add(request.key)

    def abort(self, machine: str, key: str, why: str) -> None:
        """Let a machine drop what it keeps for an attempt; nobody waits for its answer."""
        task = asyncio.get_running_loop().create_task(self.workers.abort(machine, key, why))
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)

    def retried(self, request: LiveRequest, *, continues: bool) -> None:
        """Take note that a request's attempt has been given up, and another will follow, behind its output or anew."""
        self._forget(request)
        self.meters.retries += 1
        self.meters.continued += continues

    def ended(self, request: LiveRequest) -> None:
        """Take note that a request has ended."""
        self._live.pop(request, None)
        self._dequeue(request)
        self._forget(request)
        self.meters.ended(request)
        self._stories.keep(request.story)
        if self._records is not None:
            try:
                self._records(record(request))
            except Exception:
                # The client's answer does not depend on somebody's full disk.
                _LOG.exception("the record of %s is lost", request.name)

    def _dequeue(self, request: LiveRequest) -> None:
        if request in self._queue:
            self._queue.remove(request)

    def _forget(self, request: LiveRequest) -> None:
        """Forget the present attempt of a request."""
        if self._by_key.pop(request.key, None) is not None and request.pair is not None:
            for name in (request.pair.prefill, request.pair.decode):
                self._on_machine[name].discard(request.key)

    # Reports of machines

    def lost(self, lost: Iterable[Lost]) -> None:
        """Take note of the requests whose machines are gone."""
        for key, side in lost:
            request, attempt = self._by_key.get(key, (None, 0))
            if request is not None:
                request.lost(side, attempt)

    def keys_on(self, machine: str) -> set[str]:
        """Return the attempts whose answer a machine has yet to end."""
        keys = self._on_machine.get(machine, ())
        return {key for key in keys if self._by_key[key][0].has_open_leg(machine)}

    def on_event(self, machine: str, report: Mapping[str, Any]) -> None:
        """Take a machine's report about one attempt."""
        for name, take in (("prefill_started", LiveRequest.prefill_started), ("kv_ready", LiveRequest.kv_ready)):
            if name in report:
                request, attempt = self._by_key.get(str(report[name]), (None, 0))
                if request is None:
                    self.meters.absorbed(Event(name))
                else:
                    take(request, attempt)
        if "gone" in report and report.get("why") not in ("completed", "aborted"):
            request, attempt = self._by_key.get(str(report["gone"]), (None, 0))
            if request is not None:
                request.abort(machine, str(report.get("why")), attempt)


def _arrival(request: LiveRequest) -> int:
    return request.arrival


def record(request: LiveRequest) -> Record:
    """Return what a finished request leaves for those who compare it with a prediction."""
    spec, pair = request.spec, request.pair
    return {
        "request": spec.number,
        "choice": spec.index,
        "model": spec.request.model,
        "outcome": request.outcome,
        "finish_reason": request.output.finish_reason,
        "prompt_tokens": len(spec.prompt_ids),
        "output_tokens": len(request.output.ids),
        "attempts": request.progress.attempts,
        "continued": request.continued,
        "prefill_machine": pair.prefill if pair else None,
        "decode_machine": pair.decode if pair else None,
        "ended_s": request.age_s,
    } | request.stages.record()
