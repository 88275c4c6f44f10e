"""What happens to a request in the engine: the events that it reports."""

from dataclasses import dataclass, field
from typing import Literal

from phasesplit.protocol.worker import PrefillTimes, Scored


@dataclass(frozen=True, slots=True)
class Started:
    """Prefill has begun."""


@dataclass(frozen=True, slots=True)
class PromptScored:
    """The prompt's tokens are scored, each but the first; comes before the first token.

    Attributes:
        scores: One for each token of the prompt.
    """

    scores: tuple[Scored, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One more output token.

    Attributes:
        scored: The token, with its log-probability where the request wants it.
        times: With the first token: how long the prompt took, on whichever machine.
    """

    scored: Scored
    times: PrefillTimes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class KvReady:
    """The KV of another machine's prefill is here, whole."""


@dataclass(frozen=True, slots=True)
class KvLeft:
    """Nothing reads a prompt's KV here any more, and its blocks are free: it has left, failed, or was aborted."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last token is out.

    Attributes:
        reason: Whether the text ended, or a bound was reached.
        stop: The stop token or stop string that ended it; None for the model's own end of a text and for a bound.
    """

    reason: Literal["stop", "length"]
    stop: int | str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was not taken.

    Attributes:
        status: HTTP status that says so.
        message: Why.
    """

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot go on here; nothing more follows but `KvLeft`.

    Attributes:
        why: For people.
    """

    why: str


Event = Started | PromptScored | Token | KvReady | KvLeft | Finished | Refused | Failed
