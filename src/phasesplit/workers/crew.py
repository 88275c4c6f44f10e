"""One queue of questions, and for each worker a thread that carries them there and back."""

import pickle
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Protocol

from phasesplit.errors import WorkerLostError
from phasesplit.workers.desk import opened

_LONGEST_GOODBYE_S = 0.5


class Seat(Protocol):
    """The way to one worker, as `Crew` needs it."""

    def begin(self) -> None:
        """Wait until the worker takes questions.

        Raises:
            WorkerLostError: It has ended.
        """

    def ask(self, packed_question: bytes) -> bytes:
        """Return what the worker's `Desk` replies.

        Raises:
            WorkerLostError: The worker has ended.
        """

    def end(self) -> None:
        """End the worker whatever it is at, and wake who waits in `begin` or `ask`; may be called twice."""


class Crew:
    """Workers elsewhere, each with one question at a time; when one is lost all are ended.

    Args:
        seats: The way to each worker. They are ended when the crew is closed.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._seats = seats
        self._questions: SimpleQueue[tuple[Future[Any], Any] | None] = SimpleQueue()
        self._over: BaseException | None = None
        self._lock = Lock()
        # Daemons: an interpreter that ends without closing the crew does not wait for them.
        self._threads = [Thread(target=self._serve, args=(seat,), daemon=True) for seat in seats]
        for thread in self._threads:
            thread.start()

    @property
    def width(self) -> int:
        """How many questions are worth asking at once."""
        return len(self._seats)

    def submit(self, question: Any) -> Future[Any]:
        """Ask a question; what the answer raises is raised again by the future's `result()`.

        Args:
            question: What the answer takes; it must be possible to pickle it.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._over is None:
                self._questions.put((future, question))
            else:
                future.set_exception(self._over)
        return future

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop(CancelledError("the workers were closed"))
        for thread in self._threads:
            thread.join(_LONGEST_GOODBYE_S)

    def _serve(self, seat: Seat) -> None:
        """Carry questions to one worker, until there is no more."""
        try:
            seat.begin()
        except Exception as problem:
            self._stop(problem)
            return
        while (work := self._questions.get()) is not None:
            future, question = work
            if not future.set_running_or_notify_cancel():
                continue
            try:
                answer = opened(seat.ask(pickle.dumps(question, protocol=pickle.HIGHEST_PROTOCOL)))
            except WorkerLostError as problem:
                future.set_exception(self._stop(problem))
                return
            except Exception as problem:
                future.set_exception(problem)
            else:
                future.set_result(answer)

    def _stop(self, reason: BaseException) -> BaseException:
        """End all workers, let what is still asked fail, and return why: `reason`, unless there was one before."""
        with self._lock:
            if self._over is not None:
                return self._over
            self._over = reason
        for seat in self._seats:
            seat.end()
        while True:
            try:
                work = self._questions.get_nowait()
            except Empty:
                break
            if work is not None and work[0].set_running_or_notify_cancel():
                work[0].set_exception(reason)
        for _ in self._threads:
            self._questions.put(None)
        return reason
