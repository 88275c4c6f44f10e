"""What the dispatcher answers: where a request goes, or why nowhere, and what became of machines."""

from typing import NamedTuple


class Pair(NamedTuple):
    """The machines of a request's two phases; both hold blocks for it from now on.

    Attributes:
        key: The request's name for this attempt.
        prompt: Name of the machine of the prompt phase.
        prompt_epoch: That machine's epoch.
        token: Name of the machine of the token phase.
        token_epoch: That machine's epoch.
    """

    key: str
    prompt: str
    prompt_epoch: int
    token: str
    token_epoch: int

    @property
    def same(self) -> bool:
        """Whether one machine does both phases."""
        return self.prompt == self.token


class TooLong(NamedTuple):
    """No machine could ever hold the request.

    Attributes:
        reason: Why, with figures.
    """

    reason: str


class NoCapacity(NamedTuple):
    """Nothing can take the request now.

    Attributes:
        reason: Why, with figures.
        retry_after_s: Seconds after which it may be tried again, > 0.
    """

    reason: str
    retry_after_s: float


class Lost(NamedTuple):
    """A request that a machine held and will not go on with; all that was booked for it has been given back.

    Attributes:
        key: Its name.
        side: "prompt" or "token": what the machine was to it; "token" where it was both.
    """

    key: str
    side: str


class Move(NamedTuple):
    """A machine's pool from now on, which it is to be told.

    Attributes:
        name: The machine.
        epoch: Its epoch.
        number: Grows with each move of any machine: an order with a lower number is out of date.
        pool: The pool it is in.
        home: The pool it comes home to.
    """

    name: str
    epoch: int
    number: int
    pool: str
    home: str


class MachineView(NamedTuple):
    """A machine as a person sees it.

    Attributes:
        name: Its name.
        epoch: Which life of it.
        pool: The pool it is in, or was in last.
        home: The pool it comes home to.
        state: serving, draining (finishes what it has), broken (its breaker is open), probing (one request tries it),
            or off.
        next_home: Its home once it has drained, or None.
        prompt_requests: Requests whose prompt phase is there, waiting or running.
        token_requests: Requests whose token phase is or will be there.
        pending_tokens: Tokens that wait to be computed there.
        committed_blocks: KV blocks that rules count on for its requests.
        capacity_blocks: KV blocks it has.
        leased_blocks: KV blocks under lease.
        failures: Its failures in a row.
        heard_s: When its last heartbeat came, on the gateway's clock.
    """

    name: str
    epoch: int
    pool: str
    home: str
    state: str
    next_home: str | None
    prompt_requests: int
    token_requests: int
    pending_tokens: int
    committed_blocks: int
    capacity_blocks: int
    leased_blocks: int
    failures: int
    heard_s: float
