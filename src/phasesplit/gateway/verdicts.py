"""What the dispatcher answers: where a request goes, or why nowhere, and what became of machines."""

from typing import NamedTuple


class Pair(NamedTuple):
    """The machines of a request's two phases; both hold blocks for it from now on.

    Attributes:
        key: The request's name for this attempt.
        prefill: Name of the machine of the prefill phase.
        prefill_epoch: That machine's epoch.
        decode: Name of the machine of the decode phase.
        decode_epoch: That machine's epoch.
    """

    key: str
    prefill: str
    prefill_epoch: int
    decode: str
    decode_epoch: int

    @property
    def same(self) -> bool:
        """Whether one machine does both phases."""
        return self.prefill == self.decode


class TooLong(NamedTuple):
    """No machine could ever hold the request.

    Attributes:
        reason: Why, with figures.
    """

    reason: str


class NoCapacity(NamedTuple):
    """Nothing can take the request now.

    Attributes:
        reason: Why, with figures.
        retry_after_s: Seconds after which it may be tried again, > 0.
    """

    reason: str
    retry_after_s: float


class Lost(NamedTuple):
    """A request that a machine held and will not go on with; all that was booked for it has been given back.

    Attributes:
        key: Its name.
        side: "prefill" or "decode": what the machine was to it; "decode" where it was both.
    """

    key: str
    side: str
