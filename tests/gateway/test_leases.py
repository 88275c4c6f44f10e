"""KV leases: owned, extended, and ended exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.errors import GatewayError
from phasesplit.gateway.leases import KvLease, LeaseEnd, Leases, Purpose


def reserve(leases: Leases, machine: str = "p", request: str = "r", *, blocks: int = 3, end: float = 10.0) -> KvLease:
    return leases.reserve(machine, request, blocks, Purpose.PREFILL, now_s=0.0, deadline_s=end)


def test_release_counts_once() -> None:
    """A second release of a lease would free blocks that somebody else holds by now."""
    leases = Leases()
    first, second = reserve(leases), reserve(leases)
    assert leases.release(first.number, LeaseEnd.COMPLETED) == first
    assert leases.release(first.number, LeaseEnd.CLIENT_GONE) is None
    assert (leases.blocks("p"), leases.late, leases.ended) == (second.blocks, 1, {LeaseEnd.COMPLETED: 1})


def test_late_release_does_not_meet_the_next_attempt() -> None:
    """The release of a given-up attempt would end the lease of the next one on the same machine."""
    leases = Leases()
    given_up = reserve(leases)
    leases.release(given_up.number, LeaseEnd.TRANSFER_FAILED)
    again = reserve(leases)
    leases.release(given_up.number, LeaseEnd.COMPLETED)
    assert list(leases) == [again]


def test_heartbeats_keep_leases_alive() -> None:
    """A request that waits in a long queue would lose its KV though its machine is well."""
    leases = Leases()
    reserve(leases, request="a")
    reserve(leases, request="b")
    assert leases.extend("p", ["a"], deadline_s=20.0) == frozenset()
    assert [lease.request for lease in leases.expire(10.0)] == ["b"]
    leases.extend("p", ["a"], deadline_s=5.0)
    assert leases.expire(19.0) == []
    assert [lease.request for lease in leases.expire(20.0)] == ["a"]
    assert leases.ended == {LeaseEnd.EXPIRED: 2}


def test_heartbeat_names_kv_that_nobody_owns() -> None:
    """A machine would keep KV for ever whose request has ended."""
    leases = Leases()
    reserve(leases, "p", "a")
    reserve(leases, "q", "b")
    assert leases.extend("p", ["a", "b", "c"], deadline_s=20.0) == {"b", "c"}
    assert leases.extend("gone", ["a"], deadline_s=20.0) == {"a"}


def test_lost_machine_loses_its_leases_only() -> None:
    """The KV of a dead machine would stay on the books, or that of a healthy one leave them."""
    leases = Leases()
    lost, kept = reserve(leases, "p"), reserve(leases, "q")
    assert leases.lose("p") == [lost]
    assert leases.lose("p") == []
    assert (leases.machines(), list(leases), leases.ended) == ({"q": 3}, [kept], {LeaseEnd.WORKER_LOST: 1})


@pytest.mark.parametrize(("blocks", "end"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0)])
def test_lease_of_nothing_is_refused(blocks: int, end: float) -> None:
    """A lease that is empty or over would be booked, and the gauge go wrong without a word."""
    leases = Leases()
    with pytest.raises(GatewayError):
        reserve(leases, blocks=blocks, end=end)
    assert len(leases) == 0


def test_listing_shows_owner_purpose_and_time_left() -> None:
    """A person who looks for leaked KV could not see whose it is."""
    leases = Leases()
    leases.reserve("t", "r1", 7, Purpose.DECODE, now_s=1.0, deadline_s=4.0)
    assert leases.listed(2.5) == [
        {"lease": 1, "machine": "t", "request": "r1", "purpose": "decode", "blocks": 7, "age_s": 1.5, "left_s": 1.5}
    ]


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.sampled_from("pqt"), st.integers(1, 9)),
        st.tuples(st.just("release"), st.integers(0, 20), st.sampled_from(LeaseEnd)),
        st.tuples(st.just("extend"), st.sampled_from("pqt"), st.integers(1, 30)),
        st.tuples(st.just("expire"), st.integers(0, 30), st.none()),
        st.tuples(st.just("lose"), st.sampled_from("pqt"), st.none()),
    ),
    max_size=40,
)


@given(moves=MOVES)
@settings(max_examples=150, deadline=None)
def test_gauges_are_the_sum_of_the_leases_and_drain_to_zero(moves: list[tuple]) -> None:
    """A gauge would drift from the leases behind it, or not return to zero when the last one ends."""
    leases, made = Leases(), 0
    for name, first, second in moves:
        if name == "reserve":
            reserve(leases, first, f"r{made}", blocks=second)
            made += 1
        elif name == "release":
            leases.release(first, second)
        elif name == "extend":
            leases.extend(first, [f"r{number}" for number in range(0, made, 2)], deadline_s=float(second))
        elif name == "expire":
            leases.expire(float(first))
        else:
            leases.lose(first)
        assert leases.blocks() == sum(lease.blocks for lease in leases)
        for machine in "pqt":
            assert leases.blocks(machine) == sum(lease.blocks for lease in leases if lease.machine == machine)
        assert leases.ended.total() + len(leases) == made
    leases.expire(float("inf"))
    assert (leases.blocks(), leases.machines(), len(leases), leases.ended.total()) == (0, {}, 0, made)
