"""Workers that are processes on this machine: a foreman loads the answer once, and forks them.

A fork of this process would start sooner, but is not safe once libraries have started threads (Python warns of it from
3.12 on); the foreman is a fresh interpreter and starts none. A fresh interpreter for each worker would load everything
once for each (measured: as soon on cores that are free, a third later on busy ones). `multiprocessing` has a fork
server too; it imports the calling script again.
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe

from phasesplit.errors import WorkerLostError
from phasesplit.workers.desk import Desk

_FOREMAN = "import sys; count = int(sys.argv[1]); sys.path[:] = sys.argv[2 + count:]; \
from phasesplit.workers.processes import lead; lead([int(text) for text in sys.argv[2 : 2 + count]])"
# One core for each worker, and no threads in what is forked.
_ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_LONGEST_DEATH_S = 5.0
# Imports and compiled code make long-lived objects; looking through them for garbage is a seventh of the start.
_GC_THRESHOLD = 200_000
_SIGNALLED = 128
"""An exit status above this says which signal ended a worker, as in shells."""


class Foreman:
    """The process whose children the workers are; all are in one process group.

    Args:
        channels: The workers' ends of their channels; the first one brings the answer before its first question.

    Raises:
        OSError: The system starts no more processes.
    """

    def __init__(self, channels: Sequence[Connection]) -> None:
        descriptors = [channel.fileno() for channel in channels]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, and a text of ours
            [sys.executable, "-u", "-c", _FOREMAN, str(len(descriptors)), *map(str, descriptors), *sys.path],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what an answer prints must not get into this process's output
            pass_fds=descriptors,
            env={**os.environ, **_ONE_THREAD},
            process_group=0,  # Ctrl-C at the terminal goes to the group of this process only
        )

    def end(self) -> None:
        """Kill the workers: they have nothing to save. Who waits for a reply sees the end of the channel."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_DEATH_S)

    def lost(self) -> WorkerLostError:
        """Return the error that says how a worker, or the foreman, has ended."""
        try:
            status = self._process.wait(_LONGEST_DEATH_S)
        except subprocess.TimeoutExpired:
            return WorkerLostError("a worker process no longer listens")
        ended_by = -status if status < 0 else status - _SIGNALLED
        if ended_by <= 0:
            return WorkerLostError(f"a worker process ended with exit status {status}")
        advice = "; perhaps memory ran out, fewer workers need less" if ended_by == signal.SIGKILL else ""
        return WorkerLostError(
            f"a worker process was ended by signal {ended_by} ({signal.strsignal(ended_by)}){advice}"
        )


class ProcessSeat:
    """The way to one process.

    Args:
        foreman: Its parent.
        channel: This process's end of its channel.
        first: What is sent before the first question, if anything.
    """

    def __init__(self, foreman: Foreman, channel: Connection, first: bytes | None) -> None:
        self._foreman = foreman
        self._channel = channel
        self._first = first

    def begin(self) -> None:
        """Send what comes first; a question that arrives before the process has started waits in the channel.

        Raises:
            WorkerLostError: A worker has ended.
        """
        if self._first is not None:
            try:
                self._channel.send_bytes(self._first)
            except OSError as problem:
                raise self._foreman.lost() from problem

    def ask(self, packed_question: bytes) -> bytes:
        """Return what the process's `Desk` replies.

        Args:
            packed_question: The pickled question.

        Raises:
            WorkerLostError: A worker has ended.
        """
        try:
            self._channel.send_bytes(packed_question)
            return self._channel.recv_bytes()
        except (EOFError, OSError) as problem:
            raise self._foreman.lost() from problem

    def end(self) -> None:
        """End all workers of the foreman."""
        self._foreman.end()


def start_processes(packed_answer: bytes, count: int) -> Sequence[ProcessSeat]:
    """Return the ways to that many new processes.

    Args:
        packed_answer: The pickled callable that answers a question.
        count: How many, 1 or more.

    Raises:
        WorkerLostError: The system starts no more processes.
    """
    try:
        channels = [Pipe() for _ in range(count)]
        foreman = Foreman([theirs for _, theirs in channels])
    except OSError as problem:
        raise WorkerLostError(f"{count} worker processes could not be started ({problem.strerror})") from problem
    for _, theirs in channels:
        theirs.close()
    return [
        ProcessSeat(foreman, ours, packed_answer if number == 0 else None) for number, (ours, _) in enumerate(channels)
    ]


def lead(descriptors: Sequence[int]) -> None:
    """Load the answer, fork a worker for each channel, and end as the first of them does; what the foreman runs.

    Args:
        descriptors: File descriptors of the workers' ends of the channels.
    """
    gc.set_threshold(_GC_THRESHOLD, 20, 100)
    channels = [Connection(descriptor) for descriptor in descriptors]
    try:
        desk = Desk(channels[0].recv_bytes())
    except (EOFError, OSError):  # closed, or killed, before it began
        return
    gc.freeze()  # the workers share what is loaded, as long as nobody writes to it
    for number in range(len(channels)):
        if os.fork() == 0:
            status = 1
            try:
                _serve(desk, channels, number)
                status = 0
            finally:
                os._exit(status)
    for channel in channels:
        channel.close()
    status = os.waitstatus_to_exitcode(os.wait()[1])
    os._exit(status if status >= 0 else _SIGNALLED - status)


def _serve(desk: Desk, channels: Sequence[Connection], number: int) -> None:
    """Answer questions until the other side has gone."""
    for other, channel in enumerate(channels):
        if other != number:
            channel.close()
    with contextlib.suppress(EOFError, OSError):
        while True:
            channels[number].send_bytes(desk.reply(channels[number].recv_bytes()))
