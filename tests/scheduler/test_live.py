"""The calls of drivers in real time: whatever order they come in, every account agrees, and ends at zero."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariants import check_loads, check_machine, check_memory, check_pools, entries
from ledgers import batch, ledger_of
from phasesplit.scheduler import live_cluster, live_machine
from phasesplit.scheduler.accounts import free_slot, open_slot
from phasesplit.scheduler.ledger import AWAITING_ROOM, CHOSEN, OFF, PREEMPTED, PREFILL, READY, WAITING, Ledger
from phasesplit.scheduler.placement import PLACED
from phasesplit.scheduler.pools import enlist
from phasesplit.scheduler.rules import Batching, Rules
from phasesplit.scheduler.withdrawal import withdraw

HERE, ELSEWHERE = live_machine.HERE, live_machine.ELSEWHERE
ACCOUNTS = (
    "running_entries", "prefill_entries", "batch_tokens", "context_tokens", "prefill_requests",
    "decode_requests", "pending_tokens",
    "pending_output_tokens", "committed_blocks", "used_blocks", "arriving", "departing",
)  # fmt: skip
WHOLE, PREFILL_LEG, DECODE_LEG = range(3)


def require_consistent(ledger: Ledger) -> None:
    check_memory(ledger)
    check_pools(ledger)
    check_loads(ledger)
    for machine in range(ledger.machines.size):
        check_machine(ledger, machine)


def require_empty(ledger: Ledger) -> None:
    for name in ACCOUNTS:
        assert not ledger.machines[name].any(), (name, ledger.machines[name])
    assert ledger.machines["pair_tokens"] == pytest.approx(0.0)
    for kind in (WAITING, PREEMPTED, READY, AWAITING_ROOM):
        assert all(not entries(ledger, kind, machine) for machine in range(ledger.machines.size))
    assert ledger.counters["live"][0] == 0
    assert (ledger.requests["row"] == -1).all()


class Driver:
    """Drives one machine as an engine does, and knows what it must find."""

    def __init__(self, batching: Batching, capacity_blocks: int, budget: int) -> None:
        rules = Rules(batching=batching, block_tokens=4, batch_prompt_tokens=budget, kv_headroom=0.0)
        self.ledger = live_machine.machine_ledger(rules, capacity_blocks)
        self.capacity_tokens = 4 * capacity_blocks
        self.now_s = 0.0
        self.legs: dict[int, int] = {}
        self.arriving: set[int] = set()
        self.leaving: set[int] = set()

    def open(self, leg: int, prompt_tokens: int, output_tokens: int) -> None:
        prompt_tokens = min(prompt_tokens, self.capacity_tokens - 1)
        output_tokens = min(output_tokens, self.capacity_tokens - prompt_tokens)
        self.ledger = live_cluster.with_place_for_one(self.ledger)
        slot = open_slot(self.ledger, self.now_s, prompt_tokens, output_tokens, output_tokens)
        self.legs[slot] = leg
        if leg == DECODE_LEG:
            live_machine.await_kv(self.ledger, slot)
        else:
            live_machine.take_prefill(self.ledger, slot, leg == WHOLE)

    def step(self) -> bool:
        running_entries = live_machine.form_batch(self.ledger, self.now_s)
        require_consistent(self.ledger)
        self.land()
        self.now_s += 1.0
        if running_entries:
            ended = live_machine.end_iteration(self.ledger, self.now_s)
            for task in self.ledger.running_entries[CHOSEN, HERE, :ended].tolist():
                self.end(task // 2, task % 2)
        return running_entries > 0

    def end(self, slot: int, phase: int) -> None:
        requests = self.ledger.requests
        if phase == PREFILL:
            live_machine.end_prefill_here(self.ledger, slot, self.now_s)
            if self.legs[slot] == PREFILL_LEG:
                self.leaving.add(slot)
                return
        if requests["emitted"][slot] == requests["output_tokens"][slot]:
            self.withdraw(slot)
        else:
            assert phase == PREFILL

    def land(self) -> bool:
        slot = live_machine.hold_room(self.ledger, self.now_s)
        assert slot != live_machine.STUCK
        if slot >= 0:
            self.arriving.add(slot)
        return slot >= 0

    def arrive(self) -> None:
        if self.arriving:
            slot = min(self.arriving)
            self.arriving.remove(slot)
            live_machine.kv_arrived(self.ledger, slot, self.now_s)
            if self.ledger.requests["output_tokens"][slot] == 1:
                self.withdraw(slot)

    def leave(self) -> None:
        if self.leaving:
            self.withdraw(min(self.leaving))

    def withdraw(self, slot: int) -> None:
        withdraw(self.ledger, slot, self.now_s)
        del self.legs[slot]
        self.arriving.discard(slot)
        self.leaving.discard(slot)


CALLS = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 2), st.integers(1, 60), st.integers(1, 30)),
    st.tuples(st.sampled_from(["step", "step", "step", "land", "arrive", "leave"])),
    st.tuples(st.just("withdraw"), st.integers(0, 100)),
)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(CALLS, max_size=60),
    batching=st.sampled_from([Batching.WHOLE, Batching.CHUNKED]),
    capacity_blocks=st.sampled_from([8, 16, 40]),
    budget=st.sampled_from([8, 24, 2_048]),
)
def test_a_machines_accounts_agree_in_any_order(
    calls: list[tuple[str | int, ...]], batching: Batching, capacity_blocks: int, budget: int
) -> None:
    """A request that ends in some state would leave blocks, tasks or counts behind, or take those of another."""
    driver = Driver(batching, capacity_blocks, budget)
    for name, *arguments in calls:
        if name == "withdraw":
            if driver.legs:
                driver.withdraw(sorted(driver.legs)[arguments[0] % len(driver.legs)])
        else:
            getattr(driver, str(name))(*arguments)
        require_consistent(driver.ledger)
    for slot in list(driver.legs):
        driver.withdraw(slot)
        require_consistent(driver.ledger)
    require_empty(driver.ledger)


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    batching=st.sampled_from([Batching.WHOLE, Batching.CHUNKED]),
    budget=st.sampled_from([8, 24, 2_048]),
)
def test_every_request_comes_to_its_end(requests: list[tuple[int, int, int]], batching: Batching, budget: int) -> None:
    """Requests that wait for one another's memory would wait for ever."""
    driver = Driver(batching, 16, budget)
    for request in requests:
        driver.open(*request)
    for _ in range(5_000):
        if not driver.legs:
            break
        driver.step()
        driver.arrive()
        driver.leave()
    require_empty(driver.ledger)


