"""Machine-level scheduling: which tasks form the next iteration."""

import pytest

from ledgers import batch, booked, ledger_of, listed, run_step, waiting, written
from phasesplit.scheduler.accounts import end_prefill
from phasesplit.scheduler.batching import form_chunked, form_whole
from phasesplit.scheduler.ledger import DECODE, LENGTH, PREEMPTED, QUEUE, READY, WAITING, Ledger
from phasesplit.scheduler.published import enqueue
from phasesplit.scheduler.queues import push
from phasesplit.scheduler.rules import Batching, Rules

pytestmark = pytest.mark.slow

WHOLE = Rules(unsplit_batching=Batching.WHOLE, block_tokens=1, kv_headroom=0.0)


def whole(**settings: int) -> Rules:
    return Rules(unsplit_batching=Batching.WHOLE, block_tokens=1, kv_headroom=0.0, **settings)


def chunked(**settings: int) -> Rules:
    return Rules(block_tokens=1, kv_headroom=0.0, **settings)


def running(ledger: Ledger, prompt_tokens: int, output_tokens: int) -> int:
    """Return a request whose prompt has been computed and whose decode task is in the batch of machine 0."""
    slot = waiting(ledger, 0, prompt_tokens, output_tokens)
    form_whole(ledger, 0, 0.0)
    run_step(ledger, 0)
    form_whole(ledger, 0, 0.0)
    assert ("decode", slot) in batch(ledger, 0)
    return slot


def chunks(ledger: Ledger) -> dict[int, int]:
    """Return the prompt tokens that each prefill entry computes in the next iteration."""
    return {slot: int(ledger.requests["chunk"][slot]) for phase, slot in batch(ledger, 0) if phase == "prefill"}


def test_whole_prompts_are_batched_in_order_up_to_the_token_budget() -> None:
    """Prompts would overtake one another, or a batch hold more than 2,048 prompt tokens."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    slots = [waiting(ledger, 0, tokens) for tokens in (1_000, 1_000, 49, 10)]
    assert form_whole(ledger, 0, 0.0) == 0
    assert batch(ledger, 0) == [("prefill", slots[0]), ("prefill", slots[1])]
    assert listed(ledger, WAITING, 0) == slots[2:]
    assert ledger.machines["batch_tokens"][0] == 2_000
    assert ledger.machines["used_blocks"][0] == 2_002


def test_budget_may_be_filled_to_the_last_token() -> None:
    """A batch of exactly the budget would be refused."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    slots = [waiting(ledger, 0, tokens) for tokens in (1_000, 1_048, 1)]
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("prefill", slots[0]), ("prefill", slots[1])]


def test_longer_prompt_runs_alone() -> None:
    """A prompt above the budget would never run, or share its iteration."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    slots = [waiting(ledger, 0, tokens) for tokens in (5_000, 10)]
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("prefill", slots[0])]


def test_prompts_go_before_token_tasks_which_fill_the_batch() -> None:
    """A mixed batch would preempt decode tasks that have room beside the prompt."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    first = running(ledger, 10, 5)
    second = waiting(ledger, 0, 100)
    assert form_whole(ledger, 0, 0.0) == 1
    assert batch(ledger, 0) == [("decode", first), ("prefill", second)]
    assert ledger.machines["batch_tokens"][0] == 101
    assert ledger.counters["preemptions"][0] == 0


