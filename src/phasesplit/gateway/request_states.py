"""The states of a request, and what every event does in each of them: one pure table.

A *request* here is one choice of a client's request (a client asking for n choices makes n of them). It is in one
state: queued (no pair of machines), prefilling (pair assigned, prefill phase waiting or running), transferring (the
first token is here, the rest of its KV is on its way), waiting (all KV is on the decode machine), decoding, or at an
end: done, refused (no machine has worked for it), failed. The prefill machine holds KV for it while prefilling and
transferring, the decode machine from prefilling to decoding; so each row says exactly what is released.

What each event leads to; `.` is absorbed (counted, changes nothing), `/` lists outcomes of which the first that applies
is taken. All events are absorbed in done, refused and failed.

```
event            queued          prefilling            transferring     waiting          decoding
assigned         prefilling      .                     .                .                .
prefill_started  .               prefilling            .                .                .
first_token      .               waiting/transferring  .                .                .
kv_ready         .               prefilling            waiting          .                .
token            .               LOST                  decoding         decoding         decoding
last_token       .               done                  done             done             done
stopped          .               done                  done             done             done
content_sent     .               .                     transferring     waiting          decoding
client_gone      failed          failed                failed           failed           failed
deadline         failed/failed/refused  failed/failed  failed/failed    failed/failed    failed/failed
cancelled        failed/failed/refused  failed/failed  failed/failed    failed/failed    failed/failed
no_capacity      failed/failed/refused  .              .                .                .
input_refused    failed/refused  failed/refused        failed/refused   failed/refused   failed/refused
worker_refused   .               LOST                  LOST             LOST             LOST
prefill_lost     .               LOST                  LOST             .                .
decode_lost      .               LOST                  LOST             LOST             LOST
transfer_failed  .               LOST                  LOST             LOST             LOST
```

LOST is queued/failed/queued/failed: where tokens are here and machines can go on behind them exactly, the output goes
on elsewhere while attempts are left; else a stream whose client has content ends with an error event. Before content
the request starts again from nothing while it has attempts left; else the answer is a 5xx.

Two machines report on two connections, so their reports may cross. KV that is ready before the first token is
remembered; a token of the decode phase that overtakes `kv_ready` implies it, for no token leaves a machine before its
KV is whole. A token that comes while the prefill phase runs has no such excuse: the attempt is given up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

from phasesplit.gateway.leases import LeaseEnd


class RequestState(StrEnum):
    """Where a request is."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    WAITING = "waiting"
    DECODING = "decoding"
    DONE = "done"
    REFUSED = "refused"
    FAILED = "failed"


class Event(StrEnum):
    """What can happen to a request.

    `first_token` ends a prefill phase whose token is not the last; `last_token` is the last as a machine reports, from
    either side; `stopped` is the last as the gateway finds (by a stop string), which the machines do not know.
    `content_sent` comes just before the first content goes to the client. A loss is also a stall or an error of that
    machine. `worker_refused` is a machine that is full, `input_refused` a machine (or the gateway) that finds the
    request wrong.
    """

    ASSIGNED = "assigned"
    PREFILL_STARTED = "prefill_started"
    FIRST_TOKEN = "first_token"
    KV_READY = "kv_ready"
    TOKEN = "token"
    LAST_TOKEN = "last_token"
    STOPPED = "stopped"
    CONTENT_SENT = "content_sent"
    CLIENT_GONE = "client_gone"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    NO_CAPACITY = "no_capacity"
    INPUT_REFUSED = "input_refused"
    WORKER_REFUSED = "worker_refused"
    PREFILL_LOST = "prefill_lost"
    DECODE_LOST = "decode_lost"
    TRANSFER_FAILED = "transfer_failed"


class Action(StrEnum):
    """What the driver does, in the order given.

    `emit` adds the token to the answer, `finish` ends it normally, `end_with_error` ends a begun stream with an error
    event. `answer_4xx` repeats the refusal's own message; `answer_503` carries Retry-After. `reassign` drops tokens,
    which no client has seen, and asks for another pair; `continue` keeps all tokens and asks for one that goes on. A
    release of a side without a reservation (one machine took both phases) does nothing.
    """

    RESERVE_PREFILL = "reserve_prefill"
    RESERVE_DECODE = "reserve_decode"
    SEND_LEGS = "send_legs"
    CANCEL_PREFILL = "cancel_prefill"
    CANCEL_DECODE = "cancel_decode"
    RELEASE_PREFILL = "release_prefill"
    RELEASE_DECODE = "release_decode"
    EMIT = "emit"
    FINISH = "finish"
    REASSIGN = "reassign"
    CONTINUE = "continue"
    END_WITH_ERROR = "end_with_error"
    ANSWER_4XX = "answer_4xx"
    ANSWER_502 = "answer_502"
    ANSWER_503 = "answer_503"
    ABSORB = "absorb"


class When(Enum):
    """The condition of a row; rows of an entry are tried in order, and the last is always ALWAYS."""

    ALWAYS = "always"
    RESUME = "machines can go on behind the output so far, and attempts are left"
    SENT = "the client has content"
    RETRY = "the client has no content, and attempts are left"
    KV_ARRIVED = "all KV arrived before the first token"
    TRIED = "a pair has been assigned before"


