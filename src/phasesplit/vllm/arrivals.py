"""KV that comes in: staging slots are offered for it, and what has arrived whole is copied into vLLM's blocks."""

from collections import deque
from collections.abc import Callable

from phasesplit.errors import TransferError
from phasesplit.transfer.failures import NoRoomError
from phasesplit.transfer.incoming import Incoming
from phasesplit.transfer.states import Arrival
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.staging import Device
from phasesplit.vllm.transfers import StagedReceive


class StagedReceives:
    """The incoming transfers of one machine; every method is for the mover's thread.

    Args:
        incoming: What takes them in.
        device: vLLM's blocks.
        reports: Who is told.
        received: Told of each request whose blocks nothing writes to any more, and whether its KV is there.
    """

    def __init__(
        self, incoming: Incoming, device: Device, reports: Reports, received: Callable[[str, bool], None]
    ) -> None:
        self._incoming, self._device, self._reports, self._received = incoming, device, reports, received
        self._coming: dict[str, StagedReceive] = {}
        self._waiting: deque[StagedReceive] = deque()

    def begin(self, coming: StagedReceive) -> None:
        """Take an order: hold slots as soon as there are some, in the order of the orders."""
        self._coming[coming.order.request] = coming
        self._waiting.append(coming)
        self._expect()

    def give_up(self, request: str, why: str) -> None:
        """End the transfer of a request in any state; one that is not known, or has ended, changes nothing."""
        coming = self._coming.get(request)
        if coming is not None:
            # What still arrives goes to the slots; vLLM's blocks are written to by this thread alone.
            self._end(coming, why)

    def advance(self) -> bool:
        """Do what has become possible; return whether that touched the transfers, which may make more possible."""
        has_moved = self._expect()
        for coming in list(self._coming.values()):
            if coming.is_expected:
                has_moved |= self._look(coming)
        return has_moved

    def _expect(self) -> bool:
        """Hold slots for those who wait for some; return whether anybody waits no more."""
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

    def _look(self, coming: StagedReceive) -> bool:
        order, state = coming.order, self._incoming.state(coming.order.key)
        if state is Arrival.READY:
            slots = self._incoming.take(order.key).blocks
            self._device.scatter(slots[order.first :], order.blocks[order.first :])
            self._incoming.release(order.key)
            del self._coming[order.request]
            self._received(order.request, True)
            self._reports.tell({"kv_ready": order.key})
        elif state in (Arrival.DRAINING, Arrival.RELEASED):
            self._end(coming, self._incoming.why(order.key) or "the transfer failed")
        else:
            return False
        return True

    def _end(self, coming: StagedReceive, why: str) -> None:
        """Let vLLM have its blocks back, without the KV."""
        order = coming.order
        if coming.is_expected:
            self._incoming.abort(order.key, why)
        else:
            self._waiting.remove(coming)
        del self._coming[order.request]
        self._received(order.request, False)
        self._reports.tell({"missed": order.key, "why": why})
