"""Same seed, same bytes: whatever the process, the hash seed, and how often the driver looks in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from doubles import tiny_cluster, tiny_trace
from driving import done_rows, drive
from phasesplit.domain.cluster import Cluster
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import Placement, Rules

TESTS = Path(__file__).parent


def busy_case() -> tuple[Cluster, Trace]:
    """Return a cluster short of memory and machines, and a trace that makes it spill, evict and move."""
    rows = [(0.02 * number, 30 + 37 * number % 250, 1 + 11 * number % 50) for number in range(150)]
    return tiny_cluster(("prefill", 2), ("decode", 2), capacity_tokens=480), tiny_trace(*rows)


def rules(seed: int = 0, placement: Placement = Placement.TWO_CHOICES) -> Rules:
    return Rules(prefill_placement=placement, decode_placement=placement, spill_tokens=300, seed=seed)


def outcome(seed: int = 0, budget: int = 1 << 20, placement: Placement = Placement.TWO_CHOICES) -> bytes:
    """Return everything that a run leaves behind, as bytes."""
    cluster, trace = busy_case()
    state = drive(cluster, rules(seed, placement), trace, budget=budget)
    ledger, world = state.ledger, state.world
    counted = ledger.counters.tobytes() + ledger.machines.tobytes() + world.clock.tobytes()
    seen = world.gaps.tobytes() + world.samples.tobytes() + world.batch_s.tobytes()
    return done_rows(state).tobytes() + counted + seen


def in_another_process(hash_seed: str) -> str:
    code = "import hashlib, test_determinism as t; print(hashlib.sha256(t.outcome(7)).hexdigest())"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_processes_agree_to_the_byte() -> None:
    """A result could not be reproduced: it depends on the process it was made in."""
    first = in_another_process("0")
    assert len(first.strip()) == 64
    assert in_another_process("12345") == first


@pytest.mark.parametrize("placement", [Placement.RANDOM, Placement.TWO_CHOICES])
def test_another_seed_gives_another_run(placement: Placement) -> None:
    """The seed would be ignored by rules that draw."""
    assert outcome(1, placement=placement) == outcome(1, placement=placement)
    assert outcome(1, placement=placement) != outcome(2, placement=placement)


@pytest.mark.parametrize("budget", [1, 7, 1_000_000])
def test_events_do_not_depend_on_how_many_a_call_handles(budget: int) -> None:
    """A run that is watched, or whose arrays grow in between, would go another way."""
    assert outcome(3, budget) == outcome(3)