class TransitionRow(NamedTuple):
    """One outcome of an event.

    Attributes:
        when: The condition.
        state: The state afterwards.
        actions: What the driver does.
    """

    when: When
    state: RequestState
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """How far a request is.

    Attributes:
        state: Where it is.
        attempts: Pairs assigned so far, >= 0; events of machines carry the number of the attempt they belong to.
        kv_arrived: All KV has arrived, though the first token has not.
        sent: The client has content: from here on a second start would repeat text.
    """

    state: RequestState = RequestState.QUEUED
    attempts: int = 0
    kv_arrived: bool = False
    sent: bool = False

    @property
    def ended(self) -> bool:
        """Whether the request is done, refused or failed."""
        return self.state in ENDS


ENDS = frozenset({RequestState.DONE, RequestState.REFUSED, RequestState.FAILED})
"""States that no event leaves."""

HOLDS_PREFILL = frozenset({RequestState.PREFILLING, RequestState.TRANSFERRING})
"""States in which the prefill machine holds KV for the request."""
HOLDS_DECODE = frozenset(
    {RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.WAITING, RequestState.DECODING}
)
"""States in which the decode machine holds KV, or room for it."""

REASONS = {
    Event.FIRST_TOKEN: LeaseEnd.COMPLETED,
    Event.KV_READY: LeaseEnd.COMPLETED,
    Event.LAST_TOKEN: LeaseEnd.COMPLETED,
    Event.STOPPED: LeaseEnd.COMPLETED,
    Event.CLIENT_GONE: LeaseEnd.CLIENT_GONE,
    Event.DEADLINE: LeaseEnd.DEADLINE,
    Event.CANCELLED: LeaseEnd.CANCELLED,
    Event.INPUT_REFUSED: LeaseEnd.REFUSED,
    Event.WORKER_REFUSED: LeaseEnd.REFUSED,
    Event.PREFILL_LOST: LeaseEnd.WORKER_LOST,
    Event.DECODE_LOST: LeaseEnd.WORKER_LOST,
    Event.TRANSFER_FAILED: LeaseEnd.TRANSFER_FAILED,
}
"""Why KV is released at an event; `release_reason` adds the one event whose reason depends on the state."""


def release_reason(state: RequestState, event: Event) -> LeaseEnd:
    """Return why KV that the event releases in this state is released."""
    if event is Event.TOKEN:
        return LeaseEnd.TRANSFER_FAILED if state is RequestState.PREFILLING else LeaseEnd.COMPLETED
    return REASONS[event]


def _released(state: RequestState) -> tuple[Action, ...]:
    prefill = (Action.RELEASE_PREFILL,) if state in HOLDS_PREFILL else ()
    return (*prefill, Action.RELEASE_DECODE) if state in HOLDS_DECODE else prefill


def _dropped(state: RequestState) -> tuple[Action, ...]:
    """Return the actions that call off what the machines do for a request, then release its KV."""
    prefill = (Action.CANCEL_PREFILL,) if state in HOLDS_PREFILL else ()
    decode = (Action.CANCEL_DECODE,) if state in HOLDS_DECODE else ()
    return (*prefill, *decode, *_released(state))


def _ended(state: RequestState, answer: Action, end: RequestState = RequestState.FAILED) -> tuple[TransitionRow, ...]:
    """Return the rows of an event after which nothing is tried again."""
    dropped = _dropped(state)
    return (
        TransitionRow(When.SENT, RequestState.FAILED, (*dropped, Action.END_WITH_ERROR)),
        TransitionRow(When.ALWAYS, end, (*dropped, answer)),
    )


def _lost(state: RequestState) -> tuple[TransitionRow, ...]:
    """Return the rows of an event that costs an attempt."""
    dropped = _dropped(state)
    return (
        TransitionRow(When.RESUME, RequestState.QUEUED, (*dropped, Action.CONTINUE)),
        TransitionRow(When.SENT, RequestState.FAILED, (*dropped, Action.END_WITH_ERROR)),
        TransitionRow(When.RETRY, RequestState.QUEUED, (*dropped, Action.REASSIGN)),
        TransitionRow(When.ALWAYS, RequestState.FAILED, (*dropped, Action.ANSWER_502)),
    )


def _queue_end(answer: Action) -> tuple[TransitionRow, ...]:
    """Return the rows of an end in the queue: a failure only if machines have worked for the request."""
    return (
        TransitionRow(When.SENT, RequestState.FAILED, (Action.END_WITH_ERROR,)),
        TransitionRow(When.TRIED, RequestState.FAILED, (answer,)),
        TransitionRow(When.ALWAYS, RequestState.REFUSED, (Action.ANSWER_503,)),
    )


def _always(state: RequestState, *actions: Action) -> tuple[TransitionRow, ...]:
    return (TransitionRow(When.ALWAYS, state, actions),)


