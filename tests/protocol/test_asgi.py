"""The little of ASGI that every server shares."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from phasesplit.errors import RequestError
from phasesplit.protocol.asgi import ClientGoneError, JsonAnswer, client_gone, read_body, refused


def receiving(messages: Sequence[dict[str, Any]]) -> Any:
    """Return what hands out messages, one a call."""
    left = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(left)

    return receive


def sent(answer: JsonAnswer) -> list[dict[str, Any]]:
    """Return the messages of an answer."""
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(answer({}, receiving([]), send))
    return messages


def part(body: bytes, *, has_more: bool) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": has_more}


def test_bodies_are_read_whole() -> None:
    """A body in parts would lose some of them."""
    parts = [part(b"ab", has_more=True), {"type": "http.request", "more_body": True}, part(b"c", has_more=False)]
    assert asyncio.run(read_body(receiving(parts), 3)) == b"abc"


def test_bodies_are_bounded() -> None:
    """A client could fill the memory of a machine."""
    with pytest.raises(RequestError) as caught:
        asyncio.run(read_body(receiving([part(b"ab", has_more=True), part(b"cd", has_more=True)]), 3))
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


def test_a_client_that_leaves_is_noticed() -> None:
    """A request whose client has gone would be computed to its end."""
    gone = [part(b"a", has_more=True), {"type": "http.disconnect"}]
    with pytest.raises(ClientGoneError):
        asyncio.run(read_body(receiving(gone)))
    asyncio.run(client_gone(receiving(gone)))


def test_answers_say_what_they_are() -> None:
    """A client could not tell an answer's length or type."""
    start, body = sent(JsonAnswer(201, {"a": 1}, {"X-Request-Id": "r"}))
    assert start["status"] == 201
    assert start["headers"] == [
        (b"content-type", b"application/json"), (b"content-length", b"7"), (b"x-request-id", b"r"),
    ]  # fmt: skip
    assert (body["body"], body["more_body"]) == (b'{"a":1}', False)


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [(409, None, "invalid_request_error"), (503, None, "server_error"), (503, "overloaded_error", "overloaded_error")],
)
def test_refusals_have_openai_s_shape(status: int, kind: str | None, told: str) -> None:
    """A client would read its own mistake as the server's, or could not read the refusal at all."""
    body = sent(refused(status, "no", "code", kind=kind))[1]["body"]
    assert body == f'{{"error":{{"message":"no","type":"{told}","param":null,"code":"code"}}}}'.encode()
