"""The token machine's side of transfers: KV that is awaited, and the token that comes with it."""

from phasesplit.engine.sending import read_note
from phasesplit.engine.sequences import Sequence
from phasesplit.errors import TransferError
from phasesplit.protocol.worker import Scored
from phasesplit.transfer.incoming import Incoming
from phasesplit.transfer.states import Arrival

_OVER = (Arrival.DRAINING, Arrival.RELEASED)


class Taking:
    """Drives the incoming transfers of this machine's token phases.

    Args:
        incoming: Where they come from.
    """

    def __init__(self, incoming: Incoming) -> None:
        self._incoming = incoming
        self._awaited: dict[Sequence, None] = {}

    def expect(self, sequence: Sequence) -> None:
        """Take blocks for a sequence's KV and offer them to the machine that computes it.

        Raises:
            TransferError: There are too few, or they are in too many pieces.
        """
        by = sequence.takes
        if by is None:
            raise TransferError(f"request {sequence.key} takes its KV from nowhere")
        self._incoming.expect(sequence.key, sequence.prompt_tokens, by.peer)
        self._awaited[sequence] = None

    def ended(self) -> list[tuple[Sequence, Scored | str]]:
        """Return the transfers that ended: sequences that have their KV now, with their first token, or why not."""
        ended: list[tuple[Sequence, Scored | str]] = []
        for sequence in list(self._awaited):
            state = self._incoming.state(sequence.key)
            if state is Arrival.READY:
                ended.append((sequence, self._taken(sequence)))
            elif state in _OVER:
                ended.append((sequence, self._incoming.why(sequence.key) or "the transfer failed"))
        return ended

    def _taken(self, sequence: Sequence) -> Scored | str:
        try:
            delivery = self._incoming.take(sequence.key)
            scored, sequence.told_times = read_note(delivery.note)
        except (TransferError, ValueError) as error:
            return str(error)
        del self._awaited[sequence]
        sequence.hold(delivery.blocks)
        sequence.lent = len(delivery.blocks)
        return scored

    def give_up(self, sequence: Sequence, why: str) -> int:
        """Stop a transfer, or give back what it brought; return how many blocks it holds until `is_over`."""
        if sequence.lent > 0:
            self._incoming.release(sequence.key)
            return 0
        if sequence not in self._awaited:
            return 0
        del self._awaited[sequence]
        self._incoming.abort(sequence.key, why)
        return self.held().get(sequence.key, 0)

    def is_over(self, key: str) -> bool:
        """Return whether a transfer's blocks are free."""
        return key not in self.held()

    def held(self) -> dict[str, int]:
        """Return how many blocks each transfer holds."""
        return self._incoming.held()
