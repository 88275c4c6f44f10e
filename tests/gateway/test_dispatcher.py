"""The dispatcher: pairs, what is booked for them, and machines that come, go, move and break."""

from collections import Counter
from typing import Any

import pytest

from phasesplit.errors import GatewayError, RequestError, SpecError
from phasesplit.gateway.dispatcher import Dispatcher, Lost, Pair, TooLong
from phasesplit.gateway.estimates import Backlog, NoCapacity
from phasesplit.gateway.leases import LeaseEnd
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.registry import BreakerRule, MachineView, Move
from phasesplit.scheduler.rules import Rules


def cluster_of(*homes: str, rules: Rules | None = None, moves: list[Move] | None = None) -> Dispatcher:
    """Return a dispatcher with machines of 1,000 blocks of 16 tokens, called by home and number: prompt0, token1."""
    dispatcher = Dispatcher(
        rules or Rules(),
        Limits(lease_s=30.0),
        backlog=Backlog(most_wait_s=10.0, most_pending_tokens=20_000),
        breaker=BreakerRule(failures=2, open_s=1.0, growth=2.0),
        on_move=None if moves is None else moves.append,
        most_machines=4,
    )
    for number, home in enumerate(homes):
        dispatcher.join(f"{home}{number}", 1, home, 1_000, 0.0)
    return dispatcher


def opened(dispatcher: Dispatcher, key: str = "r.1", now_s: float = 0.0, *, prompt: int = 100, **more: Any) -> Pair:
    pair = dispatcher.open(key, prompt, 60, now_s, expected_tokens=28, **more)
    assert isinstance(pair, Pair), pair
    return pair


def blocks(dispatcher: Dispatcher) -> dict[str, int]:
    """Return each machine's leased blocks, which have to be those that the ledger has committed."""
    views = dispatcher.pools(0.0)
    assert [view.committed_blocks for view in views] == [view.leased_blocks for view in views]
    return {view.name: view.leased_blocks for view in views}


def view_of(dispatcher: Dispatcher, name: str, now_s: float = 0.0) -> MachineView:
    return next(view for view in dispatcher.pools(now_s) if view.name == name)


def test_pair_holds_blocks_on_both_sides_until_each_is_done() -> None:
    """KV would be booked on one side only, or stay booked after it has left."""
    dispatcher = cluster_of("prefill", "decode")
    pair = opened(dispatcher)
    assert (pair.prefill, pair.decode, pair.same) == ("prefill0", "decode1", False)
    assert blocks(dispatcher) == {"prefill0": 7, "decode1": 8}
    assert dispatcher.prefill_started("r.1", 0.1)
    assert dispatcher.first_token("r.1", 0.2)
    assert blocks(dispatcher) == {"prefill0": 7, "decode1": 8}
    assert dispatcher.kv_ready("r.1", 0.3)
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 8}
    assert dispatcher.ended("r.1", LeaseEnd.COMPLETED, 0.9, 28)
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 0}
    assert dispatcher.leases.ended == {LeaseEnd.COMPLETED: 2}


def test_kv_that_overtakes_the_first_token_is_remembered() -> None:
    """The prefill machine's blocks would be given back while it still computes, or never."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher)
    assert dispatcher.kv_ready("r.1", 0.1)
    assert blocks(dispatcher) == {"prefill0": 7, "decode1": 8}
    assert dispatcher.first_token("r.1", 0.2)
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 8}


def test_report_that_comes_twice_or_late_changes_nothing() -> None:
    """A crossing or repeated report would free what another request holds by now."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher)
    opened(dispatcher, "other.1")
    for told in (dispatcher.prefill_started, dispatcher.first_token, dispatcher.kv_ready):
        assert [told("r.1", 0.1), told("r.1", 0.2), told("unknown.1", 0.2)] == [True, False, False]
    assert [dispatcher.ended("r.1", reason, 0.3) for reason in (LeaseEnd.CLIENT_GONE, LeaseEnd.COMPLETED)] == [
        True,
        False,
    ]
    assert not any(
        told("r.1", 0.4) for told in (dispatcher.prefill_started, dispatcher.first_token, dispatcher.kv_ready)
    )
    assert blocks(dispatcher) == {"prefill0": 7, "decode1": 8}
    assert dispatcher.leases.late == 0


