"""The little of ASGI that every server here needs: bodies under a bound, the client's leaving, answers of JSON.

Plain dictionaries, as the specification has them, so that no web framework is needed. Source: ASGI specification 3.0,
HTTP connection scope.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import orjson

from phasesplit.errors import RequestError
from phasesplit.protocol.openai_errors import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LARGEST_BODY_BYTES = 16 << 20


class ClientGoneError(Exception):
    """The client has left; there is nobody to answer."""


async def read_body(receive: Receive, most_bytes: int = LARGEST_BODY_BYTES) -> bytes:
    """Return the whole body of a request.

    Args:
        receive: Where its parts come from.
        most_bytes: The longest body.

    Raises:
        RequestError: 413 as soon as it is known to be too long.
        ClientGoneError: The client leaves.
    """
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > most_bytes:
            raise RequestError(f"the body is longer than {most_bytes} bytes", status=413, code="request_too_large")
        if not message.get("more_body", False):
            return b"".join(parts)


async def client_gone(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def start(send: Send, status: int, headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
    """Send status and headers.

    Args:
        send: Where to.
        status: HTTP status.
        headers: Names and values, in order.
    """
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in pairs]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def send_part(send: Send, body: bytes, *, has_more: bool) -> None:
    """Send a part of the body of an answer.

    Args:
        send: Where to.
        body: The part.
        has_more: Whether others follow.
    """
    await send({"type": "http.response.body", "body": body, "more_body": has_more})


class JsonAnswer:
    """A whole answer of JSON, an ASGI application.

    Args:
        status: HTTP status.
        content: The object.
        headers: Further headers.
    """

    def __init__(self, status: int, content: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        self.status, self.body = status, orjson.dumps(content)
        self.headers = {"content-type": "application/json", "content-length": str(len(self.body)), **(headers or {})}

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        """Send it."""
        await self.send_to(send)

    async def send_to(self, send: Send) -> None:
        """Send it, whatever was asked for."""
        await start(send, self.status, self.headers)
        await send_part(send, self.body, has_more=False)


def refused(
    status: int,
    message: str,
    code: str | None = None,
    *,
    kind: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JsonAnswer:
    """Return the answer to a request that is not served.

    Args:
        status: HTTP status; 500 and above is the server's fault.
        message: What a person reads.
        code: A word for programs, or None.
        kind: Of error, in OpenAI's words; None: the client's, or from 500 on the server's.
        headers: Further headers.
    """
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    return JsonAnswer(status, error_body(message, kind=kind, code=code), headers)
