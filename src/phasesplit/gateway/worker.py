"""What the gateway asks of a machine: one protocol, whichever engine runs there."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, Protocol

from phasesplit.errors import WorkerError
from phasesplit.gateway.states import Event


class Scored(NamedTuple):
    """A token, and what the model thinks of its place.

    Attributes:
        token: Its id.
        logprob: Natural logarithm, <= 0; None for a prompt's first token.
        top: The likeliest ids at its place with their log-probabilities, likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class PromptTimes(NamedTuple):
    """How long a prompt took on its machine, by the machine's own word.

    Attributes:
        queued_s: From its arrival there until its prompt phase began, in seconds.
        prompt_s: From there until its first token was out, in seconds.
    """

    queued_s: float
    prompt_s: float


class Chunk(NamedTuple):
    """What a machine adds to a choice at once.

    Attributes:
        tokens: The new ids, possibly none in the last chunk.
        scored: Their log-probabilities; empty where nobody asked.
        finish_reason: "stop" or "length" by the machine's own word, None where it goes on.
        prompt_scored: The prompt's log-probabilities; empty where nobody asked.
        times: How long the prompt took, with its first token, where the machine tells.
    """

    tokens: tuple[int, ...]
    scored: tuple[Scored, ...] = ()
    finish_reason: str | None = None
    prompt_scored: tuple[Scored, ...] = ()
    times: PromptTimes | None = None


class LegError(WorkerError):
    """A machine did not do its part.

    Attributes:
        event: What it means for the request: INPUT_REFUSED, WORKER_REFUSED, PROMPT_LOST, TOKEN_LOST or TRANSFER_FAILED.
        machine_status: The machine's own HTTP status, 502 where there was none.
        param: The field that the machine blames, or None.
        code: The machine's word for it, or None.
    """

    def __init__(
        self,
        message: str,
        event: Event,
        *,
        machine_status: int = 502,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.event = event
        self.machine_status = machine_status
        self.param = param
        self.code = code


class WorkerClient(Protocol):
    """One machine. Every call may raise LegError; cancelling a call gives the work up on the machine too."""

    async def prompt_leg(self, body: Mapping[str, Any]) -> Chunk:
        """Return the answer to a prompt leg: one token."""

    def token_leg(self, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """Iterate over the answer to a token leg, or to a request that one machine serves whole."""

    async def facts(self) -> dict[str, Any]:
        """Return what the machine says of itself now."""

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the machine's reports for as long as it lives."""

    async def abort(self, key: str, why: str) -> None:
        """Let the machine free what it keeps for an attempt; unknown keys change nothing."""

    async def role(self, epoch: int, role: str) -> None:
        """Tell the machine its pool."""

    async def drain(self) -> None:
        """Let the machine take no new requests."""

    async def close(self) -> None:
        """Let go of all connections."""
