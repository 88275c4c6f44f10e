"""The state behind a worker's server.

`Worker`: its name, epoch and role, its engine's thread, and the requests that are not over. `Feed`: what it reports on
GET /events: facts at a steady beat, and what happens to keys.
"""

import asyncio
import itertools
import os
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from phasesplit._version import __version__
from phasesplit.engine.engine_events import Event, Failed, Finished, KvLeft, KvReady, Refused, Started
from phasesplit.engine.thread import EngineThread
from phasesplit.engine.tokens import Tokenizer
from phasesplit.engine.wire import Served, WorkerRequest
from phasesplit.protocol.worker import SendKv

BEAT_S = 0.25
"""Longest time between two snapshots of the facts."""
_MOST_WAITING = 10_000
"""Lines that wait for a listener who does not read; then the listener is dropped: it has lost track anyway."""


class Feed:
    """Lines of JSON for any number of listeners. Everything happens in one event loop.

    Args:
        facts: Makes a snapshot of the worker's facts.
    """

    def __init__(self, facts: Callable[[], dict[str, Any]]) -> None:
        self._facts = facts
        self._listeners: set[_Listener] = set()

    @property
    def has_listener(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def send(self, line: dict[str, Any]) -> None:
        """Send a line to all who listen now."""
        if not self._listeners:
            return
        text = orjson.dumps(line) + b"\n"
        for listener in tuple(self._listeners):
            listener.push(text)

    def close(self) -> None:
        """Let every listener come to its end."""
        for listener in self._listeners:
            listener.is_lost = True
            listener.push(b"")

    def nudge(self) -> None:
        """Send everybody the facts now: they have changed in a way that should not wait for the next beat."""
        self.send({"facts": self._facts()})

    async def listen(self) -> AsyncIterator[bytes]:
        """Return the lines from now on, endlessly, the facts first; ends for a listener that falls behind."""
        listener = _Listener()
        self._listeners.add(listener)
        try:
            listener.push(orjson.dumps({"facts": self._facts()}) + b"\n")
            due_s = time.monotonic() + BEAT_S
            while not listener.is_lost:
                if listener.lines:
                    yield listener.pop()
                    continue
                await listener.wait(due_s - time.monotonic())
                if time.monotonic() >= due_s:
                    listener.push(orjson.dumps({"facts": self._facts()}) + b"\n")
                    due_s = time.monotonic() + BEAT_S
        finally:
            self._listeners.discard(listener)


class _Listener:
    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.is_lost = False
        self._has_lines = asyncio.Event()

    def push(self, line: bytes) -> None:
        self.is_lost = self.is_lost or len(self.lines) >= _MOST_WAITING
        self.lines.append(line)
        self._has_lines.set()

    def pop(self) -> bytes:
        """Return all lines that wait, as one text."""
        text = b"".join(self.lines)
        self.lines.clear()
        self._has_lines.clear()
        return text

    async def wait(self, within_s: float) -> None:
        """Wait for a line, at most so many seconds."""
        if within_s > 0:
            try:
                await asyncio.wait_for(self._has_lines.wait(), within_s)
            except TimeoutError:
                return


OnEvent = Callable[[Event], None]


@dataclass(kw_only=True, eq=False)
class Worker:
    """A worker as its server sees it.

    Attributes:
        name: Its name, unique in the cluster.
        epoch: Which start of it this is; grows from start to start.
        home: The role it came with, one of `protocol.roles.ROLES`.
        thread: Its engine.
        load_tokenizer: Returns what makes the text of answers; the first time may take a while.
        served: What it serves.
        constant: Facts that never change: model, layout, address, sizes, threshold.
        changing: Makes the facts that come from outside of the engine (transfers), a snapshot.
        role: The role it has now, as the gateway sets it; the engine does not use it.
        started_s: When, in seconds since 1970.
        is_draining: Whether it takes no more requests.
        feed: What it reports on GET /events.
        live: Requests that are not over, by key, with the receiver of the events of each.
    """

    name: str
    epoch: int
    home: str
    thread: EngineThread
    load_tokenizer: Callable[[], Tokenizer]
    served: Served
    constant: Mapping[str, Any]
    changing: Callable[[], Mapping[str, Any]] = dict
    role: str = ""
    started_s: float = field(default_factory=time.time)
    is_draining: bool = False
    feed: Feed = field(init=False)
    live: dict[str, OnEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.role = self.role or self.home
        self.feed = Feed(self.facts)
        self._numbers = itertools.count()
        self._start = f"own-{secrets.token_hex(4)}"

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which its model may be asked for."""
        return self.served.models

    @property
    def error(self) -> BaseException | None:
        """Why its engine has stopped, None while it runs."""
        return self.thread.error

    @property
    def tokenizer(self) -> Tokenizer:
        """What makes the text of answers."""
        return self.load_tokenizer()

    def facts(self) -> dict[str, Any]:
        """Return a snapshot of everything that is known of this worker, JSON-able."""
        engine = self.thread.facts
        return {
            "name": self.name,
            "epoch": self.epoch,
            "home": self.home,
            "role": self.role,
            **self.constant,
            "keys": [key for key in self.live if not self._is_own(key)],
            "context_tokens": engine.context_tokens,
            "capacity_blocks": engine.capacity_blocks,
            "used_blocks": engine.used_blocks,
            "waiting_prompts": engine.waiting_prompts,
            "running": engine.running,
            "held": {key: blocks for key, blocks in engine.held.items() if not self._is_own(key)},
            "pending_tokens": engine.pending_tokens,
            "steps": engine.steps,
            "tokens": engine.tokens,
            "kept_blocks": engine.kept_blocks,
            "evictions": engine.evictions,
            "is_draining": self.is_draining,
            "transfers": {"layerwise": engine.layerwise, "serialized": engine.serialized, **self.changing()},
            "started_s": self.started_s,
            "memory_bytes": resident_bytes(),
            "pid": os.getpid(),
            "version": __version__,
            "resumes": True,
        }

    def own_key(self) -> str:
        """Return a key for a request that comes without one; the gateway does not see it."""
        return f"{self._start}.{next(self._numbers)}"

    def _is_own(self, key: str) -> bool:
        return key.startswith(self._start)

    def submit(self, request: WorkerRequest, key: str, on_event: OnEvent) -> None:
        """Hand a request to the engine, and send what happens to it to the feed."""
        leaves = isinstance(request.transfer, SendKv)

        def on_its_event(event: Event) -> None:
            self._report(key, event)
            is_over = isinstance(event, Refused | Failed | KvLeft) or (isinstance(event, Finished) and not leaves)
            if is_over:
                self.live.pop(key, None)
            on_event(event)

        self.live[key] = on_its_event
        self.thread.submit(key, request, on_its_event)

    def abort(self, key: str, why: str) -> None:
        """End a request in whatever state it is; a key that is not known, or over, changes nothing.

        Args:
            key: Its key.
            why: The reason for the client that still waits for its answer.
        """
        self.thread.abort(key)
        on_event = self.live.get(key)
        if on_event is not None:
            on_event(Failed(why))

    def close(self) -> None:
        """End all requests, and whoever listens."""
        for key in tuple(self.live):
            self.abort(key, "the worker stops")
        self.feed.close()

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self.is_draining = True
        self.thread.drain()
        self.feed.nudge()

    async def drained(self, within_s: float) -> bool:
        """Wait until no request is here; return whether that came in time."""
        end_s = time.monotonic() + within_s
        while self.live and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        return not self.live

    def _report(self, key: str, event: Event) -> None:
        if isinstance(event, Started):
            self.feed.send({"prefill_started": key})
        elif isinstance(event, KvReady):
            self.feed.send({"kv_ready": key})
        elif isinstance(event, KvLeft):
            self.feed.send({"kv_left": key})
        elif isinstance(event, Failed):
            self.feed.send({"gone": key, "why": event.why})


def resident_bytes() -> int:
    """Return how much memory this process has to itself, 0 where the system does not say.

    Pages that are shared with other processes (the weights, mapped from one file) are not counted.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            _, resident, shared, *_ = map(int, statm.read().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
