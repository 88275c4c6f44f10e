"""Where questions are answered: in this process, in one process for each core, or on a Ray cluster.

A *question* is a small value that can be pickled. The *answer* is a callable that can be pickled too; it carries what
all questions share, travels once to every process, and may keep what it worked out between questions. Which questions
make sense is no business of this package.
"""

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from phasesplit.errors import SpecError
from phasesplit.planner.pool.cores import usable_cores

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Question_contra = TypeVar("Question_contra", contravariant=True)


class Pool(Protocol[Question_contra, Answer]):
    """What answers questions, several at once.

    Attributes:
        width: How many questions are worth asking at once; more than that wait.
    """

    @property
    def width(self) -> int:
        """How many questions are worth asking at once."""

    def submit(self, question: Question_contra) -> Future[Answer]:
        """Ask a question; what the answer raises is raised again by the future's `result()`."""


class InThisProcess(Generic[Question, Answer]):
    """A pool of this process alone: a question is answered when it is asked.

    Args:
        answer: Answers one question.
    """

    width = 1

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self._answer = answer

    def submit(self, question: Question) -> Future[Answer]:
        """Answer a question and return the finished future; what the answer raises is in it, except KeyboardInterrupt.

        Args:
            question: What `answer` takes.
        """
        future: Future[Answer] = Future()
        try:
            future.set_result(self._answer(question))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def __enter__(self) -> "InThisProcess[Question, Answer]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def open_pool(
    answer: Callable[[Question], Answer], *, count: int | None = None, ray_address: str | None = None
) -> AbstractContextManager[Pool[Question, Answer]]:
    """Return the pool that answers questions, to be used in a `with` statement; leaving it ends its processes at once.

    Questions that are not answered by then fail with `concurrent.futures.CancelledError`, also when the block ends by
    an exception such as KeyboardInterrupt. The processes ignore Ctrl-C: this process decides.

    Compiled code must be in Numba's disk cache already (one call of `simulate()` in this process sees to that):
    otherwise every process compiles it for itself, half a minute each.

    The script that calls this is never imported again, so it needs no `if __name__ == "__main__"`. For the same reason
    `answer` and the questions must be of classes and functions from modules, not from the script itself.

    Args:
        answer: Answers one question. It is copied to every process, and what it caches stays there.
        count: How many processes; 1 is this process itself, which answers during `submit`. By default one for each core
            that this process may use, or for each free CPU of the Ray cluster.
        ray_address: Use a Ray cluster: its HOST:PORT, "auto" for the one that runs on this machine, "local" for one
            that is started for this purpose. phasesplit must be installed on every node, in this version.

    Raises:
        SpecError: `count` is below 1, `answer` cannot be pickled, Ray is not installed, or the cluster at the address
            cannot be used.
        WorkerLostError: The system starts no more processes. Once open, futures fail with it when a process is lost.
    """
    if count is not None and count < 1:
        raise SpecError.bad("number of workers", count, "1 or more")
    if ray_address is None:
        count = count or usable_cores()
        if count == 1:
            return InThisProcess(answer)
    try:
        packed = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as problem:
        raise SpecError(f"workers: the answer cannot be sent to another process ({problem})") from problem
    if ray_address is not None:
        from phasesplit.planner.pool.ray_pool import open_ray

        return open_ray(packed, ray_address, count)
    from phasesplit.planner.pool.processes import ProcessPool

    return ProcessPool(packed, count or 1)
