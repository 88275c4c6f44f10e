"""The connections to machines: who has announced itself, whether it still answers, and which pool it is given.

A machine announces itself; from then on the gateway listens to its reports. One whose reports end, or that says nothing
for a few heartbeats, counts as lost until it speaks again: the gateway keeps calling it, and lets it join anew. The
record of each machine is the registry's (`registry`); here is only how it is called.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from phasesplit.errors import RequestError, WorkerError
from phasesplit.gateway.clock import Clock, Timer
from phasesplit.gateway.dispatcher import Dispatcher, Lost
from phasesplit.gateway.registry import RegisteredMachine
from phasesplit.gateway.worker_client import LegError, WorkerClient
from phasesplit.kv_transfer.layout import advice, shown
from phasesplit.protocol.bodies import typed_field
from phasesplit.protocol.roles import closed_to_others

Facts = Mapping[str, Any]


class Listener(Protocol):
    """Whoever serves requests on the machines."""

    def lost(self, lost: Iterable[Lost]) -> None:
        """Take note of requests that machines will not go on with."""

    def on_event(self, machine: str, report: Mapping[str, Any]) -> None:
        """Take a machine's report about a request."""

    def keys_on(self, machine: str) -> set[str]:
        """Return the requests whose answer a machine has yet to end."""

    def retry_queued(self) -> None:
        """Try again what waits for machines."""

    def check_stalls(self) -> None:
        """Give up what no token has come for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeats:
    """How often things are looked at.

    Attributes:
        tick_s: Between two looks at leases, queues and machines.
        silence_s: A machine that has said nothing for so long is lost.
        again_s: Between two tries to reach a lost machine.
        forget_s: A lost machine that has not come back for so long is called no more.
    """

    tick_s: float = 0.25
    silence_s: float = 5.0
    again_s: float = 1.0
    forget_s: float = 600.0


@dataclass(slots=True, eq=False)
class Connection:
    """How the gateway calls one machine.

    Attributes:
        url: Where the machine listens.
        client: Sends it requests.
        pool_sent: The epoch and pool that the machine has last; None where they are still to be sent.
        listening: The task that follows its reports.
    """

    url: str
    client: WorkerClient
    pool_sent: tuple[int, str] | None = None
    listening: asyncio.Task[None] | None = field(default=None, repr=False)


class WorkerConnections:
    """The calls to all machines, and what their answers mean for the registry and for those who serve requests."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        clock: Clock,
        connect: Callable[[str], WorkerClient],
        heartbeats: Heartbeats | None = None,
    ) -> None:
        """Make one without machines.

        Args:
            dispatcher: Keeps the machines, and says in which pool they are.
            clock: The gateway's.
            connect: Makes the client of a URL.
            heartbeats: How often things are looked at.
        """
        self._dispatcher, self._clock, self._connect = dispatcher, clock, connect
        self._beats = heartbeats or Heartbeats()
        self._registry = dispatcher.registry
        self._listener: Listener | None = None
        self._orders: set[asyncio.Task[None]] = set()
        self._timer: Timer | None = None
        self._next_tick_s = clock.now_s()
        self._stood_still_s = -math.inf

    def report_to(self, listener: Listener) -> None:
        """Say who serves requests on the machines."""
        self._listener = listener

    def start(self) -> None:
        """Begin to look after the machines."""
        self._tick()

    async def close(self) -> None:
        """Let go of all machines."""
        if self._timer is not None:
            self._timer.cancel()
        connections = [machine.connection for machine in self._registry.connected() if machine.connection is not None]
        tasks = [connection.listening for connection in connections if connection.listening is not None]
        for task in (*tasks, *self._orders):
            task.cancel()
        await asyncio.gather(*tasks, *self._orders, return_exceptions=True)
        for connection in connections:
            await connection.client.close()

    def client(self, name: str) -> WorkerClient | None:
        """Return who speaks to a machine, None where it is gone."""
        machine = self._registry.get(name)
        return None if machine is None or machine.off or machine.connection is None else machine.connection.client

    def address(self, name: str) -> Mapping[str, Any]:
        """Return where a machine takes KV."""
        machine = self._registry.get(name)
        return machine.facts.get("address") or {} if machine is not None else {}

    @property
    def resumes(self) -> bool:
        """Whether all machines report an output that goes on from its prompt, so that draws and penalties go on too."""
        return all(machine.facts.get("resumes") is True for machine in self._registry if not machine.off)

    @property
    def context_tokens(self) -> int:
        """Prompt and output tokens that the machines with the shortest context take; 0 where none says."""
        reported = (machine.facts.get("context_tokens") for machine in self._registry if not machine.off)
        return min((tokens for tokens in reported if tokens), default=0)

    async def abort(self, name: str, key: str, why: str) -> None:
        """Let a machine drop what it keeps for an attempt."""
        worker = self.client(name)
        if worker is not None:
            try:
                await worker.abort(key, why)
            except LegError:
                return  # its lease ends it

    async def join(self, url: str, facts: Facts | None = None) -> RegisteredMachine:
        """Let a machine join, or join anew.

        Args:
            url: Where it listens.
            facts: What it says of itself; None: it is asked.

        Raises:
            RequestError: What it says is wrong, its epoch is out of date, or its KV differs from the others'.
            LegError: It does not answer.
        """
        client = self._connect(url)
        try:
            if facts is None:
                facts = await client.facts()
            name = _checked(facts)
            self._require_equal_layouts(name, facts)
            self._require_ways(name, facts)
            known = self._registry.get(name)
            before = None if known is None else known.connection
            if (
                known is not None and not known.off and before is not None
                and (before.url, known.epoch) == (url, facts["epoch"])
            ):  # fmt: skip
                await client.close()
                return known  # it has announced itself twice
            connection = Connection(url, client)
            machine = self._begin_life(name, facts, connection)
        except (RequestError, WorkerError):
            await client.close()
            raise
        if before is not None and before.listening is not None:
            before.listening.cancel()
            await before.client.close()
        connection.listening = asyncio.get_running_loop().create_task(self._listen(machine, connection))
        return machine

    def _begin_life(self, name: str, facts: Facts, connection: Connection) -> RegisteredMachine:
        """Let a machine join, or join anew, and those who wait for machines ask again."""
        now_s = self._clock.now_s()
        lost = self._dispatcher.join(name, facts["epoch"], facts["home"], facts["capacity_blocks"], now_s, facts)
        machine = self._registry.known(name)
        machine.connection = connection
        self._report_lost(lost)
        if self._listener is not None:
            self._listener.retry_queued()
        return machine

    def _require_equal_layouts(self, name: str, facts: Facts) -> None:
        for other in self._registry:
            theirs, its = other.facts.get("layout") or {}, facts.get("layout") or {}
            if other.name == name or other.off or theirs == its:
                continue
            field_ = next(key for key in (*theirs, *its) if theirs.get(key) != its.get(key))
            mine, others = shown(its.get(field_)), shown(theirs.get(field_))
            if field_ == "model":
                mine = f"{facts.get('model')} (weights {mine})"
                others = f"{other.facts.get('model')} (weights {others})"
            raise RequestError(
                f"machine {name}: its KV differs from that of {other.name} in {field_}: {mine} against {others};"
                f" {advice(field_)}",
                status=409,
                param="facts.layout",
                code="layout_mismatch",
            )

    def _require_ways(self, name: str, facts: Facts) -> None:
        """Refuse a machine that KV could not move to or from: one of two hosts listens where only that host reaches."""
        for other in self._registry:
            ours, theirs = facts.get("address") or {}, other.facts.get("address") or {}
            hosts = {ours.get("boot_id") or "", theirs.get("boot_id") or ""}
            # Whole requests move no KV, and a machine that does not say its host may be on this one.
            if other.name == name or other.off or "unsplit" in (facts["home"], other.facts["home"]):
                continue
            if len(hosts) < 2 or "" in hosts:
                continue
            for closed, address in ((name, ours), (other.name, theirs)):
                if at := closed_to_others(address):
                    raise RequestError(
                        f"machine {name}: it is on another host than {other.name}, and {closed} listens at {at}, which"
                        f" only its own host reaches, so no KV could move between them; start {closed} with a --host"
                        " that others reach (where `phasesplit serve` has started it: serve with that address)",
                        status=409,
                        param="facts.address",
                        code="address_mismatch",
                    )

    async def _listen(self, machine: RegisteredMachine, connection: Connection) -> None:
        """Follow a machine's reports for as long as it is worth it."""
        while True:
            try:
                async with aclosing(cast(Any, connection.client.events())) as reports:
                    async for report in reports:
                        self._on_report(machine, connection, report)
            except (LegError, RequestError):
                pass
            self._lose(machine, connection)
            if self._clock.now_s() - machine.reported_s > self._beats.forget_s:
                machine.connection = None
                self._registry.forget(machine)
                return
            await self._pause(self._beats.again_s)

    def _on_report(self, machine: RegisteredMachine, connection: Connection, report: Mapping[str, Any]) -> None:
        facts = report.get("facts")
        if facts is None:
            if not machine.off and self._listener is not None:
                machine.reported_s = self._clock.now_s()
                self._listener.on_event(machine.name, report)
            return
        if _checked(facts) != machine.name:
            raise RequestError(f"machine {machine.name} answers as {facts['name']}", status=409)
        if machine.off or facts["epoch"] != machine.epoch:
            self._require_equal_layouts(machine.name, facts)
            self._require_ways(machine.name, facts)
            self._begin_life(machine.name, facts, connection)
        machine.facts, machine.reported_s = facts, self._clock.now_s()
        keys = set(facts.get("keys") or facts.get("held") or ()) | (
            self._listener.keys_on(machine.name) if self._listener else set()
        )
        for key in self._dispatcher.heartbeat(machine.name, facts["epoch"], keys, machine.reported_s):
            self._spawn(self.abort(machine.name, key, "nobody owns it"))

    def _lose(self, machine: RegisteredMachine, connection: Connection) -> None:
        if machine.off or machine.connection is not connection:
            return
        connection.pool_sent = None
        self._report_lost(self._dispatcher.lost(machine.name, self._clock.now_s()))

    def _report_lost(self, lost: tuple[Lost, ...]) -> None:
        if self._listener is not None:
            self._listener.lost(lost)

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        late_s = now_s - self._next_tick_s
        self._next_tick_s = now_s + self._beats.tick_s
        self._timer = self._clock.call_at(self._next_tick_s, self._tick)
        silence_s = self._beats.silence_s
        if late_s > silence_s / 2 and now_s - self._stood_still_s > 2 * silence_s:
            self._stood_still_s = now_s
        # What was said while the gateway itself stood still is yet to be read; machines of its host stood still too.
        # Where that happens again and again, they are judged all the same.
        if now_s - self._stood_still_s > silence_s:
            self._give_up_silent(now_s)
            self._report_lost(self._dispatcher.tick(now_s))
            if self._listener is not None:
                self._listener.check_stalls()
        for view in self._dispatcher.pools(now_s):
            machine, pool = self._registry.get(view.name), (view.epoch, view.pool)
            connection = None if machine is None or machine.off else machine.connection
            if connection is not None and connection.pool_sent != pool:
                self._spawn(self._send_pool(connection, pool))
        if self._listener is not None:
            self._listener.retry_queued()

    def _give_up_silent(self, now_s: float) -> None:
        for machine in self._registry.connected():
            connection = machine.connection
            if connection is not None and not machine.off and now_s - machine.reported_s > self._beats.silence_s:
                self._lose(machine, connection)
                if connection.listening is not None:
                    connection.listening.cancel()
                connection.listening = asyncio.get_running_loop().create_task(self._listen(machine, connection))

    async def _send_pool(self, connection: Connection, pool: tuple[int, str]) -> None:
        connection.pool_sent = pool
        try:
            await connection.client.role(*pool)
        except LegError:
            connection.pool_sent = None  # sent again at the next tick

    async def _pause(self, seconds: float) -> None:
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_at(self._clock.now_s() + seconds, lambda: over.set_result(None))
        try:
            await over
        finally:
            timer.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._orders.add(task)
        task.add_done_callback(self._orders.discard)


def _checked(facts: Any) -> str:
    """Return the name in a machine's facts, once all that the gateway counts on is there."""
    if not isinstance(facts, Mapping):
        raise RequestError("facts: not an object", param="facts", code="invalid_type")
    kinds = {"name": str, "epoch": int, "home": str, "capacity_blocks": int}
    for name, kind in kinds.items():
        typed_field(facts, name, kind, "facts.")
    if facts.get("context_tokens") is not None:
        typed_field(facts, "context_tokens", int, "facts.")
    return str(facts["name"])
