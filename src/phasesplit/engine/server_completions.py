"""POST /v1/completions of a worker: whole requests, prompt legs and token legs.

Nothing is sent before there is something to say: a refusal or a failure before the first token is an HTTP error, never
an error inside a 200. Whoever closes the connection ends the request, whatever state it is in.
"""

import asyncio
import secrets
import time
from collections import deque
from typing import Any, cast

from phasesplit.engine.events import Event, Failed, Finished, PromptScored, Refused, Token
from phasesplit.engine.server_worker import Worker
from phasesplit.engine.tokens import Detokenizer
from phasesplit.engine.wire import WorkerRequest, parsed_request
from phasesplit.errors import RequestError
from phasesplit.protocol.answers import usage
from phasesplit.protocol.asgi import (
    ClientGoneError,
    JsonAnswer,
    Receive,
    Scope,
    Send,
    client_gone,
    read_body,
    refused,
    send_part,
    start,
)
from phasesplit.protocol.errors import error_answer, error_body
from phasesplit.protocol.sse import CONTENT_TYPE, DONE, event
from phasesplit.protocol.worker import PromptTimes, Scored, TakeKv
from phasesplit.protocol.worker_answers import TOKEN_NAME, Part, WorkerAnswer

_TYPES = {400: "invalid_request_error", 409: "conflict", 503: "overloaded_error"}


class _Gone:
    """The client has closed the connection."""


_Heard = Event | _Gone


class _Inbox:
    """What a request hears, in order."""

    def __init__(self) -> None:
        self._waiting: deque[_Heard] = deque()
        self._arrived = asyncio.Event()

    def put(self, heard: _Heard) -> None:
        self._waiting.append(heard)
        self._arrived.set()

    async def take(self) -> _Heard:
        """Wait for the next, and take it."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        return self._waiting.popleft()

    def take_end(self) -> Finished | None:
        """Take the next if it is the end, and is here already."""
        if self._waiting and isinstance(self._waiting[0], Finished):
            return cast("Finished", self._waiting.popleft())
        return None


class Completions:
    """The endpoint, an ASGI application."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            body = await read_body(receive)
            request = parsed_request(body, self._worker.served, seed=secrets.randbits(63))
            request.demand_epoch(self._worker.epoch)
        except ClientGoneError:
            return
        except RequestError as problem:
            await JsonAnswer(problem.status, error_answer(problem).body).send_to(send)
            return
        await _Choice(self._worker, request).serve(receive, send)


