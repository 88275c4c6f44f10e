"""The transitions of the ledger, each against what it should leave behind."""

import numpy as np
import pytest

from ledgers import booked, ledger_of, waiting, written
from phasesplit.domain.machine import blocks_for
from phasesplit.scheduler.accounts import (
    back_to_prefill,
    blocks_of,
    draw,
    end_prefill,
    end_request,
    expected_blocks,
    fits,
    fits_with_headroom,
    free_slot,
    leave_prefill_machine,
    take_slot,
    use_blocks,
    work_tokens,
)
from phasesplit.scheduler.ledger import COUNTERS, DECODE, PREFILL, SETTINGS
from phasesplit.scheduler.rules import Rules

ACCOUNTS = (
    "prefill_requests",
    "decode_requests",
    "pending_tokens",
    "pending_output_tokens",
    "committed_blocks",
    "used_blocks",
)


def accounts(ledger, machine: int) -> list[int]:
    return [int(ledger.machines[account][machine]) for account in ACCOUNTS]


@pytest.mark.parametrize(
    ("tokens", "block_tokens", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (17, 1, 17)]
)
def test_blocks_are_rounded_up(tokens: int, block_tokens: int, blocks: int) -> None:
    """A request's last tokens would have no memory, or it would hold a block that it does not need."""
    ledger = ledger_of("unsplit", rules=Rules(block_tokens=block_tokens))
    assert blocks_of(ledger.settings, tokens) == blocks_for(tokens, block_tokens) == blocks


def test_split_request_is_booked_on_both_machines_and_leaves_nothing() -> None:
    """A phase's work or memory would be booked on the wrong machine, or stay booked after it is done."""
    ledger = ledger_of("prefill", "decode", rules=Rules(block_tokens=1))
    slot = booked(ledger, written(ledger, 100, 10), 0, 1)
    assert accounts(ledger, 0) == [1, 0, 100, 0, 101, 0]
    assert accounts(ledger, 1) == [0, 1, 1, 10, 110, 0]
    request = ledger.requests[slot]
    use_blocks(ledger.machines, 0, 101, 1.0)
    request["blocks"] = 101
    end_prefill(ledger, slot)
    assert accounts(ledger, 0) == [0, 0, 0, 0, 101, 101]
    request["emitted"], request["phase"] = 1, DECODE
    use_blocks(ledger.machines, 1, 101, 2.0)
    request["arriving_blocks"] = 101
    leave_prefill_machine(ledger, slot, 3.0)
    assert accounts(ledger, 0) == [0, 0, 0, 0, 0, 0]
    assert (request["blocks"], request["arriving_blocks"]) == (101, 0)
    end_request(ledger, slot, 4.0)
    assert accounts(ledger, 1) == [0, 0, 0, 0, 0, 0]


def test_request_on_one_machine_is_committed_once() -> None:
    """The scheduler would count the prompt's KV twice where both phases share a machine."""
    ledger = ledger_of("mixed", rules=Rules(block_tokens=1))
    slot = waiting(ledger, 0, 100, 10)
    assert accounts(ledger, 0) == [1, 1, 101, 10, 110, 0]
    assert ledger.counters["one_machine"][0] == 1
    end_prefill(ledger, slot)
    end_request(ledger, slot, 1.0)
    assert accounts(ledger, 0) == [0, 0, 0, 0, 0, 0]


def test_lost_cache_makes_the_prompt_and_its_output_pending_again() -> None:
    """An evicted request would be computed again for free in the eyes of the scheduler."""
    ledger = ledger_of("unsplit")
    slot = waiting(ledger, 0, 100, 10)
    end_prefill(ledger, slot)
    ledger.requests["emitted"][slot], ledger.requests["phase"][slot] = 4, DECODE
    back_to_prefill(ledger, 0, slot)
    assert work_tokens(ledger.requests, slot) == 104
    assert ledger.requests["phase"][slot] == PREFILL
    assert accounts(ledger, 0)[:3] == [1, 1, 105]
    end_prefill(ledger, slot)
    assert accounts(ledger, 0)[:3] == [0, 1, 1]