def _filled() -> dict[tuple[RequestState, Event], tuple[TransitionRow, ...]]:
    """Return the whole table."""
    queued, prefilling, transferring = RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING
    waiting, decoding, done = RequestState.WAITING, RequestState.DECODING, RequestState.DONE
    reserve = (Action.RESERVE_PREFILL, Action.RESERVE_DECODE, Action.SEND_LEGS)
    table = {(state, event): _always(state, Action.ABSORB) for state in RequestState for event in Event}
    table |= {
        (queued, Event.ASSIGNED): _always(prefilling, *reserve),
        (queued, Event.CLIENT_GONE): _always(RequestState.FAILED),
        (queued, Event.DEADLINE): _queue_end(Action.ANSWER_502),
        (queued, Event.CANCELLED): _queue_end(Action.ANSWER_503),
        (queued, Event.NO_CAPACITY): _queue_end(Action.ANSWER_503),
        (queued, Event.INPUT_REFUSED): _ended(queued, Action.ANSWER_4XX, RequestState.REFUSED),
        (prefilling, Event.PREFILL_STARTED): _always(prefilling),
        (prefilling, Event.FIRST_TOKEN): (
            TransitionRow(When.KV_ARRIVED, waiting, (Action.RELEASE_PREFILL, Action.EMIT)),
            TransitionRow(When.ALWAYS, transferring, (Action.EMIT,)),
        ),
        (prefilling, Event.KV_READY): _always(prefilling),
        (transferring, Event.KV_READY): _always(waiting, Action.RELEASE_PREFILL),
        (prefilling, Event.TOKEN): _lost(prefilling),
        (transferring, Event.TOKEN): _always(decoding, Action.RELEASE_PREFILL, Action.EMIT),
        (waiting, Event.TOKEN): _always(decoding, Action.EMIT),
        (decoding, Event.TOKEN): _always(decoding, Action.EMIT),
        # The decode machine waits for KV that nobody will use.
        (prefilling, Event.LAST_TOKEN): _always(done, *_dropped(prefilling), Action.EMIT, Action.FINISH),
    }
    for state in (prefilling, transferring, waiting, decoding):
        table[state, Event.STOPPED] = _always(done, *_dropped(state), Action.EMIT, Action.FINISH)
        table[state, Event.CLIENT_GONE] = _always(RequestState.FAILED, *_dropped(state))
        table[state, Event.DEADLINE] = _ended(state, Action.ANSWER_502)
        table[state, Event.CANCELLED] = _ended(state, Action.ANSWER_503)
        table[state, Event.INPUT_REFUSED] = _ended(state, Action.ANSWER_4XX, RequestState.REFUSED)
        for event in (Event.WORKER_REFUSED, Event.DECODE_LOST, Event.TRANSFER_FAILED):
            table[state, event] = _lost(state)
    for state in (prefilling, transferring):
        # Later the decode machine has all it needs, and goes on alone.
        table[state, Event.PREFILL_LOST] = _lost(state)
    for state in (transferring, waiting, decoding):
        table[state, Event.CONTENT_SENT] = _always(state)
        table[state, Event.LAST_TOKEN] = _always(done, *_released(state), Action.EMIT, Action.FINISH)
    return table


TABLE = _filled()
"""Every event in every state: its rows in the order in which they are tried."""


def step(
    progress: RequestProgress,
    event: Event,
    *,
    most_attempts: int,
    attempt: int | None = None,
    can_resume: Callable[[], bool] = bool,
) -> tuple[RequestProgress, tuple[Action, ...]]:
    """Return where a request is after an event, and what to do.

    Args:
        progress: Where it is.
        event: What happened.
        most_attempts: How many pairs a request may be given in all, >= 1.
        attempt: The attempt that the reporting machine works for; an event of another one is absorbed. None for events
            of the client and of the gateway itself.
        can_resume: Returns whether there is output, and other machines would go on behind it as this attempt's would
            have.
    """
    if attempt is not None and attempt != progress.attempts:
        return progress, (Action.ABSORB,)
    row = _chosen(TABLE[progress.state, event], progress, most_attempts, can_resume=can_resume)
    after = RequestProgress(
        state=row.state,
        attempts=progress.attempts + (event is Event.ASSIGNED and row.state is not progress.state),
        kv_arrived=row.state is RequestState.PREFILLING and (progress.kv_arrived or event is Event.KV_READY),
        sent=progress.sent or (event is Event.CONTENT_SENT and row.actions != (Action.ABSORB,)),
    )
    return after, row.actions


def _chosen(
    rows: Sequence[TransitionRow], progress: RequestProgress, most_attempts: int, *, can_resume: Callable[[], bool]
) -> TransitionRow:
    """Return the first row whose condition holds."""
    if len(rows) == 1:
        return rows[0]
    has_attempts = progress.attempts < most_attempts
    holds = {
        When.ALWAYS: True,
        When.SENT: progress.sent,
        When.RETRY: not progress.sent and has_attempts,
        When.KV_ARRIVED: progress.kv_arrived,
        When.TRIED: progress.attempts > 0,
    }
    return next(row for row in rows if (has_attempts and can_resume() if row.when is When.RESUME else holds[row.when]))
