"""A worker's server, without sockets: what goes in and out of the ASGI application, over an engine that is scripted."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import numpy as np
import pytest

from phasesplit.engine.engine_events import (
    Event,
    Failed,
    Finished,
    KvLeft,
    KvReady,
    PromptScored,
    Refused,
    Started,
    Token,
)
from phasesplit.engine.facts import EngineFacts
from phasesplit.engine.fetch import tiny_vocabulary
from phasesplit.engine.server import worker_app
from phasesplit.engine.server_worker import Worker
from phasesplit.engine.thread import EngineThread
from phasesplit.engine.tokens import tokenizer_from_gguf
from phasesplit.engine.wire import Served, WorkerRequest
from phasesplit.protocol.asgi import LARGEST_BODY_BYTES
from phasesplit.protocol.worker import PrefillTimes, Scored

EPOCH = 7
ADDRESS = {"boot_id": "b", "unix": None, "tcp": ["127.0.0.1", 1]}
SENDS = {"do_remote_decode": True, "key": "r.0", "peer": "t", "peer_epoch": 3, "epoch": EPOCH, "address": ADDRESS}
TAKES = {"do_remote_prefill": True, "key": "r.0", "peer": "p", "peer_epoch": 3, "epoch": EPOCH}


class ScriptedThread:
    """An engine that does what the test says, when it says so."""

    def __init__(self) -> None:
        self.facts = EngineFacts(context_tokens=64, capacity_blocks=8, used_blocks=0, block_tokens=32)
        self.error: BaseException | None = None
        self.requests: dict[str, tuple[WorkerRequest, Callable[[Event], None]]] = {}
        self.aborted: list[str] = []
        self.is_draining = False

    def submit(self, key: str, request: WorkerRequest, on_event: Callable[[Event], None]) -> None:
        self.requests[key] = request, on_event

    def abort(self, key: str) -> None:
        self.aborted.append(key)

    def drain(self) -> None:
        self.is_draining = True

    def say(self, *events: Event, key: str | None = None) -> None:
        """Let something happen to a request, by default to the only one."""
        _, on_event = self.requests[key or next(iter(self.requests))]
        for event in events:
            on_event(event)


class Call:
    """One HTTP request to an ASGI application, as the server of a socket would make it."""

    def __init__(
        self, app: Any, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> None:
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self._incoming.put_nowait({"type": "http.request", "body": raw, "more_body": False})
        self.sent: list[dict[str, Any]] = []
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "http_version": "1.1", "scheme": "http", "server": ("worker", 80), "client": ("gateway", 1),
            "root_path": "", "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def hang_up(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def settle(self) -> None:
        """Let everything happen that can."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def status(self) -> int | None:
        return next((message["status"] for message in self.sent if message["type"] == "http.response.start"), None)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    async def answer(self) -> tuple[int, Any]:
        """Wait for the whole answer."""
        await asyncio.wait_for(self.task, 30)
        return cast("int", self.status), json.loads(self.body)

    def events(self) -> list[Any]:
        """Return the events of a stream so far."""
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Bench:
    """A worker over a scripted engine, and its application."""

    def __init__(self, key: str | None = None) -> None:
        words = tiny_vocabulary()
        kinds = np.array([3 if word.startswith("<|") else 1 for word in words], np.int32)
        tokenizer = tokenizer_from_gguf(
            "test",
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "smollm",
                "tokenizer.ggml.tokens": words,
                "tokenizer.ggml.token_type": kinds,
                "tokenizer.ggml.merges": ["Ġ t"],
            },
        )
        self.thread = ScriptedThread()
        self.worker = Worker(
            name="w",
            epoch=EPOCH,
            home="prefill",
            thread=cast("EngineThread", self.thread),
            load_tokenizer=lambda: tokenizer,
            served=Served(
                models=("tiny",), vocab=300, context_tokens=64, encode=lambda text, _: tokenizer.encode(text)
            ),
            constant={"model": "tiny", "layout": {"layers": 2}},
        )
        self.app = worker_app(self.worker, key=key)

    async def complete(self, transfer: dict[str, Any] | None = None, **fields: Any) -> Call:
        """Send a request and let it reach the engine."""
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "return_token_ids": True} | fields
        call = Call(self.app, "POST", "/v1/completions", body | ({"kv_transfer_params": transfer} if transfer else {}))
        await call.settle()
        return call


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def token(number: int) -> Token:
    return Token(Scored(number))


