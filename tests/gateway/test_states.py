"""The table of request states: complete, as drawn, and safe under any order of events."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from phasesplit.gateway import request_states
from phasesplit.gateway.leases import KvLease, LeaseEnd, Leases, Purpose
from phasesplit.gateway.request_states import (
    ENDS,
    HOLDS_DECODE,
    HOLDS_PREFILL,
    TABLE,
    Action,
    Event,
    RequestProgress,
    RequestState,
    When,
    release_reason,
    step,
)

MOST_ATTEMPTS = 3
LIVE = [state for state in RequestState if state not in ENDS]
ANSWERS = {
    Action.FINISH,
    Action.END_WITH_ERROR,
    Action.ANSWER_4XX,
    Action.ANSWER_502,
    Action.ANSWER_503,
}
TO = {
    RequestState.QUEUED: [],
    RequestState.PREFILLING: [Event.ASSIGNED],
    RequestState.TRANSFERRING: [Event.ASSIGNED, Event.FIRST_TOKEN],
    RequestState.WAITING: [Event.ASSIGNED, Event.FIRST_TOKEN, Event.KV_READY],
    RequestState.DECODING: [Event.ASSIGNED, Event.FIRST_TOKEN, Event.KV_READY, Event.TOKEN],
}
"""The shortest way into each live state."""


class Driver:
    """The smallest driver of the table: it keeps the leases, and writes down how the client was answered."""

    def __init__(self, *, can_resume: bool = False) -> None:
        self.can_resume = can_resume
        self.progress = RequestProgress()
        self.leases = Leases()
        self.held: dict[Purpose, KvLease] = {}
        self.made = 0
        self.seen: list[Action] = []

    def tell(self, event: Event, attempt: int | None = None) -> tuple[Action, ...]:
        """Take one event, and carry out what the table says."""
        before = self.progress
        self.progress, actions = step(
            before, event, most_attempts=MOST_ATTEMPTS, attempt=attempt, can_resume=lambda: self.can_resume
        )
        for action in actions:
            self._carry_out(action, before.state, event)
        return actions

    def _carry_out(self, action: Action, state: RequestState, event: Event) -> None:
        kind, _, side = action.partition("_")
        if kind == "reserve":
            assert Purpose(side) not in self.held
            self.held[Purpose(side)] = self.leases.reserve("m", "r", 2, Purpose(side), now_s=0.0, deadline_s=1.0)
            self.made += 1
        elif kind == "release":
            assert self.leases.release(self.held.pop(Purpose(side)).number, release_reason(state, event)) is not None
        elif action in ANSWERS:
            self.seen.append(action)


def drive(*events: Event, can_resume: bool = False) -> Driver:
    driver = Driver(can_resume=can_resume)
    for event in events:
        driver.tell(event)
    return driver


def test_every_event_has_an_entry_in_every_state() -> None:
    """An event would meet a state that has no answer to it, or a row would hide those after it."""
    assert set(TABLE) == {(state, event) for state in RequestState for event in Event}
    for rows in TABLE.values():
        assert [row.when is When.ALWAYS for row in rows] == [False] * (len(rows) - 1) + [True]


def test_table_is_as_drawn() -> None:
    """The drawing that people read would differ from the table that runs."""
    _, drawing, _ = (request_states.__doc__ or "").split("```")
    head, *lines = [line.split() for line in drawing.strip().splitlines()]
    drawn = {(line[0], state): cell for line in lines for state, cell in zip(head[1:], line[1:], strict=True)}
    assert head[1:] == [str(state) for state in LIVE]
    absorbed = (Action.ABSORB,)
    lost = "queued/failed/queued/failed"
    assert {entry: lost if cell == "LOST" else cell for entry, cell in drawn.items()} == {
        (str(event), str(state)): "/".join(
            "." if row.actions == absorbed else str(row.state) for row in TABLE[state, event]
        )
        for event in Event
        for state in LIVE
    }


@pytest.mark.parametrize("state", sorted(ENDS))
def test_nothing_leaves_an_end(state: RequestState) -> None:
    """A late event would revive a request, or answer its client twice."""
    for event in Event:
        after = step(RequestProgress(state, 1), event, most_attempts=MOST_ATTEMPTS)
        assert after == (RequestProgress(state, 1), (Action.ABSORB,))


@pytest.mark.parametrize(("side", "holders"), [("prefill", HOLDS_PREFILL), ("decode", HOLDS_DECODE)])
def test_rows_release_what_the_next_state_does_not_hold(side: str, holders: frozenset[RequestState]) -> None:
    """KV would be left behind, or released twice, on some way through the table."""
    for (state, event), rows in TABLE.items():
        for row in rows:
            change = row.actions.count(Action(f"reserve_{side}")) - row.actions.count(Action(f"release_{side}"))
            assert change == (row.state in holders) - (state in holders), (state, event, row)


def test_calls_off_before_it_releases() -> None:
    """A machine would learn that blocks are free before it learns to stop writing them."""
    for rows in TABLE.values():
        for row in rows:
            kinds = [action.partition("_")[0] for action in row.actions]
            last_cancel = max((i for i, kind in enumerate(kinds) if kind == "cancel"), default=-1)
            assert last_cancel < min((i for i, kind in enumerate(kinds) if kind == "release"), default=len(kinds))


def test_normal_way_releases_as_completed() -> None:
    """A request that ends well would give its KV back for another reason, or late."""
    driver = drive(Event.ASSIGNED, Event.PREFILL_STARTED, Event.FIRST_TOKEN, Event.CONTENT_SENT)
    assert driver.leases.blocks() == 4
    driver.tell(Event.KV_READY)
    assert driver.leases.blocks() == 2
    driver.tell(Event.TOKEN)
    driver.tell(Event.LAST_TOKEN)
    assert (driver.progress.state, driver.seen) == (RequestState.DONE, [Action.FINISH])
    assert (driver.leases.ended, driver.leases.blocks()) == (Counter({LeaseEnd.COMPLETED: 2}), 0)


def test_one_token_needs_no_decode_machine() -> None:
    """A request for one token would leave the decode machine waiting for KV."""
    driver = drive(Event.ASSIGNED)
    actions = driver.tell(Event.LAST_TOKEN)
    assert Action.CANCEL_DECODE in actions
    assert actions[-2:] == (Action.EMIT, Action.FINISH)
    assert (driver.progress.state, driver.leases.blocks()) == (RequestState.DONE, 0)


@pytest.mark.parametrize("state", LIVE)
def test_client_that_gives_up_leaves_nothing(state: RequestState) -> None:
    """An abort in some state would leave KV that nobody owns, or write to a client that has gone."""
    driver = drive(*TO[state])
    assert driver.progress.state is state
    driver.tell(Event.CLIENT_GONE)
    assert (driver.progress.state, driver.seen, driver.leases.blocks()) == (RequestState.FAILED, [], 0)


LOSSES = [
    (state, event)
    for state in LIVE[1:]
    for event in (Event.WORKER_REFUSED, Event.PREFILL_LOST, Event.DECODE_LOST, Event.TRANSFER_FAILED)
    if not (event is Event.PREFILL_LOST and state in (RequestState.WAITING, RequestState.DECODING))
]


@pytest.mark.parametrize(("state", "event"), LOSSES)
def test_loss_before_content_is_a_pause(state: RequestState, event: Event) -> None:
    """A machine lost before any content would cost the client an error while attempts are left, or retries no end."""
    driver = Driver()
    for attempt in range(1, MOST_ATTEMPTS + 1):
        for way in TO[state]:
            driver.tell(way)
        assert driver.progress.attempts == attempt
        actions = driver.tell(event, attempt)
        assert driver.leases.blocks() == 0
        if attempt < MOST_ATTEMPTS:
            assert (driver.progress.state, driver.seen, actions[-1]) == (RequestState.QUEUED, [], Action.REASSIGN)
    assert (driver.progress.state, driver.seen) == (RequestState.FAILED, [Action.ANSWER_502])


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, e in LOSSES if s is not RequestState.PREFILLING])
@pytest.mark.parametrize("content", [(Event.CONTENT_SENT,), ()], ids=["content", "no content"])
def test_loss_is_a_pause_where_others_can_go_on(state: RequestState, event: Event, content: tuple[Event, ...]) -> None:
    """An answer would break off though other machines could go on, start again and repeat text, or be tried no end."""
    driver = drive(*TO[state], *content, can_resume=True)
    for attempt in range(1, MOST_ATTEMPTS + 1):
        assert driver.progress.attempts == attempt
        actions = driver.tell(event, attempt)
        assert driver.leases.blocks() == 0
        if attempt < MOST_ATTEMPTS:
            assert (driver.progress.state, driver.seen, actions[-1]) == (RequestState.QUEUED, [], Action.CONTINUE)
            for way in TO[state]:
                driver.tell(way)
    answer = Action.END_WITH_ERROR if content else Action.ANSWER_502
    assert (driver.progress.state, driver.seen) == (RequestState.FAILED, [answer])


@pytest.mark.parametrize("event", [Event.DEADLINE, Event.CANCELLED, Event.NO_CAPACITY, Event.INPUT_REFUSED])
def test_a_begun_stream_that_finds_no_machine_ends_with_an_error_event(event: Event) -> None:
    """A status would be written into the middle of a stream."""
    driver = drive(Event.ASSIGNED, Event.FIRST_TOKEN, Event.CONTENT_SENT, Event.DECODE_LOST, event, can_resume=True)
    assert (driver.progress.state, driver.seen) == (RequestState.FAILED, [Action.END_WITH_ERROR])


@pytest.mark.parametrize(("state", "event"), [(s, e) for s, e in LOSSES if s is not RequestState.PREFILLING])
def test_loss_after_content_ends_with_an_error_where_none_can_go_on(state: RequestState, event: Event) -> None:
    """A stream that has begun would start again and repeat text, or end as if all were well."""
    driver = drive(*TO[state], Event.CONTENT_SENT)
    driver.tell(event)
    assert (driver.progress.state, driver.seen, driver.leases.blocks()) == (
        RequestState.FAILED,
        [Action.END_WITH_ERROR],
        0,
    )


@pytest.mark.parametrize("state", [RequestState.WAITING, RequestState.DECODING])
def test_prefill_machine_is_not_needed_once_its_kv_has_arrived(state: RequestState) -> None:
    """A prefill machine that is lost after its work would take healthy streams with it."""
    driver = drive(*TO[state])
    assert driver.tell(Event.PREFILL_LOST) == (Action.ABSORB,)
    assert driver.progress.state is state


def test_kv_may_be_ready_before_the_first_token() -> None:
    """Reports that cross on two connections would leave a request waiting for KV that is there."""
    driver = drive(Event.ASSIGNED, Event.KV_READY)
    assert driver.progress.kv_arrived
    assert driver.tell(Event.FIRST_TOKEN) == (Action.RELEASE_PREFILL, Action.EMIT)
    assert (driver.progress.state, driver.progress.kv_arrived) == (RequestState.WAITING, False)


def test_arrived_kv_is_forgotten_with_its_attempt() -> None:
    """The second attempt would take the first one's KV for its own."""
    driver = drive(Event.ASSIGNED, Event.KV_READY, Event.DECODE_LOST, Event.ASSIGNED, Event.FIRST_TOKEN)
    assert driver.progress.state is RequestState.TRANSFERRING


