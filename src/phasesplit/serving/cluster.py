"""The process of `phasesplit serve`: the gateway, and the supervisor of this host's workers."""

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.files.serve_files import ServedCluster
from phasesplit.serving.children import Log
from phasesplit.serving.listening import Listening
from phasesplit.serving.local_workers import Surroundings, worker_commands, worker_environment, workers_host
from phasesplit.serving.naming import model_name
from phasesplit.serving.ready import Ready
from phasesplit.serving.sockets import socket_directory
from phasesplit.serving.supervisor import Patience, Supervisor

if TYPE_CHECKING:
    from phasesplit.serving.front import Front

_STOP_WORKERS_S = 5.0
_LOOK_S = 0.02
_PROBE_S = 5.0
INTERRUPTED = 130
"""Exit code after a Ctrl-C that could not be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who is told what.

    Attributes:
        ready: Told once all workers have joined.
        say: Takes one line about the cluster.
        log: Takes a worker's name and a line of its log.
        decisions: Takes the scheduler's decisions, a line each, or None.
        records: Takes a record of each request that has ended, or None.
        log_ended: Returns why the log of decisions has ended early, nothing while it has not.
    """

    ready: Callable[[Ready], None]
    say: Callable[[str], None]
    log: Log
    decisions: Callable[[bytes], object] | None = None
    records: Callable[[Mapping[str, Any]], object] | None = None
    log_ended: Callable[[], str] = str


async def run_cluster(cluster: ServedCluster, model: Path, watchers: Watchers) -> int:
    """Serve until told to stop, and return the process's exit code.

    The first SIGINT or SIGTERM drains: no new requests, those that are here have `drain_s` seconds. The second ends
    everything at once. No worker outlives this process, however it ends.

    Args:
        cluster: What to run.
        model: Path of the model.
        watchers: Who is told.

    Raises:
        SpecError: The model, the limits or the address are wrong, or workers cannot run.
    """
    since_s = time.monotonic()
    listening = Listening(cluster.host, cluster.port)
    signals = _Signals()
    with socket_directory() as sockets:
        name = model_name(cluster.model)
        around = Surroundings(listening.url, model, name, sockets, workers_host(cluster))
        supervisor = Supervisor(
            worker_commands(cluster, around),
            environment=worker_environment(cluster),
            log=watchers.log,
            answers=_answers,
            patience=Patience(stalled_s=cluster.stalled_s),
        )
        # The workers take longest to start: they go first, and the gateway is put together meanwhile.
        supervisor.start()
        try:
            making = _beside(lambda: _front(cluster, model, name, watchers))
            await _first_of(making, signals.first.wait())
            if signals.first.is_set():
                return INTERRUPTED  # nothing runs that would have to end in peace
            front = making.result()
            await listening.start(front.app, header_s=front.limits.header_s)
            if await _joined(supervisor, front, signals):
                watchers.ready(
                    Ready(
                        url=listening.url,
                        model=name,
                        needs_key=bool(cluster.client_keys),
                        took_s=time.monotonic() - since_s,
                        workers=supervisor.listed(),
                        degraded=front.degraded(),
                    )
                )
                await signals.first.wait()
            return await _stop(cluster, supervisor, front, signals, watchers)
        finally:
            supervisor.kill()
            await supervisor.stop(within_s=0.0)
            await listening.stop()


def _front(cluster: ServedCluster, model: Path, name: str, watchers: Watchers) -> "Front":
    """Put the gateway together; its imports alone take longer than it takes to start the workers."""
    from phasesplit.serving.front import Front

    return Front(cluster, model, name, watchers)


class _Signals:
    """The first signal to stop, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _joined(supervisor: Supervisor, front: "Front", signals: _Signals) -> bool:
    """Wait until every worker has joined; return False where a signal came first.

    Raises:
        SpecError: A worker was given up: the cluster that was asked for cannot run here.
    """
    names = {str(worker["name"]) for worker in supervisor.listed()}
    while not signals.first.is_set():
        hopeless = [str(worker["given_up"]) for worker in supervisor.listed() if worker["given_up"]]
        if hopeless:
            raise SpecError(hopeless[0])
        if names <= front.serving():
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _stop(
    cluster: ServedCluster,
    supervisor: Supervisor,
    front: "Front",
    signals: _Signals,
    watchers: Watchers,
) -> int:
    watchers.say("stopping: no new requests, those that are here go on; Ctrl-C again to stop at once")
    steps: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
        lambda: front.drain(cluster.drain_s),
        lambda: supervisor.stop(within_s=_STOP_WORKERS_S),
    )
    for step in steps:
        await _first_of(asyncio.ensure_future(step()), signals.second.wait())
        if signals.second.is_set():
            return INTERRUPTED
    return 0


async def _first_of(work: "asyncio.Future[Any]", signal_comes: Coroutine[Any, Any, object]) -> None:
    """Wait for work, or for a signal; what the other one waits for is left alone.

    Raises:
        Exception: What the work has raised.
    """
    told = asyncio.ensure_future(signal_comes)
    await asyncio.wait([work, told], return_when=asyncio.FIRST_COMPLETED)
    told.cancel()
    if work.done():
        work.result()


def _beside(make: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Return what a thread makes that this process does not wait for when it ends: it may compile for a while."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Any] = loop.create_future()

    def tell(take: Callable[[Any], None], result: Any) -> None:
        if not made.done():
            take(result)

    def run() -> None:
        take: Callable[[Any], None] = made.set_result
        try:
            result = make()
        except BaseException as problem:
            take, result = made.set_exception, problem
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, take, result)

    threading.Thread(target=run, name="front", daemon=True).start()
    return made


async def _answers(url: str) -> bool:
    """Return whether a worker answers at all; one that drains or fails does."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    try:
        async with asyncio.timeout(_PROBE_S):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            with contextlib.closing(writer):
                writer.write(b"GET /health HTTP/1.1\r\nHost: worker\r\nConnection: close\r\n\r\n")
                return bool(await reader.readline())
    except (OSError, ValueError, TimeoutError):
        return False
