"""A pool of processes on this machine: the standard library's executor over its fork server.

The fork server is a fresh interpreter that imports the simulator once and forks every process of the pool; a fork of
this process would not be safe once libraries have started threads. It stays for the next pool, and ends with this
process.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import Lock, Thread
from types import ModuleType, TracebackType
from typing import Any

from phasesplit.errors import WorkerLostError
from phasesplit.planner.pool.packing import outcome, packed, unpacked_answer, unpacked_outcome

_PRELOADED = ["phasesplit.planner.planner", "phasesplit.planner.drift", "phasesplit.planner.study.study"]
# One core for each process, and no threads in what is forked.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")

_answer: Callable[[Any], Any]
"""In a process of a pool: what answers its questions."""


class _Process(ForkServerProcess):
    """A process that does not import the calling script again."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - the name in multiprocessing
        with _no_script():
            return ForkServerProcess._Popen(process)


class _Context(ForkServerContext):
    """Starts processes from the fork server, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[_Process] = []

    def Process(self, *args: Any, **options: Any) -> _Process:  # type: ignore[override]  # noqa: N802 - as above
        process = _Process(*args, **options)
        self.started.append(process)
        return process


class ProcessPool:
    """Processes, each with one question at a time; when one is lost all are ended.

    Args:
        packed_answer: The pickled callable that answers a question.
        count: How many processes, 1 or more.

    Raises:
        WorkerLostError: The system starts no more processes.
    """

    def __init__(self, packed_answer: bytes, count: int) -> None:
        self.width = count
        self._over: BaseException | None = None
        self._lock = Lock()
        try:
            _start_fork_server()
            self._context = _Context()
            self._executor = ProcessPoolExecutor(count, self._context, _begin, (packed_answer,))
        except OSError as problem:
            raise WorkerLostError(f"{count} worker processes could not be started ({problem.strerror})") from problem

    def submit(self, question: Any) -> Future[Any]:
        """Ask a question; what the answer raises is raised again by the future's `result()`.

        Args:
            question: What the answer takes; it must be possible to pickle it.
        """
        future: Future[Any] = Future()
        try:
            asked = self._executor.submit(_reply, packed(question))
        except (BrokenProcessPool, RuntimeError):  # RuntimeError: it is closed
            future.set_exception(self._ended())
        except OSError as problem:
            future.set_exception(WorkerLostError(f"no more worker processes could be started ({problem.strerror})"))
        except Exception as problem:
            future.set_exception(problem)
        else:
            asked.add_done_callback(lambda done: self._settle(done, future))
        return future

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = self._over or CancelledError("the workers were closed")
        for process in self._context.started:
            with contextlib.suppress(ValueError, AttributeError):  # it has been closed, or was never started
                process.kill()  # it has nothing to save
        self._executor.shutdown(cancel_futures=True)

    def _settle(self, asked: Future[bytes], future: Future[Any]) -> None:
        """Hand on what a process replied, or why none did."""
        try:
            future.set_result(unpacked_outcome(asked.result()))
        except (BrokenProcessPool, CancelledError):
            future.set_exception(self._ended())
        except BaseException as problem:
            future.set_exception(problem)

    def _ended(self) -> BaseException:
        """Return why no question is answered any more."""
        with self._lock:
            if self._over is None:
                self._over = _lost([process.exitcode for process in self._context.started])
            return self._over


def _lost(exit_codes: list[int | None]) -> WorkerLostError:
    """Return the error that says how the first process has ended, by the exit codes of all; None: it runs."""
    # Those that the executor ended after the first one have this code.
    ended = sorted((code for code in exit_codes if code is not None), key=lambda code: code == -signal.SIGTERM)
    if not ended:
        return WorkerLostError("a worker process no longer listens")
    if ended[0] >= 0:
        return WorkerLostError(f"a worker process ended with exit status {ended[0]}")
    advice = "; perhaps memory ran out, fewer workers need less" if ended[0] == -signal.SIGKILL else ""
    return WorkerLostError(f"a worker process was ended by signal {-ended[0]} ({signal.strsignal(-ended[0])}){advice}")


def _start_fork_server() -> None:
    """Start the fork server of this process, unless it runs."""
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    # The server and its processes inherit the mask: Ctrl-C at the terminal reaches this process only.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ.update(_ONE_THREAD)
    try:
        with _no_script():
            multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def _no_script() -> Iterator[None]:
    """Hide the script that runs from `multiprocessing`, which would have every new process import it."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _begin(packed_answer: bytes) -> None:
    """Make a process ready for questions; what runs first in it."""
    global _answer  # an executor has no other place for what all questions share
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what an answer prints must not get into the output of the process that asks
    Thread(target=_end_with_parent, daemon=True).start()
    _answer = unpacked_answer(packed_answer)


def _end_with_parent() -> None:
    """End this process once the one that asks has ended, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _reply(packed_question: bytes) -> bytes:
    """Answer a question; what a process of the pool runs."""
    return outcome(_answer, packed_question)