def test_a_whole_request_is_answered_in_one_piece() -> None:
    """A client that does not stream would get chunks, other tokens, or a wrong count."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete()
        assert call.status is None
        bench.thread.say(Started(), token(40), token(41), Finished("stop", 41))
        status, answer = await call.answer()
        choice = answer["choices"][0]
        assert (status, choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == (
            200,
            [40, 41],
            "stop",
            41,
        )
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        assert bench.thread.aborted == []
        assert bench.worker.live == {}

    run(test)


def test_a_stream_has_a_token_a_chunk_and_its_end_with_the_last() -> None:
    """The gateway would see two tokens at once, or an end that comes without its token."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(TAKES, stream=True, stream_options={"include_usage": True})
        bench.thread.say(KvReady())
        await call.settle()
        assert call.status is None, "headers are held until there is a token"
        bench.thread.say(token(40))
        await call.settle()
        assert call.events()[0]["choices"][0]["token_ids"] == [40]
        bench.thread.say(token(41), token(42), Finished("length"))
        await asyncio.wait_for(call.task, 30)
        *chunks, used, done = call.events()
        assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[40], [41], [42]]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
        assert used["usage"]["completion_tokens"] == 3
        assert done == "[DONE]"
        assert bench.thread.aborted == []

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_token_tells_how_long_its_prompt_took(stream: bool) -> None:
    """The gateway would not know how long a request queued, where the report of its start is late."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(stream=stream)
        bench.thread.say(Started(), Token(Scored(40), PrefillTimes(0.25, 1.5)), token(41), Finished("length"))
        await asyncio.wait_for(call.task, 30)
        times = (
            [line.get("phasesplit") for line in call.events()[:-1]] if stream else [json.loads(call.body)["phasesplit"]]
        )
        assert times == [{"queued_s": 0.25, "prefill_s": 1.5}, None][: len(times)]

    run(test)


def test_a_failure_before_the_first_token_is_an_http_error() -> None:
    """A gateway could not try another pair: a stream that has begun cannot be taken back."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(TAKES, stream=True)
        bench.thread.say(Failed("the sender has gone"))
        status, answer = await call.answer()
        assert (status, answer["error"]["code"]) == (500, "transfer_failed")
        assert bench.worker.live == {}

    run(test)


def test_a_failure_after_the_first_token_is_an_event_without_an_end() -> None:
    """An error would look like a normal end."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(TAKES, stream=True)
        bench.thread.say(KvReady(), token(40), Failed("memory"))
        await asyncio.wait_for(call.task, 30)
        assert call.events()[-1]["error"]["message"] == "memory"
        assert b"[DONE]" not in call.body
        assert not any(event["choices"][0]["finish_reason"] for event in call.events() if "choices" in event)

    run(test)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (409, "conflict"), (503, "overloaded_error")]
)
def test_a_refusal_has_its_status(status: int, kind: str) -> None:
    """The gateway would take a wrong request for a full worker, or the other way round."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete()
        bench.thread.say(Refused(status, "no"))
        assert (await call.answer())[0] == status
        assert json.loads(call.body)["error"]["type"] == kind

    run(test)


