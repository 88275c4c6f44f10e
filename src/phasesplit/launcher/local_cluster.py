"""The process of `phasesplit serve`: the gateway, and the supervisor of the workers of this host.

1. `run_cluster` binds the port and starts the workers, which take longest to start (`worker_commands`).
2. Meanwhile a thread makes the gateway: codec, dispatcher, limits, keys and the ASGI application (`GatewayProcess`).
3. When every worker has joined, the cluster is ready and serves until a signal.
4. The first signal drains the gateway, then stops the workers. A second signal ends everything at once.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.io.cluster_file import BLOCK_TOKENS, ServedCluster, VllmOptions
from phasesplit.io.rule_settings import rules_settings
from phasesplit.kv_transfer.chooser import ruled_tokens
from phasesplit.launcher.announcing import model_name
from phasesplit.launcher.listening import ALL_ADDRESSES, Listening, outward_host
from phasesplit.launcher.ready import Ready
from phasesplit.launcher.sockets import socket_directory
from phasesplit.launcher.supervisor import Command, Log, Supervisor, SupervisorTimeouts
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE
from phasesplit.scheduler.rules import Rules

if TYPE_CHECKING:
    from phasesplit.launcher.gateway_process import GatewayProcess

_STOP_WORKERS_S = 5.0
_LOOK_S = 0.02
_PROBE_S = 5.0
INTERRUPTED = 130
"""Exit code after a Ctrl-C that could not be waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who gets what.

    Attributes:
        ready: Called once all workers have joined.
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
    """Serve until a signal, and return the process's exit code.

    The first SIGINT or SIGTERM drains: no new requests, those that are here have `drain_s` seconds. The second ends
    everything at once. No worker outlives this process, however it ends.

    Args:
        cluster: What to run.
        model: Path of the model.
        watchers: Who gets what happens.

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
            timeouts=SupervisorTimeouts(stalled_s=cluster.stalled_s),
        )
        # The workers take longest to start: they go first, and the gateway is put together meanwhile.
        supervisor.start()
        try:
            making = _in_thread(lambda: _gateway(cluster, model, name, watchers))
            await _first_of(making, signals.first.wait())
            if signals.first.is_set():
                return INTERRUPTED  # nothing runs that would have to end in peace
            gateway = making.result()
            await listening.start(gateway.app, header_s=gateway.limits.header_s)
            if await _joined(supervisor, gateway, signals):
                watchers.ready(
                    Ready(
                        url=listening.url,
                        model=name,
                        needs_key=bool(cluster.client_keys),
                        took_s=time.monotonic() - since_s,
                        workers=supervisor.listed(),
                        degraded=gateway.degraded(),
                    )
                )
                await signals.first.wait()
            return await _stop(cluster, supervisor, gateway, signals, watchers)
        finally:
            supervisor.kill()
            await supervisor.stop(within_s=0.0)
            await listening.stop()


def _gateway(cluster: ServedCluster, model: Path, name: str, watchers: Watchers) -> "GatewayProcess":
    """Return the gateway; its imports alone take longer than it takes to start the workers."""
    from phasesplit.launcher.gateway_process import GatewayProcess

    return GatewayProcess(cluster, model, name, watchers)


class _Signals:
    """The first signal to stop, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _joined(supervisor: Supervisor, gateway: "GatewayProcess", signals: _Signals) -> bool:
    """Wait until every worker has joined; return False where a signal came first.

    Raises:
        SpecError: A worker was given up: the cluster that was asked for cannot run here.
    """
    names = {str(worker["name"]) for worker in supervisor.listed()}
    while not signals.first.is_set():
        hopeless = [str(worker["given_up"]) for worker in supervisor.listed() if worker["given_up"]]
        if hopeless:
            raise SpecError(hopeless[0])
        if names <= gateway.serving():
            return True
        await asyncio.sleep(_LOOK_S)
    return False