def machine(capacity_blocks: int = 100) -> Ledger:
    """Return an idle machine's ledger, with a free slot."""
    rules = Rules(batching=Batching.CHUNKED, block_tokens=4)
    return live_cluster.with_place_for_one(live_machine.machine_ledger(rules, capacity_blocks))


def in_state(name: str) -> tuple[Ledger, int]:
    """Return a machine with one request in a state, and its slot."""
    ledger = machine()
    slot = open_slot(ledger, 0.0, 10, 5, 5)
    if name in ("awaiting room", "arriving", "kv here", "kv here and running"):
        live_machine.await_kv(ledger, slot)
        if name != "awaiting room":
            assert live_machine.hold_room(ledger, 0.0) == slot
        if name.startswith("kv here"):
            live_machine.kv_arrived(ledger, slot, 1.0)
        if name == "kv here and running":
            live_machine.form_batch(ledger, 1.0)
        return ledger, slot
    live_machine.take_prefill(ledger, slot, name not in ("kv leaving", "prefill leg running"))
    if name != "waiting":
        live_machine.form_batch(ledger, 1.0)
    if name in ("ready", "running", "kv leaving"):
        assert live_machine.end_iteration(ledger, 2.0) == 1
        live_machine.end_prefill_here(ledger, slot, 2.0)
    if name == "running":
        live_machine.form_batch(ledger, 2.0)
        live_machine.end_iteration(ledger, 3.0)
    return ledger, slot


