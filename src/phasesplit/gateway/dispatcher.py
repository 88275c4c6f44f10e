"""The dispatcher: which pair of machines each request gets, and what is booked for it when.

Its answers are `Pair`, `TooLong` and `NoCapacity`; a `Lost` names a request that a machine will not go on with. Three
books change together, at one instant: the scheduling ledger, through calls that are recorded (`decisions`); the
leases of KV blocks (`leases`); and the machines (`registry`). A `Reservation` is what one attempt of a request has in
them. Nothing here opens a socket or reads a clock.

A request is known by a *key*, which names the attempt too: a call about a key that has ended, or was given up, changes
nothing. All instants are seconds on the gateway's clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from phasesplit.domain.machine import blocks_for
from phasesplit.errors import GatewayError, RequestError
from phasesplit.gateway.decisions import Decisions, Placed, Sink
from phasesplit.gateway.estimates import SOON_S, Backlog, NoCapacity, OutputLength
from phasesplit.gateway.leases import LeaseEnd, Leases, Purpose
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.registry import BreakerRule, MachineView, Move, RegisteredMachine, WorkerRegistry, checked_home
from phasesplit.scheduler.rules import Rules

_MOST_TOKENS = (1 << 30) - 1


class Pair(NamedTuple):
    """The machines of a request's two phases; both hold blocks for it from now on.

    Attributes:
        key: The request's name for this attempt.
        prefill: Name of the machine of the prefill phase.
        prefill_epoch: That machine's epoch.
        decode: Name of the machine of the decode phase.
        decode_epoch: That machine's epoch.
    """

    key: str
    prefill: str
    prefill_epoch: int
    decode: str
    decode_epoch: int

    @property
    def same(self) -> bool:
        """Whether one machine does both phases."""
        return self.prefill == self.decode


class TooLong(NamedTuple):
    """No machine could ever hold the request.

    Attributes:
        reason: Why, with figures.
    """

    reason: str


class Lost(NamedTuple):
    """A request that a machine held and will not go on with; all that was booked for it has been given back.

    Attributes:
        key: Its name.
        side: "prefill" or "decode": what the machine was to it; "decode" where it was both.
    """

    key: str
    side: str


class Reservation:
    """What is reserved for one attempt of a request: its slot in the ledger, and its leases.

    Attributes:
        key: Its name.
        slot: Its slot in the ledger.
        prefill: The machine of its prefill phase.
        decode: The machine of its decode phase.
        computing: Prompt tokens that wait or run; 0 from the first token on.
        started: Its prefill phase has begun to run.
        kv_arrived: All its KV is on the decode machine.
        prefill_lease: Number of its lease on the prefill machine; 0 where that is the decode machine, or once it ended.
        decode_lease: Number of its lease on the decode machine; 0 once it ended.
    """

    __slots__ = (
        "computing",
        "decode",
        "decode_lease",
        "key",
        "kv_arrived",
        "prefill",
        "prefill_lease",
        "slot",
        "started",
    )

    def __init__(
        self, key: str, slot: int, prefill: RegisteredMachine, decode: RegisteredMachine, prompt_tokens: int
    ) -> None:
        self.key = key
        self.slot = slot
        self.prefill = prefill
        self.decode = decode
        self.computing = prompt_tokens
        self.started = False
        self.kv_arrived = False
        self.prefill_lease = 0
        self.decode_lease = 0

    def needs(self, machine: RegisteredMachine) -> bool:
        """Return whether it cannot go on without a machine."""
        return self.decode is machine or (self.prefill is machine and self.prefill_lease > 0)


class Dispatcher:
    """Machines, requests, and the pairs between them.

    Attributes:
        registry: The machines.
        leases: Who holds KV blocks where.
        pending_prompt_tokens: Tokens of prompts that wait or run.
        counts: Requests `placed`, of them with `same_machine` for both phases, tried again (`retried`), and while the
            cluster was `degraded`; those answered `too_long` and `no_capacity`.
    """

    def __init__(
        self,
        rules: Rules,
        limits: Limits | None = None,
        *,
        backlog: Backlog | None = None,
        breaker: BreakerRule | None = None,
        on_move: Callable[[Move], None] | None = None,
        sink: Sink | None = None,
        most_machines: int = 64,
    ) -> None:
        """Make one without machines.

        Args:
            rules: The scheduler's settings.
            limits: `lease_s` is how long a lease lives without a heartbeat.
            backlog: How much prompt work may wait before requests are turned away.
            breaker: When a failing machine is left alone.
            on_move: Gets every change of a machine's pool, that of its joining included.
            sink: Where the decision log goes, see `decisions`.
            most_machines: Machines that may be there at once.

        Raises:
            SpecError: The rules are not for a live cluster.
        """
        self.counts: Counter[str] = Counter()
        self._block_tokens = rules.block_tokens
        self._lease_s = (limits or Limits()).lease_s
        self._backlog = backlog or Backlog()
        self._decisions = Decisions(rules, most_machines, sink=sink)
        self.registry = WorkerRegistry(self._decisions, most_machines, breaker or BreakerRule(), on_move)
        self._lengths = OutputLength()
        self.leases = Leases()
        self.pending_prompt_tokens = 0
        self._reservations: dict[str, Reservation] = {}

    def join(
        self,
        name: str,
        epoch: int,
        home: str,
        capacity_blocks: int,
        now_s: float,
        facts: Mapping[str, Any] | None = None,
    ) -> tuple[Lost, ...]:
        """Let a machine join, and return the requests that an earlier life of it held.

        Args:
            name: Its name.
            epoch: Which life of it; higher than that of every earlier life.
            home: Name of its pool.
            capacity_blocks: KV blocks it has, >= 1.
            now_s: The instant.
            facts: What it says of itself, kept for those who ask.

        Raises:
            RequestError: The epoch is out of date or there is no place left (409), or a value is wrong (400).
        """
        home = checked_home(home)
        if capacity_blocks < 1:
            raise RequestError(f"machine {name}: {capacity_blocks} KV blocks hold nothing", param="capacity_blocks")
        machine = self.registry.admit(name, epoch)
        lost = self.lost(name, now_s)
        self.registry.begin(machine, epoch, home, capacity_blocks, facts or {}, now_s)
        return lost

    def lost(self, name: str, now_s: float) -> tuple[Lost, ...]:
        """Take out a machine that is gone, and return the requests that it was still needed for."""
        machine = self.registry.get(name)
        if machine is None or machine.off:
            return ()
        machine.off = True
        lost = self._lose(machine, now_s)
        self.registry.switch_off(machine)
        return lost

    def drain(self, name: str, now_s: float) -> None:
        """Let a machine finish what it has and take nothing new; raises a RequestError where there is none (404)."""
        self.registry.drain(name, now_s, drained=True)

    def undrain(self, name: str, now_s: float) -> None:
        """Let a machine serve again that was to drain; raises as `drain`."""
        self.registry.drain(name, now_s, drained=False)

    def is_drained(self, name: str) -> bool:
        """Return whether nothing is left of what a machine had, or it is gone."""
        machine = self.registry.get(name)
        return machine is None or self.registry.is_drained(machine)

    def set_home(self, name: str, home: str, epoch: int, now_s: float) -> None:
        """Give a machine another home, once it has finished what it has.

        Args:
            name: The machine.
            home: Name of the pool.
            epoch: The machine's epoch as whoever gives the order knows it.
            now_s: The instant.

        Raises:
            RequestError: There is no such machine (404) or pool (400), or the epoch is out of date (409).
        """
        self.registry.set_home(name, home, epoch, now_s)

    def heartbeat(self, name: str, epoch: int, keys: Iterable[str], now_s: float) -> frozenset[str]:
        """Extend the leases on a machine.

        Args:
            name: The machine.
            epoch: Its epoch; an old one changes nothing.
            keys: All requests that it knows of, the waiting ones too.
            now_s: The instant.

        Returns:
            Requests that it has named twice in a row and that nobody owns there: it is to drop them. Once may mean that
            its report and the end of the request have crossed.
        """
        machine = self.registry.get(name)
        if machine is None or machine.off or epoch != machine.epoch:
            return frozenset()
        machine.reported_s = machine.heartbeat_s = now_s
        orphans = self.leases.extend(name, keys, deadline_s=now_s + self._lease_s)
        again = orphans & machine.orphan_keys
        machine.orphan_keys = orphans
        return again

    def failed(self, name: str, now_s: float) -> None:
        """Count a failure that is a machine's fault. Its successes are first tokens and completed requests."""
        machine = self.registry.get(name)
        if machine is not None and not machine.off:
            self.registry.failed(machine, now_s)

    def open(
        self,
        key: str,
        prompt_tokens: int,
        most_output_tokens: int,
        now_s: float,
        *,
        expected_tokens: int | None = None,
        avoid: Collection[str] = (),
        is_retry: bool = False,
    ) -> Pair | TooLong | NoCapacity:
        """Choose the pair of a request, and reserve its blocks on both machines; or say why not.

        Args:
            key: Its name for this attempt, never used before.
            prompt_tokens: Tokens of its prompt, >= 1.
            most_output_tokens: Tokens at which its output ends at the latest, >= 1.
            now_s: The instant.
            expected_tokens: Output tokens that rules count on; None: by the outputs so far.
            avoid: Machines that have failed it; they get it only where no others can serve.
            is_retry: Whether an attempt before this one has failed.

        Raises:
            GatewayError: The key is in use, or there are no tokens.
        """
        if self._reservations.get(key) is not None or prompt_tokens < 1 or most_output_tokens < 1:
            raise GatewayError(
                f"request {key}: opened twice, or without tokens ({prompt_tokens}, {most_output_tokens})"
            )
        turned_away = self._turned_away(prompt_tokens, most_output_tokens, now_s)
        if turned_away is not None:
            self.counts["no_capacity"] += 1
            return turned_away
        expected = self._lengths.expected(most_output_tokens) if expected_tokens is None else expected_tokens
        placed = self._decisions.place(
            key,
            now_s,
            min(prompt_tokens, _MOST_TOKENS),
            min(most_output_tokens, _MOST_TOKENS),
            min(expected, _MOST_TOKENS),
            self.registry.rows(avoid) if avoid else (),
        )
        if placed is None:
            self.counts["too_long"] += 1
            return TooLong(
                f"{prompt_tokens} prompt tokens and up to {most_output_tokens} output tokens are more than the"
                f" {self.most_tokens} tokens that the smallest machine holds"
            )
        self.registry.report_moves()
        live = self._book(key, placed, prompt_tokens, expected, now_s)
        self._count(live, retried=is_retry)
        for machine in {live.prefill, live.decode}:
            if machine.tried:
                self.registry.probe(machine, key, now_s)
        return Pair(key, live.prefill.name, live.prefill.epoch, live.decode.name, live.decode.epoch)

    def prefill_started(self, key: str, now_s: float) -> bool:
        """Book that a prefill phase has begun to run; return whether that was new."""
        live = self._reservations.get(key)
        if live is None or live.started:
            return False
        live.started = True
        self._decisions.begin_prefill(live.slot, now_s)
        return True

    def first_token(self, key: str, now_s: float) -> bool:
        """Book a first token; return whether that was new. Where all KV has arrived, the prefill side is free."""
        live = self._reservations.get(key)
        if live is None or not live.computing:
            return False
        live.started = True
        self._computed(live, live.computing, now_s)
        self._decisions.end_prefill_phase(live.slot, now_s)
        self.registry.report_moves()
        self.registry.succeeded(live.prefill, now_s)
        if live.kv_arrived:
            self._leave_prefill_machine(live, now_s)
        return True

    def kv_ready(self, key: str, now_s: float) -> bool:
        """Book that all KV is on the decode machine; return whether that was new. The prefill side is free from now on.

        Before the first token it is only noted.
        """
        live = self._reservations.get(key)
        if live is None or live.kv_arrived:
            return False
        live.kv_arrived = True
        if not live.computing:
            self._leave_prefill_machine(live, now_s)
        return True

    def ended(self, key: str, reason: LeaseEnd, now_s: float, output_tokens: int = 0) -> bool:
        """Book a request's end, or that of an attempt, in any state; return whether that was new.

        Args:
            key: The request.
            reason: Why, see `states.release_reason`.
            now_s: The instant.
            output_tokens: Length of a completed output, where it is known.
        """
        live = self._reservations.get(key)
        if live is None:
            return False
        if reason is LeaseEnd.COMPLETED:
            # One token only: the prefill machine has done it all.
            self.registry.succeeded(live.prefill if live.computing else live.decode, now_s)
            if output_tokens > 0:
                self._lengths.add(output_tokens)
        self._end(live, reason, now_s)
        return True

    def tick(self, now_s: float) -> tuple[Lost, ...]:
        """Do what is due, and return the requests whose leases have expired.

        Machines of the mixed pool may go home or change their home, drained ones get their next home, and broken ones
        may be tried again.
        """
        lost = self._expire(now_s)
        self.registry.tick(now_s)
        return lost

    @property
    def live(self) -> int:
        """Requests that have a pair."""
        return len(self._reservations)

    @property
    def most_tokens(self) -> int:
        """Tokens of prompt and output together that the smallest serving machine holds; 0 where none serves."""
        if not self._decisions.serves():
            return 0
        return max(0, int(self._decisions.ledger.settings[0]["most_blocks"]) * self._block_tokens - 1)

    @property
    def degraded(self) -> tuple[str, ...]:
        """Which phase has no machine of its own, in words; empty while both have."""
        return self.registry.degraded

    def wait_s(self) -> float | None:
        """Return how long prompts wait by the measured rate, None where nothing has been measured."""
        rate = self.registry.prompt_tokens_per_s
        return None if rate is None else self.pending_prompt_tokens / rate

    def pools(self, now_s: float) -> list[MachineView]:
        """Return all machines as a person sees them, in the order in which they joined."""
        return self.registry.view(self.leases, now_s)

    def moves(self) -> dict[str, int]:
        """Return how many moves between pools load has caused, by kind."""
        return self._decisions.moves()

    def facts(self, name: str) -> Mapping[str, Any]:
        """Return what a machine said of itself when it joined; nothing where it never did."""
        return {} if (machine := self.registry.get(name)) is None else machine.facts

    def _turned_away(self, prompt_tokens: int, most_output_tokens: int, now_s: float) -> NoCapacity | None:
        if not self._decisions.serves():
            self.registry.tick(now_s)
            if not self._decisions.serves():
                return NoCapacity("; ".join(self.degraded), max(SOON_S, self.registry.next_try_s(now_s) or 0.0))
        if prompt_tokens + most_output_tokens > self.most_tokens:
            return None  # to come back later would not help: placing it says so
        return self._backlog.turned_away(self.pending_prompt_tokens, prompt_tokens, self.wait_s())

    def _book(self, key: str, placed: Placed, prompt_tokens: int, expected_tokens: int, now_s: float) -> Reservation:
        """Book a request that the ledger has placed.

        What the ledger commits is leased: the prompt and one token there, the prompt and the expected output here.

        Args:
            key: Its name.
            placed: Its slot and its machines.
            prompt_tokens: Tokens of its prompt, >= 1.
            expected_tokens: Output tokens that rules count on, >= 1.
            now_s: The instant.
        """
        live = Reservation(
            key,
            placed.slot,
            self.registry.at(placed.prefill_machine),
            self.registry.at(placed.decode_machine),
            prompt_tokens,
        )
        self._reservations[key] = live
        if live.prefill is not live.decode:
            live.prefill_lease = self._lease(live.prefill, key, prompt_tokens + 1, Purpose.PREFILL, now_s)
        live.decode_lease = self._lease(live.decode, key, prompt_tokens + expected_tokens, Purpose.DECODE, now_s)
        self.pending_prompt_tokens += prompt_tokens
        live.prefill.rate.begin(now_s)
        return live

    def _leave_prefill_machine(self, live: Reservation, now_s: float) -> None:
        """Book that a request's KV is off its prefill machine, if that is not its decode machine too."""
        if live.prefill_lease:
            self._decisions.end_transfer(live.slot, now_s)
            self.leases.release(live.prefill_lease, LeaseEnd.COMPLETED)
            live.prefill_lease = 0

    def _end(self, live: Reservation, reason: LeaseEnd, now_s: float) -> None:
        """Take a request out of all books."""
        del self._reservations[live.key]
        if live.computing:
            self._computed(live, 0, now_s)
        self._decisions.end_request(live.slot, now_s)
        self.registry.report_moves()
        for number in (live.prefill_lease, live.decode_lease):
            if number:
                self.leases.release(number, reason)
        for machine in (live.prefill, live.decode):
            if machine.probe == live.key:
                self.registry.probe_ended(machine, now_s)

    def _lose(self, machine: RegisteredMachine, now_s: float) -> tuple[Lost, ...]:
        """End the requests that cannot go on without a machine that is gone, and return them."""
        needed = [live for live in self._reservations.values() if live.needs(machine)]
        for live in needed:
            self._end(live, LeaseEnd.WORKER_LOST, now_s)
        return tuple(Lost(live.key, "decode" if live.decode is machine else "prefill") for live in needed)

    def _expire(self, now_s: float) -> tuple[Lost, ...]:
        """End the requests of which a lease has expired, and return them."""
        expired: dict[str, Lost] = {}
        for lease in self.leases.expire(now_s):
            live = self._reservations[lease.request]
            if lease.purpose is Purpose.PREFILL:
                live.prefill_lease = 0
            else:
                live.decode_lease = 0
            expired.setdefault(live.key, Lost(live.key, str(lease.purpose)))
        for key in expired:
            self._end(self._reservations[key], LeaseEnd.EXPIRED, now_s)
        return tuple(expired.values())

    def _lease(self, machine: RegisteredMachine, key: str, tokens: int, purpose: Purpose, now_s: float) -> int:
        """Reserve blocks for so many tokens, and return the number of the lease."""
        blocks = blocks_for(tokens, self._block_tokens)
        return self.leases.reserve(
            machine.name, key, blocks, purpose, now_s=now_s, deadline_s=now_s + self._lease_s
        ).number

    def _computed(self, live: Reservation, tokens: int, now_s: float) -> None:
        """Take a prompt off the pending ones, of which so many tokens have been computed."""
        self.pending_prompt_tokens -= live.computing
        live.computing = 0
        live.prefill.rate.end(tokens, now_s)

    def _count(self, live: Reservation, *, retried: bool) -> None:
        self.counts["placed"] += 1
        self.counts["same_machine"] += live.prefill is live.decode
        self.counts["retried"] += retried
        self.counts["degraded"] += bool(self.registry.degraded)