def test_one_machine_for_both_phases_holds_one_lease() -> None:
    """The only machine would book the prompt's KV twice."""
    dispatcher = cluster_of("unsplit")
    assert opened(dispatcher).same
    assert len(dispatcher.leases) == 1
    dispatcher.first_token("r.1", 0.1)
    dispatcher.kv_ready("r.1", 0.1)
    assert blocks(dispatcher) == {"unsplit0": 8}
    dispatcher.ended("r.1", LeaseEnd.COMPLETED, 0.2)
    assert blocks(dispatcher) == {"unsplit0": 0}


def test_lost_machine_costs_only_the_requests_that_need_it() -> None:
    """A request whose KV has left a dead machine would be computed again, or one that needs it wait for ever."""
    dispatcher = cluster_of("prefill", "decode")
    for number in range(3):
        opened(dispatcher, f"r{number}.1")
    for key in ("r0.1", "r1.1"):
        dispatcher.first_token(key, 0.1)
    dispatcher.kv_ready("r0.1", 0.2)
    assert dispatcher.lost("prefill0", 0.3) == (Lost("r1.1", "prefill"), Lost("r2.1", "prefill"))
    assert dispatcher.lost("prefill0", 0.3) == ()
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 8}
    assert dispatcher.lost("decode1", 0.4) == (Lost("r0.1", "decode"),)
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 0}
    assert dispatcher.leases.late == 0
    assert not dispatcher.ended("r0.1", LeaseEnd.WORKER_LOST, 0.5)


def test_restarted_machine_joins_with_a_higher_epoch_only() -> None:
    """A message of a life that is over would bring its machine back, or a restart leave requests waiting for it."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher)
    for epoch in (0, 1):
        with pytest.raises(RequestError, match=f"epoch {epoch} is not above 1") as refused:
            dispatcher.join("decode1", epoch, "decode", 1_000, 1.0)
        assert refused.value.status == 409
    assert dispatcher.join("decode1", 2, "decode", 500, 1.0) == (Lost("r.1", "decode"),)
    assert dispatcher.heartbeat("decode1", 1, ["r.1"], 1.0) == frozenset()
    assert view_of(dispatcher, "decode1").epoch == 2
    assert opened(dispatcher, "r.2", 1.1).decode_epoch == 2


def test_machine_given_up_too_early_may_come_back() -> None:
    """A machine behind a broken connection would have to be restarted to serve again."""
    dispatcher = cluster_of("prefill", "decode")
    dispatcher.lost("decode1", 1.0)
    assert dispatcher.join("decode1", 1, "decode", 1_000, 2.0) == ()
    assert view_of(dispatcher, "decode1").state == "serving"


@pytest.mark.parametrize(("home", "pool"), [("prompt", "prefill"), ("token", "decode")])
def test_machine_may_name_its_home_in_the_papers_words(home: str, pool: str) -> None:
    """A machine that was started with the paper's roles would be refused, or be in a pool of another name."""
    dispatcher = cluster_of()
    dispatcher.join("new", 1, home, 100, 0.0)
    view = view_of(dispatcher, "new")
    assert (view.home, view.pool, view.state) == (pool, pool, "serving")


@pytest.mark.parametrize(("home", "capacity_blocks"), [("prefills", 100), ("decode", 0)])
def test_machine_that_makes_no_sense_is_refused(home: str, capacity_blocks: int) -> None:
    """A wrong role or an empty memory would be found at the first request."""
    dispatcher = cluster_of("prefill")
    with pytest.raises(RequestError):
        dispatcher.join("new", 1, home, capacity_blocks, 0.0)
    assert [view.name for view in dispatcher.pools(0.0)] == ["prefill0"]


