"""The connector where the model runs: it stages each layer as soon as it is final, and tells what has ended."""

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

    leaving: StagedSend
    piece: PromptPiece
    next_layer: int = 0


class WorkerHalf:
    """The connector's half in a process that computes; every method is for the model's thread.

    Args:
        mover: What moves KV.
        device: vLLM's blocks.
        slots: Staging slots for KV that leaves.
        reports: Who is told.
        layout: The model's KV.
    """

    def __init__(self, mover: TransferThread, device: Device, slots: Slots, reports: Reports, layout: KvLayout) -> None:
        self._mover, self._device, self._slots, self._reports = mover, device, slots, reports
        self._layout = layout
        self._leaving: dict[str, StagedSend] = {}
        self._parts: list[_Part] = []
        self._computes = True

    def begin(self, step: StepOrders) -> None:
        """Take the orders of a step, before it is computed."""
        mover, self._computes = self._mover, step.computes
        for send in step.sends:
            leaving = self._leaving[send.request] = StagedSend(send)
            mover.do(partial(mover.sends.begin, leaving))
        for take in step.takes:
            mover.do(partial(mover.receives.begin, StagedReceive(take)))
        for request, blocks in step.computed:
            mover.do(partial(mover.sends.computed, self._leaving.pop(request), blocks))
        for request in step.given_up:
            mover.do(partial(mover.receives.give_up, request, "the request has ended"))
            ended = self._leaving.pop(request, None)
            if ended is not None:
                mover.do(partial(mover.sends.give_up, ended, "the request has ended"))
        self._parts = [_Part(self._leaving[piece.request], piece) for piece in step.pieces]
        begun = tuple(part.leaving.order.key for part in self._parts if part.piece.is_first)
        for key in begun + step.started:
            self._reports.tell({"prefill_started": key})

    def layer_computed(self, layer: int) -> None:
        """Let a layer leave, and those before it that have not."""
        for part in self._parts:
            self._stage(part, layer + 1)

    def end(self) -> None:
        """Let the rest leave of what the step has computed; a graph may have skipped `layer_computed`."""
        for part in self._parts:
            if part.leaving.slots is not None:
                self._stage(part, self._layout.layers)
                part.leaving.sent = max(part.leaving.sent, part.piece.end)
        self._parts = []
        self._device.order_after_copies()

    def take_ended(self) -> Ended:
        """Return the transfers that have ended."""
        return self._mover.take_ended(0.0 if self._computes else IDLE_S)

    def close(self) -> None:
        """End the mover."""
        self._mover.close()

    def _stage(self, part: _Part, end_layer: int) -> None:
        leaving, first, end = part.leaving, part.leaving.sent, part.piece.end
        if leaving.is_over or first >= end or not self._has_slots(leaving):
            return
        blocks, slots = part.piece.blocks[first:end], (leaving.slots or ())[first:end]
        for layer in range(part.next_layer, end_layer):
            is_done = self._device.gather(layer, blocks, slots)
            self._mover.do(partial(self._mover.sends.send, leaving, layer, first, end, is_done))
        part.next_layer = end_layer

    def _has_slots(self, leaving: StagedSend) -> bool:
        """Return whether slots hold the KV of a request, after taking them where it is time to."""
        if leaving.slots is not None:
            return True
        order = leaving.order
        if not leaving.is_offered or choose(order.tokens, self._mover.threshold_tokens) is Mode.SERIALIZED:
            return False
        leaving.slots = self._slots.take(self._layout.blocks_for(order.tokens))
        if leaving.slots is not None:
            self._mover.do(partial(self._mover.sends.open, leaving))
        return leaving.slots is not None
