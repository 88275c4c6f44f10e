"""Cluster-level scheduling: which machines a request gets."""

from collections import Counter

import numpy as np
import pytest

from invariants import check_loads, check_pools, pool_machines
from ledgers import booked, ledger_of, placed, waiting, written
from phasesplit.scheduler.accounts import touched
from phasesplit.scheduler.ledger import DECODE, MIXED, PREFILL, Ledger
from phasesplit.scheduler.placement import PLACED, TOO_LONG, UNDECIDED, place
from phasesplit.scheduler.rules import Placement, Rules

UNSPLIT_4 = ("unsplit",) * 4


def with_load(ledger: Ledger, machine: int, **accounts: int) -> None:
    """Set accounts of a machine and let the pools know."""
    for account, value in accounts.items():
        ledger.machines[account][machine] = value
    touched(ledger, machine)


def test_round_robin_takes_turns_in_pool_order() -> None:
    """Round robin would skip a machine, or take the turns of the two phases from each other."""
    rules = Rules(prefill_placement=Placement.ROUND_ROBIN, decode_placement=Placement.ROUND_ROBIN)
    ledger = ledger_of("prefill", "prefill", "prefill", "decode", "decode", rules=rules)
    assert [placed(ledger, 10) for _ in range(6)] == [(0, 3), (1, 4), (2, 3), (0, 4), (1, 3), (2, 4)]


def test_random_placement_reaches_every_machine_alike() -> None:
    """Random placement would leave machines out (counts beyond five standard deviations)."""
    ledger = ledger_of(*UNSPLIT_4, rules=Rules(prefill_placement=Placement.RANDOM), slots=2_048)
    counts = Counter(placed(ledger, 10)[0] for _ in range(2_000))
    assert set(counts) == {0, 1, 2, 3}
    assert max(abs(count - 500) for count in counts.values()) < 5 * np.sqrt(2_000 * 0.25 * 0.75)


def fullest(rule: Placement) -> int:
    ledger = ledger_of(*("unsplit",) * 50, rules=Rules(prefill_placement=rule), slots=1_024)
    return max(Counter(placed(ledger, 10)[0] for _ in range(1_000)).values())


def test_two_choices_balance_better_than_one() -> None:
    """The two machines would not be compared, or the fuller one taken."""
    assert fullest(Placement.JSQ_TOKENS) == 20
    assert fullest(Placement.TWO_CHOICES) <= 24
    assert fullest(Placement.RANDOM) >= 28


@pytest.mark.parametrize(
    ("rule", "chosen"), [(Placement.JSQ_REQUESTS, 0), (Placement.JSQ_TOKENS, 1), (Placement.JSQ_KV, 2)]
)
def test_shortest_queue_is_by_the_load_of_the_rule(rule: Placement, chosen: int) -> None:
    """A rule would compare another load than it is named for."""
    ledger = ledger_of("unsplit", "unsplit", "unsplit", rules=Rules(prefill_placement=rule))
    with_load(ledger, 0, prefill_requests=1, pending_tokens=900, committed_blocks=900)
    with_load(ledger, 1, prefill_requests=5, pending_tokens=100, committed_blocks=900)
    with_load(ledger, 2, prefill_requests=5, pending_tokens=900, committed_blocks=100)
    assert placed(ledger, 10) == (chosen, chosen)


@pytest.mark.parametrize(
    ("rule", "chosen"), [(Placement.JSQ_REQUESTS, 1), (Placement.JSQ_TOKENS, 2), (Placement.JSQ_KV, 3)]
)
def test_token_side_has_its_own_rule_and_load(rule: Placement, chosen: int) -> None:
    """The decode phase would follow the prefill side's rule, or its tokens be those of prompts."""
    ledger = ledger_of("prefill", "decode", "decode", "decode", rules=Rules(decode_placement=rule))
    with_load(ledger, 1, decode_requests=1, pending_output_tokens=900, committed_blocks=900)
    with_load(ledger, 2, decode_requests=5, pending_output_tokens=100, committed_blocks=900)
    with_load(ledger, 3, decode_requests=5, pending_output_tokens=900, committed_blocks=100)
    assert placed(ledger, 10) == (0, chosen)


