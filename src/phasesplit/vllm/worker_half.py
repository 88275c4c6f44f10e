"""The connector where the model runs: it stages each layer as soon as it is final, and returns what has ended."""

from dataclasses import dataclass
from functools import partial

from phasesplit.kv_transfer.chooser import Mode, choose
from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.scheduler_half import PromptPiece, StepOrders
from phasesplit.vllm.staging import Device, Slots
from phasesplit.vllm.transfer_thread import Ended, StagedReceive, StagedSend, TransferThread

IDLE_S = 0.002
"""How long a step that computes nothing waits for a transfer to end: vLLM would ask again a millisecond later, and two
processes would spin for as long as a prefill phase takes elsewhere."""


@dataclass(slots=True)
class _Part:
    """What this step computes of a prompt."""

    staged: StagedSend
    piece: PromptPiece
    next_layer: int = 0


class WorkerHalf:
    """The connector's half in a process that computes; every method is for the model's thread.

    Args:
        transfers: The thread that moves KV.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Where events go.
        layout: The model's KV.
    """

    def __init__(
        self, transfers: TransferThread, device: Device, slots: Slots, reports: Reports, layout: KvLayout
    ) -> None:
        self._transfers, self._device, self._slots, self._reports = transfers, device, slots, reports
        self._layout = layout
        self._sends: dict[str, StagedSend] = {}
        self._parts: list[_Part] = []
        self._computes = True

    def begin(self, step: StepOrders) -> None:
        """Take the orders of a step, before it is computed."""
        transfers, self._computes = self._transfers, step.computes
        for order in step.sends:
            staged = self._sends[order.request] = StagedSend(order)
            transfers.do(partial(transfers.sends.begin, staged))
        for awaited in step.receives:
            transfers.do(partial(transfers.receives.begin, StagedReceive(awaited)))
        for request, blocks in step.computed:
            transfers.do(partial(transfers.sends.computed, self._sends.pop(request), blocks))
        for request in step.aborted:
            transfers.do(partial(transfers.receives.abort, request, "the request has ended"))
            ended = self._sends.pop(request, None)
            if ended is not None:
                transfers.do(partial(transfers.sends.abort, ended, "the request has ended"))
        self._parts = [_Part(self._sends[piece.request], piece) for piece in step.pieces]
        begun = tuple(part.staged.order.key for part in self._parts if part.piece.is_first)
        for key in begun + step.started:
            self._reports.send({"prefill_started": key})

    def layer_computed(self, layer: int) -> None:
        """Let a layer leave, and those before it that have not."""
        for part in self._parts:
            self._stage(part, layer + 1)

    def end(self) -> None:
        """Let the rest leave of what the step has computed; a graph may have skipped `layer_computed`."""
        for part in self._parts:
            if part.staged.slots is not None:
                self._stage(part, self._layout.layers)
                part.staged.sent = max(part.staged.sent, part.piece.end)
        self._parts = []
        self._device.order_after_copies()

    def take_ended(self) -> Ended:
        """Return the transfers that have ended."""
        return self._transfers.take_ended(0.0 if self._computes else IDLE_S)

    def close(self) -> None:
        """End the thread that moves KV."""
        self._transfers.close()

    def _stage(self, part: _Part, end_layer: int) -> None:
        staged, first, end = part.staged, part.staged.sent, part.piece.end
        if staged.is_over or first >= end or not self._has_slots(staged):
            return
        blocks, slots = part.piece.blocks[first:end], (staged.slots or ())[first:end]
        for layer in range(part.next_layer, end_layer):
            is_done = self._device.gather(layer, blocks, slots)
            self._transfers.do(partial(self._transfers.sends.send, staged, layer, first, end, is_done))
        part.next_layer = end_layer

    def _has_slots(self, staged: StagedSend) -> bool:
        """Return whether slots hold the KV of a request, after taking them where it is time to."""
        if staged.slots is not None:
            return True
        order = staged.order
        if not staged.is_offered or choose(order.tokens, self._transfers.threshold_tokens) is Mode.SERIALIZED:
            return False
        staged.slots = self._slots.take(self._layout.blocks_for(order.tokens))
        if staged.slots is not None:
            self._transfers.do(partial(self._transfers.sends.open, staged))
        return staged.slots is not None
