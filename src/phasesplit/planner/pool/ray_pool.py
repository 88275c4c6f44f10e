"""A pool on a Ray cluster: a task for each question. What an answer caches stays with Ray's process."""

import contextlib
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import cache
from tempfile import TemporaryDirectory
from threading import Lock
from types import TracebackType
from typing import Any

from phasesplit._version import __version__
from phasesplit.errors import SpecError, WorkerLostError
from phasesplit.planner.pool.cores import usable_cores
from phasesplit.planner.pool.packing import outcome, packed, unpacked_answer, unpacked_outcome

_FIELD = "address of the Ray cluster"
_LONGEST_CONNECT_S = 5.0
_LONGEST_RELEASE_S = 2.0
_LIVES = 3
"""A question whose process or node is lost is asked again elsewhere, so often less one."""

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


_answers: dict[str, Callable[[Any], Any]] = {}
"""In a process of the cluster: the latest answer, by Ray's name for its bytes."""


def _reply(held: list[Any], version: str, packed_question: bytes) -> bytes:
    """Answer a question in a process of the cluster, and return the packed outcome.

    Args:
        held: Ray's reference to the pickled callable that answers a question, in a list so that Ray fetches it only
            when it is asked for: with the first question of each process.
        version: Of phasesplit, where it is asked.
        packed_question: The pickled question.
    """
    if version != __version__:
        refusal = f"Ray: a node of the cluster has phasesplit {__version__}, this process has {version}"
        return packed((False, SpecError(refusal)))
    name = held[0].hex()
    if name not in _answers:
        import ray

        _answers.clear()
        _answers[name] = unpacked_answer(ray.get(held[0]))
    return outcome(_answers[name], packed_question)


class RayPool:
    """Tasks on a Ray cluster, each with one question; when one is lost all are ended.

    Args:
        ray: The module, connected to a cluster.
        packed_answer: The pickled callable that answers a question.
        width: How many tasks at once, 1 or more.
    """

    def __init__(self, ray: Any, packed_answer: bytes, width: int) -> None:
        self.width = width
        self._ray = ray
        self._packed_answer = ray.put(packed_answer)
        self._task = ray.remote(_reply).options(num_cpus=1, max_retries=_LIVES - 1)
        self._asked: set[Any] = set()
        self._over: BaseException | None = None
        self._lock = Lock()
        self._threads = ThreadPoolExecutor(width)

    def submit(self, question: Any) -> Future[Any]:
        """Ask a question; what the answer raises is raised again by the future's `result()`.

        Args:
            question: What the answer takes; it must be possible to pickle it.
        """
        try:
            return self._threads.submit(self._ask, packed(question))
        except Exception as problem:
            future: Future[Any] = Future()
            future.set_exception(self._over or problem)
            return future

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(CancelledError("the workers were closed"))
        self._threads.shutdown(wait=True)

    def _ask(self, packed_question: bytes) -> Any:
        """Wait for the answer to one question, in a thread of its own."""
        with self._lock:
            if self._over is not None:
                raise self._over
            task = self._task.remote([self._packed_answer], __version__, packed_question)
            self._asked.add(task)
        try:
            reply = self._ray.get(task)
        except self._ray.exceptions.RayTaskError as problem:  # our task raises nothing: it could not be loaded
            raise self._end(
                SpecError(
                    f"Ray: a worker could not start ({_lines(problem)[-1]}); "
                    f"phasesplit {__version__} must be installed on every node of the cluster"
                )
            ) from problem
        except self._ray.exceptions.RayError as problem:
            lost = WorkerLostError(f"a worker on the Ray cluster was lost ({_lines(problem)[0]})")
            raise self._end(lost) from problem
        finally:
            with self._lock:
                self._asked.discard(task)
        return unpacked_outcome(reply)

    def _end(self, reason: BaseException) -> BaseException:
        """End all tasks, let what is still asked fail, and return why: `reason`, unless there was one before."""
        with self._lock:
            if self._over is not None:
                return self._over
            self._over = reason
            asked = list(self._asked)
        for task in asked:
            self._ray.cancel(task, force=True)
        return reason


@contextlib.contextmanager
def open_ray(packed_answer: bytes, address: str, count: int | None) -> Iterator[RayPool]:
    """Yield a pool on a Ray cluster; a connection, and a local cluster, that began here ends here.

    Args:
        packed_answer: The pickled callable that answers a question.
        address: HOST:PORT, "auto" for the cluster that runs on this machine, or "local" to start one.
        count: How many tasks at once at most; by default one for each free CPU.

    Raises:
        SpecError: Ray is not installed, or the cluster cannot be reached or has no free CPU.
    """
    with _connected(address, count) as ray:
        width = _free_cpus(ray, count)
        if width < 1:
            raise SpecError(f"{_FIELD}: the cluster at {address!r} has no free CPU")
        with RayPool(ray, packed_answer, width) as pool:
            yield pool


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
