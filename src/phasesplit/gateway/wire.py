"""What a machine's answers and errors mean for a request; `protocol.worker_answers` reads them."""

from collections.abc import Mapping
from typing import Any

from phasesplit.gateway.states import Event
from phasesplit.gateway.worker import LegError
from phasesplit.protocol.worker import Chunk
from phasesplit.protocol.worker_answers import read_answer

_REFUSED = frozenset({400, 404, 413, 422})
_FULL = frozenset({409, 429, 503})


def read_chunk(answer: Mapping[str, Any], lost: Event) -> Chunk:
    """Return what an answer, or one event of a stream, says.

    Args:
        answer: The JSON object.
        lost: The event that a machine's failure means on this leg.

    Raises:
        LegError: It is an error, or not an answer.
    """
    if "error" in answer:
        raise read_error(answer, None, lost)
    try:
        chunk = read_answer(answer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise LegError("a machine sent something that is not an answer", lost) from None
    if chunk.finish_reason not in (None, "stop", "length"):
        raise LegError(f"a machine ended a request with {chunk.finish_reason!r}", lost)
    return chunk


def read_error(answer: Any, status: int | None, lost: Event) -> LegError:
    """Return what a machine's error means.

    Args:
        answer: Its body, where it has one.
        status: Its HTTP status, None for an error within a stream.
        lost: See `read_chunk`.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"a machine answered with status {status}")
    if error.get("code") == "transfer_failed":
        return LegError(message, Event.TRANSFER_FAILED)
    if status in _FULL or error.get("code") == "no_capacity":
        return LegError(message, Event.WORKER_REFUSED, machine_status=status or 503)
    if status in _REFUSED or (status is None and error.get("type") == "invalid_request_error"):
        param, code = error.get("param"), error.get("code")
        return LegError(
            message,
            Event.INPUT_REFUSED,
            machine_status=status or 400,
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    return LegError(message, lost, machine_status=status or 502)