def test_preempted_task_keeps_its_cache_and_comes_back() -> None:
    """A long prompt would drop the KV of the decode task it displaces, or the task not come back after it."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    first = running(ledger, 10, 5)
    used = int(ledger.machines["used_blocks"][0])
    second = waiting(ledger, 0, 3_000)
    form_whole(ledger, 0, 1.0)
    assert batch(ledger, 0) == [("prefill", second)]
    assert listed(ledger, PREEMPTED, 0) == [first]
    assert ledger.machines["used_blocks"][0] == used + 3_001
    assert ledger.requests["preemptions"][first] == ledger.counters["preemptions"][0] == 1
    run_step(ledger, 0)
    form_whole(ledger, 0, 2.0)
    assert batch(ledger, 0) == [("decode", first), ("decode", second)]
    assert listed(ledger, PREEMPTED, 0) == listed(ledger, READY, 0) == []


def long_prompt_alone(ledger: Ledger) -> None:
    """Let a long prompt come and go, which displaces what runs."""
    waiting(ledger, 0, 3_000, 1)
    form_whole(ledger, 0, 0.0)
    run_step(ledger, 0)
    ledger.lists[READY, 0, LENGTH] = 0  # it ends with its first token


@pytest.mark.parametrize("times", [1, 2, 3, 4])
def test_task_preempted_four_times_goes_before_everything_else(times: int) -> None:
    """A preempted request would never age, or pass the prompts too early."""
    ledger = ledger_of("unsplit", rules=WHOLE, capacity_blocks=100_000)
    slot = running(ledger, 10, 50)
    for _ in range(times):
        form_whole(ledger, 0, 0.0)
        assert batch(ledger, 0) == [("decode", slot)]
        long_prompt_alone(ledger)
    assert listed(ledger, PREEMPTED, 0) == [slot]
    assert ledger.requests["preemptions"][slot] == times
    rival = waiting(ledger, 0, 3_000)
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == ([("decode", slot)] if times >= 4 else [("prefill", rival)])


def test_batch_holds_no_more_requests_than_the_limit() -> None:
    """A batch would be larger than the engine's limit of requests."""
    ledger = ledger_of("unsplit", rules=whole(batch_requests=3))
    slots = [waiting(ledger, 0, 10) for _ in range(5)]
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("prefill", slot) for slot in slots[:3]]


def test_prompt_waits_for_memory_in_order() -> None:
    """A smaller prompt would overtake one that waits for memory (FCFS), or memory be overfilled."""
    ledger = ledger_of("unsplit", rules=WHOLE, capacity_blocks=150)
    slots = [waiting(ledger, 0, tokens) for tokens in (100, 60, 10)]
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("prefill", slots[0])]
    assert listed(ledger, WAITING, 0) == slots[1:]


def test_token_tasks_join_a_running_batch_behind_it() -> None:
    """A joining task would disturb the entries of those that run, or be taken for an old one."""
    ledger = ledger_of("unsplit", rules=WHOLE)
    first = running(ledger, 10, 5)
    second = waiting(ledger, 0, 20)
    form_whole(ledger, 0, 0.0)
    run_step(ledger, 0)
    assert form_whole(ledger, 0, 0.0) == 1
    assert batch(ledger, 0) == [("decode", first), ("decode", second)]
    assert ledger.machines["context_tokens"][0] == 12 + 21


def test_published_queue_search_does_not_sort() -> None:
    """Insertion would sort a queue that the published program leaves unsorted after counts have grown."""
    ledger = ledger_of("unsplit", rules=Rules.as_published())
    slots = [waiting(ledger, 0, 1, 2, arrival_s=float(number)) for number in range(4)]
    for slot, count in zip(slots, (0, 3, 0, 1), strict=True):
        ledger.requests["decode_count"][slot] = count
    for slot in slots[:3]:
        push(ledger.lists[QUEUE, 0], 2 * slot + 1)
    enqueue(ledger, 0, 2 * slots[3] + 1)
    assert listed(ledger, QUEUE, 0) == [slots[0], slots[3], slots[1], slots[2]]