def test_places_are_bounded_and_taken_over_from_the_gone() -> None:
    """Machines with ever new names would fill the ledger, though few of them live."""
    dispatcher = cluster_of("prefill", "decode", "decode", "decode")
    with pytest.raises(RequestError, match="more than 4 machines"):
        dispatcher.join("new", 1, "decode", 1_000, 1.0)
    opened(dispatcher)
    dispatcher.first_token("r.1", 0.1)
    dispatcher.kv_ready("r.1", 0.2)
    dispatcher.lost("prefill0", 1.0)
    dispatcher.join("new", 1, "prefill", 1_000, 1.0)
    assert opened(dispatcher, "s.1", 1.1).prefill == "new"
    assert dispatcher.ended("r.1", LeaseEnd.COMPLETED, 2.0)
    assert blocks(dispatcher)["new"] == 7


def test_new_home_waits_until_the_machine_is_empty() -> None:
    """A machine would change its role under the requests it has, or never."""
    moves: list[Move] = []
    dispatcher = cluster_of("prefill", "prefill", "decode", moves=moves)
    assert opened(dispatcher).prefill == "prefill0"
    dispatcher.set_home("prefill0", "decode", 1, 0.1)
    view = view_of(dispatcher, "prefill0")
    assert (view.state, view.next_home, dispatcher.is_drained("prefill0")) == ("draining", "decode", False)
    assert opened(dispatcher, "s.1", 0.2).prefill == "prefill1"
    dispatcher.first_token("r.1", 0.3)
    dispatcher.kv_ready("r.1", 0.4)
    assert dispatcher.tick(0.5) == ()
    view = view_of(dispatcher, "prefill0")
    assert (view.state, view.home, view.pool, view.next_home) == ("serving", "decode", "decode", None)
    assert moves[-1] == Move("prefill0", 1, 4, "decode", "decode")


def test_orders_out_of_date_are_refused() -> None:
    """An order given for an earlier life of a machine would change what a person has not looked at."""
    dispatcher = cluster_of("prefill", "decode")
    dispatcher.join("decode1", 5, "decode", 1_000, 1.0)
    for name, home, epoch, status in [
        ("decode1", "mixed", 1, 409),
        ("nobody", "mixed", 1, 404),
        ("decode1", "x", 5, 400),
    ]:
        with pytest.raises(RequestError) as refused:
            dispatcher.set_home(name, home, epoch, 1.0)
        assert refused.value.status == status
    assert view_of(dispatcher, "decode1").home == "decode"


def test_draining_machine_finishes_what_it_has() -> None:
    """A machine to be stopped would lose requests, or get new ones."""
    dispatcher = cluster_of("prefill", "decode", "decode")
    first = opened(dispatcher)
    dispatcher.drain(first.decode, 0.1)
    second = opened(dispatcher, "s.1", 0.2)
    assert second.decode != first.decode
    assert not dispatcher.is_drained(first.decode)
    dispatcher.first_token("r.1", 0.3)
    dispatcher.ended("r.1", LeaseEnd.COMPLETED, 0.4)
    assert dispatcher.is_drained(first.decode)
    dispatcher.undrain(first.decode, 0.5)
    assert opened(dispatcher, "t.1", 0.6).decode == first.decode


def test_retry_avoids_the_machines_that_failed_it() -> None:
    """A request would spend its attempts on one broken machine."""
    dispatcher = cluster_of("prefill", "prefill", "decode")
    first = opened(dispatcher)
    dispatcher.ended("r.1", LeaseEnd.WORKER_LOST, 0.1)
    for attempt in range(2, 6):
        again = opened(dispatcher, f"r.{attempt}", 0.1, avoid=(first.prefill,), is_retry=True)
        assert again.prefill != first.prefill
    assert view_of(dispatcher, first.prefill).state == "serving"
    everywhere = opened(dispatcher, "r.9", 0.2, avoid=("prefill0", "prefill1", "decode2", "unknown"), is_retry=True)
    assert {everywhere.prefill, everywhere.decode} <= {"prefill0", "prefill1", "decode2"}
    opened(dispatcher, "r.10", 0.3, is_retry=True)  # the machine that failed it is gone: nobody to avoid
    assert dispatcher.counts["retried"] == 6


