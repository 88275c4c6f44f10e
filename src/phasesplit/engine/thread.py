"""The engine's own thread: commands go in from any thread, events come out in batches, and it sleeps while idle."""

import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from phasesplit.engine.engine_events import Event
from phasesplit.engine.facts import EngineFacts
from phasesplit.engine.loop import Engine
from phasesplit.engine.sequences import OnEvent
from phasesplit.engine.wire import WorkerRequest
from phasesplit.kv_transfer.endpoint import KvEndpoint

Command = Callable[[Engine], None]

_LONGEST_SLEEP_S = 0.25
_FACTS_EVERY_S = 0.05


class EngineThread:
    """Runs an engine until it is stopped. All methods may be called from any thread, and none waits but `stop`.

    Args:
        engine: The engine, which nobody else calls from now on.
        endpoint: What moves its KV, if it moves any.
        deliver: Called on the engine's thread, before and after an iteration, with all events and the receiver of each.
        clock: Returns the instant.

    Attributes:
        facts: The latest snapshot.
        error: What ended the thread, if something did: every request has failed then.
    """

    def __init__(
        self,
        engine: Engine,
        endpoint: KvEndpoint | None,
        deliver: Callable[[list[tuple[OnEvent, Event]]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts: EngineFacts = engine.facts()
        self.error: BaseException | None = None
        self._engine, self._endpoint, self._deliver, self._clock = engine, endpoint, deliver, clock
        self._commands: deque[Command] = deque()
        self._asleep, self._bell = socket.socketpair()
        self._asleep.setblocking(False)
        self._bell.setblocking(False)
        self._is_stopped = self._is_quiet = False
        self._next_facts_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """End after the present iteration, and wait for that; return whether it has ended."""
        self._is_stopped = True
        self._ring()
        self._thread.join(timeout_s)
        has_ended = not self._thread.is_alive()
        if has_ended:
            self._asleep.close()
            self._bell.close()
        return has_ended

    def submit(self, key: str, request: WorkerRequest, on_event: OnEvent) -> None:
        """Hand in a request, see `Engine.submit`; where the thread has ended with an error, it fails."""
        self.call(lambda engine: engine.submit(key, request, on_event))
        if self.error is not None:
            self._fail_all(self.error)

    def abort(self, key: str) -> None:
        """Abort a request, see `Engine.abort`."""
        self.call(lambda engine: engine.abort(key))

    def drain(self) -> None:
        """Take no more requests, see `Engine.drain`."""
        self.call(lambda engine: engine.drain())

    def call(self, command: Command) -> None:
        """Let the engine's thread do something between two iterations."""
        self._commands.append(command)
        self._ring()

    def _ring(self) -> None:
        # A full bell wakes the thread already, and a closed one has no thread.
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._turn()
        except BaseException as error:
            self.error = error
            self._fail_all(error)
            raise

    def _fail_all(self, error: BaseException) -> None:
        """Fail what is here, and what was handed in too late, each once."""
        with contextlib.suppress(Exception):
            while self._commands:
                self._commands.popleft()(self._engine)
        events = self._engine.fail_all(f"the engine has failed: {error}")
        if events:
            self._deliver(events)

    def _turn(self) -> None:
        while self._commands:
            self._commands.popleft()(self._engine)
        is_busy = self._engine.step(self._deliver_events)
        self._deliver_events()
        now_s = self._clock()
        if now_s >= self._next_facts_s or not is_busy:
            self._next_facts_s = now_s + _FACTS_EVERY_S
            self.facts = self._engine.facts()
        if is_busy or self._commands or self._is_stopped:
            self._is_quiet = False
        elif not self._is_quiet:
            # Any call of the endpoint may take in what came meanwhile: once more is looked before sleeping on it.
            self._is_quiet = True
        else:
            self._is_quiet = False
            self._sleep()

    def _deliver_events(self) -> None:
        events = self._engine.take_events()
        if events:
            self._deliver(events)

    def _sleep(self) -> None:
        """Wait until a transfer can move, somebody rings, or a while has passed."""
        poll = select.poll()
        poll.register(self._asleep, select.POLLIN)
        for descriptor, mask in (self._endpoint.descriptors() if self._endpoint is not None else {}).items():
            poll.register(descriptor, mask)
        poll.poll(_LONGEST_SLEEP_S * 1e3)
        with contextlib.suppress(BlockingIOError):
            while self._asleep.recv(4096):
                pass