@pytest.mark.parametrize(
    "state",
    [
        "waiting", "prompt running", "prefill leg running", "ready", "running", "kv leaving",
        "awaiting room", "arriving", "kv here", "kv here and running",
    ],
)  # fmt: skip
def test_withdrawn_in_any_state_nothing_is_left(state: str) -> None:
    """A client that hangs up at that moment would leave something of its request for ever."""
    ledger, slot = in_state(state)
    require_consistent(ledger)
    withdraw(ledger, slot, 5.0)
    require_consistent(ledger)
    require_empty(ledger)


def test_a_withdrawn_lane_leaves_the_others_where_they_were() -> None:
    """The neighbours of a request that is given up would lose a token, or their order."""
    ledger = machine()
    slots = [open_slot(ledger, 0.0, 10, 9, 9) for _ in range(3)]
    for slot in slots:
        live_machine.take_prefill(ledger, slot, True)
    live_machine.form_batch(ledger, 0.0)
    live_machine.end_iteration(ledger, 1.0)
    for slot in slots:
        live_machine.end_prefill_here(ledger, slot, 1.0)
    live_machine.form_batch(ledger, 1.0)
    live_machine.end_iteration(ledger, 2.0)
    withdraw(ledger, slots[1], 2.0)
    assert batch(ledger, HERE) == [("decode", slots[0]), ("decode", slots[2])]
    ended = [live_machine.form_batch(ledger, 3.0) and live_machine.end_iteration(ledger, 3.0) for _ in range(7)]
    assert ended == [0, 0, 0, 0, 0, 0, 2]


def test_kv_lands_in_order_and_only_where_it_fits() -> None:
    """A large request would wait for ever behind small ones, or KV would be written where there is no room."""
    ledger = machine(capacity_blocks=10)
    large, small = open_slot(ledger, 0.0, 30, 5, 5), open_slot(ledger, 0.0, 4, 5, 5)
    first = open_slot(ledger, 0.0, 15, 5, 5)
    for slot in (first, large, small):
        live_machine.await_kv(ledger, slot)
    assert live_machine.hold_room(ledger, 0.0) == first
    assert live_machine.hold_room(ledger, 0.0) == live_machine.NO_ROOM_NOW
    withdraw(ledger, first, 1.0)
    assert live_machine.hold_room(ledger, 1.0) == large
    assert live_machine.hold_room(ledger, 1.0) == small
    assert ledger.machines["used_blocks"].tolist() == [10, 0]


def test_kv_that_never_fits_is_stuck() -> None:
    """A request larger than the machine would wait without anybody being told."""
    ledger = machine(capacity_blocks=2)
    live_machine.await_kv(ledger, open_slot(ledger, 0.0, 30, 5, 5))
    assert live_machine.hold_room(ledger, 0.0) == live_machine.STUCK


def test_known_tokens_are_not_computed_again() -> None:
    """A prompt whose beginning is in memory would be computed whole."""
    ledger = machine()
    slot = open_slot(ledger, 0.0, 20, 5, 5)
    live_machine.take_prefill(ledger, slot, True)
    ledger.requests["computed"][slot] = 16
    live_machine.form_batch(ledger, 0.0)
    assert ledger.requests["chunk"][slot] == 4
    assert ledger.requests["blocks"][slot] == 6
    assert live_machine.end_iteration(ledger, 1.0) == 1