def test_expectation_is_used_and_not_the_true_output() -> None:
    """A rule would see the future: the true output length of a request."""
    ledger = ledger_of("prefill", "decode", rules=Rules(block_tokens=1))
    slot = written(ledger, 100, 10)
    ledger.requests["output_tokens"][slot] = 5_000
    assert expected_blocks(ledger, slot) == 110
    booked(ledger, slot, 0, 1)
    assert accounts(ledger, 1) == [0, 1, 1, 10, 110, 0]


def test_published_rules_commit_the_true_output() -> None:
    """The published rules would reserve KV(prompt + 1) + KV(output - 1) by an expectation."""
    ledger = ledger_of("prefill", "decode", rules=Rules.as_published())
    slot = written(ledger, 100, 10)
    ledger.requests["expected_tokens"][slot] = 77
    assert expected_blocks(ledger, slot) == 110


def test_memory_fits_up_to_the_last_block() -> None:
    """A machine would be overfilled by a block, or never be full."""
    ledger = ledger_of("unsplit", capacity_blocks=100, rules=Rules(kv_headroom=0.1))
    use_blocks(ledger.machines, 0, 60, 0.0)
    assert fits(ledger.machines, 0, 40)
    assert not fits(ledger.machines, 0, 41)
    assert fits_with_headroom(ledger.settings, ledger.machines, 0, 40)
    ledger.machines["running_entries"][0] = 1
    assert fits_with_headroom(ledger.settings, ledger.machines, 0, 30)
    assert not fits_with_headroom(ledger.settings, ledger.machines, 0, 31)


def test_use_over_time_is_integrated() -> None:
    """A report's share of KV memory in use would not be the mean over time."""
    ledger = ledger_of("unsplit")
    for blocks, now_s in ((10, 1.0), (20, 2.0), (-30, 4.5)):
        use_blocks(ledger.machines, 0, blocks, now_s)
    assert ledger.machines["kv_block_s"][0] == 10 * 1.0 + 30 * 2.5
    assert ledger.machines["used_blocks"][0] == 0


def test_slots_are_taken_once_and_given_back() -> None:
    """Two requests would share a slot, or slots would run out although requests have ended."""
    ledger = ledger_of("unsplit", slots=4)
    taken = [take_slot(ledger) for _ in range(4)]
    assert sorted(taken) == [0, 1, 2, 3]
    assert (ledger.counters["live"][0], ledger.counters["free_slot"][0]) == (4, -1)
    free_slot(ledger, taken[2])
    assert ledger.requests["row"][taken[2]] == -1
    assert take_slot(ledger) == taken[2]
    assert ledger.counters["live"][0] == 4


def drawn(seed: int, count: int) -> np.ndarray:
    settings, counters = np.zeros(1, SETTINGS), np.zeros(1, COUNTERS)
    settings["seed"] = seed
    return np.array([draw(settings, counters) for _ in range(count)])


def test_draws_follow_from_seed_and_counter() -> None:
    """A run could not be repeated, or other seeds would give the same run."""
    assert drawn(7, 50).tolist() == drawn(7, 50).tolist()
    assert drawn(7, 50).tolist() != drawn(8, 50).tolist()
    settings, counters = np.zeros(1, SETTINGS), np.zeros(1, COUNTERS)
    settings["seed"], counters["draws"] = 7, 30
    assert draw(settings, counters) == drawn(7, 31)[30]
    assert counters["draws"][0] == 31


@pytest.mark.parametrize("machines", [2, 3, 7, 40])
def test_draws_are_spread_evenly(machines: int) -> None:
    """Random placement would prefer some machines (chi-square beyond five standard deviations)."""
    numbers = drawn(3, 8_000)
    assert numbers.min() >= 0
    assert numbers.max() < 1 << 32
    counts = np.bincount(numbers % machines, minlength=machines)
    chi_square = ((counts - 8_000 / machines) ** 2 / (8_000 / machines)).sum()
    assert chi_square < machines - 1 + 5 * np.sqrt(2 * (machines - 1))


def test_draws_do_not_follow_one_another() -> None:
    """Two choices would in truth be one: successive draws are correlated."""
    shares = drawn(5, 8_000) / 2**32
    assert abs(np.corrcoef(shares[:-1], shares[1:])[0, 1]) < 0.05