async def _stop(
    cluster: ServedCluster,
    supervisor: Supervisor,
    gateway: "GatewayProcess",
    signals: _Signals,
    watchers: Watchers,
) -> int:
    watchers.say("stopping: no new requests, those that are here go on; Ctrl-C again to stop at once")
    steps: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
        lambda: gateway.drain(cluster.drain_s),
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
    stopping = asyncio.ensure_future(signal_comes)
    await asyncio.wait([work, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if work.done():
        work.result()


def _in_thread(make: Callable[[], Any]) -> "asyncio.Future[Any]":
    """Return what a thread makes that this process does not wait for when it ends: it may compile for a while."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Any] = loop.create_future()

    def hand_over(take: Callable[[Any], None], result: Any) -> None:
        if not made.done():
            take(result)

    def run() -> None:
        take: Callable[[Any], None] = made.set_result
        try:
            result = make()
        except BaseException as problem:
            take, result = made.set_exception, problem
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(hand_over, take, result)

    threading.Thread(target=run, name="gateway", daemon=True).start()
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


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a host share.

    Attributes:
        gateway: URL of the gateway.
        model: Path of the model.
        model_name: Name that clients ask for.
        sockets: Directory for Unix sockets.
        host: Where workers listen; empty: at the address that faces the gateway.
    """

    gateway: str
    model: Path
    model_name: str
    sockets: str
    host: str = ""


def worker_commands(cluster: ServedCluster, around: Surroundings) -> dict[str, Command]:
    """Return the workers of a cluster: name to command, in the order of the pools."""
    return {name: _command(name, role, cluster, around) for name, role in cluster.workers.items()}


def _command(name: str, role: str, cluster: ServedCluster, around: Surroundings) -> Command:
    kind = "worker" if cluster.vllm is None else "vllm-worker"
    fixed = [
        sys.executable, "-m", "phasesplit", kind, "--join", around.gateway, "--name", name, "--home", role,
        "--model", str(around.model), "--model-name", around.model_name, "--kv-memory", str(cluster.kv_bytes),
        "--sockets", around.sockets, "--drain", f"{cluster.drain_s:g} s", "--parent", str(os.getpid()),
    ]  # fmt: skip
    if around.host:
        fixed += ["--host", around.host]
    if cluster.vllm is not None:
        return _vllm_command(fixed, cluster.vllm, ruled_tokens(cluster.rules))
    for field, value in _changed(cluster.rules).items():
        fixed += ["--set", f"{field}={value}"]
    if cluster.core_share < 1.0:
        fixed += ["--core-share", f"{cluster.core_share:.4g}"]
    if cluster.has_prefix_cache:
        fixed.append("--prefix-cache")

    def command(epoch: int) -> Sequence[str]:
        return [*fixed, "--epoch", str(epoch)]

    return command


def _vllm_command(fixed: list[str], vllm: VllmOptions, threshold_tokens: int | None) -> Command:
    options = [*fixed, "--connector", vllm.connector, *(["--python", vllm.python] if vllm.python else [])]
    if threshold_tokens is not None:
        options += ["--layerwise-from-tokens", str(threshold_tokens)]
    return lambda epoch: [*options, "--epoch", str(epoch), "--", *vllm.arguments]


def _changed(rules: Rules) -> dict[str, object]:
    """Return the settings that differ from those a worker starts from."""
    usual = rules_settings(Rules(block_tokens=BLOCK_TOKENS))
    return {field: value for field, value in rules_settings(rules).items() if value != usual[field]}


def workers_host(cluster: ServedCluster) -> str:
    """Return where a cluster's workers listen, empty for the address that faces the gateway.

    With a key workers of other hosts may join, which must reach those of this host too; a gateway that listens at all
    addresses is faced at a loopback one. Without a default route that is all there is.
    """
    return outward_host() if cluster.join_key and cluster.host in ALL_ADDRESSES else ""


def worker_environment(cluster: ServedCluster) -> Mapping[str, str]:
    """Return the environment of a cluster's workers: this process's, with the cluster's key, and how many threads.

    Each library has one; vLLM those that it was given.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop(JOIN_KEY_VARIABLE, None)
    if cluster.join_key:
        environment[JOIN_KEY_VARIABLE] = cluster.join_key
    if cluster.vllm is not None and cluster.vllm.threads is not None:
        environment["OMP_NUM_THREADS"] = str(cluster.vllm.threads)
    return environment