def test_paced_single_requests_spread() -> None:
    """Where every request finds all machines idle, all would go to one."""
    dispatcher = cluster_of("prefill", "prefill", "decode", "decode")
    used: Counter[str] = Counter()
    for number in range(20):
        pair = opened(dispatcher, f"r{number}.1", float(number))
        used.update((pair.prefill, pair.decode))
        dispatcher.ended(pair.key, LeaseEnd.COMPLETED, number + 0.5)
    assert used == dict.fromkeys(("prefill0", "prefill1", "decode2", "decode3"), 10)


def test_too_long_says_by_how_much_and_follows_the_machines() -> None:
    """A client could not tell how much shorter its prompt must be, or a small machine's limit would outlive it."""
    dispatcher = cluster_of("prefill", "decode")
    found = dispatcher.open("r.1", 15_950, 60, 0.0)
    assert isinstance(found, TooLong)
    assert "15950 prompt tokens and up to 60 output tokens" in found.reason
    assert "the 15999 tokens that the smallest machine holds" in found.reason
    assert dispatcher.most_tokens == 15_999
    opened(dispatcher, "r.2", prompt=15_939)
    dispatcher.join("small", 1, "decode", 10, 0.0)
    assert dispatcher.most_tokens == 159
    assert isinstance(dispatcher.open("r.3", 100, 60, 0.0), TooLong)
    dispatcher.lost("small", 0.1)
    opened(dispatcher, "r.4", prompt=3_000)
    assert isinstance(dispatcher.open("r.5", 1 << 40, 1 << 40, 0.0), TooLong)
    assert (dispatcher.counts["too_long"], dispatcher.live) == (3, 2)


def test_without_machines_there_is_no_capacity() -> None:
    """A request would be booked on a machine that is not there."""
    dispatcher = cluster_of()
    assert isinstance(dispatcher.open("r.1", 1, 1, 0.0), NoCapacity)
    assert (dispatcher.most_tokens, dispatcher.degraded) == (0, ("no machine serves",))
    half = cluster_of("prefill", rules=Rules(elastic=False))
    found = half.open("r.1", 1, 1, 0.0)
    assert isinstance(found, NoCapacity)
    assert "no decode machine serves" in found.reason
    half.join("decode1", 1, "decode", 1_000, 0.0)
    opened(half)


def test_backlog_turns_away_before_prompts_wait_too_long() -> None:
    """Clients would wait in a queue that nobody can serve within their patience."""
    dispatcher = cluster_of("prefill", "decode", rules=Rules(elastic=False))
    for number in range(3):
        opened(dispatcher, f"r{number}.1", prompt=6_000)
    by_tokens = dispatcher.open("s.1", 6_000, 60, 0.0)
    assert isinstance(by_tokens, NoCapacity)
    assert by_tokens == NoCapacity(
        "18000 prompt tokens are pending, with this one's 6000 there may be 20000", by_tokens.retry_after_s
    )
    assert dispatcher.wait_s() is None
    dispatcher.first_token("r0.1", 6.0)
    dispatcher.tick(6.0)
    assert dispatcher.wait_s() == pytest.approx(12.0)
    by_time = dispatcher.open("s.1", 1, 60, 6.0)
    assert isinstance(by_time, NoCapacity)
    assert by_time.reason == "prompts wait 12.0 s, allowed is 10 s"
    assert by_time.retry_after_s == pytest.approx(2.0)
    dispatcher.first_token("r1.1", 12.0)
    opened(dispatcher, "s.1", 12.0, prompt=1)
    assert dispatcher.counts["no_capacity"] == 2


def test_single_long_prompt_is_let_through() -> None:
    """A prompt above the bound on the backlog could never be served, though the cluster idles."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher, prompt=15_900)
    dispatcher.ended("r.1", LeaseEnd.COMPLETED, 1.0)
    assert dispatcher.pending_prompt_tokens == 0


def test_static_pools_do_not_spill() -> None:
    """An overloaded prefill pool would wreck the decode machines' time between tokens though elasticity is off."""
    moves: list[Move] = []
    dispatcher = cluster_of("prefill", "decode", rules=Rules(elastic=False, spill_tokens=0), moves=moves)
    for number in range(100):
        assert opened(dispatcher, f"r{number}.1", prompt=100).prefill == "prefill0"
    assert isinstance(dispatcher.open("s.1", 15_000, 60, 0.0), NoCapacity)
    assert len(moves) == 2


