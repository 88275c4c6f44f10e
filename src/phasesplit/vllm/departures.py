"""KV that leaves: staged layer by layer while the prompt is computed, or at once when it and its offer are there."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from phasesplit.errors import TransferError
from phasesplit.transfer.outgoing import Outgoing
from phasesplit.transfer.states import Departure
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.staging import Device, IsDone, Slots
from phasesplit.vllm.transfers import StagedSend

_Copy = tuple[StagedSend, Callable[[], None], IsDone | None]
"""What is sent, and what says that it has been copied into slots."""


class StagedSends:
    """The outgoing transfers of one machine; every method is for the mover's thread.

    Args:
        outgoing: What sends them.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Who is told.
        sent: Told of each request whose blocks vLLM has kept for us and may now use again.
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
        self._leaving: dict[str, StagedSend] = {}
        self._copying: deque[_Copy] = deque()

    @property
    def is_copying(self) -> bool:
        """Whether copies into staging slots go on."""
        return bool(self._copying)

    def begin(self, leaving: StagedSend) -> None:
        """Take an order: wait for the other machine's offer."""
        order = leaving.order
        try:
            self._outgoing.await_offer(order.key, order.peer, order.address, order.peer_epoch)
        except TransferError as error:
            self._reports.tell({"gone": order.key, "why": str(error)})
            leaving.is_over = leaving.is_given_up = True
            return
        self._leaving[order.key] = leaving

    def open(self, leaving: StagedSend) -> None:
        """Begin a transfer whose slots are taken."""
        key, slots = leaving.order.key, leaving.slots or ()
        offer = self._outgoing.offer_for(key)
        if offer is not None and offer.tokens != leaving.order.tokens:
            self._outgoing.abort(key, f"the offer is for {offer.tokens} tokens, the prompt has {leaving.order.tokens}")
            return
        try:
            self._outgoing.open(key, slots)
        except TransferError as error:
            self._outgoing.abort(key, str(error))

    def send(self, leaving: StagedSend, layer: int, first: int, end: int, is_done: IsDone | None) -> None:
        """Send blocks of a layer, once their copy into the slots has ended."""
        self._copying.append(
            (leaving, partial(self._outgoing.send_layer, leaving.order.key, layer, first, end), is_done)
        )
        self._send_copied()

    def computed(self, leaving: StagedSend, blocks: Sequence[int]) -> None:
        """Take note that the prompt phase is over; vLLM keeps the blocks until `sent` is told."""
        leaving.blocks = tuple(blocks)
        if self._leaving.get(leaving.order.key) is not leaving:  # its order was refused
            self._sent(leaving.order.request)

    def give_up(self, leaving: StagedSend, why: str) -> None:
        """End a transfer whose request has ended; vLLM keeps no blocks for it."""
        leaving.is_given_up = True
        if self._leaving.get(leaving.order.key) is leaving:  # else its order was refused: the key is another's
            self._outgoing.abort(leaving.order.key, why)

    def abort_key(self, key: str, why: str) -> None:
        """End the transfer of a key in any state; of one that is not known, say once more that it has left."""
        if key in self._leaving:
            self._outgoing.abort(key, why)
        else:
            self._reports.tell({"kv_left": key})

    def advance(self) -> bool:
        """Do what has become possible; return whether that touched the transfers, which may make more possible."""
        has_moved = self._send_copied()
        for leaving in list(self._leaving.values()):
            state = self._outgoing.state(leaving.order.key)
            if state is Departure.OFFERED:
                leaving.is_offered = True
                if leaving.blocks is not None and leaving.slots is None:
                    has_moved |= self._send_whole(leaving)
            elif state in (Departure.COMPLETED, Departure.FAILED):
                has_moved |= self._end(leaving, state)
        return has_moved

    def _send_copied(self) -> bool:
        """Send, in order, what has been copied into slots; return whether anything was."""
        has_sent = False
        while self._copying:
            leaving, send, is_done = self._copying[0]
            if is_done is not None and not is_done():
                break
            self._copying.popleft()
            if self._outgoing.state(leaving.order.key) is Departure.OPEN:
                send()
                has_sent = True
        return has_sent

    def _send_whole(self, leaving: StagedSend) -> bool:
        blocks = leaving.blocks or ()
        leaving.slots = self._slots.take(len(blocks))
        if leaving.slots is None:
            return False  # others leave first; the blocks are kept
        self.open(leaving)
        # Copies end in the order in which they begin.
        is_done = [self._device.gather(layer, blocks, leaving.slots) for layer in range(self._layers)][-1]
        self._copying.append((leaving, partial(self._outgoing.send_all, leaving.order.key), is_done))
        self._send_copied()
        return True

    def _end(self, leaving: StagedSend, state: Departure) -> bool:
        key = leaving.order.key
        is_copied = all(part[0] is not leaving for part in self._copying)
        if not leaving.is_over:
            # Nobody stages for it any more once this is set, so its slots have their last owner.
            leaving.is_over = True
            if state is Departure.FAILED:
                self._reports.tell({"gone": key, "why": self._outgoing.why(key) or "the transfer failed"})
        # The model's thread may be about to copy into the slots until it has said that the request has ended.
        has_ended = leaving.blocks is not None or leaving.is_given_up
        if not (has_ended and is_copied and self._outgoing.may_free(key)):
            return False
        if leaving.slots is not None:
            self._slots.give(leaving.slots)
            leaving.slots = None
        self._outgoing.forget(key)
        del self._leaving[key]
        if leaving.blocks is not None:
            self._sent(leaving.order.request)
        self._reports.tell({"kv_left": key})
        self._reports.tell({"moved": self._figures()})
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