@pytest.mark.parametrize(
    ("transfer", "stream", "before"),
    [
        pytest.param(None, False, (), id="whole, queued"),
        pytest.param(None, False, (Started(), token(40)), id="whole, in the decode phase"),
        pytest.param(None, True, (Started(), token(40)), id="whole, streaming"),
        pytest.param(SENDS, False, (), id="prefill leg, queued"),
        pytest.param(SENDS, False, (Started(),), id="prefill leg, in the prefill phase"),
        pytest.param(TAKES, True, (), id="decode leg, waiting for KV"),
        pytest.param(TAKES, True, (KvReady(),), id="decode leg, KV here"),
        pytest.param(TAKES, True, (KvReady(), token(40)), id="decode leg, streaming"),
    ],
)
def test_a_closed_connection_aborts_in_every_state(
    transfer: dict[str, Any] | None, stream: bool, before: tuple[Event, ...]
) -> None:
    """KV of a client that has gone would be held, and computed on, until the request's end."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(transfer, stream=stream, max_tokens=1 if transfer is SENDS else 4)
        bench.thread.say(*before)
        await call.settle()
        assert bench.thread.aborted == []
        call.hang_up()
        await asyncio.wait_for(call.task, 30)
        assert bench.thread.aborted == list(bench.thread.requests)
        assert bench.worker.live == {}

    run(test)


def test_a_prompt_legs_kv_stays_after_its_answer() -> None:
    """The KV would be thrown away before it has left: every answer of a prefill leg closes its connection."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(SENDS, max_tokens=1)
        bench.thread.say(Started(), token(40), Finished("length"))
        assert (await call.answer())[0] == 200
        call.hang_up()
        await call.settle()
        assert bench.thread.aborted == []
        assert bench.worker.facts()["keys"] == ["r.0"]
        bench.thread.say(KvLeft())
        assert bench.worker.facts()["keys"] == []

    run(test)


def test_an_abort_by_key_reaches_the_engine_and_is_told_once() -> None:
    """KV that waits to leave after the prefill leg's answer could not be given up, or be given up twice."""

    async def test() -> None:
        bench = Bench()
        listening = Call(bench.app, "GET", "/events")
        call = await bench.complete(SENDS, max_tokens=1)
        bench.thread.say(token(40), Finished("length"))
        await call.answer()
        for _ in range(2):
            assert (await Call(bench.app, "POST", "/abort", {"key": "r.0"}).answer())[0] == 200
        await listening.settle()
        lines = [json.loads(line) for line in listening.body.splitlines()]
        assert [line for line in lines if "gone" in line] == [{"gone": "r.0", "why": "aborted"}]
        listening.task.cancel()

    run(test)


def test_events_tell_what_happens_to_keys() -> None:
    """The gateway's ledger would book prefill phases and transfers at other times than they happen, or never."""

    async def test() -> None:
        bench = Bench()
        listening = Call(bench.app, "GET", "/events")
        await listening.settle()
        call = await bench.complete(SENDS, max_tokens=1)
        bench.thread.say(Started(), token(40), Finished("length"), Failed("peer gone"), KvLeft())
        await call.answer()
        await listening.settle()
        first, *others = [json.loads(line) for line in listening.body.splitlines()]
        assert first["facts"]["name"] == "w"
        assert others == [{"prefill_started": "r.0"}, {"gone": "r.0", "why": "peer gone"}, {"kv_left": "r.0"}]
        listening.hang_up()
        await asyncio.wait_for(listening.task, 30)
        assert not bench.worker.feed.has_listener

    run(test)


def test_facts_come_at_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A healthy worker that has nothing to do would look dead."""
    monkeypatch.setattr("phasesplit.engine.server_worker.BEAT_S", 0.01)

    async def test() -> None:
        bench = Bench()
        listening = Call(bench.app, "GET", "/events")
        await asyncio.sleep(0.2)
        assert listening.body.count(b'"facts"') >= 3
        listening.task.cancel()

    run(test)


@pytest.mark.parametrize("transfer", [SENDS | {"epoch": 6}, TAKES | {"epoch": 8}, {"epoch": 6}])
def test_a_stale_epoch_is_refused(transfer: dict[str, Any]) -> None:
    """An order meant for an earlier start of this worker would be carried out by a later one."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(transfer, max_tokens=1)
        assert (await call.answer())[0] == 409
        assert bench.thread.requests == {}

    run(test)


