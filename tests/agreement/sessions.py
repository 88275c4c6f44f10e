"""Random sessions of a dispatcher: requests at every pace, machines that fail, join again and change their roles."""

from collections import Counter
from random import Random

from phasesplit.errors import RequestError
from phasesplit.gateway.decisions import Sink
from phasesplit.gateway.dispatcher import Dispatcher, Lost, Pair, TooLong
from phasesplit.gateway.estimates import Backlog, NoCapacity
from phasesplit.gateway.leases import LeaseEnd
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.registry import BreakerRule, Move
from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.scheduler.rules import Placement, Rules

PLACEMENTS = [rule for rule in Placement if rule is not Placement.CUSTOM]
ENDS = [LeaseEnd.COMPLETED] * 6 + [
    reason for reason in LeaseEnd if reason not in (LeaseEnd.COMPLETED, LeaseEnd.EXPIRED)
]
NAMES = ("a", "b", "c", "d", "e")


def drawn_rules(random: Random) -> Rules:
    """Return rules under which little load is enough for moves."""
    return Rules(
        prefill_placement=random.choice(PLACEMENTS),
        decode_placement=random.choice(PLACEMENTS),
        spill_tokens=random.choice([0, 100, 400]),
        elastic=random.random() < 0.8,
        repurpose_after_s=random.choice([0.5, 5.0]),
        block_tokens=random.choice([1, 16, 32]),
        seed=random.randrange(1000),
    )


class Session:
    """A dispatcher, and what a driver knows of its requests.

    Attributes:
        seen: How often each kind of thing has happened.
    """

    def __init__(self, random: Random, sink: Sink | None = None) -> None:
        self.random = random
        self.seen: Counter[str] = Counter()
        self.now_s = 0.0
        self.moves: list[Move] = []
        self.epochs: dict[str, int] = {}
        self.live: list[str] = []
        self.ended: list[str] = []
        self._requests = 0
        self.dispatcher = Dispatcher(
            drawn_rules(random),
            Limits(lease_s=random.choice([0.5, 30.0])),
            backlog=Backlog(most_wait_s=5.0, most_pending_tokens=random.choice([2_000, 1 << 18])),
            breaker=BreakerRule(failures=2, open_s=0.2, most_open_s=1.0),
            on_move=self.moves.append,
            sink=sink,
            most_machines=4,
        )

    def act(self) -> None:
        """Let one thing happen, a little later than the last."""
        self.now_s += self.random.choice([0.0, 0.0, 0.01, 0.1])
        draw = self.random.random()
        if draw < 0.28:
            self._open()
        elif draw < 0.80:
            self._go_on()
        elif draw < 0.87:
            self._take_lost(self.dispatcher.tick(self.now_s))
        elif draw < 0.93:
            self._beat()
        else:
            self._change_machines()

    def end_all(self) -> None:
        """End what is left, and let the mixed machines go home."""
        for key in self.live:
            assert self.dispatcher.ended(key, LeaseEnd.CANCELLED, self.now_s)
        self._take_lost(self.dispatcher.tick(self.now_s))

    def _open(self) -> None:
        self._requests += 1
        key = f"r{self._requests}.1"
        size = self.random.choice([1, 20, 100, 300, 3_000])
        avoid = self.random.sample(NAMES, self.random.choice([0, 0, 0, 1, 2, 4]))
        most = self.random.choice([1, 2, 50, 200])
        found = self.dispatcher.open(key, size, most, self.now_s, avoid=avoid, is_retry=bool(avoid))
        self.seen[type(found).__name__] += 1
        if isinstance(found, Pair):
            self.live.append(key)
            assert found.prefill_epoch == self.epochs[found.prefill]
            assert found.decode_epoch == self.epochs[found.decode]
        else:
            assert isinstance(found, TooLong | NoCapacity)
            assert found.reason
        if isinstance(found, NoCapacity):
            assert found.retry_after_s > 0

    def _go_on(self) -> None:
        """Tell of one request, mostly of a live one, in any order and more than once."""
        late = self.ended and self.random.random() < 0.1
        if not self.live and not late:
            return
        key = self.random.choice(self.ended if late else self.live)
        step = self.random.choice(["prefill_started", "first_token", "kv_ready", "ended", "failed"])
        if step == "ended":
            new = self.dispatcher.ended(key, self.random.choice(ENDS), self.now_s, self.random.choice([0, 5, 400]))
            assert new != late
            if new:
                self._gone(key)
        elif step == "failed":
            self.dispatcher.failed(self.random.choice(NAMES), self.now_s)
        else:
            new = getattr(self.dispatcher, step)(key, self.now_s)
            assert not (new and late)
            assert not getattr(self.dispatcher, step)(key, self.now_s)
        self.seen[step] += 1

    def _beat(self) -> None:
        name = self.random.choice(NAMES)
        keys = self.random.sample(self.live, self.random.randint(0, len(self.live)))
        epoch = self.epochs.get(name, 0) - (self.random.random() < 0.2)
        assert not self.dispatcher.heartbeat(name, epoch, keys, self.now_s) - set(keys)

    def _change_machines(self) -> None:
        name = self.random.choice(NAMES)
        home = self.random.choice(["prefill", "prefill", "decode", "decode", "mixed", "unsplit"])
        change = self.random.choice(["join", "join", "lost", "drain", "undrain", "undrain", "set_home"])
        epoch = self.epochs.get(name, 0)
        try:
            if change == "join":
                epoch += self.random.choice([0, 1, 1])
                lost = self.dispatcher.join(name, epoch, home, self.random.choice([50, 500, 5_000]), self.now_s)
                self.epochs[name] = epoch
                self._take_lost(lost)
            elif change == "lost":
                self._take_lost(self.dispatcher.lost(name, self.now_s))
            elif change == "set_home":
                self.dispatcher.set_home(name, home, epoch - self.random.choice([0, 0, 1]), self.now_s)
            else:
                getattr(self.dispatcher, change)(name, self.now_s)
        except RequestError as refused:
            change = f"{change} refused {refused.status}"
        self.seen[change] += 1

    def _take_lost(self, lost: tuple[Lost, ...]) -> None:
        for key, side in lost:
            assert side in ("prefill", "decode")
            self._gone(key)
            assert not self.dispatcher.ended(key, LeaseEnd.WORKER_LOST, self.now_s)
        self.seen["lost requests"] += len(lost)

    def _gone(self, key: str) -> None:
        self.live.remove(key)
        self.ended.append(key)


