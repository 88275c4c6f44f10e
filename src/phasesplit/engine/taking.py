"""The decode machine's side of transfers: KV that is awaited, and the token that comes with it."""

from phasesplit.engine.sending import read_note
from phasesplit.engine.sequences import Sequence
from phasesplit.errors import TransferError
from phasesplit.protocol.worker import Scored
from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.incoming import Incoming
from phasesplit.transfer.states import Arrival

_OVER = (Arrival.DRAINING, Arrival.RELEASED)


class Taking:
    """Drives the incoming transfers of this machine's decode phases.

    Args:
        incoming: Where they come from.
        pool: Who uses the machine's blocks.
    """

    def __init__(self, incoming: Incoming, pool: BlockPool) -> None:
        self._incoming, self._pool = incoming, pool
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
        # The blocks go from the transfer to the sequence: at no instant does nobody use them.
        self._pool.share(sequence.holding, delivery.blocks)
        self._incoming.release(sequence.key)
        return scored

    def give_up(self, sequence: Sequence, why: str) -> None:
        """Stop a transfer that has not ended; its blocks are free once its sender is known to write to them no more."""
        if sequence in self._awaited:
            del self._awaited[sequence]
            self._incoming.abort(sequence.key, why)
