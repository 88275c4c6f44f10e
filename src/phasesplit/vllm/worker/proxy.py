"""POST /v1/completions of a vLLM worker: the gateway's legs, passed to vLLM's own API server, and POST /handover.

A leg of the prefill machine and one of the decode machine:

1. The gateway sends both legs at once. Each knows only the `kv_transfer_params` that the gateway gave it.
2. The prefill leg waits for vLLM's prefill. Its worker then calls POST /handover of the decode machine's worker, with
   the parameters from which vLLM's own connector fetches the KV, if that connector is used.
3. The decode leg of vLLM's own connector waits for the handover. With ours it goes to vLLM at once, which waits for KV.
4. The handover is answered with the first token of the decode machine, which the prefill leg passes on in place of its
   own. vLLM's decode machine computes the last position of the prompt again in order to sample, so the text continues
   from its token, and in half precision the two may differ.

Response headers are held until vLLM answers. A closed connection ends the request: vLLM sees its own connection close.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import orjson
from starlette.requests import Request

from phasesplit.errors import RequestError
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
from phasesplit.protocol.bodies import typed_field
from phasesplit.protocol.sse import DONE, answer_lines, chunk_text, event, framed
from phasesplit.vllm.worker.state import Leg, VllmWorkerState

_AGREE_S = 5.0
"""How long a prefill machine that has its first token waits for the decode machine's, which no longer waits itself."""
_HANDOVER_S = 120.0
"""How long a decode leg waits for the parameters from which it fetches KV."""
_REMEMBERED = 1_000
"""First tokens that are kept for prefill machines that call late."""
_EVENTS = {"Content-Type": "text/event-stream"}
_JSON = {"Content-Type": "application/json"}
_NIXL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""What vLLM's NixlConnector asks of a prefill leg. Source: vllm 0.32, docs/features/nixl_connector_usage.md."""


