"""Errors as OpenAI clients know them: status, headers and body."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from phasesplit.errors import GatewayError, NoCapacityError, RequestError, TransferError, WorkerError

if TYPE_CHECKING:
    from pydantic import ValidationError

_SHOWN = 80
"""Characters of a client's value that a message shows."""


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
    return RequestError(
        f"the model {shortened(name)!r} does not exist", status=404, param="model", code="model_not_found"
    )


def wrong_key() -> RequestError:
    """Return the error for a missing or wrong API key."""
    return RequestError("missing or wrong API key", status=401, code="invalid_api_key")


def of_validation(error: "ValidationError") -> RequestError:
    """Return the first thing that is wrong with a body, in OpenAI's words for it."""
    first = error.errors(include_url=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return RequestError(f"{param}: {first['msg']}, got {shortened(repr(first['input']))}", param=param, code=code)


def invalid(param: str, message: str) -> RequestError:
    """Return the error for a field whose value is wrong.

    Args:
        param: The field.
        message: What is wrong with it.
    """
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> RequestError:
    """Return the error for a field that is not served.

    Args:
        param: The field.
        message: Why.
    """
    return RequestError(f"{param}: {message}", param=param, code="unsupported_parameter")


def too_long_context(
    context_tokens: int, prompt_tokens: int, output_tokens: int | None, *, param: str = "prompt"
) -> RequestError:
    """Return the error for a request that does not fit into the context.

    Args:
        context_tokens: The longest context.
        prompt_tokens: Tokens of the prompt.
        output_tokens: Most output tokens as asked for, None where nobody asked.
        param: The field to blame.
    """
    output = "" if output_tokens is None else f" and {output_tokens} output tokens"
    return RequestError(
        f"the longest context is {context_tokens} tokens; the request has {prompt_tokens} prompt tokens{output}",
        param=param,
        code="context_length_exceeded",
    )


def shortened(text: str) -> str:
    """Return a text that fits into a message."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
