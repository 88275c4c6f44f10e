"""Which designs are compared, and which cluster and rules each stands for."""

from dataclasses import replace

import pytest

from phasesplit.domain.cluster import Role
from phasesplit.domain.machine import Link
from phasesplit.errors import SpecError
from phasesplit.planner.designs import DesignKind, cluster_for, design, designs_of, divisions_of, rules_for, variants_of
from phasesplit.planner.problem import Variation
from phasesplit.scheduler.rules import Batching, Rules
from planner.problems import offer, problem

LINK = Link(bytes_per_s=1e9, latency_s=0.002, per_layer_s=1e-4, streaming_slowdown=0.5)
TWO = problem(offer("h", link=LINK), offer("a"), offer("h@50%", variant_of="h"))


def test_every_pair_and_every_baseline_is_compared() -> None:
    """If wrong, a design is left out and the verdict is against too weak a rival."""
    names = [one.name for one in designs_of(TWO)]
    assert names == [
        "unsplit, chunked prompts: h",
        "unsplit, chunked prompts: a",
        "unsplit, whole prompts: h",
        "unsplit, whole prompts: a",
        *(f"split, {how}: {pair}" for how in ("elastic", "static") for pair in ("h + h", "h + a", "a + h", "a + a")),
    ]


def test_published_rules_have_neither_chunks_nor_static_pools() -> None:
    """If wrong, a published plan compares what the published simulator does not know."""
    made = problem(rules=Rules.as_published())
    assert {one.kind for one in designs_of(made)} == {DesignKind.WHOLE, DesignKind.ELASTIC}
    assert all(rules_for(made, kind) is made.rules for kind in DesignKind)


def test_variants_change_one_machine_at_a_time() -> None:
    """If wrong, a power cap is tried on both pools only, or never."""
    base = design(TWO, DesignKind.ELASTIC, [0, 0])
    assert [one.slots for one in variants_of(TWO, base)] == [
        ((Role.PREFILL, 2), (Role.DECODE, 0)),
        ((Role.PREFILL, 0), (Role.DECODE, 2)),
    ]
    assert variants_of(TWO, design(TWO, DesignKind.CHUNKED, [1])) == []


def test_divisions_give_each_type_every_role() -> None:
    """If wrong, some way to use one's machines is never looked at."""
    split = next(one for one in divisions_of(TWO) if one.kind == DesignKind.STATIC)
    assert split.slots == ((Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0), (Role.DECODE, 1))
    unsplit = next(one for one in divisions_of(TWO) if one.kind == DesignKind.CHUNKED)
    assert unsplit.slots == ((Role.UNSPLIT, 0), (Role.UNSPLIT, 1))


@pytest.mark.parametrize(
    ("kind", "elastic", "batching"),
    [
        (DesignKind.CHUNKED, True, Batching.CHUNKED),
        (DesignKind.WHOLE, True, Batching.WHOLE),
        (DesignKind.ELASTIC, True, Batching.WHOLE),
        (DesignKind.STATIC, False, Batching.WHOLE),
    ],
)
def test_a_kind_changes_what_makes_it_and_nothing_else(kind: DesignKind, elastic: bool, batching: Batching) -> None:
    """If wrong, two designs of a plan run under the same rules, or under other settings than were asked for."""
    made = problem(rules=Rules(batch_requests=7, seed=3))
    rules = rules_for(made, kind)
    assert (rules.elastic, rules.unsplit_batching) == (elastic, batching)
    assert (rules.batch_requests, rules.seed, rules.batching) == (7, 3, Batching.WHOLE)


def test_a_cluster_has_the_pools_that_have_machines() -> None:
    """If wrong, an empty pool stops a division, or a variation of the link changes another figure."""
    split = next(one for one in divisions_of(TWO) if one.kind == DesignKind.ELASTIC)
    cluster = cluster_for(TWO, split, (2, 0, 0, 1), Variation(link=0.5))
    assert [(pool.role, pool.count, pool.machine.name) for pool in cluster.pools] == [
        (Role.PREFILL, 2, "h"),
        (Role.DECODE, 1, "a"),
    ]
    assert {pool.machine.nic_bytes_per_s for pool in cluster.pools} == {TWO.offers[0].machine.nic_bytes_per_s / 2}
    assert [pool.machine.link for pool in cluster.pools] == [replace(LINK, bytes_per_s=5e8), None]
    assert cluster.reference is TWO.reference
    with pytest.raises(SpecError):
        cluster_for(TWO, split, (2, 0, 0, 0))
