"""The machines of a live cluster: who has joined, which life of it, and whether it should serve."""

from collections.abc import Iterator, Mapping
from typing import Any

from phasesplit.errors import RequestError
from phasesplit.gateway.breaker import Breaker, BreakerRule
from phasesplit.gateway.estimates import PromptRate

GONE, CONFLICT = 404, 409


class Member:
    """A machine that has joined.

    Attributes:
        name: Its name.
        row: Its number in the ledger.
        epoch: Which life of it; later lives have higher epochs.
        home: Name of the pool it comes home to.
        capacity_blocks: KV blocks it has.
        facts: What it said of itself when it joined.
        off: It is gone.
        serving: It is in a pool.
        drained: A person has asked it to finish what it has and take nothing new.
        next_home: Its home once nothing is left of what it has, or None.
        breaker: Opens after failures.
        probe: Key of the one request that tries it after its breaker was open; empty while none is on its way.
        rate: How fast it computes prompts.
        heard_s: When its last heartbeat came.
        strangers: Keys of its last heartbeat that nobody owned.
    """

    def __init__(self, name: str, row: int, rule: BreakerRule) -> None:
        self.name = name
        self.row = row
        self._rule = rule
        self.serving = False
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
        self.rate = PromptRate()
        self.heard_s = now_s
        self.strangers: frozenset[str] = frozenset()

    @property
    def tried(self) -> bool:
        """Whether its breaker was open and no success has come since."""
        return self.breaker.until_s is not None

    def should_serve(self, now_s: float) -> bool:
        """Return whether it should be in a pool."""
        wanted = not (self.off or self.drained or self.next_home is not None)
        return wanted and not self.breaker.open(now_s) and not self.probe

    def state(self, now_s: float) -> str:
        """Return its state in one word, see `verdicts.MachineView`."""
        if self.off:
            return "off"
        if self.drained or self.next_home is not None:
            return "draining"
        if self.breaker.open(now_s):
            return "broken"
        return "probing" if self.tried else "serving"


class Members:
    """All machines that have joined, by name and by number.

    Args:
        most: As many may be there at once.
        rule: When their breakers open.
    """

    def __init__(self, most: int, rule: BreakerRule) -> None:
        self._most = most
        self._rule = rule
        self._by_name: dict[str, Member] = {}
        self._by_row: dict[int, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Member | None:
        """Return a machine, None if it never joined."""
        return self._by_name.get(name)

    def at(self, row: int) -> Member:
        """Return the machine with a number."""
        return self._by_row[row]

    def known(self, name: str, epoch: int | None = None) -> Member:
        """Return a machine that has joined.

        Args:
            name: Its name.
            epoch: The epoch that whoever asks knows of; None: any.

        Raises:
            RequestError: There is none (404), or the epoch is not its own (409).
        """
        member = self._by_name.get(name)
        if member is None or member.off:
            raise RequestError(f"machine {name}: it has not joined, or is gone", status=GONE, param="name")
        if epoch is not None and epoch != member.epoch:
            raise RequestError(
                f"machine {name}: epoch {epoch} is out of date, it is {member.epoch} now",
                status=CONFLICT,
                param="epoch",
            )
        return member

    def admitted(self, name: str, epoch: int) -> Member:
        """Return the place for a machine that joins, or joins again.

        Raises:
            RequestError: Its epoch is not new, or there is no place left (409).
        """
        member = self._by_name.get(name)
        if member is not None:
            # A machine given up for lost may have been there all the time.
            if epoch < member.epoch or (epoch == member.epoch and not member.off):
                raise RequestError(
                    f"machine {name}: epoch {epoch} is not above {member.epoch}, which has joined",
                    status=CONFLICT,
                    param="epoch",
                )
            return member
        member = Member(name, self._free_row(), self._rule)
        self._by_name[name] = self._by_row[member.row] = member
        return member

    def _free_row(self) -> int:
        """Return a number without a machine; one that is gone gives its number up to a new name."""
        if len(self._by_name) < self._most:
            return next(row for row in range(self._most) if row not in self._by_row)
        gone = next((member for member in self if member.off), None)
        if gone is None:
            raise RequestError(f"there is no place for more than {self._most} machines", status=CONFLICT)
        del self._by_name[gone.name], self._by_row[gone.row]
        return gone.row