def test_idle_machines_share_paced_requests() -> None:
    """One of several idle machines would get every request that comes while all are idle."""
    ledger = ledger_of(*UNSPLIT_4, slots=1_024)
    counts: Counter[int] = Counter()
    for _ in range(400):
        machine = placed(ledger, 10)[0]
        counts[machine] += 1
        with_load(ledger, machine, pending_tokens=0, committed_blocks=0, prefill_requests=0, decode_requests=0)
    assert min(counts[machine] for machine in range(4)) > 60


def test_published_ties_go_to_the_first_in_the_pool() -> None:
    """The published rules would break ties otherwise than by the order of the list."""
    ledger = ledger_of("prefill", "prefill", "decode", "decode", rules=Rules.as_published())
    assert placed(ledger, 10) == (0, 2)
    assert placed(ledger, 10) == (1, 3)


def busy_prefill(ledger: Ledger, machine: int, tokens: int = 8_000) -> None:
    """Give a machine a queue of so many tokens."""
    waiting(ledger, machine, tokens)


def test_full_prompt_queue_spills_to_the_mixed_pool() -> None:
    """A prompt would wait behind a full queue although a mixed machine is there."""
    ledger = ledger_of("prefill", "decode", "mixed")
    busy_prefill(ledger, 0)
    assert placed(ledger, 300) == (2, 1)
    assert ledger.counters["decode_to_mixed"][0] == 0


@pytest.mark.parametrize(("prompt_tokens", "chosen"), [(192, 0), (193, 1)])
def test_full_prompt_queue_spills_to_a_token_machine(prompt_tokens: int, chosen: int) -> None:
    """The limit of the queue (8,192 tokens with the new prompt) would be another, or the decode machine not move."""
    ledger = ledger_of("prefill", "decode", "decode")
    booked(ledger, slot := written(ledger, 8_000), 0, 2)
    ledger.lists[0, 0, 1] = 1
    ledger.lists[0, 0, 2] = 2 * slot
    assert placed(ledger, prompt_tokens)[0] == chosen
    assert pool_machines(ledger, MIXED) == ([1] if chosen else [])
    assert ledger.counters["decode_to_mixed"][0] == chosen
    check_pools(ledger)
    check_loads(ledger)


def test_prompt_machine_without_a_queue_takes_any_prompt() -> None:
    """A long prompt would be sent to the other pool although a prefill machine is about to be free."""
    ledger = ledger_of("prefill", "decode")
    with_load(ledger, 0, pending_tokens=8_000)
    assert placed(ledger, 5_000) == (0, 1)


@pytest.mark.parametrize(("committed", "chosen"), [(990, 1), (991, 0)])
def test_full_token_memory_spills_to_a_prompt_machine(committed: int, chosen: int) -> None:
    """Committed KV above a decode machine's memory would not send the decode phase elsewhere, or do so too early."""
    ledger = ledger_of("prefill", "decode", rules=Rules(block_tokens=1), capacity_blocks=1_100)
    with_load(ledger, 1, committed_blocks=committed)
    assert placed(ledger, 100, 10) == (0, chosen)
    assert pool_machines(ledger, MIXED) == ([] if chosen else [0])
    assert ledger.counters["prefill_to_mixed"][0] == 1 - chosen


def test_mixed_machine_takes_token_phases_before_a_prompt_machine_moves() -> None:
    """A prefill machine would leave its pool although a mixed machine has room."""
    ledger = ledger_of("prefill", "decode", "mixed", rules=Rules(block_tokens=1), capacity_blocks=1_100)
    with_load(ledger, 1, committed_blocks=1_100)
    assert placed(ledger, 100, 10) == (0, 2)


def test_least_loaded_of_all_takes_both_when_nothing_else_is_left() -> None:
    """With every queue and memory full a request would get no machine, or not the least loaded one."""
    ledger = ledger_of("mixed", "mixed", "mixed", rules=Rules(spill_tokens=0))
    for machine, tokens in enumerate((500, 300, 400)):
        busy_prefill(ledger, machine, tokens)
    assert placed(ledger, 10) == (1, 1)