class FirstTokenHandover:
    """What the two legs of one request exchange.

    Attributes:
        params: What the prefill machine hands over.
        first: The decode machine's first choice object, None if there was none.
        users: Legs and calls that use this now.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.params: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.first: asyncio.Future[dict[str, Any] | None] = loop.create_future()
        self.users = 0

    def set_params(self, params: dict[str, Any]) -> None:
        """Let the decode leg continue."""
        if not self.params.done():
            self.params.set_result(params)

    def set_first(self, choice: dict[str, Any] | None) -> None:
        """Answer the prefill machine; only the first call counts."""
        if not self.first.done():
            self.first.set_result(choice)


class FirstTokenHandovers:
    """The handovers in use, and the first tokens of the latest that have ended.

    A decode machine may end a short answer before the prefill machine calls.
    """

    def __init__(self) -> None:
        self._open: dict[str, FirstTokenHandover] = {}
        self._firsts: dict[str, dict[str, Any]] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[FirstTokenHandover]:
        """Use the handover of a key; it ends with its last user."""
        handover = self._open.get(key)
        if handover is None:
            handover = self._open[key] = FirstTokenHandover()
            if key in self._firsts:
                handover.set_first(self._firsts.pop(key))
        handover.users += 1
        try:
            yield handover
        finally:
            handover.users -= 1
            if not handover.users:
                del self._open[key]
                self._remember(key, handover)

    def _remember(self, key: str, handover: FirstTokenHandover) -> None:
        first = handover.first.result() if handover.first.done() and not handover.first.cancelled() else None
        if first is not None:
            self._firsts[key] = first
        if len(self._firsts) > _REMEMBERED:
            del self._firsts[next(iter(self._firsts))]


class VllmProxy:
    """The endpoint, an ASGI application.

    Args:
        worker: The worker.
        peers: For calls to the workers of other machines.
    """

    def __init__(self, worker: VllmWorkerState, peers: aiohttp.ClientSession) -> None:
        self._worker, self._peers, self._handovers = worker, peers, FirstTokenHandovers()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            text = await read_body(receive)
            body, params = self._checked(text)
        except ClientGoneError:
            return
        except RequestError as problem:
            await refused(problem.status, str(problem), problem.code)(scope, receive, send)
            return
        leg = Leg(
            str(params.get("key", "")),
            len(body.get("prompt") or ()),
            sends=bool(params.get("do_remote_decode")),
            awaits=bool(params.get("do_remote_prefill")),
        )
        serving = asyncio.create_task(self._serve(leg, body, params, scope, receive, send))
        leaving = asyncio.create_task(client_gone(receive))
        self._worker.legs.begin(leg)
        if leg.key:
            self._worker.tasks[leg.key] = serving
        try:
            await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
        finally:
            self._worker.tasks.pop(leg.key, None)
            self._worker.legs.end(leg)
            if leg.sends and not leg.tokens:
                self._worker.drop(leg.key)

    async def handover(self, request: Request) -> JsonAnswer:
        """Take what a prefill machine hands over; answer with our first token, 504 if there is none in time."""
        try:
            body = _object(await read_body(request.receive))
            key, params = typed_field(body, "key", str), _object_in(body, "params")
        except ClientGoneError:
            return refused(400, "the body is not a JSON object")
        except RequestError as problem:
            return refused(problem.status, str(problem), problem.code)
        with self._handovers.of(key) as handover:
            handover.set_params(params)
            try:
                first = await asyncio.wait_for(asyncio.shield(handover.first), _AGREE_S)
            except TimeoutError:
                first = None
        return refused(504, "there is no first token yet", None) if first is None else JsonAnswer(200, first)

    def _checked(self, text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a body and its `kv_transfer_params`."""
        body = _object(text)
        params = _object_in(body, "kv_transfer_params")
        epoch, worker = params.get("epoch"), self._worker
        if epoch is not None and epoch != worker.epoch:
            raise RequestError(
                f"kv_transfer_params.epoch: got {epoch}, this worker is in epoch {worker.epoch}",
                status=409,
                code="stale_epoch",
            )
        if worker.is_draining or worker.error is not None:
            raise RequestError("this worker takes no more requests", status=503, code="no_capacity")
        splits = params.get("do_remote_decode") or params.get("do_remote_prefill")
        if splits and (not isinstance(params.get("key"), str) or not params["key"]):
            raise RequestError("kv_transfer_params.key: allowed is a text", param="kv_transfer_params.key")
        if splits and worker.settings.connector == "none":
            raise RequestError("this worker serves whole requests only", status=503, code="no_capacity")
        return body, params

    async def _serve(
        self, leg: Leg, body: dict[str, Any], params: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        is_nixl = self._worker.settings.connector == "nixl"
        if not leg.sends and not leg.awaits:
            body.pop("kv_transfer_params", None)
            if leg.key and self._worker.settings.connector == "phasesplit":
                body["kv_transfer_params"] = {"key": leg.key}  # the connector reports when prefill begins
        if leg.sends:
            if is_nixl:
                body["kv_transfer_params"] = _NIXL
                self._worker.report({"prefill_started": leg.key})
            await (await self._prefill_leg(leg, body, params))(scope, receive, send)
            return
        with self._handovers.of(leg.key or str(id(leg))) as handover:
            try:
                if leg.awaits and is_nixl:
                    body["kv_transfer_params"] = await asyncio.wait_for(handover.params, _HANDOVER_S)
                await self._stream(leg, body, send, handover)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as problem:
                # An answer that has begun breaks off, which its reader takes for a lost machine.
                if not leg.answers:
                    await refused(502, f"vLLM: {type(problem).__name__} {problem}", None)(scope, receive, send)
            finally:
                handover.set_first(None)

    async def _prefill_leg(self, leg: Leg, body: dict[str, Any], params: dict[str, Any]) -> JsonAnswer:
        status, answer = await _call(self._worker.session, f"{self._worker.server.url}/v1/completions", body)
        if status != 200 or not answer.get("choices"):
            return JsonAnswer(status, answer)
        leg.tokens = 1
        choice = answer["choices"][0]
        _drop_prompt_ids(answer)
        handed_over = {"key": leg.key, "params": answer.pop("kv_transfer_params", None)}
        url = str((params.get("address") or {}).get("http") or "")
        if not url:
            return JsonAnswer(200, answer)
        status, theirs = await _call(self._peers, f"{url}/handover", handed_over, within_s=_AGREE_S + 1.0)
        if status == 200 and theirs.get("token_ids"):
            tokens = len(theirs["token_ids"])
            choice |= {"token_ids": theirs["token_ids"][:1], "text": "", "logprobs": _first_of(theirs.get("logprobs"))}
            choice["finish_reason"] = "stop" if tokens == 1 and theirs.get("finish_reason") == "stop" else "length"
            if self._worker.settings.connector == "nixl":
                self._worker.report({"kv_left": leg.key})
        return JsonAnswer(200, answer)

    async def _stream(self, leg: Leg, body: dict[str, Any], send: Send, handover: FirstTokenHandover) -> None:
        """Pass an answer on as it comes."""
        # vLLM scores prompts only in answers of one piece.
        in_one_piece = body.get("prompt_logprobs") is not None
        if in_one_piece:
            body |= {"stream": False}
            body.pop("stream_options", None)
        async with self._worker.session.post(
            f"{self._worker.server.url}/v1/completions", data=orjson.dumps(body),
            headers=_JSON, timeout=aiohttp.ClientTimeout(total=None),
        ) as response:  # fmt: skip
            if response.status != 200 or not body.get("stream"):
                answer = await response.read()
                is_event = in_one_piece and response.status == 200
                leg.answers = True
                await start(send, response.status, _EVENTS if is_event else _JSON)
                await send_part(send, framed(answer) + DONE if is_event else answer, has_more=False)
                return
            async for line in answer_lines(response.content):
                if not line:
                    continue
                passed, text = line + b"\n\n", chunk_text(line)
                if text is not None:
                    chunk = orjson.loads(text)
                    self._count(leg, chunk, handover)
                    passed = event(chunk) if _drop_prompt_ids(chunk) else passed
                if not leg.answers:
                    leg.answers = True
                    await start(send, 200, _EVENTS)
                await send_part(send, passed, has_more=True)
            await send_part(send, b"", has_more=False)

    def _count(self, leg: Leg, chunk: dict[str, Any], handover: FirstTokenHandover) -> None:
        """Count the tokens of a chunk; the first one is the handover's."""
        for choice in chunk.get("choices") or ():
            tokens = len(choice.get("token_ids") or ())
            if tokens and not leg.tokens:
                if leg.awaits and self._worker.settings.connector == "nixl":
                    self._worker.report({"kv_ready": leg.key})
                handover.set_first(choice)
            leg.tokens += tokens


async def _call(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], within_s: float | None = None
) -> tuple[int, dict[str, Any]]:
    """Post JSON; return status and answer, 502 if there is none."""
    try:
        async with session.post(
            url, data=orjson.dumps(body), headers=_JSON, timeout=aiohttp.ClientTimeout(total=within_s)
        ) as response:
            answer = orjson.loads(await response.read())
            return response.status, answer if isinstance(answer, dict) else {}
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as problem:
        return 502, {"error": {"message": f"vLLM: {type(problem).__name__} {problem}", "type": "server_error"}}


def _object(text: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is, or raise a RequestError."""
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise RequestError("the body is not a JSON object")
    return found


def _object_in(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object's field that is an object too, an empty one if it is left out; or raise a RequestError."""
    found = body.get(name) or {}
    if not isinstance(found, dict):
        raise RequestError(f"{name}: allowed is an object", param=name)
    return found


def _drop_prompt_ids(answer: dict[str, Any]) -> bool:
    """Remove the prompt's ids, which nobody reads, from an answer; return whether they were there.

    vLLM sends them with those of the output (`return_token_ids`), in the first event of a stream.
    """
    found = [choice.pop("prompt_token_ids", None) for choice in answer.get("choices") or ()]
    return any(ids is not None for ids in found)


def _first_of(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the log-probabilities of the first token alone."""
    if not logprobs:
        return None
    return {name: value[:1] if isinstance(value, list) else value for name, value in logprobs.items()}