def test_token_that_overtakes_its_kv_report_is_kept() -> None:
    """A token would be lost because its KV's report came on the slower connection."""
    driver = drive(Event.ASSIGNED, Event.FIRST_TOKEN)
    assert driver.tell(Event.TOKEN) == (Action.RELEASE_PREFILL, Action.EMIT)
    assert driver.leases.ended == {LeaseEnd.COMPLETED: 1}
    assert driver.tell(Event.KV_READY) == (Action.ABSORB,)


def test_events_of_another_attempt_are_absorbed() -> None:
    """A machine of an attempt that was given up would end, or feed, the present one."""
    driver = drive(Event.ASSIGNED, Event.DECODE_LOST, Event.ASSIGNED)
    for event in Event:
        assert driver.tell(event, 1) == (Action.ABSORB,)
    assert driver.progress == RequestProgress(RequestState.PREFILLING, attempts=2)


@pytest.mark.parametrize(
    ("events", "state", "answer"),
    [
        ([Event.NO_CAPACITY], RequestState.REFUSED, Action.ANSWER_503),
        ([Event.DEADLINE], RequestState.REFUSED, Action.ANSWER_503),
        ([Event.CANCELLED], RequestState.REFUSED, Action.ANSWER_503),
        ([Event.INPUT_REFUSED], RequestState.REFUSED, Action.ANSWER_4XX),
        ([Event.ASSIGNED, Event.DECODE_LOST, Event.DEADLINE], RequestState.FAILED, Action.ANSWER_502),
        ([Event.ASSIGNED, Event.DECODE_LOST, Event.NO_CAPACITY], RequestState.FAILED, Action.ANSWER_503),
        ([Event.ASSIGNED, Event.DEADLINE], RequestState.FAILED, Action.ANSWER_502),
        ([Event.ASSIGNED, Event.INPUT_REFUSED], RequestState.REFUSED, Action.ANSWER_4XX),
        ([Event.ASSIGNED, Event.CANCELLED], RequestState.FAILED, Action.ANSWER_503),
        (
            [Event.ASSIGNED, Event.FIRST_TOKEN, Event.CONTENT_SENT, Event.DEADLINE],
            RequestState.FAILED,
            Action.END_WITH_ERROR,
        ),
        ([Event.ASSIGNED, Event.FIRST_TOKEN, Event.STOPPED], RequestState.DONE, Action.FINISH),
    ],
)
def test_ends_are_answered_by_what_led_to_them(events: list[Event], state: RequestState, answer: Action) -> None:
    """A client would get the wrong status, or none."""
    driver = drive(*events)
    assert (driver.progress.state, driver.seen, driver.leases.blocks()) == (state, [answer], 0)