STATIC = Rules(elastic=False, block_tokens=1)


def test_static_pools_queue_prompts_where_there_is_least_to_do() -> None:
    """A machine would change its pool although pools are static, or a prompt queue at the fuller machine."""
    ledger = ledger_of("prefill", "prefill", "decode", "mixed", rules=STATIC)
    for machine, tokens in ((0, 8_500), (1, 8_400), (3, 9_000)):
        busy_prefill(ledger, machine, tokens)
    assert placed(ledger, 300) == (1, 2)
    assert [pool_machines(ledger, pool) for pool in (PREFILL, DECODE, MIXED)] == [[0, 1], [2], [3]]


def test_static_pools_use_the_mixed_pool_first() -> None:
    """A dedicated mixed machine would be idle while the other two pools have queues."""
    ledger = ledger_of("prefill", "decode", "mixed", rules=STATIC, capacity_blocks=10_000)
    busy_prefill(ledger, 0)
    with_load(ledger, 1, committed_blocks=9_990)
    assert placed(ledger, 300) == (2, 2)


def test_static_pools_queue_tokens_where_least_is_committed() -> None:
    """A decode phase would go to a machine of the prefill pool, or not to the least loaded one of the others."""
    ledger = ledger_of("prefill", "decode", "decode", "mixed", rules=STATIC, capacity_blocks=1_100)
    for machine, committed in ((1, 1_099), (2, 1_098), (3, 1_098)):
        with_load(ledger, machine, committed_blocks=committed)
    assert placed(ledger, 100, 10) == (0, 2)
    assert ledger.counters["prefill_to_mixed"][0] == 0


def test_unsplit_machine_takes_what_comes() -> None:
    """A request would be refused by an unsplit machine with a long queue, where there is nowhere to spill to."""
    ledger = ledger_of("unsplit")
    busy_prefill(ledger, 0, 9_000)
    assert placed(ledger, 9_000) == (0, 0)


@pytest.mark.parametrize(("prompt_tokens", "verdict"), [(89, PLACED), (90, TOO_LONG)])
def test_request_longer_than_a_machine_is_refused(prompt_tokens: int, verdict: int) -> None:
    """A request would be accepted that no machine can finish, or one be refused that just fits."""
    ledger = ledger_of("prefill", "decode", rules=Rules(block_tokens=1), capacity_blocks=100)
    slot = written(ledger, prompt_tokens, 10)
    assert place(ledger, slot, 0.0) == verdict
    assert ledger.machines["pending_tokens"].sum() == 0


def test_custom_rule_is_asked_and_then_obeyed() -> None:
    """A custom rule's choice would be ignored, or used for the next request too."""
    ledger = ledger_of("prefill", "decode", "decode", rules=Rules(prefill_placement=Placement.CUSTOM))
    slot = written(ledger, 10)
    assert place(ledger, slot, 0.0) == UNDECIDED
    ledger.counters["chosen_prefill"], ledger.counters["chosen_decode"] = 2, 1
    assert place(ledger, slot, 0.0) == PLACED
    assert (ledger.requests["prefill_machine"][slot], ledger.requests["decode_machine"][slot]) == (2, 1)
    assert place(ledger, written(ledger, 10), 0.0) == UNDECIDED


def test_moving_machines_stay_in_one_pool_under_load() -> None:
    """A machine would be lost, or stand in two pools, when many requests spill over."""
    ledger = ledger_of("prefill", "prefill", "decode", "decode", "decode", slots=512, capacity_blocks=500)
    for number in range(300):
        slot = written(ledger, 900, 50)
        assert place(ledger, slot, float(number)) == PLACED
        machines = int(ledger.requests["prefill_machine"][slot]), int(ledger.requests["decode_machine"][slot])
        booked(ledger, slot, *machines)
        ledger.lists[0, machines[0], 1] += 1
        check_pools(ledger)
        check_loads(ledger)
    moves = ledger.counters["prefill_to_mixed"][0] + ledger.counters["decode_to_mixed"][0]
    assert moves == 5
    assert len(pool_machines(ledger, PREFILL) + pool_machines(ledger, DECODE)) == 0