class _Choice:
    """One request, from its parsing to the last byte of its answer."""

    def __init__(self, worker: Worker, request: WorkerRequest) -> None:
        self._worker, self._request = worker, request
        self._key = request.transfer.key if request.transfer is not None else worker.own_key()
        self._heard = _Inbox()
        self._tokens = 0
        self._text_length = 0
        self._detokenizer = Detokenizer(worker.tokenizer)
        self._prompt: tuple[Scored, ...] = ()
        self._times: PromptTimes | None = None
        self._answer = WorkerAnswer(
            request=f"cmpl-{self._key}",
            created_s=int(time.time()),
            model=request.model,
            spelled=self._spelled,
            has_token_ids=request.return_token_ids,
            has_logprobs=request.sampling.logprobs is not None,
            has_echo=request.echo,
            has_prompt_logprobs=request.prompt_logprobs is not None,
        )

    async def serve(self, receive: Receive, send: Send) -> None:
        """Compute and answer; a client that goes away, and every error here, ends the request."""
        self._worker.submit(self._request, self._key, self._heard.put)
        leaving = asyncio.create_task(self._watch(receive))
        is_over = False
        try:
            first = await self._first()
            if isinstance(first, _Gone):
                return
            if isinstance(first, Refused | Failed):
                is_over = True
                await self._refuse(first).send_to(send)
            elif self._request.stream:
                is_over = await self._stream(first, send)
            else:
                is_over = await self._whole(first, send)
        finally:
            leaving.cancel()
            if not is_over:
                self._worker.abort(self._key, "aborted")

    async def _watch(self, receive: Receive) -> None:
        await client_gone(receive)
        self._heard.put(_Gone())

    async def _first(self) -> Token | Finished | Refused | Failed | _Gone:
        """Return the first event that says something to the client."""
        while True:
            heard = await self._heard.take()
            if isinstance(heard, PromptScored):
                self._prompt = heard.scores
            elif isinstance(heard, Token):
                self._times = heard.times
                return heard
            elif isinstance(heard, Finished | Refused | Failed | _Gone):
                return heard

    async def _whole(self, first: Token | Finished, send: Send) -> bool:
        """WorkerAnswer in one piece; return whether the request is over here (or its KV is on its way by itself)."""
        output: list[Scored] = []
        heard: _Heard = first
        while not isinstance(heard, Finished):
            if isinstance(heard, Token):
                output.append(heard.scored)
            elif isinstance(heard, Failed):
                await self._refuse(heard).send_to(send)
                return True
            elif isinstance(heard, _Gone):
                return False
            heard = await self._heard.take()
        part = self._part(output, heard)
        used = usage([len(self._request.prompt_ids)], [self._tokens])
        await JsonAnswer(200, self._answer.completion(part, used)).send_to(send)
        return True

    async def _stream(self, first: Token | Finished, send: Send) -> bool:
        """WorkerAnswer a token a chunk; return whether the request is over here."""
        await start(send, 200, {"content-type": CONTENT_TYPE, "cache-control": "no-cache"})
        heard: _Heard = first
        while True:
            if isinstance(heard, _Gone):
                return False
            if isinstance(heard, Failed):
                # No mark of a normal end: an error is never one.
                await send_part(send, event(_failure(heard, self._request, has_token=True)), has_more=False)
                return True
            if isinstance(heard, Token | Finished):
                output = [heard.scored] if isinstance(heard, Token) else []
                end = heard if isinstance(heard, Finished) else self._heard.take_end()
                chunk = event(self._answer.chunk(self._part(output, end), with_usage=self._request.include_usage))
                if end is not None:
                    await send_part(send, chunk + self._usage_chunk() + DONE, has_more=False)
                    return True
                await send_part(send, chunk, has_more=True)
            heard = await self._heard.take()

    def _part(self, output: list[Scored], end: Finished | None) -> Part:
        self._tokens += len(output)
        text = "".join([self._detokenizer.push(one.token) for one in output])
        if end is not None:
            text += self._detokenizer.finish()
            if isinstance(end.stop, str) and not self._request.include_stop and not self._request.stream:
                text = text[: text.find(end.stop)] if end.stop in text else text
        prompt, self._prompt = self._prompt, ()
        times, self._times = self._times, None
        if self._request.echo and self._text_length == 0 and self._tokens == len(output):
            text = self._worker.tokenizer.decode(self._request.prompt_ids) + text
        offset, self._text_length = self._text_length, self._text_length + len(text)
        return Part(
            text=text,
            output=output,
            prompt=prompt,
            text_offset=offset,
            finish_reason=None if end is None else end.reason,
            stop_reason=None if end is None else end.stop,
            times=times,
        )

    def _usage_chunk(self) -> bytes:
        if not self._request.include_usage:
            return b""
        return event(self._answer.usage_chunk(usage([len(self._request.prompt_ids)], [self._tokens])))

    def _refuse(self, why: Refused | Failed) -> JsonAnswer:
        if isinstance(why, Failed):
            return JsonAnswer(500, _failure(why, self._request, has_token=self._tokens > 0))
        return refused(why.status, why.message, "refused", kind=_TYPES.get(why.status, "server_error"))

    def _spelled(self, token: int) -> str:
        if self._request.names_by_id:
            return f"{TOKEN_NAME}{token}"
        return self._worker.tokenizer.token_bytes(token).decode("utf-8", "replace")


def _failure(why: Failed, request: WorkerRequest, *, has_token: bool) -> dict[str, Any]:
    is_transfer = isinstance(request.transfer, TakeKv) and not has_token
    return error_body(why.why, kind="server_error", code="transfer_failed" if is_transfer else "engine_failed")
