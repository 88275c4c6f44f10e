"""The gateway: everything that an app needs, put together once."""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phasesplit.errors import NoCapacityError
from phasesplit.gateway.clock import Clock
from phasesplit.gateway.codec import Codec
from phasesplit.gateway.connections import Heartbeats, WorkerConnections
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.in_flight import InFlightRequests
from phasesplit.gateway.limits import Limits, bearer_key, key_accepted
from phasesplit.gateway.meters import Meters
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.worker_client import WorkerClient
from phasesplit.protocol.openai_errors import unknown_model, wrong_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Who may do what: SHA-256 digests of keys, see `limits.key_digest`.

    Attributes:
        client: For the OpenAI endpoints and the debug pages; without any they are open.
        admin: For /admin; without any nobody may.
        join: For machines that announce themselves; without any only those on this host may.
    """

    client: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()
    join: tuple[bytes, ...] = ()


class Gateway:
    """One gateway.

    Attributes:
        models: Names under which the model may be asked for.
        codec: The model's.
        limits: What clients may ask of it.
        keys: Who may do what.
        clock: Its time.
        in_flight: Its requests.
        workers: Its machines, as they are called.
        dispatcher: Who chooses machines.
        meters: What it has counted.
        created_s: When it was made, whole seconds since 1970.
    """

    def __init__(
        self,
        *,
        codec: Codec,
        dispatcher: Dispatcher,
        connect: Callable[[str], WorkerClient],
        models: Sequence[str],
        clock: Clock,
        limits: Limits | None = None,
        keys: Keys | None = None,
        heartbeats: Heartbeats | None = None,
        records: Callable[[dict[str, Any]], object] | None = None,
        log_ended: Callable[[], str] = str,
    ) -> None:
        """Put a gateway together.

        `connect` makes the client of a machine's URL, `heartbeats` says how often machines are checked, `records` is
        called with one JSON object for each choice that has ended, and `log_ended` returns why the log of decisions has
        ended early (nothing while it has not). All else is an attribute.
        """
        self.models, self.codec, self.clock = tuple(models), codec, clock
        self.limits, self.keys = limits or Limits(), keys or Keys()
        self.dispatcher, self.meters = dispatcher, Meters()
        self.workers = WorkerConnections(dispatcher, clock, connect, heartbeats)
        self.created_s = int(clock.unix_s())
        self.in_flight = InFlightRequests(
            dispatcher=dispatcher, workers=self.workers, codec=codec, clock=clock, limits=self.limits,
            meters=self.meters, records=records, log_ended=log_ended,
        )  # fmt: skip
        self._is_draining = False
        self._live_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self) -> None:
        """Begin to look after the machines; needs the running event loop."""
        self.workers.start()

    async def drain(self, within_s: float) -> None:
        """Take no new requests, and wait for the present ones.

        Args:
            within_s: What is not done by then ends with an error.
        """
        self._is_draining = True
        timer = self.clock.call_at(self.clock.now_s() + within_s, self._cancel_all)
        try:
            await self._idle.wait()
        finally:
            timer.cancel()

    async def close(self) -> None:
        """Let go of all machines."""
        self._is_draining = True
        self._cancel_all()
        await self.workers.close()

    def _cancel_all(self) -> None:
        for choice in self.in_flight.live:
            choice.apply(Event.CANCELLED)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the model, and every machine that serves now, take."""
        return min(self.codec.context_tokens, self.workers.context_tokens or self.codec.context_tokens)

    @property
    def lacks(self) -> str:
        """What keeps it from serving, in words; empty while nothing does."""
        if self._is_draining:
            return "the gateway is shutting down"
        return "" if self.dispatcher.most_tokens else "no machines serve both phases"

    def require_client(self, authorization: str | None) -> None:
        """Look at a client's key.

        Raises:
            RequestError: 401.
        """
        if self.keys.client and not key_accepted(bearer_key(authorization), self.keys.client):
            raise wrong_key()

    def require_model(self, name: str) -> None:
        """Look whether a model is served here.

        Raises:
            RequestError: 404.
        """
        if name not in self.models:
            raise unknown_model(name)

    def enter(self) -> None:
        """Take in one more request; `leave` ends it.

        Raises:
            NoCapacityError: There are too many, or the gateway is shutting down.
        """
        if self._is_draining:
            raise NoCapacityError(self.lacks, retry_after_s=5.0)
        if self._live_requests >= self.limits.live_requests:
            raise NoCapacityError(f"{self._live_requests} requests are served now, the limit", retry_after_s=1.0)
        self._live_requests += 1
        self._idle.clear()

    def leave(self) -> None:
        """End what `enter` began."""
        self._live_requests -= 1
        if not self._live_requests:
            self._idle.set()

    def number(self) -> str:
        """Return a number for a request, never used before."""
        return secrets.token_hex(12)

    def seed(self) -> int:
        """Return a seed for a request that brings none."""
        return secrets.randbits(63)
