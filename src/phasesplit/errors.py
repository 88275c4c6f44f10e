"""Every error that phasesplit raises on purpose.

```
PhasesplitError
  SpecError            the input is wrong: names file, line or field, the value, what is allowed
  InfeasibleError      no design meets the SLO: carries the nearest miss and the binding limit
  SimulationError      an invariant broke in the kernel: always our bug
  WorkerLostError      a process that simulates for a plan ended before it answered (out of memory, killed)
  GatewayError         the gateway cannot serve a request: carries the HTTP status of the answer
    RequestError       the client's request is wrong: 4xx, names the field
    NoCapacityError    nothing can take the request now: 503 + Retry-After
    WorkerError        a worker refused, failed or timed out: 502, after the retries are spent
    TransferError      the KV cache did not arrive whole: re-prefilled elsewhere first, then 502
```

The command line prints the message as one line and exits with 2 for a `SpecError`, 1 for an `InfeasibleError` or a
`WorkerLostError`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class PhasesplitError(Exception):
    """Base of all errors raised on purpose."""


class SpecError(PhasesplitError):
    """The input is wrong; the message names where, the value, and what is allowed."""

    @classmethod
    def bad(cls, where: str, value: object, allowed: str) -> "SpecError":
        """Return the error for a value that is not allowed.

        Args:
            where: File, line, field or flag, as the person who wrote it knows it.
            value: The value found there.
            allowed: What would have been accepted, as a phrase ("a positive number").
        """
        return cls(f"{where}: got {value!r}, allowed is {allowed}")

    @classmethod
    def unknown(cls, where: str, name: str, known: Iterable[str]) -> "SpecError":
        """Return the error for a name that is not known, with the nearest known names first.

        Args:
            where: File, line, field or flag, as the person who wrote it knows it.
            name: The name found there.
            known: All names that would have been accepted.
        """
        names = sorted(known)
        near = get_close_matches(name.lower(), names, n=3, cutoff=0.5)
        if near:
            return cls(f"{where}: unknown name {name!r}, did you mean {' or '.join(near)}?")
        return cls(f"{where}: unknown name {name!r}, known are {', '.join(names)}")


class InfeasibleError(PhasesplitError):
    """No design meets the SLO; the message carries the nearest miss and the binding limit."""


class SimulationError(PhasesplitError):
    """An invariant broke inside the kernel: always a bug of phasesplit, never of its input."""


class WorkerLostError(PhasesplitError):
    """A worker process ended, or cannot be started; the message says what is known of why."""


class GatewayError(PhasesplitError):
    """The gateway cannot serve a request.

    Attributes:
        status: HTTP status of the answer, as long as no content has reached the client.
    """

    status = 500


class RequestError(GatewayError):
    """The client's request is wrong.

    Attributes:
        status: HTTP status, 400 to 499.
        param: The request's field, dotted ("messages.0.role"), or None where no single field is to blame.
        code: A word for programs ("context_length_exceeded"), or None.
    """

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code


class NoCapacityError(GatewayError):
    """Nothing can take the request now.

    Attributes:
        retry_after_s: Seconds after which the client should try again, > 0.
    """

    status = 503

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerError(GatewayError):
    """A worker refused, failed or timed out, and the retries are spent."""

    status = 502


class TransferError(GatewayError):
    """The KV cache did not arrive whole: nothing of it may be read."""

    status = 502


def one_line(error: BaseException) -> str:
    """Return what an error of a library says, short and in one line; its type where it says nothing."""
    return " ".join(str(error).split())[:200] or type(error).__name__