def test_machine_that_helps_out_learns_its_pool_and_its_way_home() -> None:
    """A worker would not know its role, or stay in it when the load has gone."""
    moves: list[Move] = []
    dispatcher = cluster_of("prefill", "decode", rules=Rules(spill_tokens=150), moves=moves)
    opened(dispatcher, "r0.1")
    assert opened(dispatcher, "r1.1").prefill == "decode1"
    assert moves[-1] == Move("decode1", 1, 3, "mixed", "decode")
    assert view_of(dispatcher, "decode1").pool == "mixed"
    dispatcher.first_token("r1.1", 0.5)
    assert moves[-1] == Move("decode1", 1, 4, "decode", "decode")
    assert dispatcher.moves() == {"prefill_to_mixed": 0, "decode_to_mixed": 1, "returns": 1, "repurposed": 0}


def test_machine_long_in_the_mixed_pool_changes_its_home() -> None:
    """A decode machine that does prompts all the time would keep counting as one that is away."""
    moves: list[Move] = []
    rules = Rules(spill_tokens=150, repurpose_after_s=10.0)
    dispatcher = cluster_of("prefill", "decode", "decode", rules=rules, moves=moves)
    opened(dispatcher, "r0.1")
    helping = opened(dispatcher, "r1.1").prefill
    assert dispatcher.tick(9.9) == ()
    assert view_of(dispatcher, helping).home == "decode"
    dispatcher.tick(10.0)
    assert (moves[-1].name, moves[-1].pool, moves[-1].home) == (helping, "prefill", "prefill")
    assert view_of(dispatcher, helping).home == "prefill"
    assert dispatcher.moves()["repurposed"] == 1


def test_degraded_cluster_says_so_and_counts() -> None:
    """All prompts would run on the decode machines and nobody know."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher, "r0.1")
    assert (dispatcher.degraded, dispatcher.counts["degraded"]) == ((), 0)
    dispatcher.lost("prefill0", 1.0)
    assert dispatcher.degraded == ("no prefill machine serves: others do its work",)
    assert opened(dispatcher, "r1.1", 1.0).same
    assert dispatcher.counts["degraded"] == 1
    assert cluster_of("unsplit").degraded == cluster_of("mixed").degraded == ()


def test_failing_machine_is_left_alone_then_tried_once() -> None:
    """One broken machine would be picked again and again, or get all requests at once when it is tried."""
    dispatcher = cluster_of("prefill", "prefill", "decode")
    dispatcher.failed("prefill0", 0.0)
    assert view_of(dispatcher, "prefill0").state == "serving"
    dispatcher.failed("prefill0", 0.0)
    assert view_of(dispatcher, "prefill0").state == "broken"
    assert {opened(dispatcher, f"r{n}.1", 0.1).prefill for n in range(4)} == {"prefill1"}
    dispatcher.tick(0.9)
    assert view_of(dispatcher, "prefill0", 0.9).state == "broken"
    dispatcher.tick(1.0)
    assert view_of(dispatcher, "prefill0", 1.0).state == "probing"
    pairs = [opened(dispatcher, f"s{n}.1", 1.1) for n in range(4)]
    assert [pair.prefill for pair in pairs].count("prefill0") == 1
    probe = next(pair.key for pair in pairs if pair.prefill == "prefill0")
    dispatcher.failed("prefill0", 1.2)
    dispatcher.ended(probe, LeaseEnd.WORKER_LOST, 1.2)
    dispatcher.tick(3.1)
    assert view_of(dispatcher, "prefill0", 3.1).state == "broken"
    dispatcher.tick(3.2)
    assert view_of(dispatcher, "prefill0", 3.2).state == "probing"
    assert opened(dispatcher, "t0.1", 3.3).prefill == "prefill0"
    dispatcher.ended("t0.1", LeaseEnd.CLIENT_GONE, 3.4)
    assert opened(dispatcher, "t1.1", 3.5).prefill == "prefill0"
    assert opened(dispatcher, "t2.1", 3.5).prefill == "prefill1"
    dispatcher.first_token("t1.1", 3.6)
    assert view_of(dispatcher, "prefill0", 3.6)[4:5] == ("serving",)
    assert view_of(dispatcher, "prefill0", 3.6).failures == 0


def test_broken_cluster_says_when_to_come_back() -> None:
    """Clients would be asked to come back before any machine can be tried, or never be let in again."""
    dispatcher = cluster_of("unsplit")
    for _ in range(2):
        dispatcher.failed("unsplit0", 0.0)
    for _ in range(2):
        dispatcher.failed("unsplit0", 1.5)  # the second one says nothing new
    found = dispatcher.open("r.1", 10, 10, 1.6)
    assert isinstance(found, NoCapacity)
    assert found.retry_after_s == pytest.approx(1.9)
    assert opened(dispatcher, "r.2", 3.5).decode == "unsplit0"


def test_heartbeats_keep_leases_and_find_strangers() -> None:
    """A request in a long queue would lose its blocks, or a machine keep KV for ever that nobody owns."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher)
    assert dispatcher.heartbeat("prefill0", 1, ["r.1", "gone.1"], 20.0) == frozenset()
    assert dispatcher.heartbeat("prefill0", 1, ["r.1", "gone.1", "new.1"], 21.0) == {"gone.1"}
    assert dispatcher.heartbeat("decode1", 1, ["r.1"], 20.0) == frozenset()
    assert view_of(dispatcher, "prefill0").heartbeat_s == 21.0
    assert dispatcher.tick(49.0) == ()
    assert dispatcher.tick(50.0) == (Lost("r.1", "decode"),)
    assert blocks(dispatcher) == {"prefill0": 0, "decode1": 0}
    assert (dispatcher.leases.ended, dispatcher.leases.late) == ({LeaseEnd.EXPIRED: 2}, 0)
    assert dispatcher.heartbeat("nobody", 1, ["r.1"], 50.0) == frozenset()


