"""Which machines serve, in which pool: what joins, leaves, drains, breaks and moves, booked in the ledger."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from phasesplit.errors import RequestError
from phasesplit.gateway.breaker import BreakerRule
from phasesplit.gateway.decisions import Decisions
from phasesplit.gateway.leases import Leases
from phasesplit.gateway.members import Member, Members
from phasesplit.gateway.verdicts import MachineView, Move
from phasesplit.scheduling.pools import POOL_NAMES, is_drained

_SIDES = {"prompt": ("prompt", "mixed", "unsplit"), "token": ("token", "mixed", "unsplit")}


class Roster:
    """The machines of a live cluster.

    A machine serves unless it is gone, drains, or has a breaker that is open; this is the only place where that becomes
    a change of the ledger.

    Attributes:
        members: Everything that has joined.
        degraded: Which phase has no machine of its own, in words; empty while both have.
        prompt_tokens_per_s: What the machines that take prompts compute together, by measurement; None: unknown.
    """

    def __init__(
        self, decisions: Decisions, most_machines: int, rule: BreakerRule, on_move: Callable[[Move], None] | None
    ) -> None:
        self.members = Members(most_machines, rule)
        self.degraded: tuple[str, ...] = ()
        self.prompt_tokens_per_s: float | None = None
        self._decisions = decisions
        self._on_move = on_move
        self._orders = 0
        self._look_around()

    def begin(
        self, member: Member, epoch: int, home: str, capacity_blocks: int, facts: Mapping[str, Any], now_s: float
    ) -> None:
        """Begin a life of a machine that is off."""
        member.begin(epoch=epoch, home=home, capacity_blocks=capacity_blocks, facts=facts, now_s=now_s)
        self.settle(member, now_s)

    def switch_off(self, member: Member) -> None:
        """Take out a machine that is gone (`off` is set), and whose requests have all ended."""
        member.serving = False
        self._decisions.switch_off(member.row)
        self._look_around()

    def drain(self, name: str, now_s: float, *, drained: bool) -> None:
        """Let a machine take nothing new, or serve again.

        Raises:
            RequestError: There is no such machine (404).
        """
        member = self.members.known(name)
        member.drained = drained
        self.settle(member, now_s)

    def set_home(self, name: str, home: str, epoch: int, now_s: float) -> None:
        """Give a machine another home, once nothing is left of what it has.

        Raises:
            RequestError: There is no such machine (404) or pool (400), or the epoch is out of date (409).
        """
        check_home(home)
        member = self.members.known(name, epoch)
        member.next_home = None if home == member.home else home
        self.settle(member, now_s)

    def is_drained(self, member: Member) -> bool:
        """Return whether nothing is left of what a machine had."""
        return is_drained(self._decisions.ledger, member.row)

    def failed(self, member: Member, now_s: float) -> None:
        """Count a failure of a machine."""
        member.breaker.failed(now_s)
        member.probe = ""
        self.settle(member, now_s)

    def succeeded(self, member: Member, now_s: float) -> None:
        """Count a success of a machine."""
        if member.breaker.failures:
            member.breaker.succeeded()
            member.probe = ""
            self.settle(member, now_s)

    def probe(self, member: Member, key: str, now_s: float) -> None:
        """Let nothing more come to a machine that a request tries."""
        member.probe = key
        self.settle(member, now_s)

    def probe_ended(self, member: Member, now_s: float) -> None:
        """Let another request try a machine: the one that did has ended, and nobody knows more."""
        member.probe = ""
        self.settle(member, now_s)

    def settle(self, member: Member, now_s: float) -> None:
        """Let a machine serve if it should, or no longer."""
        if member.serving and not member.should_serve(now_s):
            member.serving = False
            self._decisions.retire(member.row)
            self._look_around()
        if member.next_home is not None and self.is_drained(member):
            member.home, member.next_home = member.next_home, None
        if not member.serving and member.should_serve(now_s):
            member.serving = True
            self._decisions.enlist(member.name, member.row, POOL_NAMES.index(member.home), member.capacity_blocks)
            self._told(member, member.home)
            self._look_around()

    def tick(self, now_s: float) -> None:
        """Let machines of the mixed pool go home, and all serve that should by now."""
        for member in self.members:
            if member.serving and self._decisions.look_home(member.row, now_s):
                self.report_moves()
            if not member.off:
                self.settle(member, now_s)
        self._measure()

    def report_moves(self) -> None:
        """Tell of the machines that the last call has moved."""
        for row in self._decisions.moved:
            member = self.members.at(row)
            machine = self._decisions.ledger.machines[row]
            member.home = POOL_NAMES[machine["home"]]
            self._told(member, POOL_NAMES[machine["pool"]])
        if self._decisions.moved:
            self._look_around()

    def rows(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return the numbers of those of the named machines that serve."""
        found = (self.members.get(name) for name in names)
        return tuple(member.row for member in found if member is not None and member.serving)

    def next_try_s(self, now_s: float) -> float | None:
        """Return in how many seconds the first machine that is left alone may be tried; None: there is none."""
        waits = [m.breaker.until_s - now_s for m in self.members if not m.off and m.breaker.until_s is not None]
        return max(0.0, min(waits)) if waits else None

    def view(self, leases: Leases, now_s: float) -> list[MachineView]:
        """Return all machines as a person sees them."""
        leased = leases.machines()
        return [self._view(member, leased.get(member.name, 0), now_s) for member in self.members]

    def _view(self, member: Member, leased_blocks: int, now_s: float) -> MachineView:
        machine = self._decisions.ledger.machines[member.row]
        return MachineView(
            name=member.name,
            epoch=member.epoch,
            pool=POOL_NAMES[machine["pool"]],
            home=member.home,
            state=member.state(now_s),
            next_home=member.next_home,
            prompt_requests=int(machine["prompt_requests"]),
            token_requests=int(machine["token_requests"]),
            pending_tokens=int(machine["pending_tokens"]),
            committed_blocks=int(machine["committed_blocks"]),
            capacity_blocks=member.capacity_blocks,
            leased_blocks=leased_blocks,
            failures=member.breaker.failures,
            heard_s=member.heard_s,
        )

    def _told(self, member: Member, pool: str) -> None:
        self._orders += 1
        if self._on_move is not None:
            self._on_move(Move(member.name, member.epoch, self._orders, pool, member.home))

    def _look_around(self) -> None:
        """Notice which phase has no machine of its own, and how fast prompts are computed now."""
        homes = {member.home for member in self.members if member.serving}
        if not homes:
            self.degraded = ("no machine serves",)
        else:
            self.degraded = tuple(
                f"no {side} machine serves: others do its work"
                for side, able in _SIDES.items()
                if homes.isdisjoint(able)
            )
        self._measure()

    def _measure(self) -> None:
        pools = self._decisions.ledger.machines["pool"]
        able = [m.rate.per_s() for m in self.members if m.serving and POOL_NAMES[pools[m.row]] in _SIDES["prompt"]]
        known = [rate for rate in able if rate is not None]
        # One that has not yet computed any is expected to be like the others.
        self.prompt_tokens_per_s = sum(known) / len(known) * len(able) if known else None


def check_home(home: str) -> None:
    """Raise unless a machine may have this home.

    Raises:
        RequestError: There is no such pool (400).
    """
    if home not in POOL_NAMES:
        raise RequestError(f"home {home!r}: allowed is one of {', '.join(POOL_NAMES)}", param="home")