def test_roles_are_fenced_by_epoch_and_checked() -> None:
    """A role meant for an earlier start would stick, or one that does not exist be believed."""

    async def test() -> None:
        bench = Bench()
        for order, status in (
            ({"epoch": EPOCH - 1, "role": "decode"}, 409),
            ({"role": "decode"}, 409),
            ({"epoch": EPOCH, "role": "king"}, 400),
            ({"epoch": EPOCH, "role": "decode"}, 200),
        ):
            assert (await Call(bench.app, "POST", "/role", order).answer())[0] == status
        assert bench.worker.facts()["role"] == "decode"
        assert bench.worker.facts()["home"] == "prefill"

    run(test)


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    """Whoever reaches the port could compute, or read what others do."""

    async def test() -> None:
        bench = Bench(key="open sesame")
        for method, path in (("GET", "/facts"), ("GET", "/events"), ("POST", "/v1/completions"), ("POST", "/drain")):
            assert (await Call(bench.app, method, path).answer())[0] == 401
            wrong = {"Authorization": "Bearer open"}
            assert (await Call(bench.app, method, path, headers=wrong).answer())[0] == 401
        right = {"Authorization": "Bearer open sesame"}
        assert (await Call(bench.app, "GET", "/facts", headers=right).answer())[0] == 200
        assert (await Call(bench.app, "GET", "/health").answer())[0] == 200

    run(test)


def test_draining_is_told_to_the_engine_and_shown() -> None:
    """A worker that is to leave would go on taking requests, or look healthy."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete()
        assert (await Call(bench.app, "POST", "/drain", {}).answer())[0] == 200
        assert bench.thread.is_draining
        assert (await Call(bench.app, "GET", "/health").answer())[0] == 503
        assert not await bench.worker.drained(within_s=0.02)
        bench.thread.say(token(40), Finished("length"))
        await call.answer()
        assert await bench.worker.drained(within_s=0.02)

    run(test)


def test_a_dead_engine_is_not_healthy() -> None:
    """A worker that computes nothing any more would never be started again."""

    async def test() -> None:
        bench = Bench()
        bench.thread.error = ValueError("broken")
        assert (await Call(bench.app, "GET", "/health").answer())[0] == 503

    run(test)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"\xff", 400),
        (b"[]", 400),
        ({"model": "other", "prompt": [5]}, 404),
        ({"model": "tiny", "prompt": "a" * 100}, 400),
        ({"model": "tiny", "prompt": [5], "max_tokens": "4"}, 400),
        (b" " * (LARGEST_BODY_BYTES + 1), 413),
    ],
)
def test_wrong_bodies_are_refused(body: Any, status: int) -> None:
    """A wrong request would end in a 500, or reach the engine."""

    async def test() -> None:
        bench = Bench()
        assert (await Call(bench.app, "POST", "/v1/completions", body).answer())[0] == status
        assert bench.thread.requests == {}

    run(test)


def test_log_probabilities_and_prompt_scores_are_told() -> None:
    """A client that asks what the model thought would get nothing, or another place's figures."""

    async def test() -> None:
        bench = Bench()
        call = await bench.complete(logprobs=1, prompt_logprobs=0)
        scores = (Scored(5), Scored(6, -1.0), Scored(7, -2.0))
        bench.thread.say(PromptScored(scores), Token(Scored(40, -0.5, ((41, -0.25),))), Finished("length"))
        choice = (await call.answer())[1]["choices"][0]
        assert choice["logprobs"]["token_logprobs"] == [-0.5]
        assert choice["logprobs"]["top_token_ids"] == [[41]]
        assert [place and next(iter(place.values()))["logprob"] for place in choice["prompt_logprobs"]] == [
            None,
            -1.0,
            -2.0,
        ]

    run(test)


def test_own_keys_are_not_told_to_the_gateway() -> None:
    """The gateway would ask to abort a request that it did not send."""

    async def test() -> None:
        bench = Bench()
        await bench.complete()
        assert len(bench.worker.live) == 1
        assert bench.worker.facts()["keys"] == []

    run(test)
