"""Text and tokens for the gateway, over a model's own tokenizer and chat template.

The workers that `serve` starts on its own host: their names and the commands that start them.

The process of `phasesplit serve`: the gateway, and the supervisor of this host's workers.

The gateway put together: codec, dispatcher, limits, keys, and the ASGI application over them.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.tokens import Tokenizer
from phasesplit.errors import SpecError
from phasesplit.gateway.app import make_app
from phasesplit.gateway.clock import LoopClock
from phasesplit.gateway.decisions import warm
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.estimates import Backlog
from phasesplit.gateway.gateway import Gateway, Keys
from phasesplit.gateway.http_worker import HttpWorker
from phasesplit.gateway.limits import Limits, key_digest
from phasesplit.gateway.registry import BreakerRule
from phasesplit.io.cluster_file import BLOCK_TOKENS, ServedCluster, VllmOptions
from phasesplit.io.rule_settings import rules_settings
from phasesplit.io.text import Where, inside
from phasesplit.kv_transfer.chooser import ruled_tokens
from phasesplit.launcher.announcing import model_name
from phasesplit.launcher.listening import ALL_ADDRESSES, Listening, outward_host
from phasesplit.launcher.ready import Ready
from phasesplit.launcher.sockets import socket_directory
from phasesplit.launcher.supervisor import Command, Log, Supervisor, SupervisorTimeouts
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE
from phasesplit.scheduler.rules import Rules


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
            patience=SupervisorTimeouts(stalled_s=cluster.stalled_s),
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


def _front(cluster: ServedCluster, model: Path, name: str, watchers: Watchers) -> "GatewayProcess":
    """Put the gateway together; its imports alone take longer than it takes to start the workers."""
    return GatewayProcess(cluster, model, name, watchers)


class _Signals:
    """The first signal to stop, and the second."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take)

    def _take(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def _joined(supervisor: Supervisor, front: "GatewayProcess", signals: _Signals) -> bool:
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
    front: "GatewayProcess",
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


class ModelCodec:
    """A `gateway.codec.Codec`.

    Attributes:
        context_tokens: Longest prompt plus output of the model.
        vocabulary: Token ids are 0 to this, exclusive.
        stop_token_ids: The model's own ends of a text.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.context_tokens = config.context_tokens
        self.vocabulary = config.vocab
        self.stop_token_ids = frozenset(config.stop_token_ids)
        self._tokenizer, self._template = tokenizer, template

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        """Return the tokens of a text, with the start token where that is asked for and the model wants one."""
        return self._tokenizer.encode(text, has_start=has_start)

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a chat, up to where the assistant's answer starts.

        Args:
            messages: As the client sent them.
            given: Further names for the template; `add_generation_prompt` is one of them, and `add_special_tokens` puts
                the start token before what it makes.

        Raises:
            SpecError: The model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise SpecError("this model has no chat template; use /v1/completions")
        names = dict(given)
        wanted = names.pop("add_generation_prompt", True)
        has_start = names.pop("add_special_tokens", False)
        text = self._template.render(messages, has_generation_prompt=bool(wanted), **names)
        return self._tokenizer.encode(text, has_start=bool(has_start))

    def token_bytes(self, token: int) -> bytes:
        """Return what a token stands for, nothing for a special token."""
        return b"" if token in self._tokenizer.special else self._tokenizer.token_bytes(token)

    def token_name(self, token: int) -> str:
        """Return how log-probabilities show a token; bytes that are no character are U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


_Kind = TypeVar("_Kind", Limits, Backlog, BreakerRule)
_PARTS = ("backlog", "breaker")
_MOST = 1e18


class Sinks(Protocol):
    """Where what happens is written."""

    @property
    def decisions(self) -> Any:
        """Takes the scheduler's decisions, a line each, or None."""

    @property
    def records(self) -> Any:
        """Takes a record of each request that has ended, or None."""

    @property
    def log_ended(self) -> Callable[[], str]:
        """Returns why the log of decisions has ended early, nothing while it has not."""


class GatewayProcess:
    """What clients talk to.

    Args:
        cluster: What is served.
        model: Path of the model.
        name: Name of the model.
        sinks: Where what happens is written.

    Attributes:
        app: The ASGI application.
        limits: What clients may ask of it.

    Raises:
        SpecError: The model or the limits are wrong.
    """

    def __init__(self, cluster: ServedCluster, model: Path, name: str, sinks: Sinks) -> None:
        self.limits, backlog, breaker = bounds_from(cluster.limits, cluster.limits_place)
        checkpoint = open_checkpoint(model)
        dispatcher = Dispatcher(cluster.rules, self.limits, backlog=backlog, breaker=breaker, sink=sinks.decisions)
        self._gateway = Gateway(
            codec=ModelCodec(checkpoint.config, checkpoint.tokenizer, checkpoint.template),
            dispatcher=dispatcher,
            connect=lambda url: HttpWorker(url, key=cluster.join_key),
            models=(name,),
            clock=LoopClock(),
            limits=self.limits,
            keys=Keys(
                client=_digests(cluster.client_keys),
                admin=_digests(cluster.admin_keys),
                join=_digests((cluster.join_key,) if cluster.join_key else ()),
            ),
            records=sinks.records,
            log_ended=sinks.log_ended,
        )
        self.app = make_app(self._gateway)
        warm(cluster.rules)

    def serving(self) -> set[str]:
        """Return the names of the workers that serve."""
        return {machine.name for machine in self._gateway.dispatcher.registry.connected() if not machine.off}

    def degraded(self) -> tuple[str, ...]:
        """Return in words what keeps the cluster from being split as it should be, nothing where that is well."""
        return self._gateway.dispatcher.degraded

    async def drain(self, within_s: float) -> None:
        """Take no new requests, wait for those that are here, and end the rest."""
        await self._gateway.drain(within_s)


class GatewayBounds(NamedTuple):
    """What a deployment may set about its gateway.

    Attributes:
        limits: What clients may ask of it.
        backlog: How much prompt work may wait.
        breaker: When a failing machine is left alone.
    """

    limits: Limits
    backlog: Backlog
    breaker: BreakerRule


def bounds_from(settings: Mapping[str, Any], where: Where) -> GatewayBounds:
    """Return bounds with some fields set.

    Args:
        settings: Field of `Limits` to value; `backlog` and `breaker` to the fields of these.
        where: From a field to how the person knows its place.

    Raises:
        SpecError: A field is unknown, or a value is not allowed.
    """
    own = dict(settings)
    parts = [own.pop(name, {}) for name in _PARTS]
    for name, part in zip(_PARTS, parts, strict=True):
        if not isinstance(part, Mapping):
            raise SpecError.bad(where(name), part, "fields with values")
    return GatewayBounds(
        _bounds(Limits, own, where, "limits", (*Limits.__dataclass_fields__, *_PARTS)),
        _bounds(Backlog, parts[0], inside(where, "backlog"), "backlog", Backlog.__dataclass_fields__),
        _bounds(BreakerRule, parts[1], inside(where, "breaker"), "breaker", BreakerRule.__dataclass_fields__),
    )


def _bounds(kind: type[_Kind], settings: Mapping[str, Any], where: Where, word: str, known: Iterable[str]) -> _Kind:
    """Return an object of bounds; `word` is what it calls itself in its errors."""
    usual = kind()
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in usual.__dataclass_fields__:
            raise SpecError.unknown(where(str(name)), str(name), known)
        type_ = type(getattr(usual, name))
        is_number = isinstance(value, int | float) and -_MOST <= value <= _MOST  # no nan, and nothing that is no float
        fits = isinstance(value, bool) if type_ is bool else is_number and value == type_(value)
        if not fits or (isinstance(value, bool) and type_ is not bool):
            allowed = {bool: "true or false", int: "a whole number"}.get(type_, "a number")
            raise SpecError.bad(where(name), value, allowed)
        values[name] = type_(value)
    try:
        return kind(**values)
    except SpecError as problem:
        said = re.sub(rf"{word}, (\w+)", lambda found: where(found[1]), str(problem), count=1)
        raise SpecError(said) from None


def _digests(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(key_digest(key) for key in keys)