def test_both_leases_of_a_request_may_expire_together() -> None:
    """The second would be released twice, or the request reported twice."""
    dispatcher = cluster_of("prefill", "decode")
    opened(dispatcher)
    assert dispatcher.tick(30.0) == (Lost("r.1", "prefill"),)
    assert (len(dispatcher.leases), dispatcher.leases.late, dispatcher.live) == (0, 0, 0)


def test_expected_length_follows_finished_outputs() -> None:
    """Rules would count on outputs of a length that no request has."""
    dispatcher = cluster_of("unsplit")
    sizes = []
    for number in range(200):
        key = f"r{number}.1"
        assert isinstance(dispatcher.open(key, 16, 4_000, float(number)), Pair)
        sizes.append(dispatcher.leases.blocks())
        dispatcher.ended(key, LeaseEnd.COMPLETED, number + 0.5, 16)
    assert sizes[0] == 1 + 128 // 16
    assert sizes[-1] == 1 + 2
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("prompt_tokens", "most_output_tokens"), [(0, 1), (1, 0), (-1, 1)])
def test_request_of_nothing_is_refused(prompt_tokens: int, most_output_tokens: int) -> None:
    """A request without tokens would be booked as one with a negative load."""
    with pytest.raises(GatewayError):
        cluster_of("unsplit").open("r.1", prompt_tokens, most_output_tokens, 0.0)


def test_key_in_use_is_refused() -> None:
    """Two attempts would share one entry, and the end of one free the blocks of the other."""
    dispatcher = cluster_of("unsplit")
    opened(dispatcher)
    with pytest.raises(GatewayError, match=r"r\.1"):
        opened(dispatcher)


def test_rules_of_no_live_cluster_are_refused() -> None:
    """The published simulator's queues, which a gateway does not see, would be taken for empty."""
    with pytest.raises(SpecError, match="published"):
        Dispatcher(Rules.as_published())


def test_facts_are_those_of_the_last_life() -> None:
    """A restarted machine would be reached at its old address."""
    dispatcher = cluster_of("prefill")
    dispatcher.join("w", 1, "decode", 10, 0.0, {"url": "a"})
    dispatcher.join("w", 2, "decode", 10, 1.0, {"url": "b"})
    assert (dispatcher.facts("w"), dispatcher.facts("nobody")) == ({"url": "b"}, {})
