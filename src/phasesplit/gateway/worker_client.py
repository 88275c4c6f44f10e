"""What the gateway asks of a machine: one protocol, whichever engine runs there."""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

from phasesplit.errors import WorkerError
from phasesplit.gateway.request_states import Event
from phasesplit.protocol.worker import Chunk


class LegError(WorkerError):
    """A machine did not do its part.

    Attributes:
        event: What it means: INPUT_REFUSED, WORKER_REFUSED, PREFILL_LOST, DECODE_LOST or TRANSFER_FAILED.
        machine_status: The machine's own HTTP status, 502 where there was none.
        param: The field that the machine names, or None.
        code: The machine's code for it, or None.
    """

    def __init__(
        self,
        message: str,
        event: Event,
        *,
        machine_status: int = 502,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.event = event
        self.machine_status = machine_status
        self.param = param
        self.code = code


class WorkerClient(Protocol):
    """One machine. Every call may raise LegError; cancelling a call gives the work up on the machine too."""

    async def prefill_leg(self, body: Mapping[str, Any]) -> Chunk:
        """Return the answer to a prefill leg: one token."""

    def decode_leg(self, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        """Iterate over the answer to a decode leg, or to a request that one machine serves whole."""

    async def facts(self) -> dict[str, Any]:
        """Return what the machine says of itself now."""

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """Iterate over the machine's reports for as long as it lives."""

    async def abort(self, key: str, why: str) -> None:
        """Let the machine free what it keeps for an attempt; unknown keys change nothing."""

    async def role(self, epoch: int, role: str) -> None:
        """Give the machine its pool."""

    async def close(self) -> None:
        """Close all connections."""
