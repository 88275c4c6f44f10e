"""What a sender knows of each transfer, found by the key of its request or by the number of its reservation.

Offer and order of a request come from different machines, in either order, and either may be withdrawn before the
other is here. What was withdrawn is remembered for a while, so that its counterpart is turned down when it comes.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.transfer.offers import Reservation
from phasesplit.transfer.states import Departure

_REMEMBERED = 1_000

Transfer = Reservation | str
"""A transfer, named by its reservation or by the key that it was offered under."""


@dataclass(slots=True)
class OutboundTransfer:
    """One transfer at its sender.

    Attributes:
        deadline_s: Instant after which it has failed.
        state: Its state.
        key: What both ends call the request; empty for one that was never offered.
        ordered: Whether our machine has an order for it.
        reservation: What the receiver holds, once it is known.
        blocks: Our blocks, once they are named.
        unsent: Blocks that were not given to `send`, bool (layers, blocks of the transfer), once it is open.
        noted: Whether its note was given.
        why: Why it failed.
        queued: Frames and notes that no channel has taken yet.
    """

    deadline_s: float
    state: Departure
    key: str = ""
    ordered: bool = True
    reservation: Reservation | None = None
    blocks: tuple[int, ...] = ()
    unsent: NDArray[np.bool_] | None = None
    noted: bool = False
    why: str = ""
    queued: int = 0

    @property
    def is_sent(self) -> bool:
        """Whether a channel has taken every part."""
        if self.queued or self.unsent is None or self.reservation is None or self.unsent.any():
            return False
        return self.noted or not self.reservation.wants_note

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be sent."""
        return self.state in (Departure.COMPLETED, Departure.FAILED)


class OutboundTransfers:
    """All transfers of a sender, and the latest that were given up before all of it was known."""

    def __init__(self) -> None:
        self._by_number: dict[int, OutboundTransfer] = {}
        self._by_key: dict[str, OutboundTransfer] = {}
        self._keys_given_up: dict[str, str] = {}  # with the reason
        self._offers_withdrawn: deque[int] = deque(maxlen=_REMEMBERED)

    def every(self) -> list[OutboundTransfer]:
        """Return each transfer once, whether it has a key, a number or both."""
        return [*self._by_key.values(), *(outbound for outbound in self._by_number.values() if not outbound.key)]

    def numbered(self) -> Iterable[tuple[int, OutboundTransfer]]:
        """Return the transfers whose reservation is known, with its number."""
        return self._by_number.items()

    def of_number(self, number: int) -> OutboundTransfer | None:
        """Return the transfer of a reservation of this receiver in its present epoch."""
        return self._by_number.get(number)

    def of_key(self, key: str) -> OutboundTransfer | None:
        """Return the transfer of a request."""
        return self._by_key.get(key)

    def look_up(self, transfer: Transfer) -> OutboundTransfer | None:
        """Return a transfer, or None where it is not known."""
        if isinstance(transfer, str):
            return self._by_key.get(transfer)
        outbound = self._by_number.get(transfer.transfer)
        return outbound if outbound and outbound.reservation and outbound.reservation.epoch == transfer.epoch else None

    def find(self, transfer: Transfer) -> OutboundTransfer:
        """Return a transfer.

        Raises:
            TransferError: It is not known.
        """
        outbound = self.look_up(transfer)
        if outbound is None:
            name = transfer if isinstance(transfer, str) else f"{transfer.transfer} in epoch {transfer.epoch}"
            raise TransferError(f"transfer {name} is not open here")
        return outbound

    def add(self, outbound: OutboundTransfer) -> None:
        """Make a transfer known by what it has of key and reservation; once more when it has more."""
        if outbound.key:
            self._by_key[outbound.key] = outbound
        if outbound.reservation is not None:
            self._by_number[outbound.reservation.transfer] = outbound

    def drop(self, outbound: OutboundTransfer) -> None:
        """Forget a transfer; what still comes under its key is turned down."""
        if outbound.reservation is not None:
            self._by_number.pop(outbound.reservation.transfer, None)
        if outbound.key:
            self._by_key.pop(outbound.key, None)
            self.give_up(outbound.key, outbound.why or "it is over")

    def give_up(self, key: str, why: str) -> None:
        """Remember that nothing is sent for a request any more."""
        self._keys_given_up.setdefault(key, why)
        while len(self._keys_given_up) > _REMEMBERED:
            del self._keys_given_up[next(iter(self._keys_given_up))]

    def given_up_because(self, key: str) -> str:
        """Return why nothing is sent for a request any more, or the empty text; the latest of them are known."""
        return self._keys_given_up.get(key, "")

    def withdraw(self, number: int) -> None:
        """Remember that a reservation ended before it was offered."""
        self._offers_withdrawn.append(number)

    def was_withdrawn(self, number: int) -> bool:
        """Return whether a reservation is one of the latest that ended before they were offered."""
        return number in self._offers_withdrawn
