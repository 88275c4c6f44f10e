"""One client's request over HTTP: its body, read under bounds on bytes and on time, and the bytes of its answer.

Nothing is sent before the first content is there, headers neither: until then a failure can still be tried again, or be
answered with its own status.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import MutableMapping, Sequence
from typing import Any

from phasesplit.errors import GatewayError, RequestError
from phasesplit.gateway.choice_spec import ChoiceSpec
from phasesplit.gateway.in_flight import InFlightRequests
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.live_request import LiveRequest
from phasesplit.gateway.request_states import Event
from phasesplit.protocol import sse
from phasesplit.protocol.answers import AnswerPiece, ClientAnswer, usage
from phasesplit.protocol.asgi import (
    ClientGoneError,
    JsonAnswer,
    Receive,
    Scope,
    Send,
    client_gone,
    read_body,
    send_part,
    start,
)
from phasesplit.protocol.completions import ChatRequest, ClientRequest
from phasesplit.protocol.openai_errors import error_answer

_DISCARD_BYTES, _DISCARD_S = 1 << 24, 1.0
"""What is still taken of a body that is too long, so that its client sees the answer."""


async def bounded_body(scope: Scope, receive: Receive, limits: Limits) -> bytes:
    """Return a request's body.

    Raises:
        RequestError: 413 as soon as it is known to be too long, 408 if it does not arrive in time.
        ClientGoneError: The client leaves.
    """
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if length.isdigit() and len(length) < 20 and int(length) > limits.body_bytes:
        if b"expect" not in headers:  # such a client sends nothing before it is asked to
            await _discard(receive)
        raise _too_long(f"{int(length)}", limits)
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


def _too_long(length: str, limits: Limits) -> RequestError:
    return RequestError(
        f"the body has {length} bytes, allowed are {limits.body_bytes}", status=413, code="body_too_long"
    )


_SLOW_READER_S = 30.0
"""How much longer than its request a client may take to read the answer."""


class ResponseStream:
    """What one request and its client have to do with one another."""

    def __init__(
        self, in_flight: InFlightRequests, request: ClientRequest, specs: Sequence[ChoiceSpec], answer: ClientAnswer
    ) -> None:
        """Make one whose choices have not begun.

        Args:
            in_flight: Where choices are served.
            request: The client's request.
            specs: Its choices.
            answer: What all parts of the answer share.
        """
        self._in_flight, self._request, self._answer = in_flight, request, answer
        self._is_chat = isinstance(request, ChatRequest)
        streams = bool(request.stream)
        self._choices = [LiveRequest(in_flight, spec, self._on_piece, streams=streams) for spec in specs]
        self._open = len(self._choices)
        self._failure: Exception | None = None
        self._client_gone = False
        self._pieces: deque[tuple[LiveRequest, int, AnswerPiece]] = deque()
        self._news = asyncio.Event()
        self._introduced: set[int] = set()

    async def serve(self, receive: Receive, send: Send) -> None:
        """Serve the request, to its end or to that of its client.

        Raises:
            GatewayError: It cannot be answered, and nothing has been sent.
            ClientGoneError: The client has left.
        """
        watch = asyncio.get_running_loop().create_task(self._watch(receive))
        try:
            for choice in self._choices:
                self._in_flight.begin(choice)
            async with asyncio.timeout(self._in_flight.limits.request_s + _SLOW_READER_S):
                await (self._stream(send) if self._request.stream else self._whole(send))
        except TimeoutError:
            raise ClientGoneError from None
        finally:
            watch.cancel()
            for choice in self._choices:
                if not choice.progress.ended:
                    choice.apply(Event.CLIENT_GONE if self._client_gone else Event.CANCELLED)

    def _on_piece(self, choice: LiveRequest, attempt: int, piece: AnswerPiece | None) -> None:
        if piece is not None:
            self._pieces.append((choice, attempt, piece))
        else:
            self._open -= 1
            if choice.output.finish_reason is None and self._failure is None:
                self._failure = choice.error or GatewayError("the request was given up")
            if not self._request.stream and self._open and self._failure is None:
                return
        self._news.set()

    async def _watch(self, receive: Receive) -> None:
        await client_gone(receive)
        self._client_gone = True
        self._news.set()

    async def _whole(self, send: Send) -> None:
        await self._news.wait()
        self._give_up_if_gone()
        if self._failure is not None:
            raise self._failure
        finished = [choice.output.finished() for choice in self._choices]
        shape = self._answer.chat if self._is_chat else self._answer.completion
        await JsonAnswer(200, shape(finished, self._usage()), {"x-request-id": self._answer.request}).send_to(send)

    async def _stream(self, send: Send) -> None:
        begun = False
        events: list[bytes] = []
        if self._failure is not None:  # refused before anything could be waited for
            raise self._failure
        while self._open or self._pieces:
            await self._news.wait()
            self._news.clear()
            self._give_up_if_gone()
            events = self._events()
            if self._failure is not None:
                if not begun:
                    raise self._failure
                events.append(sse.event(error_answer(self._failure).body))
                await send_part(send, b"".join(events), has_more=False)
                return
            if events and not begun:
                begun = True
                await start(send, 200, {"content-type": sse.CONTENT_TYPE, **self._stream_headers()})
            if events and (self._open or self._pieces):
                await send_part(send, b"".join(events), has_more=True)
                events = []
        if self._request.wants_usage:
            shape = self._answer.chat_usage_chunk if self._is_chat else self._answer.completion_usage_chunk
            events.append(sse.event(shape(self._usage())))
        events.append(sse.DONE)
        await send_part(send, b"".join(events), has_more=False)

    def _events(self) -> list[bytes]:
        """Return the events of all pieces that have come, unless their attempt has been given up since."""
        has_usage = self._request.wants_usage
        events = []
        while self._pieces:
            choice, attempt, piece = self._pieces.popleft()
            if not choice.begin_sending(attempt):
                continue
            if not self._is_chat:
                events.append(sse.event(self._answer.completion_chunk(piece, with_usage=has_usage)))
                continue
            if piece.index not in self._introduced:
                self._introduced.add(piece.index)
                events.append(sse.event(self._answer.role_chunk(piece.index, with_usage=has_usage)))
            events.append(sse.event(self._answer.chat_chunk(piece, with_usage=has_usage)))
        return events

    def _give_up_if_gone(self) -> None:
        if self._client_gone:
            raise ClientGoneError

    def _stream_headers(self) -> dict[str, str]:
        return {"cache-control": "no-cache", "x-accel-buffering": "no", "x-request-id": self._answer.request}

    def _usage(self) -> dict[str, int]:
        each = self._request.n or 1
        prompts = [len(choice.spec.prompt_ids) for choice in self._choices[::each]]
        return usage(prompts, [len(choice.output.ids) for choice in self._choices])
