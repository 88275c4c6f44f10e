"""Workers on a Ray cluster: one actor for each CPU, so that what an answer caches stays with its actor."""

import contextlib
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

from phasesplit._version import __version__
from phasesplit.errors import SpecError, WorkerLostError
from phasesplit.workers.cores import usable_cores
from phasesplit.workers.crew import Crew
from phasesplit.workers.desk import Desk

_FIELD = "address of the Ray cluster"
_LONGEST_CONNECT_S = 5.0
_LONGEST_RELEASE_S = 2.0
_LIVES = 3
"""A worker whose node is lost begins again elsewhere, and is asked the same question, so often less one."""

_LOCAL_STORE_BYTES = 128 << 20
# Ray reads its settings from the environment, some when it is imported. A user's own values are kept.
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}
_GIVE_UP_SOON = {  # else two minutes, and then the end of this process
    "RAY_NUM_REDIS_GET_RETRIES": "1",
    "RAY_py_gcs_connect_timeout_s": "4",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
}
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's ports are open to the network otherwise
_SET_BY_RAY = "RAY_AUTH_MODE"  # when it starts a cluster, for good


class RemoteDesk:
    """A desk on a node of the cluster."""

    def __init__(self) -> None:
        self._desk: Desk | None = None

    def version(self) -> str:
        """Return the node's version of phasesplit."""
        return __version__

    def reply(self, held: list[Any], packed_question: bytes) -> bytes:
        """Return the packed outcome, as `Desk.reply` does.

        Args:
            held: Ray's reference to the pickled callable that answers a question, in a list so that Ray fetches it only
                when it is asked for: with the first question after each start.
            packed_question: The pickled question.
        """
        if self._desk is None:
            import ray

            self._desk = Desk(ray.get(held[0]))
        return self._desk.reply(packed_question)


class RaySeat:
    """The way to one actor; the cluster starts it from construction on.

    Args:
        ray: The module, connected to a cluster.
        packed_answer: Ray's reference to the pickled callable that answers a question.
    """

    def __init__(self, ray: Any, packed_answer: Any) -> None:
        self._ray = ray
        self._packed_answer = packed_answer
        self._actor = ray.remote(RemoteDesk).options(num_cpus=1, max_restarts=_LIVES - 1).remote()

    def begin(self) -> None:
        """Wait until the actor runs.

        Raises:
            SpecError: phasesplit is not there, or in another version.
        """
        try:
            version = self._ray.get(self._actor.version.remote())
        except self._ray.exceptions.RayError as problem:
            raise SpecError(
                f"Ray: a worker could not start ({_lines(problem)[-1]}); "
                f"phasesplit {__version__} must be installed on every node of the cluster"
            ) from problem
        if version != __version__:
            raise SpecError(f"Ray: a node of the cluster has phasesplit {version}, this process has {__version__}")

    def ask(self, packed_question: bytes) -> bytes:
        """Return what the actor replies.

        Args:
            packed_question: The pickled question.

        Raises:
            WorkerLostError: The actor was lost, and lost again where it was started anew.
        """
        lives_left = _LIVES
        while True:
            lives_left -= 1
            try:
                reply: bytes = self._ray.get(self._actor.reply.remote([self._packed_answer], packed_question))
                return reply
            except self._ray.exceptions.RayError as problem:
                if lives_left == 0 or not isinstance(problem, self._ray.exceptions.ActorUnavailableError):
                    raise WorkerLostError(f"a worker on the Ray cluster was lost ({_lines(problem)[0]})") from problem

    def end(self) -> None:
        """End the actor for good."""
        self._ray.kill(self._actor)


@contextlib.contextmanager
def ray_workers(packed_answer: bytes, address: str, count: int | None) -> Iterator[Crew]:
    """Yield workers on a Ray cluster; a connection, and a local cluster, that began here ends here.

    Args:
        packed_answer: The pickled callable that answers a question.
        address: HOST:PORT, "auto" for the cluster that runs on this machine, or "local" to start one.
        count: How many at most; by default one for each free CPU.

    Raises:
        SpecError: Ray is not installed, or the cluster cannot be reached or has no free CPU.
    """
    with _connected(address, count) as ray:
        width = _free_cpus(ray, count)
        if width < 1:
            raise SpecError(f"{_FIELD}: the cluster at {address!r} has no free CPU")
        packed = ray.put(packed_answer)
        with Crew([RaySeat(ray, packed) for _ in range(width)]) as crew:
            yield crew


def _free_cpus(ray: Any, most: int | None) -> int:
    """Return how many CPUs of the cluster are free; those of workers that have just ended are so after a moment."""
    wanted = min(most or sys.maxsize, int(ray.cluster_resources().get("CPU", 0)))
    given_up_s = time.monotonic() + _LONGEST_RELEASE_S
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < given_up_s:
        time.sleep(0.05)
    return min(free, wanted)


@contextlib.contextmanager
def _connected(address: str, count: int | None) -> Iterator[Any]:
    """Yield the module `ray`, connected; a connection that the caller of phasesplit made is used and left alone."""
    with contextlib.ExitStack() as left_over:
        options: Mapping[str, Any] = {}
        if address == "local":
            settings = _QUIET | _LOOPBACK_ONLY | {"RAY_AUTH_TOKEN": _own_token()}
            options = {
                "num_cpus": count or usable_cores(),
                "include_dashboard": False,
                "object_store_memory": _LOCAL_STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
                "_temp_dir": left_over.enter_context(TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)),
            }
        else:
            settings = _QUIET | _GIVE_UP_SOON
            check_address(address)
        with _begun(address, settings, options) as ray:
            yield ray


@contextlib.contextmanager
def _begun(address: str, settings: Mapping[str, str], options: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the module `ray`, connected with these settings of the environment and options of `ray.init`."""
    with _environment(settings):
        try:
            import ray
        except ImportError:
            raise SpecError("Ray is not installed: pip install 'phasesplit[ray]'") from None
        if ours := not ray.is_initialized():
            try:
                ray.init(address=address, namespace="phasesplit", log_to_driver=False, logging_level="ERROR", **options)
            except Exception as problem:
                ray.shutdown()
                raise SpecError(f"{_FIELD}: cannot use {address!r} ({' '.join(str(problem).split())})") from problem
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set what is not set in the environment, for a while; what Ray sets goes as well."""
    before = {name: os.environ.get(name) for name in (*settings, _SET_BY_RAY)}
    os.environ.update({name: value for name, value in settings.items() if before[name] is None})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _own_token() -> str:
    """Return the token of the clusters that this process starts; without one Ray makes one and keeps it in ~/.ray.

    Always the same: Ray reads it once in a process.
    """
    return secrets.token_hex(32)


def check_address(address: str, field: str = _FIELD) -> None:
    """Refuse what is no address, and one where nobody listens, before Ray tries at length.

    Args:
        address: HOST:PORT, "auto" or "local".
        field: What a person calls it.

    Raises:
        SpecError: It is something else, or nobody listens there.
    """
    if address in ("auto", "local"):
        return
    parts = re.fullmatch(r"(?P<host>[^/\s]+):(?P<port>\d{1,5})", address)
    if parts is None:
        raise SpecError.bad(field, address, "HOST:PORT, 'auto' or 'local'")
    try:
        socket.create_connection((parts["host"].strip("[]"), int(parts["port"])), timeout=_LONGEST_CONNECT_S).close()
    except (OSError, OverflowError) as problem:
        raise SpecError(f"{field}: nobody listens at {address} ({problem})") from problem


def _lines(problem: Exception) -> list[str]:
    return [line.strip().rstrip(".") for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
