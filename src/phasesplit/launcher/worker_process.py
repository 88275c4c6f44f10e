"""The process of one worker: `phasesplit worker`."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from phasesplit.engine.server import WorkerState, worker_app
from phasesplit.launcher.announcing import GatewayAddress, keep_announced
from phasesplit.launcher.embedded import EmbeddedWorker, Happened, WorkerSettings
from phasesplit.launcher.listening import Listening


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where a worker listens, and which gateway it joins.

    Attributes:
        host: Where it listens.
        port: The same; 0 takes any free one.
        gateway: Whom it joins, None for nobody.
        join_key: Key for that, or None.
        key: Key that its own callers have to bring, or None.
        drain_s: Seconds that live requests have to end when the worker is stopped.
    """

    host: str
    port: int
    gateway: GatewayAddress | None
    join_key: str | None
    key: str | None
    drain_s: float

    def url(self, listening: Listening) -> str:
        """Return where the gateway reaches it."""
        if self.gateway is not None and self.host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            return f"http://{self.gateway.own_host()}:{listening.port}"
        return listening.url


async def run_worker(
    settings: WorkerSettings,
    place: WorkerPlace,
    *,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> int:
    """Run a worker until it is stopped, and return the process's exit code.

    The first SIGTERM or SIGINT lets it drain; the second ends it at once. An engine that fails ends it too, so that
    whoever supervises it starts another.

    Args:
        settings: What it is.
        place: Where it is.
        ready: Called with `url` and its facts once it can be reached.
        say: Takes one line for the log.

    Raises:
        SpecError: The model or the settings are wrong, it cannot listen, or the gateway refuses it.
    """
    loop = asyncio.get_running_loop()

    def deliver(happened: Happened) -> None:
        loop.call_soon_threadsafe(_deliver, happened)

    embedded = await asyncio.to_thread(EmbeddedWorker, settings, deliver, say, place.join_key)
    listening = Listening(place.host, place.port)
    worker = embedded.worker
    embedded.start()
    await listening.start(worker_app(worker, key=place.key))
    try:
        return await live(worker, place, listening, ready=ready, say=say)
    finally:
        embedded.close()


class Living(WorkerState, Protocol):
    """What answers for a worker, and can be brought to an end."""

    async def drained(self, within_s: float) -> bool:
        """Wait until no request is here."""

    def close(self) -> None:
        """End all requests, and whoever listens."""


async def live(
    worker: Living,
    place: WorkerPlace,
    listening: Listening,
    *,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> int:
    """Announce a worker that is served, until it is stopped or its engine ends; see `run_worker`.

    Args:
        worker: Who answers for it.
        place: Where it is.
        listening: Its server; stopped at the end.
        ready: Called at once with `url` and its facts.
        say: Takes one line for the log.

    Raises:
        SpecError: The gateway refuses it.
    """
    ready({"url": place.url(listening), **worker.facts()})
    announcing = None
    if place.gateway is not None:
        announcing = asyncio.create_task(
            keep_announced(
                place.gateway,
                place.url(listening),
                worker.facts,
                key=place.join_key,
                has_listener=lambda: worker.feed.has_listener,
                say=say,
            )
        )
    code = 0
    try:
        if await _stopped(lambda: worker.error is None and not (announcing is not None and announcing.done())):
            if announcing is not None:
                announcing.cancel()
            worker.drain()
            await asyncio.wait(
                [asyncio.create_task(worker.drained(place.drain_s)), asyncio.create_task(_stopped(lambda: True))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        elif worker.error is None and announcing is not None:
            announcing.result()  # raises: it ends no other way
        else:
            say(f"the engine has stopped: {worker.error!r}")
            code = 1
    finally:
        if announcing is not None:
            announcing.cancel()
        worker.close()
        await listening.stop()
    return code


def _deliver(happened: Happened) -> None:
    for on_event, event in happened:
        on_event(event)


async def _stopped(goes_on: Callable[[], bool], look_s: float = 0.1) -> bool:
    """Wait for SIGTERM or SIGINT; return whether one came, rather than that `goes_on` turned false."""
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    while goes_on():
        try:
            await asyncio.wait_for(stopped.wait(), look_s)
        except TimeoutError:
            continue
        return True
    return False
