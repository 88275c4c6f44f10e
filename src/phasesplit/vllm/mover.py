"""The thread that moves KV while the model computes: it alone touches the endpoint.

The model's thread hands it calls, each carried out in order, and reads what has ended.
"""

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from phasesplit.transfer.endpoint import KvEndpoint
from phasesplit.vllm.arrivals import StagedReceives
from phasesplit.vllm.departures import StagedSends
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.staging import Device, Slots
from phasesplit.vllm.transfers import Ended

_BEAT_MS, _COPYING_MS = 500, 1
_log = logging.getLogger(__name__)


class Mover:
    """Moves the KV of one machine.

    Args:
        endpoint: Its transfers.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Who is told.
        threshold_tokens: The shortest prompt that leaves layer by layer.

    Attributes:
        threshold_tokens: As above. This thread sets it when it is told to, the model's thread reads it: a whole number
            at a time, so without a lock. It counts until a prompt has its staging slots; then its way is settled.
        departures: KV that leaves; its methods are for calls of `do`.
        arrivals: KV that comes in; the same.
    """

    def __init__(
        self, endpoint: KvEndpoint, device: Device, slots: Slots, reports: Reports, threshold_tokens: int
    ) -> None:
        self._endpoint, self._reports, self.threshold_tokens = endpoint, reports, threshold_tokens
        self._ended, self._news = Ended(), threading.Condition()
        layers = endpoint.info.layout.layers
        self.sends = StagedSends(endpoint.outgoing, device, slots, reports, self._sent, layers=layers)
        self.receives = StagedReceives(endpoint.incoming, device, reports, self._received)
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="phasesplit-mover", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], None]) -> None:
        """Let the thread carry out a call.

        Raises:
            RuntimeError: The thread has ended.
        """
        self._demand_alive()
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def take_ended(self, within_s: float) -> Ended:
        """Return what has ended since the last call, as soon as there is anything, at the latest after a while.

        Raises:
            RuntimeError: The thread has ended: what is waited for would never come.
        """
        self._demand_alive()
        with self._news:
            if not self._ended and within_s > 0:
                self._news.wait(within_s)
            ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """End the thread, and let go of sockets."""
        if self._thread.is_alive() and self._error is None:
            self._is_closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(2.0)

    def _demand_alive(self) -> None:
        if self._error is not None:
            raise RuntimeError("the thread that moves KV has ended") from self._error

    def _sent(self, request: str) -> None:
        with self._news:
            self._ended.sent.add(request)
            self._news.notify()

    def _received(self, request: str, whole: bool) -> None:
        with self._news:
            self._ended.received.add(request)
            if not whole:
                self._ended.failed.add(request)
            self._news.notify()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except ConnectionError:
            # Nobody can reach this machine any more; vLLM ends when one of its processes does.
            _log.error("the process that speaks for this machine is gone: ending")
            os._exit(1)
        except BaseException as error:
            self._error = error
            _log.exception("the thread that moves KV has ended")
            raise
        finally:
            self._endpoint.close()
            self._reports.close()

    def _turn(self) -> None:
        poller = select.poll()
        for descriptor, events in self._endpoint.descriptors().items():
            poller.register(descriptor, events)
        for descriptor in (self._wake, self._reports.fileno()):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(_COPYING_MS if self.sends.is_copying else _BEAT_MS)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._calls:
            self._calls.popleft()()
        for order in self._reports.orders():
            self._obey(order)
        self._endpoint.poll()
        # What touches the endpoint may take in what has come since, so nothing is left to look at before it sleeps.
        while self.sends.advance() | self.receives.advance():
            pass

    def _obey(self, order: dict[str, Any]) -> None:
        if "threshold_tokens" in order:
            self.threshold_tokens = int(order["threshold_tokens"])
        else:
            self.sends.abort_key(str(order.get("abort")), "aborted")
