"""A gateway in front of fake machines, in one process, on a clock that tests move."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from doubles import ByteCodec, FakeWire, FakeWorker, ManualClock, alphabet
from phasesplit.gateway.app import make_app
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.gateway import Gateway, Keys
from phasesplit.gateway.limits import Limits
from phasesplit.scheduler.rules import Rules

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
SPLIT = (("p", "prefill"), ("t", "decode"))
TWICE = (("p1", "prefill"), ("p2", "prefill"), ("t1", "decode"), ("t2", "decode"))
TURNS = 60
"""Turns of the event loop in which everything that can happen without time has happened."""


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Call:
    """One HTTP request to an app, its answer, and its client, who may leave."""

    def __init__(
        self,
        app: Callable[..., Awaitable[None]],
        method: str,
        path: str,
        body: bytes | list[bytes] | None = None,
        headers: dict[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self.parts = [] if body is None else [body] if isinstance(body, bytes) else list(body)
        self.is_slow = False
        self._gone = asyncio.Event()
        self._scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "client": (host, 1), "server": ("x", 80),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        }  # fmt: skip
        self._has_body_ended = False
        self._task = asyncio.get_running_loop().create_task(self._run(app))

    async def _run(self, app: Callable[..., Awaitable[None]]) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if not self._has_body_ended and not (self.is_slow and not self.parts):
            part = self.parts.pop(0) if self.parts else b""
            self._has_body_ended = not self.parts and not self.is_slow
            return {"type": "http.request", "body": part, "more_body": not self._has_body_ended}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def leave(self) -> None:
        """Close the client's connection."""
        self._gone.set()

    def cancel(self) -> None:
        """End the app's work, as a server that stops at once does."""
        self._task.cancel()

    async def answer(self) -> "Call":
        """Wait for the end of the answer."""
        await asyncio.wait_for(self._task, 30)
        return self

    @property
    def done(self) -> bool:
        """Whether the app has ended."""
        return self._task.done()

    @property
    def status(self) -> int | None:
        """Its status, None while no headers have been sent."""
        return self.sent[0]["status"] if self.sent else None

    @property
    def headers(self) -> dict[str, str]:
        """Its headers."""
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        """What of its body has been sent."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        """Its body, read."""
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream that have been sent; the mark of the end as text."""
        lines = [line[6:] for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """The text of a stream's first choice."""
        choices = [event["choices"][0] for event in self.events if event != "[DONE]" and event.get("choices")]
        return "".join(one["text"] if "text" in one else one["delta"].get("content", "") for one in choices)


class Rig:
    """A gateway, its machines and its clock."""

    def __init__(
        self,
        pools: tuple[tuple[str, str], ...] = SPLIT,
        *,
        limits: Limits | None = None,
        keys: Keys | None = None,
        records: Callable[[dict[str, Any]], object] | None = None,
        rule: Callable[..., int] = alphabet,
        context_tokens: int = 4096,
        **machine: Any,
    ) -> None:
        self.clock = ManualClock()
        self.wire = FakeWire()
        self.pools, self._rule, self._machine = pools, rule, {"context_tokens": context_tokens} | machine
        self.workers: dict[str, FakeWorker] = {}
        self.records: list[dict[str, Any]] = []
        self.gateway = Gateway(
            codec=ByteCodec(context_tokens),
            dispatcher=Dispatcher(Rules(block_tokens=16), limits),
            connect=self._connect,
            models=("fake",),
            clock=self.clock,
            limits=limits,
            keys=keys,
            records=records or self.records.append,
        )
        self.app = make_app(self.gateway)

    def _connect(self, url: str) -> FakeWorker:
        return self.workers[url.removeprefix("http://")]

    def worker(self, name: str, **changed: Any) -> FakeWorker:
        """Make a machine, or its next life."""
        given = {"rule": self._rule, "clock": self.clock} | self._machine | changed
        self.workers[name] = FakeWorker(name, self.wire, **given)
        return self.workers[name]

    async def join(self, name: str, home: str, **changed: Any) -> FakeWorker:
        """Let a machine join."""
        worker = self.worker(name, **changed)
        await self.gateway.workers.join(f"http://{name}", worker.snapshot(home=home))
        return worker

    async def __aenter__(self) -> "Rig":
        """Start everything."""
        self.gateway.start()
        for name, home in self.pools:
            await self.join(name, home)
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        """End everything, and look that nothing is left behind."""
        await settle()
        await self.gateway.close()
        for worker in self.workers.values():
            await worker.close()
        await settle()

    async def pass_time(self, seconds: float, step_s: float = 0.25) -> None:
        """Let time pass, with heartbeats of all machines that are not dead."""
        for _ in range(round(seconds / step_s)):
            for name, home in self.pools:
                if not self.workers[name].is_dead:
                    self.workers[name].report({"facts": self.workers[name].snapshot(home=home)})
            await settle()
            self.clock.advance(step_s)
            await settle()

    def call(self, path: str, body: Any = None, **given: Any) -> Call:
        """Send a request; GET without a body."""
        raw = body if isinstance(body, bytes | list) or body is None else json.dumps(body).encode()
        given["headers"] = {"Content-Type": "application/json", "Host": "localhost:8000"} | (given.get("headers") or {})
        return Call(self.app, "GET" if body is None else "POST", path, raw, **given)

    def complete(self, prompt: Any = "hello", **fields: Any) -> Call:
        """Ask for a completion."""
        return self.call(COMPLETIONS, {"model": "fake", "prompt": prompt, "max_tokens": 4} | fields)

    def chat(self, content: Any = "hello", **fields: Any) -> Call:
        """Ask for a chat completion."""
        messages = [{"role": "user", "content": content}]
        return self.call(CHATS, {"model": "fake", "messages": messages, "max_tokens": 4} | fields)

    def story(self, request: str = "") -> str:
        """Return what has happened to a request, or to all of them, as text for the messages of assertions."""
        names = [request] if request else [f"{record['request']}-{record['choice']}" for record in self.records]
        names += [] if request else [choice.name for choice in self.gateway.in_flight.live]
        return "\n".join(str(story) for name in names for story in self.gateway.in_flight.story(name))

    def require_nothing_held(self) -> None:
        """Assert that no KV is owned anywhere, and no request is left."""
        assert [worker.held for worker in self.workers.values() if worker.held and not worker.is_dead] == []
        assert self.gateway.dispatcher.leases.machines() == {}
        assert self.gateway.in_flight.live == ()
        assert self.gateway.dispatcher.live == 0


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run a scenario; nothing of it may outlive it."""
    asyncio.run(scenario)
