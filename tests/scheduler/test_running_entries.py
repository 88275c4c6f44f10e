"""The running batch: entries that grow, end, and are evicted when memory runs out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledgers import batch, ledger_of, listed, run_step, waiting
from phasesplit.scheduler.batching import form_chunked, form_whole
from phasesplit.scheduler.ledger import PREFILL, WAITING, Ledger
from phasesplit.scheduler.queues import growth, make_room, step_length
from phasesplit.scheduler.rules import Batching, Rules


def decoding(
    *requests: tuple[int, int], block_tokens: int = 1, capacity_blocks: int = 10_000
) -> tuple[Ledger, list[int]]:
    """Return a machine that decodes requests (prompt, output tokens), their first tokens out, and their slots."""
    rules = Rules(
        unsplit_batching=Batching.WHOLE, block_tokens=block_tokens, kv_headroom=0.0, batch_prompt_tokens=1 << 20
    )
    ledger = ledger_of("unsplit", rules=rules, capacity_blocks=capacity_blocks)
    slots = [waiting(ledger, 0, *request) for request in requests]
    form_whole(ledger, 0, 0.0)
    run_step(ledger, 0)
    form_whole(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", slot) for slot in slots]
    return ledger, slots


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 70), st.integers(2, 60)), min_size=1, max_size=6),
    block_tokens=st.sampled_from([1, 4, 16, 64]),
    iterations=st.integers(1, 100),
)
def test_growth_is_what_iterations_one_by_one_would_take(
    requests: list[tuple[int, int]], block_tokens: int, iterations: int
) -> None:
    """A step of many iterations would end with more or fewer blocks than its iterations need."""
    ledger, slots = decoding(*requests, block_tokens=block_tokens)
    contexts = [int(ledger.requests["prompt_tokens"][slot]) + 1 for slot in slots]
    blocks = sum(-(-(context + iterations) // block_tokens) - -(-context // block_tokens) for context in contexts)
    assert growth(ledger, 0, iterations) == blocks


def test_step_runs_until_the_first_lane_ends() -> None:
    """A step would run past the last token of one of its requests."""
    ledger, slots = decoding((10, 7), (10, 4), (10, 9))
    assert step_length(ledger, 0) == 3
    assert run_step(ledger, 0, 3) == [slots[1]]
    assert batch(ledger, 0) == [("decode", slots[0]), ("decode", slots[2])]
    assert ledger.machines["context_tokens"][0] == 2 * 14
    assert step_length(ledger, 0) == 3


def test_step_with_a_prompt_is_one_iteration() -> None:
    """A prompt would be computed more than once in a step."""
    ledger, _ = decoding((10, 7))
    waiting(ledger, 0, 5)
    form_whole(ledger, 0, 0.0)
    assert step_length(ledger, 0) == 1


@pytest.mark.parametrize(("capacity_blocks", "iterations"), [(27, 2), (28, 3), (29, 3), (30, 4), (100, 6)])
def test_step_ends_when_memory_is_full(capacity_blocks: int, iterations: int) -> None:
    """A step would grow beyond the machine's memory, or stop before it is full."""
    ledger, _ = decoding((10, 7), (10, 9), capacity_blocks=capacity_blocks)
    assert ledger.machines["used_blocks"][0] == 22
    assert step_length(ledger, 0) == iterations
    run_step(ledger, 0, iterations)
    assert ledger.machines["used_blocks"][0] <= capacity_blocks


def test_blocks_are_taken_as_they_fill() -> None:
    """A request would hold blocks for tokens that it does not have yet, or none for those it has."""
    ledger, _ = decoding((14, 30), block_tokens=16)
    used = [int(ledger.machines["used_blocks"][0])]
    for _ in range(3):
        run_step(ledger, 0)
        used.append(int(ledger.machines["used_blocks"][0]))
    assert used == [1, 1, 2, 2]  # 15, 16, 17, 18 tokens


def test_last_to_join_is_evicted_and_computed_again() -> None:
    """Memory that runs out would stop all requests, evict the oldest, or forget what the evicted one has emitted."""
    ledger, (first, second) = decoding((10, 20), (10, 20), capacity_blocks=25)
    run_step(ledger, 0)
    assert ledger.machines["used_blocks"][0] == 24
    make_room(ledger, 0, 0.0)
    assert batch(ledger, 0) == [("decode", first)]
    assert listed(ledger, WAITING, 0) == [second]
    request = ledger.requests[second]
    assert (request["emitted"], request["blocks"], request["phase"], request["preemptions"]) == (2, 0, PREFILL, 1)
    assert ledger.machines["used_blocks"][0] == 12
    assert ledger.machines["pending_tokens"][0] == 2 + 12
    assert ledger.counters["evictions"][0] == 1


def test_evicted_request_emits_its_remaining_tokens() -> None:
    """Recomputation would repeat or lose output tokens, or forget that they need memory."""
    ledger, (first, second) = decoding((10, 20), (10, 20), capacity_blocks=35)
    finished = []
    for _ in range(60):
        form_chunked(ledger, 0, 0.0)
        assert ledger.machines["used_blocks"][0] + growth(ledger, 0, 1) <= 35
        finished += [slot for slot in run_step(ledger, 0) if ledger.requests["row"][slot] == -1]
    assert finished == [first, second]
    assert ledger.counters["evictions"][0] >= 1
    for account in ("used_blocks", "pending_tokens", "committed_blocks", "batch_tokens", "context_tokens"):
        assert ledger.machines[account][0] == 0, account


def test_evicted_prompt_takes_its_work_along() -> None:
    """The next iteration would pay for a prompt that was evicted before it ran."""
    ledger, (first,) = decoding((10, 20), capacity_blocks=32)
    second = waiting(ledger, 0, 20)
    form_whole(ledger, 0, 0.0)  # 11 + 21 blocks fit, the token that the first adds does not
    assert batch(ledger, 0) == [("decode", first)]
    assert listed(ledger, WAITING, 0) == [second]
    assert (ledger.machines["batch_tokens"][0], ledger.machines["pair_tokens"][0]) == (1, 0.0)
    assert ledger.machines["used_blocks"][0] == 11


def test_nothing_is_evicted_while_the_next_iteration_fits() -> None:
    """A request would lose its KV although there is room."""
    ledger, _ = decoding((10, 20), (10, 20), capacity_blocks=24)
    make_room(ledger, 0, 0.0)
    assert len(batch(ledger, 0)) == 2