def reachable() -> set[RequestProgress]:
    """Return every progress that some order of events leads to."""
    found, left = {RequestProgress()}, [RequestProgress()]
    while left:
        before = left.pop()
        after = {
            step(before, event, most_attempts=MOST_ATTEMPTS, can_resume=can_resume)[0]
            for event in Event
            for can_resume in (lambda: False, lambda: True)
        } - found
        found |= after
        left += after
    return found


def test_every_way_is_bounded() -> None:
    """Some order of events would try without end, or keep one attempt's KV for the next."""
    for progress in reachable():
        assert 0 <= progress.attempts <= MOST_ATTEMPTS
        assert not (progress.kv_arrived and progress.state is not RequestState.PREFILLING)


def test_every_way_can_still_end_and_every_row_is_used() -> None:
    """A request would be caught in a state that it cannot leave, or a row of the table would never apply."""
    used = set()
    for progress in reachable():
        assert progress.ended or step(progress, Event.DEADLINE, most_attempts=MOST_ATTEMPTS)[0].ended
        for event in Event:
            for can_resume in (lambda: False, lambda: True):
                after, actions = step(progress, event, most_attempts=MOST_ATTEMPTS, can_resume=can_resume)
                used.add((progress.state, event, after.state, actions))
    assert {(*entry, row.state, row.actions) for entry, rows in TABLE.items() for row in rows} <= used


