"""Request bodies, read under bounds on bytes and on time."""

import asyncio
import contextlib
import time
from collections.abc import MutableMapping
from typing import Any

from phasesplit.errors import RequestError
from phasesplit.gateway.limits import Limits
from phasesplit.protocol.asgi import ClientGoneError, Receive, Scope, read_body

_DISCARD_BYTES, _DISCARD_S = 1 << 24, 1.0
"""What is still taken of a body that is too long, so that its client sees the answer."""


async def bounded_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return a request's body.

    Raises:
        RequestError: 413 as soon as it is known to be too long, 408 if it does not arrive in time.
        ClientGoneError: The client leaves.
    """
    headers = dict(scope["headers"])
    told = headers.get(b"content-length", b"")
    if told.isdigit() and len(told) < 20 and int(told) > limits.body_bytes:
        if b"expect" not in headers:  # such a client sends nothing before it is asked to
            await _discard(receive)
        raise _too_long(f"{int(told)}", limits)
    try:
        async with asyncio.timeout(limits.header_s):
            try:
                return await read_body(receive, limits.body_bytes)
            except RequestError:
                await _discard(receive)
                raise _too_long("more", limits) from None
    except TimeoutError:
        raise RequestError(
            f"the body did not arrive within {limits.header_s:g} s", status=408, code="request_timeout"
        ) from None


async def _discard(receive: Receive) -> None:
    """Drop the rest of a body, within bounds: a client that is still sending would be cut off before the answer."""
    length, end_s = 0, time.monotonic() + _DISCARD_S
    with contextlib.suppress(TimeoutError):
        while length < _DISCARD_BYTES and time.monotonic() < end_s:
            async with asyncio.timeout(_DISCARD_S):
                message: MutableMapping[str, Any] = await receive()
            length += len(message.get("body", b""))
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            if not message.get("more_body", False):
                return


def _too_long(told: str, limits: Limits) -> RequestError:
    return RequestError(f"the body has {told} bytes, allowed are {limits.body_bytes}", status=413, code="body_too_long")
