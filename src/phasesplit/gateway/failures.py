"""From the event that ended a choice badly to the error that its client reads."""

from phasesplit.errors import GatewayError, NoCapacityError, RequestError, TransferError, WorkerError
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.states import Action, Event
from phasesplit.gateway.worker import LegError

_RETRY_AFTER_S = 1.0
ANSWERS = frozenset({Action.END_WITH_ERROR, Action.ANSWER_4XX, Action.ANSWER_502, Action.ANSWER_503})
"""Actions that tell the client of an error."""


def client_error(action: Action, event: Event, cause: Exception | None, limits: Limits) -> Exception:
    """Return what a client is told.

    Args:
        action: One of `ANSWERS`.
        event: What happened.
        cause: What is known of why; an error that is not a GatewayError is our bug, and told as such.
        limits: The gateway's.
    """
    if isinstance(cause, RequestError | NoCapacityError) or (cause is not None and not isinstance(cause, GatewayError)):
        return cause
    why = str(cause) if cause is not None else _words(event, limits)
    if isinstance(cause, LegError) and event is Event.INPUT_REFUSED:
        return RequestError(why, status=cause.machine_status, param=cause.param, code=cause.code)
    if action is Action.ANSWER_503:
        return NoCapacityError(why, retry_after_s=_RETRY_AFTER_S)
    if event is Event.TRANSFER_FAILED:
        return TransferError(f"the KV cache did not arrive whole: {why}")
    return WorkerError(why)


def _words(event: Event, limits: Limits) -> str:
    if event is Event.DEADLINE:
        return f"not in time: the first token is due in {limits.first_token_s:g} s, the last in {limits.request_s:g} s"
    return "the gateway is shutting down" if event is Event.CANCELLED else f"the request failed: {event}"