def test_chunks_fill_what_token_tasks_leave_of_the_budget() -> None:
    """An iteration would exceed its token budget, or a decode task wait for a prompt."""
    ledger = ledger_of("unsplit", rules=chunked(batch_prompt_tokens=100))
    first = waiting(ledger, 0, 40, 10)
    form_chunked(ledger, 0, 0.0)
    run_step(ledger, 0)
    second, third = waiting(ledger, 0, 130), waiting(ledger, 0, 500)
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first), ("prefill", second)]
    assert chunks(ledger) == {second: 99}
    assert ledger.machines["batch_tokens"][0] == 100
    run_step(ledger, 0)
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first), ("prefill", second), ("prefill", third)]
    assert chunks(ledger) == {second: 31, third: 68}
    assert run_step(ledger, 0) == [second]
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first), ("prefill", third), ("decode", second)]
    assert chunks(ledger) == {third: 98}
    assert ledger.requests["computed"][third] == 68


def test_pairs_count_what_a_chunk_attends_to() -> None:
    """A later chunk would cost as much attention as the first, or the whole prompt's attention be paid twice."""
    ledger = ledger_of("unsplit", rules=chunked(batch_prompt_tokens=100))
    waiting(ledger, 0, 250)
    pairs = []
    for _ in range(3):
        form_chunked(ledger, 0, 0.0)
        pairs.append(float(ledger.machines["pair_tokens"][0]))
        run_step(ledger, 0)
    assert pairs == [5_000.0, 15_000.0, 50 * (25.0 + 200.0)]
    assert sum(pairs) == 250**2 / 2


def test_prompt_without_budget_waits() -> None:
    """A prompt would join without budget, or be lost, when decode tasks take the whole budget."""
    ledger = ledger_of("unsplit", rules=chunked(batch_prompt_tokens=2))
    slots = [waiting(ledger, 0, 1, 20) for _ in range(2)]
    form_chunked(ledger, 0, 0.0)
    run_step(ledger, 0)
    third = waiting(ledger, 0, 5)
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", slot) for slot in slots]
    assert listed(ledger, WAITING, 0) == [third]


def test_begun_prompt_without_budget_keeps_its_lane() -> None:
    """A prompt in the middle of its chunks would be dropped, or computed for nothing, when decode tasks join."""
    ledger = ledger_of("unsplit", rules=chunked(batch_prompt_tokens=2))
    first = waiting(ledger, 0, 1, 20)
    form_chunked(ledger, 0, 0.0)
    run_step(ledger, 0)
    begun = waiting(ledger, 0, 5)
    form_chunked(ledger, 0, 0.0)
    run_step(ledger, 0)
    joining = booked(ledger, written(ledger, 3, 20), 0, 0)
    end_prefill(ledger, joining)
    ledger.requests["emitted"][joining], ledger.requests["phase"][joining] = 1, DECODE
    push(ledger.lists[READY, 0], 2 * joining + DECODE)
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first), ("prefill", begun), ("decode", joining)]
    assert chunks(ledger) == {begun: 0}
    assert ledger.machines["batch_tokens"][0] == 2
    assert run_step(ledger, 0) == []
    assert ledger.requests["computed"][begun] == 1


def test_prompt_is_admitted_only_with_room_for_all_of_it() -> None:
    """A chunked prompt would be begun that memory cannot hold to its end."""
    ledger = ledger_of("unsplit", rules=chunked(batch_prompt_tokens=10), capacity_blocks=150)
    first, second = waiting(ledger, 0, 100), waiting(ledger, 0, 60)
    form_chunked(ledger, 0, 0.0)
    assert chunks(ledger) == {first: 10}
    assert ledger.machines["used_blocks"][0] == 101
    assert listed(ledger, WAITING, 0) == [second]


def test_headroom_is_kept_from_newcomers() -> None:
    """The memory into which running requests grow would be given to new ones."""
    rules = Rules(block_tokens=1, kv_headroom=0.1, batch_prompt_tokens=100)
    ledger = ledger_of("unsplit", rules=rules, capacity_blocks=200)
    first, second = waiting(ledger, 0, 99), waiting(ledger, 0, 80)
    form_chunked(ledger, 0, 0.0)
    run_step(ledger, 0)
    form_chunked(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first)]  # 100 used, 81 more fit, but not below 180
    assert listed(ledger, WAITING, 0) == [second]