def check_books(session: Session) -> None:
    """Raise unless ledger, leases and machines say the same."""
    dispatcher = session.dispatcher
    assert dispatcher.live == len(session.live)
    assert dispatcher.leases.late == 0
    assert dispatcher.pending_prompt_tokens >= 0
    owners = {lease.request for lease in dispatcher.leases}
    assert owners == set(session.live)
    for machine in dispatcher.pools(session.now_s):
        assert machine.committed_blocks == machine.leased_blocks, machine
        assert machine.pool in POOL_NAMES
        assert min(machine.prefill_requests, machine.decode_requests, machine.pending_tokens) >= 0
        if machine.state == "off":
            assert machine.leased_blocks == 0
    told = {move.name: move for move in session.moves}
    assert [move.number for move in session.moves] == list(range(1, len(session.moves) + 1))
    for machine in dispatcher.pools(session.now_s):
        if machine.state == "serving":
            assert (told[machine.name].pool, told[machine.name].home) == (machine.pool, machine.home)


def check_empty(session: Session) -> None:
    """Raise unless nothing is left of any request."""
    dispatcher = session.dispatcher
    assert (len(dispatcher.leases), dispatcher.leases.blocks(), dispatcher.live) == (0, 0, 0)
    assert dispatcher.pending_prompt_tokens == 0
    for machine in dispatcher.pools(session.now_s):
        left = (machine.prefill_requests, machine.decode_requests, machine.pending_tokens, machine.committed_blocks)
        assert left == (0, 0, 0, 0), machine
        assert dispatcher.is_drained(machine.name)