class AnyOrder(RuleBasedStateMachine):
    """Any events in any order, of this attempt and of others; a request that has ended makes room for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(can_resume=True)
        self.gone = False

    @precondition(lambda self: self.driver.progress.ended)
    @rule()
    def begins(self) -> None:
        self.teardown()
        self.driver = Driver(can_resume=not self.driver.can_resume)
        self.gone = False

    @rule(pick=st.integers(0, 9))
    def goes_on(self, pick: int) -> None:
        rows = [(event, TABLE[self.driver.progress.state, event]) for event in Event]
        ways = [event for event, (*_, row) in rows if row.state not in ENDS and row.actions != (Action.ABSORB,)]
        if ways:
            self.happens(ways[pick % len(ways)], None)

    @rule(event=st.sampled_from(Event), stale=st.sampled_from([None, 0, 1]))
    def tells(self, event: Event, stale: int | None) -> None:
        self.happens(event, stale)

    def happens(self, event: Event, stale: int | None) -> None:
        before = self.driver.progress
        attempt = None if stale is None else before.attempts - stale
        actions = self.driver.tell(event, attempt)
        self.gone = self.gone or (event is Event.CLIENT_GONE and not before.ended and actions != (Action.ABSORB,))
        if before.ended:
            assert (actions, self.driver.progress) == ((Action.ABSORB,), before)
        if before.sent:
            assert Action.REASSIGN not in actions
            assert self.driver.progress.sent
        if Action.FINISH in actions:
            assert self.driver.progress.state is RequestState.DONE

    @invariant()
    def ends_once(self) -> None:
        answers = self.driver.seen
        assert len(answers) + self.gone == int(self.driver.progress.ended)
        assert (answers == [Action.FINISH]) == (self.driver.progress.state is RequestState.DONE)

    @invariant()
    def holds_what_its_state_says(self) -> None:
        state = self.driver.progress.state
        held = {Purpose.PREFILL} if state in HOLDS_PREFILL else set()
        assert set(self.driver.held) == (held | {Purpose.DECODE} if state in HOLDS_DECODE else held)

    @invariant()
    def attempts_are_bounded(self) -> None:
        assert 0 <= self.driver.progress.attempts <= MOST_ATTEMPTS

    def teardown(self) -> None:
        self.driver.tell(Event.CLIENT_GONE)
        leases = self.driver.leases
        assert self.driver.progress.ended
        assert (leases.blocks(), len(leases), leases.late) == (0, 0, 0)
        assert leases.ended.total() == self.driver.made


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def test_any_order_of_events_ends_once_and_leaves_nothing() -> None:
    """Some order of events would answer a client twice or never, finish after an error, or leak or double-free KV."""
    AnyOrder.TestCase("runTest").runTest()
