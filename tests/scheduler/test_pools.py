"""Moves between pools: spilling over, going home, changing home."""

import pytest

from invariants import check_loads, check_pools, pool_machines
from ledgers import booked, ledger_of, written
from phasesplit.scheduler.ledger import DECODE, MIXED, PREFILL, PRESENT
from phasesplit.scheduler.pools import enter, leave, return_home, spill_into_mixed
from phasesplit.scheduler.queues import push, remove
from phasesplit.scheduler.rules import Rules

LONG_S = 1_000.0


def test_machines_open_in_the_pools_of_their_homes() -> None:
    """A machine would begin in no pool or a wrong one."""
    ledger = ledger_of("prefill", "decode", "mixed", "prefill")
    check_pools(ledger)
    check_loads(ledger)
    assert [pool_machines(ledger, pool) for pool in (PREFILL, DECODE, MIXED)] == [[0, 3], [1], [2]]


def test_leaving_keeps_the_order_of_the_others() -> None:
    """Round robin and the published ties would look at the machines of a pool in another order."""
    ledger = ledger_of("prefill", "prefill", "prefill", "prefill")
    leave(ledger, 1)
    assert pool_machines(ledger, PREFILL) == [0, 2, 3]
    enter(ledger, 1, PREFILL)
    assert pool_machines(ledger, PREFILL) == [0, 2, 3, 1]
    check_pools(ledger)
    check_loads(ledger)


@pytest.mark.parametrize(("home", "count"), [("prefill", "prefill_to_mixed"), ("decode", "decode_to_mixed")])
def test_spilling_keeps_the_home(home: str, count: str) -> None:
    """A machine would forget where it belongs, or its move would not be counted."""
    ledger = ledger_of(home, home)
    machine_home = int(ledger.machines["home"][0])
    spill_into_mixed(ledger, 0, 3.0)
    assert pool_machines(ledger, MIXED) == [0]
    assert pool_machines(ledger, machine_home) == [1]
    assert ledger.machines["home"][0] == machine_home
    assert ledger.machines["mixed_since_s"][0] == 3.0
    assert ledger.counters[count][0] == 1
    check_pools(ledger)
    check_loads(ledger)


def test_token_machine_goes_home_when_its_prompts_are_done() -> None:
    """A decode machine would wait for its own token work before it goes home, or leave with prompts to do."""
    ledger = ledger_of("prefill", "decode", "decode")
    spill_into_mixed(ledger, 1, 0.0)
    booked(ledger, written(ledger, 100), 1, 1)
    assert not return_home(ledger, 1, 0.1)
    ledger.machines["prefill_requests"][1] = 0  # its decode phase is still here
    assert return_home(ledger, 1, 0.2)
    assert pool_machines(ledger, DECODE) == [2, 1]
    assert ledger.counters["returns"][0] == 1


def test_prompt_machine_goes_home_when_its_token_phases_are_done() -> None:
    """A prefill machine would leave the mixed pool with decode phases, or KV on the way, that it still has to serve."""
    ledger = ledger_of("prefill", "prefill", "decode")
    spill_into_mixed(ledger, 1, 0.0)
    booked(ledger, written(ledger, 100), 0, 1)
    assert not return_home(ledger, 1, 0.1)
    ledger.machines["decode_requests"][1] = 0
    ledger.machines["prefill_requests"][1] = 1  # a prompt of its own kind
    assert return_home(ledger, 1, 0.3)
    assert pool_machines(ledger, PREFILL) == [0, 1]


def test_published_machine_goes_home_only_when_idle() -> None:
    """The published rules would let a machine leave the mixed pool while a request is present."""
    ledger = ledger_of("prefill", "decode", "decode", rules=Rules.as_published())
    spill_into_mixed(ledger, 1, 0.0)
    slot = written(ledger, 100)
    push(ledger.lists[PRESENT, 1], slot)
    assert not return_home(ledger, 1, LONG_S)
    remove(ledger.lists[PRESENT, 1], slot)
    assert return_home(ledger, 1, LONG_S)


@pytest.mark.parametrize("machine", [0, 2])
def test_machines_that_are_at_home_stay(machine: int) -> None:
    """A machine in its own pool, or one whose home is the mixed pool, would be moved."""
    ledger = ledger_of("prefill", "decode", "mixed")
    pool = int(ledger.machines["pool"][machine])
    assert not return_home(ledger, machine, LONG_S)
    assert ledger.machines["pool"][machine] == pool


@pytest.mark.parametrize("now_s", [9.999, 10.0])
def test_long_mixed_machine_changes_its_home(now_s: float) -> None:
    """A machine that has long done the other phase's work would stay mixed, or change at once."""
    ledger = ledger_of("prefill", "decode", "decode", rules=Rules(repurpose_after_s=10.0))
    spill_into_mixed(ledger, 1, 0.0)
    booked(ledger, written(ledger, 100), 1, 2)
    assert return_home(ledger, 1, now_s) == (now_s >= 10.0)
    if now_s >= 10.0:
        assert ledger.machines["home"][1] == PREFILL
        assert pool_machines(ledger, PREFILL) == [0, 1]
        assert (ledger.counters["repurposed"][0], ledger.counters["returns"][0]) == (1, 0)
    check_pools(ledger)


def test_last_machine_of_a_home_is_not_repurposed() -> None:
    """A phase would be left without any machine of its own."""
    ledger = ledger_of("prefill", "decode", rules=Rules(repurpose_after_s=10.0))
    spill_into_mixed(ledger, 1, 0.0)
    booked(ledger, written(ledger, 100), 1, 0)
    assert not return_home(ledger, 1, LONG_S)
    assert ledger.machines["home"][1] == DECODE
