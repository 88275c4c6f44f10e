"""The process that sends a trace: apart from the cluster, so that neither waits for the other's interpreter."""

import asyncio
import multiprocessing
import signal
import time
from multiprocessing.connection import Connection

from phasesplit.domain.request import Trace
from phasesplit.errors import WorkerLostError
from phasesplit.measuring.prompts import Prompts
from phasesplit.measuring.replay import Replay, replay

_END_S = 5.0


class Client:
    """A process that replays what it is given; to be closed at the end. Only who started it can interrupt it."""

    def __init__(self) -> None:
        # A fork of a process with threads and an event loop would inherit half of both.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process.pid is not None  # noqa: S101 - it has been started
        return self._process.pid

    async def replay(self, trace: Trace, url: str, model: str, prompts: Prompts) -> tuple[Replay, float]:
        """Return what came of a trace, and the seconds that the process computed for it.

        Args:
            trace: The requests.
            url: Base of the endpoint.
            model: The model's name there.
            prompts: Makes the prompts.

        Raises:
            WorkerLostError: The process has ended.
        """
        return await asyncio.to_thread(self._exchange, (trace, url, model, prompts))

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.join(_END_S)
        self._connection.close()

    def _exchange(self, asked: tuple[Trace, str, str, Prompts]) -> tuple[Replay, float]:
        try:
            self._connection.send(asked)
            found: tuple[Replay, float] = self._connection.recv()
        except (EOFError, OSError):
            raise WorkerLostError("the process that sends the requests has ended early") from None
        return found


def _serve(connection: Connection) -> None:
    """Replay what comes, until nobody is there any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        try:
            trace, url, model, prompts = connection.recv()
        except EOFError:
            return
        since_s = time.process_time()
        seen = asyncio.run(replay(trace, url, model=model, prompts=prompts))
        connection.send((seen, time.process_time() - since_s))