class Cluster:
    """Drives the ledger of a cluster as a gateway does."""

    def __init__(self, *homes: str) -> None:
        rules = Rules(block_tokens=4, spill_tokens=60, repurpose_after_s=5.0)
        self.ledger = ledger_of(*homes, rules=rules, capacity_blocks=60, slots=2)
        self.now_s = 0.0
        self.live: list[int] = []
        self.next: dict[int, Callable[[Ledger, int, float], None] | None] = {}

    def open(self, prompt_tokens: int, output_tokens: int) -> None:
        self.ledger = live_cluster.with_place_for_one(self.ledger)
        slot = open_slot(self.ledger, self.now_s, prompt_tokens, output_tokens, output_tokens)
        if live_cluster.assign_pair(self.ledger, slot, self.now_s) == PLACED:
            self.live.append(slot)
            self.next[slot] = live_cluster.begin_prefill
        else:
            free_slot(self.ledger, slot)

    def go_on(self, which: int) -> None:
        if not self.live:
            return
        slot = self.live[which % len(self.live)]
        self.now_s += 1.0
        call = self.next[slot]
        if call is None:
            self.end(which)
            return
        call(self.ledger, slot, self.now_s)
        is_split = self.ledger.requests["prefill_machine"][slot] != self.ledger.requests["decode_machine"][slot]
        self.next[slot] = {
            live_cluster.begin_prefill: live_cluster.end_prefill_phase,
            live_cluster.end_prefill_phase: live_cluster.end_transfer if is_split else None,
        }.get(call)

    def end(self, which: int) -> None:
        if self.live:
            self.now_s += 1.0
            slot = self.live.pop(which % len(self.live))
            del self.next[slot]
            live_cluster.end_request_anywhere(self.ledger, slot, self.now_s)

    def lose(self, which: int) -> None:
        """Lose a machine with all its requests, and start it again."""
        machine = which % self.ledger.machines.size
        requests = self.ledger.requests
        for slot in list(self.live):
            if machine in (requests["prefill_machine"][slot], requests["decode_machine"][slot]):
                self.end(self.live.index(slot))
        live_cluster.switch_off(self.ledger, machine)
        require_consistent(self.ledger)
        assert self.ledger.machines["state"][machine] == OFF
        for name in ACCOUNTS:
            assert not self.ledger.machines[name][machine], name
        enlist(self.ledger, machine, int(self.ledger.machines["home"][machine]))

    def look(self, which: int) -> None:
        self.now_s += 3.0
        live_cluster.look_home(self.ledger, which % self.ledger.machines.size, self.now_s)


CLUSTER_CALLS = st.one_of(
    st.tuples(st.just("open"), st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.sampled_from(["go_on", "go_on", "go_on", "end", "look"]), st.integers(0, 50)),
    st.tuples(st.just("lose"), st.integers(0, 50)),
)


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(CLUSTER_CALLS, max_size=60),
    homes=st.sampled_from([("prefill", "decode"), ("prefill", "prefill", "decode", "decode"), ("unsplit", "unsplit")]),
)
def test_a_clusters_accounts_agree_in_any_order(calls: list[tuple[str | int, ...]], homes: tuple[str, ...]) -> None:
    """A request that ends anywhere, or a machine that dies, would leave load behind that is not there."""
    cluster = Cluster(*homes)
    for name, *arguments in calls:
        getattr(cluster, str(name))(*arguments)
        require_consistent(cluster.ledger)
    while cluster.live:
        cluster.end(0)
        require_consistent(cluster.ledger)
    require_empty(cluster.ledger)


def test_a_prompt_begins_once() -> None:
    """A late or repeated message would move the instant at which a prompt began."""
    cluster = Cluster("prefill", "decode")
    cluster.open(10, 5)
    (slot,) = cluster.live
    live_cluster.begin_prefill(cluster.ledger, slot, 1.0)
    live_cluster.begin_prefill(cluster.ledger, slot, 2.0)
    assert cluster.ledger.requests["prefill_start_s"][slot] == 1.0
    assert not entries(cluster.ledger, WAITING, 0)


def test_room_is_made_for_as_many_as_come() -> None:
    """The driver would write behind the end of its lists or its running entries."""
    ledger = machine(capacity_blocks=1_000)
    slots = []
    for _ in range(200):
        ledger = live_cluster.with_place_for_one(ledger)
        slots.append(open_slot(ledger, 0.0, 2, 2, 2))
        live_machine.take_prefill(ledger, slots[-1], True)
    assert sorted(slots) == list(range(200))
    assert live_machine.form_batch(ledger, 0.0) == 200
    require_consistent(ledger)
