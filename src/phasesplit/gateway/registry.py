"""The registry: one record of each machine, and its life from joining to being lost.

A machine goes through one life cycle, and its record says where it is:

1. *Join.* `admit` finds or makes its record, with a row of the scheduling ledger; `begin` starts a life under an epoch.
2. *Serve.* `update_serving` lets it into the pool of its home. This is the only place where serving becomes a change
   of the ledger, and where it ends.
3. *Report.* Heartbeats name the requests that it knows of; failures open its breaker, and successes close it.
4. *Drain.* It finishes what it has and takes nothing new, because a person asked or because it gets another home.
5. *Lost.* It is off. Its row keeps its record, for it may come back, until a new machine needs the row.

The ledger holds the columns that rules compare (pool, pending tokens, committed blocks); the record holds all else.
Nothing here opens a socket or reads a clock: see `connections` for how machines are called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from phasesplit.domain.cluster import Role
from phasesplit.errors import RequestError, SpecError
from phasesplit.gateway.decisions import Decisions
from phasesplit.gateway.estimates import PrefillRate
from phasesplit.gateway.leases import Leases
from phasesplit.scheduler.pools import POOL_NAMES, is_drained

if TYPE_CHECKING:
    from phasesplit.gateway.connections import Connection

GONE, CONFLICT = 404, 409
_SIDES = {"prefill": ("prefill", "mixed", "unsplit"), "decode": ("decode", "mixed", "unsplit")}
_NO_ROW = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRule:
    """When a breaker opens, and for how long.

    Attributes:
        failures: Failures in a row that open it.
        open_s: Seconds that it stays open at first.
        growth: Factor from one opening to the next without a success in between, >= 1.
        most_open_s: Seconds that it stays open at most.

    Raises:
        SpecError: A bound is not positive, or the growth below 1.
    """

    failures: int = 3
    open_s: float = 1.0
    growth: float = 2.0
    most_open_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("growth", "failures") else 0
            if not (least <= value < float("inf") and value > 0):
                raise SpecError.bad(f"breaker, {field.name}", value, "a number >= 1" if least else "a positive number")


class Breaker:
    """The breaker of one machine: closed (all is well), open (left alone), half-open (one request may try it).

    Attributes:
        failures: Failures in a row.
        openings: Openings without a success since.
        until_s: While it is open: when one request may try the machine; None while it is closed.
    """

    def __init__(self, rule: BreakerRule) -> None:
        self.failures = 0
        self.openings = 0
        self.until_s: float | None = None
        self._rule = rule

    def failed(self, now_s: float) -> None:
        """Count a failure. What fails while the breaker is open was begun before, and says nothing new."""
        self.failures += 1
        half_open = self.until_s is not None and now_s >= self.until_s
        if half_open or (self.until_s is None and self.failures >= self._rule.failures):
            # The exponent is bounded, or the power overflows after a thousand openings.
            open_s = self._rule.open_s * self._rule.growth ** min(self.openings, 64)
            self.until_s = now_s + min(open_s, self._rule.most_open_s)
            self.openings += 1

    def succeeded(self) -> None:
        """Count a success, which closes the breaker."""
        self.failures = self.openings = 0
        self.until_s = None

    def open(self, now_s: float) -> bool:
        """Return whether the machine is to be left alone."""
        return self.until_s is not None and now_s < self.until_s


class Move(NamedTuple):
    """A machine's pool from now on, which it is to learn.

    Attributes:
        name: The machine.
        epoch: Its epoch.
        number: Grows with each move of any machine: an order with a lower number is out of date.
        pool: The pool it is in.
        home: The pool it comes home to.
    """

    name: str
    epoch: int
    number: int
    pool: str
    home: str


class MachineView(NamedTuple):
    """A machine as a person sees it.

    Attributes:
        name: Its name.
        epoch: Which life of it.
        pool: The pool it is in, or was in last.
        home: The pool it comes home to.
        state: serving, draining (finishes what it has), broken (its breaker is open), probing (one request tries it),
            or off.
        next_home: Its home once it has drained, or None.
        prefill_requests: Requests whose prefill phase is there, waiting or running.
        decode_requests: Requests whose decode phase is or will be there.
        pending_tokens: Tokens that wait to be computed there.
        committed_blocks: KV blocks that rules count on for its requests.
        capacity_blocks: KV blocks it has.
        leased_blocks: KV blocks under lease.
        failures: Its failures in a row.
        heartbeat_s: When its last heartbeat came, on the gateway's clock.
    """

    name: str
    epoch: int
    pool: str
    home: str
    state: str
    next_home: str | None
    prefill_requests: int
    decode_requests: int
    pending_tokens: int
    committed_blocks: int
    capacity_blocks: int
    leased_blocks: int
    failures: int
    heartbeat_s: float


class RegisteredMachine:
    """The one record of a machine that has joined.

    Attributes:
        name: Its name.
        row: Its number in the ledger; -1 once another machine has taken it over.
        epoch: Which life of it; later lives have higher epochs.
        home: Name of the pool it comes home to.
        capacity_blocks: KV blocks it has.
        facts: What it said of itself last.
        off: It is gone.
        serving: It is in a pool.
        drained: A person has asked it to finish what it has and take nothing new.
        next_home: Its home once nothing is left of what it has, or None.
        breaker: Opens after failures.
        probe: Key of the one request that tries it after its breaker was open; empty while none is on its way.
        rate: How fast it computes prompts.
        reported_s: When it last sent anything.
        heartbeat_s: When its last heartbeat came.
        orphan_keys: Keys of its last heartbeat that nobody owned.
        connection: How it is called; None where nobody calls it (any more).
    """

    def __init__(self, name: str, row: int, rule: BreakerRule) -> None:
        self.name = name
        self.row = row
        self._rule = rule
        self.serving = False
        self.connection: Connection | None = None
        self.begin(epoch=0, home="", capacity_blocks=0, facts={}, now_s=0.0)
        self.off = True

    def begin(self, *, epoch: int, home: str, capacity_blocks: int, facts: Mapping[str, Any], now_s: float) -> None:
        """Begin a life; nothing of the last one counts any more."""
        self.epoch = epoch
        self.home = home
        self.capacity_blocks = capacity_blocks
        self.facts = facts
        self.off = False
        self.drained = False
        self.next_home: str | None = None
        self.breaker = Breaker(self._rule)
        self.probe = ""
        self.rate = PrefillRate()
        self.reported_s = self.heartbeat_s = now_s
        self.orphan_keys: frozenset[str] = frozenset()

    @property
    def url(self) -> str | None:
        """Where it listens, None where nobody calls it (any more)."""
        return None if self.connection is None else self.connection.url

    @property
    def tried(self) -> bool:
        """Whether its breaker was open and no success has come since."""
        return self.breaker.until_s is not None

    def should_serve(self, now_s: float) -> bool:
        """Return whether it should be in a pool."""
        wanted = not (self.off or self.drained or self.next_home is not None)
        return wanted and not self.breaker.open(now_s) and not self.probe

    def state(self, now_s: float) -> str:
        """Return its state in one word, see `MachineView`."""
        if self.off:
            return "off"
        if self.drained or self.next_home is not None:
            return "draining"
        if self.breaker.open(now_s):
            return "broken"
        return "probing" if self.tried else "serving"


class WorkerRegistry:
    """The machines of a live cluster.

    A machine serves unless it is gone, drains, or has a breaker that is open; this is the only place where that becomes
    a change of the ledger.

    Attributes:
        degraded: Which phase has no machine of its own, in words; empty while both have.
        prompt_tokens_per_s: What the machines that take prompts compute together, by measurement; None: unknown.
    """

    def __init__(
        self, decisions: Decisions, most_machines: int, rule: BreakerRule, on_move: Callable[[Move], None] | None
    ) -> None:
        self._most, self._rule = most_machines, rule
        self._by_name: dict[str, RegisteredMachine] = {}
        self._by_row: dict[int, RegisteredMachine] = {}
        self.degraded: tuple[str, ...] = ()
        self.prompt_tokens_per_s: float | None = None
        self._decisions = decisions
        self._on_move = on_move
        self._orders = 0
        self._measure_capacity()

    def __iter__(self) -> Iterator[RegisteredMachine]:
        """Iterate over the machines that have a row, in the order in which they joined."""
        return (machine for machine in self._by_name.values() if machine.row != _NO_ROW)

    def get(self, name: str) -> RegisteredMachine | None:
        """Return a machine, None if it never joined."""
        return self._by_name.get(name)

    def at(self, row: int) -> RegisteredMachine:
        """Return the machine with a number."""
        return self._by_row[row]

    def known(self, name: str, epoch: int | None = None) -> RegisteredMachine:
        """Return a machine that has joined.

        Args:
            name: Its name.
            epoch: The epoch that whoever asks knows of; None: any.

        Raises:
            RequestError: There is none (404), or the epoch is not its own (409).
        """
        machine = self._by_name.get(name)
        if machine is None or machine.off:
            raise RequestError(f"machine {name}: it has not joined, or is gone", status=GONE, param="name")
        if epoch is not None and epoch != machine.epoch:
            raise RequestError(
                f"machine {name}: epoch {epoch} is out of date, it is {machine.epoch} now",
                status=CONFLICT,
                param="epoch",
            )
        return machine

    def admit(self, name: str, epoch: int) -> RegisteredMachine:
        """Return the place for a machine that joins, or joins again.

        Raises:
            RequestError: Its epoch is not new, or there is no place left (409).
        """
        machine = self._by_name.get(name)
        if machine is not None and machine.row != _NO_ROW:
            # A machine given up for lost may have been there all the time.
            if epoch < machine.epoch or (epoch == machine.epoch and not machine.off):
                raise RequestError(
                    f"machine {name}: epoch {epoch} is not above {machine.epoch}, which has joined",
                    status=CONFLICT,
                    param="epoch",
                )
            return machine
        row = self._free_row()
        if machine is None:
            machine = RegisteredMachine(name, row, self._rule)
        else:
            del self._by_name[name]  # it comes back behind those that have joined meanwhile
            machine.row = row
        self._by_name[name] = self._by_row[row] = machine
        return machine

    def begin(
        self,
        machine: RegisteredMachine,
        epoch: int,
        home: str,
        capacity_blocks: int,
        facts: Mapping[str, Any],
        now_s: float,
    ) -> None:
        """Begin a life of a machine that is off."""
        machine.begin(epoch=epoch, home=home, capacity_blocks=capacity_blocks, facts=facts, now_s=now_s)
        self.update_serving(machine, now_s)

    def switch_off(self, machine: RegisteredMachine) -> None:
        """Take out a machine that is gone (`off` is set), and whose requests have all ended."""
        machine.serving = False
        self._decisions.switch_off(machine.row)
        self._measure_capacity()

    def forget(self, machine: RegisteredMachine) -> None:
        """Drop the record of a machine that has neither a row nor anybody who calls it."""
        if machine.row == _NO_ROW and machine.connection is None:
            del self._by_name[machine.name]

    def connected(self) -> list[RegisteredMachine]:
        """Return the machines that somebody calls, the lost ones too, by name."""
        return [self._by_name[name] for name in sorted(self._by_name) if self._by_name[name].connection is not None]

    def drain(self, name: str, now_s: float, *, drained: bool) -> None:
        """Let a machine take nothing new, or serve again.

        Raises:
            RequestError: There is no such machine (404).
        """
        machine = self.known(name)
        machine.drained = drained
        self.update_serving(machine, now_s)

    def set_home(self, name: str, home: str, epoch: int, now_s: float) -> None:
        """Give a machine another home, once nothing is left of what it has.

        Raises:
            RequestError: There is no such machine (404) or pool (400), or the epoch is out of date (409).
        """
        home = checked_home(home)
        machine = self.known(name, epoch)
        machine.next_home = None if home == machine.home else home
        self.update_serving(machine, now_s)

    def is_drained(self, machine: RegisteredMachine) -> bool:
        """Return whether nothing is left of what a machine had."""
        return machine.row == _NO_ROW or is_drained(self._decisions.ledger, machine.row)

    def failed(self, machine: RegisteredMachine, now_s: float) -> None:
        """Count a failure of a machine."""
        machine.breaker.failed(now_s)
        machine.probe = ""
        self.update_serving(machine, now_s)

    def succeeded(self, machine: RegisteredMachine, now_s: float) -> None:
        """Count a success of a machine."""
        if machine.breaker.failures:
            machine.breaker.succeeded()
            machine.probe = ""
            self.update_serving(machine, now_s)

    def probe(self, machine: RegisteredMachine, key: str, now_s: float) -> None:
        """Let nothing more come to a machine that a request tries."""
        machine.probe = key
        self.update_serving(machine, now_s)

    def probe_ended(self, machine: RegisteredMachine, now_s: float) -> None:
        """Let another request try a machine: the one that did has ended, and nobody knows more."""
        machine.probe = ""
        self.update_serving(machine, now_s)

    def update_serving(self, machine: RegisteredMachine, now_s: float) -> None:
        """Let a machine serve if it should, or no longer."""
        if machine.serving and not machine.should_serve(now_s):
            machine.serving = False
            self._decisions.retire(machine.row)
            self._measure_capacity()
        if machine.next_home is not None and self.is_drained(machine):
            machine.home, machine.next_home = machine.next_home, None
        if not machine.serving and machine.should_serve(now_s):
            machine.serving = True
            self._decisions.enlist(machine.name, machine.row, POOL_NAMES.index(machine.home), machine.capacity_blocks)
            self._report_move(machine, machine.home)
            self._measure_capacity()

    def tick(self, now_s: float) -> None:
        """Let machines of the mixed pool go home, and all serve that should by now."""
        for machine in self:
            if machine.serving and self._decisions.look_home(machine.row, now_s):
                self.report_moves()
            if not machine.off:
                self.update_serving(machine, now_s)
        self._measure_rate()

    def report_moves(self) -> None:
        """Report the machines that the last call has moved."""
        for row in self._decisions.moved:
            machine = self.at(row)
            columns = self._decisions.ledger.machines[row]
            machine.home = POOL_NAMES[columns["home"]]
            self._report_move(machine, POOL_NAMES[columns["pool"]])
        if self._decisions.moved:
            self._measure_capacity()

    def rows(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the numbers of those of the named machines that serve."""
        found = (self.get(name) for name in names)
        return tuple(machine.row for machine in found if machine is not None and machine.serving)

    def next_try_s(self, now_s: float) -> float | None:
        """Return in how many seconds the first machine that is left alone may be tried; None: there is none."""
        waits = [m.breaker.until_s - now_s for m in self if not m.off and m.breaker.until_s is not None]
        return max(0.0, min(waits)) if waits else None

    def view(self, leases: Leases, now_s: float) -> list[MachineView]:
        """Return all machines as a person sees them."""
        leased = leases.machines()
        return [self._view(machine, leased.get(machine.name, 0), now_s) for machine in self]

    def _free_row(self) -> int:
        """Return a number without a machine; one that is gone gives its number up to a new name."""
        if len(self._by_row) < self._most:
            return next(row for row in range(self._most) if row not in self._by_row)
        gone = next((machine for machine in self if machine.off), None)
        if gone is None:
            raise RequestError(f"there is no place for more than {self._most} machines", status=CONFLICT)
        row, gone.row = gone.row, _NO_ROW
        del self._by_row[row]
        self.forget(gone)
        return row

    def _view(self, machine: RegisteredMachine, leased_blocks: int, now_s: float) -> MachineView:
        columns = self._decisions.ledger.machines[machine.row]
        return MachineView(
            name=machine.name,
            epoch=machine.epoch,
            pool=POOL_NAMES[columns["pool"]],
            home=machine.home,
            state=machine.state(now_s),
            next_home=machine.next_home,
            prefill_requests=int(columns["prefill_requests"]),
            decode_requests=int(columns["decode_requests"]),
            pending_tokens=int(columns["pending_tokens"]),
            committed_blocks=int(columns["committed_blocks"]),
            capacity_blocks=machine.capacity_blocks,
            leased_blocks=leased_blocks,
            failures=machine.breaker.failures,
            heartbeat_s=machine.heartbeat_s,
        )

    def _report_move(self, machine: RegisteredMachine, pool: str) -> None:
        self._orders += 1
        if self._on_move is not None:
            self._on_move(Move(machine.name, machine.epoch, self._orders, pool, machine.home))

    def _measure_capacity(self) -> None:
        """Notice which phase has no machine of its own, and how fast prompts are computed now."""
        homes = {machine.home for machine in self if machine.serving}
        if not homes:
            self.degraded = ("no machine serves",)
        else:
            self.degraded = tuple(
                f"no {side} machine serves: others do its work"
                for side, able in _SIDES.items()
                if homes.isdisjoint(able)
            )
        self._measure_rate()

    def _measure_rate(self) -> None:
        pools = self._decisions.ledger.machines["pool"]
        able = [m.rate.per_s() for m in self if m.serving and POOL_NAMES[pools[m.row]] in _SIDES["prefill"]]
        known = [rate for rate in able if rate is not None]
        # One that has not yet computed any is expected to be like the others.
        self.prompt_tokens_per_s = sum(known) / len(known) * len(able) if known else None


def checked_home(home: str) -> str:
    """Return the pool that a machine names as its home, also where it names it in the paper's words.

    Raises:
        RequestError: There is no such pool (400).
    """
    try:
        return str(Role(home))
    except ValueError:
        raise RequestError(f"home {home!r}: allowed is one of {', '.join(POOL_NAMES)}", param="home") from None
