"""One transfer at its receiver: what it may write, what has come of it, and what is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phasesplit.transfer.failures import Reason
from phasesplit.transfer.layout import KvLayout
from phasesplit.transfer.leases import Lease
from phasesplit.transfer.messages import Message
from phasesplit.transfer.states import Arrival


@dataclass(slots=True)
class InboundTransfer:
    """A transfer that blocks are held for.

    Attributes:
        lease: The blocks.
        sender: Machine that sends.
        offer: What the sender is told of it; None where it learns of the reservation in another way.
        wants_note: Whether it is whole only with a note.
        arrived: Which blocks have come, bool (layers, blocks of the transfer).
        channels: Numbers of the channels that a part of it may still come through.
        note: Its note, once it has come.
        state: Its state.
        reason: Why its blocks are given back.
        why: The same for people.
    """

    lease: Lease
    sender: str
    offer: Message | None
    wants_note: bool
    arrived: NDArray[np.bool_]
    channels: set[int]
    note: bytes | None = None
    state: Arrival = Arrival.RESERVED
    reason: Reason = Reason.COMPLETED
    why: str = ""
    _places: Mapping[int, int] = field(init=False)  # block in the pool -> its place in the transfer

    def __post_init__(self) -> None:
        self._places = {block: place for place, block in enumerate(self.lease.blocks)}

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return bool(self.arrived.all()) and (self.note is not None or not self.wants_note)

    def fault(self, frame: Message, layout: KvLayout) -> str:
        """Return what is wrong with the address of a frame, or the empty text."""
        if frame.layer >= layout.layers or not frame.blocks:
            return "is outside the layers"
        # Block numbers of a reservation ascend, so a frame is inside it if and only if its blocks are neighbours there.
        first = self._places.get(frame.first_block)
        last = self._places.get(frame.first_block + frame.blocks - 1)
        if first is None or last is None or last - first != frame.blocks - 1:
            return "is outside the reservation"
        if frame.length_bytes != frame.blocks * layout.block_bytes:
            return "has a wrong length"
        return ""

    def seen(self, frame: Message) -> NDArray[np.bool_]:
        """Return a view of which blocks of a frame without a fault have arrived."""
        first = self._places[frame.first_block]
        return self.arrived[frame.layer, first : first + frame.blocks]
