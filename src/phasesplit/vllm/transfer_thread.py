"""The thread that moves KV while the model computes: it alone touches the endpoint.

The model's thread hands it calls, each carried out in order, and reads which transfers have ended.

KV that leaves (`StagedSends`):

1. `begin`: the transfer thread waits for the other machine's offer of blocks.
2. `open` and `send`: the model's thread has taken staging slots and begun to copy layers into them; each layer leaves
   when its copy has ended. A short prompt is staged in one go, when it is computed and its offer is there.
3. `computed`: the prefill phase is over, and vLLM keeps the blocks of the request until `sent` is called.
4. The transfer ends, well or badly. The slots are given back, and vLLM may use the blocks again.

KV that comes in (`StagedReceives`): staging slots are offered for it in the order of the orders, and KV that has
arrived whole is copied into vLLM's blocks. A request whose KV does not come is reported as failed: vLLM computes it.

A field that both threads see has one thread that writes it, named next to it; the other thread only reads it.
"""

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.incoming import Incoming
from phasesplit.kv_transfer.messages import NoRoomError
from phasesplit.kv_transfer.outgoing import Outgoing
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.scheduler_half import ReceiveOrder, SendOrder
from phasesplit.vllm.staging import Device, IsDone, Slots

_IDLE_MS, _COPYING_MS = 500, 1
"""How long the thread sleeps at most: without copies, and while copies go on."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class StagedSend:
    """A request whose KV leaves.

    Attributes:
        order: What was ordered.
        is_offered: The other machine has blocks for it. [transfer thread]
        is_over: The transfer has ended, well or badly. [transfer thread]
        slots: Staging slots that hold its KV; None before it was staged and after it is over. [model's thread before
            `blocks` is set, then transfer thread]
        sent: One behind the last block that was given to the transfer thread. [model's thread]
        blocks: vLLM's blocks, kept for us once the prefill phase is over; None before. [transfer thread]
        is_aborted: Nobody waits for it any more. [transfer thread]
    """

    order: SendOrder
    is_offered: bool = False
    is_over: bool = False
    slots: tuple[int, ...] | None = None
    sent: int = 0
    blocks: tuple[int, ...] | None = None
    is_aborted: bool = False


@dataclass(slots=True, eq=False)
class StagedReceive:
    """A request that waits for KV. All of it belongs to the transfer thread.

    Attributes:
        order: What was ordered.
        is_expected: Staging slots are held for it, and offered.
    """

    order: ReceiveOrder
    is_expected: bool = False


@dataclass(slots=True)
class Ended:
    """Transfers that have ended since the last call, by vLLM's names of the requests.

    Attributes:
        sent: Nothing reads their blocks any more.
        received: Nothing writes to their blocks any more.
        failed: Those of `received` whose KV is not there.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def __bool__(self) -> bool:
        """Return whether there is anything."""
        return bool(self.sent or self.received)


_Copy = tuple[StagedSend, Callable[[], None], IsDone | None]
"""What is sent, and what says that it has been copied into slots."""


class StagedSends:
    """The outgoing transfers of one machine; every method is for the transfer thread.

    Args:
        outgoing: What sends them.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Where events and figures go.
        sent: Called with each request whose blocks vLLM has kept for us and may now use again.
        layers: Layers of the model.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        device: Device,
        slots: Slots,
        reports: Reports,
        sent: Callable[[str], None],
        *,
        layers: int,
    ) -> None:
        self._outgoing, self._device, self._slots, self._reports, self._sent = outgoing, device, slots, reports, sent
        self._layers = layers
        self._sends: dict[str, StagedSend] = {}
        self._copying: deque[_Copy] = deque()

    @property
    def is_copying(self) -> bool:
        """Whether copies into staging slots go on."""
        return bool(self._copying)

    def begin(self, staged: StagedSend) -> None:
        """Take an order: wait for the other machine's offer."""
        order = staged.order
        try:
            self._outgoing.await_offer(order.key, order.peer, order.address, order.peer_epoch)
        except TransferError as error:
            self._reports.send({"gone": order.key, "why": str(error)})
            staged.is_over = staged.is_aborted = True
            return
        self._sends[order.key] = staged

    def open(self, staged: StagedSend) -> None:
        """Begin a transfer whose slots are taken."""
        key, slots = staged.order.key, staged.slots or ()
        offer = self._outgoing.offer_for(key)
        if offer is not None and offer.tokens != staged.order.tokens:
            self._outgoing.abort(key, f"the offer is for {offer.tokens} tokens, the prompt has {staged.order.tokens}")
            return
        try:
            self._outgoing.open(key, slots)
        except TransferError as error:
            self._outgoing.abort(key, str(error))

    def send(self, staged: StagedSend, layer: int, first: int, end: int, is_done: IsDone | None) -> None:
        """Send blocks of a layer, once their copy into the slots has ended."""
        self._copying.append((staged, partial(self._outgoing.send_layer, staged.order.key, layer, first, end), is_done))
        self._send_copied()

    def computed(self, staged: StagedSend, blocks: Sequence[int]) -> None:
        """Record that the prefill phase is over; vLLM keeps the blocks until `sent` is called."""
        staged.blocks = tuple(blocks)
        if self._sends.get(staged.order.key) is not staged:  # its order was refused
            self._sent(staged.order.request)

    def abort(self, staged: StagedSend, why: str) -> None:
        """End a transfer whose request has ended; vLLM keeps no blocks for it."""
        staged.is_aborted = True
        if self._sends.get(staged.order.key) is staged:  # else its order was refused: the key is another's
            self._outgoing.abort(staged.order.key, why)

    def abort_key(self, key: str, why: str) -> None:
        """End the transfer of a key in any state; of one that is not known, report once more that it has left."""
        if key in self._sends:
            self._outgoing.abort(key, why)
        else:
            self._reports.send({"kv_left": key})

    def advance(self) -> bool:
        """Do what has become possible; return whether that touched the transfers, which may make more possible."""
        has_moved = self._send_copied()
        for staged in list(self._sends.values()):
            state = self._outgoing.state(staged.order.key)
            if state is OutboundState.OFFERED:
                staged.is_offered = True
                if staged.blocks is not None and staged.slots is None:
                    has_moved |= self._send_whole(staged)
            elif state in (OutboundState.COMPLETED, OutboundState.FAILED):
                has_moved |= self._end(staged, state)
        return has_moved

    def _send_copied(self) -> bool:
        """Send, in order, what has been copied into slots; return whether anything was."""
        has_sent = False
        while self._copying:
            staged, send, is_done = self._copying[0]
            if is_done is not None and not is_done():
                break
            self._copying.popleft()
            if self._outgoing.state(staged.order.key) is OutboundState.OPEN:
                send()
                has_sent = True
        return has_sent

    def _send_whole(self, staged: StagedSend) -> bool:
        blocks = staged.blocks or ()
        staged.slots = self._slots.take(len(blocks))
        if staged.slots is None:
            return False  # others leave first; the blocks are kept
        self.open(staged)
        # Copies end in the order in which they begin.
        is_done = [self._device.gather(layer, blocks, staged.slots) for layer in range(self._layers)][-1]
        self._copying.append((staged, partial(self._outgoing.send_all, staged.order.key), is_done))
        self._send_copied()
        return True

    def _end(self, staged: StagedSend, state: OutboundState) -> bool:
        key = staged.order.key
        is_copied = all(part[0] is not staged for part in self._copying)
        if not staged.is_over:
            # Nothing is staged for it any more once this is set, so its slots have their last owner.
            staged.is_over = True
            if state is OutboundState.FAILED:
                self._reports.send({"gone": key, "why": self._outgoing.why(key) or "the transfer failed"})
        # The model's thread may be about to copy into the slots until it has reported that the request has ended.
        has_ended = staged.blocks is not None or staged.is_aborted
        if not (has_ended and is_copied and self._outgoing.may_free(key)):
            return False
        if staged.slots is not None:
            self._slots.give(staged.slots)
            staged.slots = None
        self._outgoing.forget(key)
        del self._sends[key]
        if staged.blocks is not None:
            self._sent(staged.order.request)
        self._reports.send({"kv_left": key})
        self._reports.send({"transfers": self._figures()})
        return True

    def _figures(self) -> dict[str, object]:
        sent = self._outgoing.sent
        return {
            **{mode.value: count for mode, count in sent.transfers.items()},
            "failed": sent.failed,
            "bytes_sent": sent.size_bytes,
            "exposed_s": sent.exposed_s,
            "last_exposed_s": sent.last_exposed_s,
        }


class StagedReceives:
    """The incoming transfers of one machine; every method is for the transfer thread.

    Args:
        incoming: What takes them in.
        device: vLLM's blocks.
        reports: Where events and figures go.
        received: Called with each request whose blocks nothing writes to any more, and whether its KV is there.
    """

    def __init__(
        self, incoming: Incoming, device: Device, reports: Reports, received: Callable[[str, bool], None]
    ) -> None:
        self._incoming, self._device, self._reports, self._received = incoming, device, reports, received
        self._receives: dict[str, StagedReceive] = {}
        self._waiting: deque[StagedReceive] = deque()

    def begin(self, staged: StagedReceive) -> None:
        """Take an order: hold slots as soon as there are some, in the order of the orders."""
        self._receives[staged.order.request] = staged
        self._waiting.append(staged)
        self._expect()

    def abort(self, request: str, why: str) -> None:
        """End the transfer of a request in any state; one that is not known, or has ended, changes nothing."""
        staged = self._receives.get(request)
        if staged is not None:
            # What still arrives goes to the slots; vLLM's blocks are written to by this thread alone.
            self._end(staged, why)

    def advance(self) -> bool:
        """Do what has become possible; return whether that touched the transfers, which may make more possible."""
        has_moved = self._expect()
        for staged in list(self._receives.values()):
            if staged.is_expected:
                has_moved |= self._check(staged)
        return has_moved

    def _expect(self) -> bool:
        """Hold slots for the transfers that wait for some; return whether any got some."""
        before = len(self._waiting)
        while self._waiting:
            order = self._waiting[0].order
            try:
                self._incoming.expect(order.key, order.tokens, order.peer, wants_note=False)
            except NoRoomError:
                break
            except TransferError as error:
                self._end(self._waiting[0], str(error))
                continue
            self._waiting.popleft().is_expected = True
        return len(self._waiting) < before

    def _check(self, staged: StagedReceive) -> bool:
        order, state = staged.order, self._incoming.state(staged.order.key)
        if state is InboundState.READY:
            slots = self._incoming.take(order.key).blocks
            self._device.scatter(slots[order.first :], order.blocks[order.first :])
            self._incoming.release(order.key)
            del self._receives[order.request]
            self._received(order.request, True)
            self._reports.send({"kv_ready": order.key})
        elif state in (InboundState.DRAINING, InboundState.RELEASED):
            self._end(staged, self._incoming.why(order.key) or "the transfer failed")
        else:
            return False
        return True

    def _end(self, staged: StagedReceive, why: str) -> None:
        """Return the blocks to vLLM without the KV."""
        order = staged.order
        if staged.is_expected:
            self._incoming.abort(order.key, why)
        else:
            self._waiting.remove(staged)
        del self._receives[order.request]
        self._received(order.request, False)
        self._reports.send({"missed": order.key, "why": why})


class TransferThread:
    """Moves the KV of one machine.

    Args:
        endpoint: Its transfers.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Where events and figures go.
        threshold_tokens: The shortest prompt that leaves layer by layer.

    Attributes:
        threshold_tokens: As above. This thread sets it, the model's thread reads it: a whole number at a time, so
            without a lock. It counts until a prompt has its staging slots; then its mode is settled.
        sends: KV that leaves; its methods are for calls of `do`.
        receives: KV that comes in; the same.
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
        self._thread = threading.Thread(target=self._run, name="phasesplit-transfers", daemon=True)
        self._thread.start()

    def do(self, call: Callable[[], None]) -> None:
        """Let the thread carry out a call.

        Raises:
            RuntimeError: The thread has ended.
        """
        self._require_alive()
        self._calls.append(call)
        os.eventfd_write(self._wake, 1)

    def take_ended(self, within_s: float) -> Ended:
        """Return what has ended since the last call, as soon as there is anything, at the latest after a while.

        Raises:
            RuntimeError: The thread has ended: what is waited for would never come.
        """
        self._require_alive()
        with self._news:
            if not self._ended and within_s > 0:
                self._news.wait(within_s)
            ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """End the thread, and close its sockets."""
        if self._thread.is_alive() and self._error is None:
            self._is_closing = True
            os.eventfd_write(self._wake, 1)
            self._thread.join(2.0)

    def _require_alive(self) -> None:
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
                self._poll()
        except ConnectionError:
            # Nobody can reach this machine any more; vLLM ends when one of its processes does.
            _log.error("the process that reports for this machine is gone: exit")
            os._exit(1)
        except BaseException as error:
            self._error = error
            _log.exception("the thread that moves KV has ended")
            raise
        finally:
            self._endpoint.close()
            self._reports.close()

    def _poll(self) -> None:
        poller = select.poll()
        for descriptor, events in self._endpoint.descriptors().items():
            poller.register(descriptor, events)
        for descriptor in (self._wake, self._reports.fileno()):
            if descriptor >= 0:
                poller.register(descriptor, select.POLLIN)
        poller.poll(_COPYING_MS if self.sends.is_copying else _IDLE_MS)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._calls:
            self._calls.popleft()()
        for order in self._reports.orders():
            self._follow(order)
        self._endpoint.poll()
        # What touches the endpoint may take in what has come since, so nothing is left to look at before it sleeps.
        while self.sends.advance() | self.receives.advance():
            pass

    def _follow(self, order: dict[str, Any]) -> None:
        if "threshold_tokens" in order:
            self.threshold_tokens = int(order["threshold_tokens"])
        else:
            self.sends.abort_key(str(order.get("abort")), "aborted")
