"""Errors as OpenAI clients know them: status, headers and body."""

import math
from typing import Any, NamedTuple

from phasesplit.errors import GatewayError, NoCapacityError, RequestError, TransferError, WorkerError


class ErrorAnswer(NamedTuple):
    """How an error is answered while nothing has been sent.

    Attributes:
        status: HTTP status.
        headers: Headers that belong to it.
        body: The JSON object; it is also the error event of a stream that has begun.
    """

    status: int
    headers: dict[str, str]
    body: dict[str, Any]


def error_answer(error: Exception) -> ErrorAnswer:
    """Return the answer to an error; one that is not a GatewayError is our bug, and its text stays here."""
    if not isinstance(error, GatewayError):
        return ErrorAnswer(500, {}, error_body("internal error", kind="server_error", code="internal_error"))
    if isinstance(error, RequestError):
        headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
        body = error_body(str(error), kind="invalid_request_error", param=error.param, code=error.code)
        return ErrorAnswer(error.status, headers, body)
    headers = {}
    code = "gateway_error"
    if isinstance(error, NoCapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
        code = "no_capacity"
    elif isinstance(error, WorkerError):
        code = "worker_error"
    elif isinstance(error, TransferError):
        code = "transfer_error"
    return ErrorAnswer(error.status, headers, error_body(str(error), kind="server_error", code=code))


def error_body(message: str, *, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape.

    Args:
        message: What a person reads.
        kind: "invalid_request_error" or "server_error".
        param: The field to blame, or None.
        code: A word for programs, or None.
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def unknown_model(name: str) -> RequestError:
    """Return the error for a model that is not served here."""
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    return RequestError(f"the model {shown!r} does not exist", status=404, param="model", code="model_not_found")


def wrong_key() -> RequestError:
    """Return the error for a missing or wrong API key."""
    return RequestError("missing or wrong API key", status=401, code="invalid_api_key")
