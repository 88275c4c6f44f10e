"""What must hold in every run, between any two events: random small clusters, traces and rules."""

from dataclasses import replace

from hypothesis import given, settings

from doubles import tiny_cluster, tiny_trace
from driving import done_rows, drive
from invariants import check_records, check_state
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.run import check_drained
from phasesplit.simulator.world import COMPLETED
from strategies import Case, cases, published_cases


def checked_run(case: Case, *, trees: bool = False) -> None:
    """Run a case event by event and check everything; nothing may be left in the end."""
    state = drive(case.cluster, case.rules, case.trace, budget=1, after=check_state, trees=trees)
    assert state.ledger.counters["live"][0] == 0
    check_drained(state.ledger)
    done = done_rows(state)
    check_records(done, len(case.trace))
    completed = done[done["status"] == COMPLETED]
    assert state.world.gaps.sum() == (completed["output_tokens"] - 1).sum()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_accounts_agree_with_what_is_there_between_any_two_events(case: Case) -> None:
    """Memory would be overfilled or leak, a task be lost or doubled, a request end twice or never, time go back."""
    checked_run(case)


@settings(max_examples=30, deadline=None)
@given(cases())
def test_tournament_trees_change_nothing(case: Case) -> None:
    """A large cluster, which looks machines up in trees, would follow other rules than a small one."""
    checked_run(case, trees=True)
    plain, treed = (drive(case.cluster, case.rules, case.trace, trees=trees) for trees in (False, True))
    assert done_rows(plain).tobytes() == done_rows(treed).tobytes()


@settings(max_examples=60, deadline=None)
@given(published_cases())
def test_published_rules_keep_their_accounts(case: Case) -> None:
    """Under the published rules memory would be overfilled, a task be lost, or a request end twice."""
    state = drive(case.cluster, case.rules, case.trace, budget=1, after=check_state)
    left = int(state.ledger.counters["live"][0])
    done = done_rows(state)
    assert done["row"].size + left == len(case.trace)
    assert len(set(done["row"].tolist())) == done["row"].size
    if not left:
        check_drained(state.ledger)
        check_records(done, len(case.trace))


def test_the_cases_reach_what_they_are_meant_to_reach() -> None:
    """The random cases would be so easy that no invariant is ever at risk."""
    rows = [(0.02 * number, 30 + 37 * number % 250, 1 + 11 * number % 50) for number in range(80)]
    rules = Rules(block_tokens=4, kv_headroom=0.0, spill_tokens=200, batch_prompt_tokens=100, repurpose_after_s=0.5)
    cluster = tiny_cluster(("prefill", 2), ("decode", 2), capacity_tokens=480)
    state = drive(cluster, rules, tiny_trace(*rows), budget=1, after=check_state)
    reached = {name: int(state.ledger.counters[name][0]) for name in state.ledger.counters.dtype.names or ()}
    for name in (
        "preemptions",
        "evictions",
        "prefill_to_mixed",
        "decode_to_mixed",
        "returns",
        "repurposed",
        "one_machine",
    ):
        assert reached[name] > 0, name


@settings(max_examples=60, deadline=None)
@given(cases())
def test_static_pools_never_change_and_serve_everything(case: Case) -> None:
    """With static pools a machine would leave its pool, or a request wait for ever for a machine that may not come."""
    case = replace(case, rules=replace(case.rules, elastic=False))
    state = drive(case.cluster, case.rules, case.trace)
    assert state.ledger.counters["live"][0] == 0
    machines = state.ledger.machines
    assert machines["pool"].tolist() == machines["home"].tolist()
    for moves in ("prefill_to_mixed", "decode_to_mixed", "returns", "repurposed"):
        assert state.ledger.counters[moves][0] == 0
