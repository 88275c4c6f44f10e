"""Errors as OpenAI's clients read them."""

import pytest

from phasesplit.errors import GatewayError, NoCapacityError, RequestError, TransferError, WorkerError
from phasesplit.protocol.openai_errors import error_answer, unknown_model, wrong_key


@pytest.mark.parametrize(
    ("error", "status", "headers", "kind", "param", "code"),
    [
        (RequestError("x", param="n", code="invalid_value"), 400, {}, "invalid_request_error", "n", "invalid_value"),
        (RequestError("x", status=413), 413, {}, "invalid_request_error", None, None),
        (NoCapacityError("x", retry_after_s=0.2), 503, {"Retry-After": "1"}, "server_error", None, "no_capacity"),
        (NoCapacityError("x", retry_after_s=2.1), 503, {"Retry-After": "3"}, "server_error", None, "no_capacity"),
        (WorkerError("x"), 502, {}, "server_error", None, "worker_error"),
        (TransferError("x"), 502, {}, "server_error", None, "transfer_error"),
        (GatewayError("x"), 500, {}, "server_error", None, "gateway_error"),
    ],
)
def test_errors_have_openai_shape(
    error: Exception, status: int, headers: dict[str, str], kind: str, param: str | None, code: str | None
) -> None:
    """A client's library could not tell its own mistake from ours, or when to come back."""
    answer = error_answer(error)
    assert (answer.status, answer.headers) == (status, headers)
    assert answer.body == {"error": {"message": "x", "type": kind, "param": param, "code": code}}


def test_our_own_bugs_tell_nothing() -> None:
    """An unexpected error would show its insides to a client."""
    answer = error_answer(KeyError("secret"))
    assert answer.status == 500
    assert "secret" not in str(answer.body)


def test_unknown_model_is_not_found() -> None:
    """A client would retry a model that is not here, or have its megabyte name repeated."""
    error = unknown_model("x" * 1000)
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert len(str(error)) < 120


def test_wrong_key_asks_for_one() -> None:
    """A client without a key would not learn that it needs one."""
    answer = error_answer(wrong_key())
    assert (answer.status, answer.headers) == (401, {"WWW-Authenticate": "Bearer"})
