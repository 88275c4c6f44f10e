"""KV of this machine's requests that leaves (`Sending`) and that arrives (`Taking`).

KV that leaves:

1. `Sending.expect` waits for the decode machine's offer.
2. Layer by layer, for prompts from `threshold_tokens` tokens on: `before_pass` and `after_pass` enclose a forward pass,
   and the blocks of a layer leave when that layer is final.
3. `first_token` hands over the first token, which travels as the note of the transfer.
4. `ended` begins transfers that are sent in one go, after the prefill, and returns those that are complete or failed.

KV that arrives:

1. `Taking.expect` takes blocks and offers them to the prefill machine.
2. `ended` returns the sequences whose KV is here, with their first token; their blocks go from the transfer to the
   sequence.
"""

import json
from collections.abc import Callable
from dataclasses import asdict

from phasesplit.domain.machine import blocks_for
from phasesplit.engine.machine_scheduler import RunningEntry
from phasesplit.engine.sequences import Sequence
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.chooser import Mode, choose
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.incoming import Incoming
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from phasesplit.protocol.worker import PrefillTimes, Scored


class Sending:
    """Drives the outgoing transfers of this machine's prompts.

    Args:
        endpoint: What moves them.
        pool: Who uses the machine's blocks; a transfer that is open uses those of its sequence.
        threshold_tokens: The shortest prompt that is sent layer by layer.
        block_tokens: Tokens of a block.

    Attributes:
        threshold_tokens: As above; may be set at any time.
    """

    def __init__(self, endpoint: KvEndpoint, pool: BlockPool, threshold_tokens: int, block_tokens: int) -> None:
        self.threshold_tokens = threshold_tokens
        self._outgoing, self._poll, self._block_tokens = endpoint.outgoing, endpoint.poll, block_tokens
        self._pool = pool
        self._open: set[Sequence] = set()
        self._notes: dict[Sequence, bytes] = {}
        self._expected: dict[Sequence, None] = {}

    def expect(self, sequence: Sequence) -> None:
        """Wait for the offer that a prompt's KV will leave by.

        Raises:
            TransferError: The peer has started anew since, or the key is in use.
        """
        to = sequence.sends
        if to is None:
            raise TransferError(f"request {sequence.key} sends its KV nowhere")
        self._outgoing.await_offer(sequence.key, to.peer, asdict(to.address), to.peer_epoch)
        self._expected[sequence] = None

    def is_open(self, sequence: Sequence) -> bool:
        """Return whether the KV of a sequence has begun to leave."""
        return sequence in self._open

    def before_pass(self, running_entries: list[RunningEntry]) -> Callable[[int], None] | None:
        """Return what is to be called when a layer is final, None where no KV leaves layer by layer.

        An offer that comes in mid-pass is taken up at the next layer.
        """
        leaving = [
            running_entry
            for running_entry in running_entries
            if running_entry.is_prefill and self._goes_by_layers(running_entry.sequence)
        ]
        if not leaving:
            return None
        parts = []
        for sequence, first, rows, _, gives_token in leaving:
            # A block that is not full is final only with the last row of the prompt.
            final = self._blocks(sequence) if gives_token else (first + rows) // self._block_tokens
            if final > sequence.sent:
                parts.append((sequence, final))

        def after_layer(layer: int) -> None:
            for sequence, final in parts:
                self._send_layer(sequence, layer, final)

        return after_layer

    def after_pass(self, running_entries: list[RunningEntry]) -> None:
        """Note what the pass has sent."""
        for sequence, first, rows, is_prefill, gives_token in running_entries:
            if is_prefill and sequence in self._open:
                sequence.sent = self._blocks(sequence) if gives_token else (first + rows) // self._block_tokens

    def _goes_by_layers(self, sequence: Sequence) -> bool:
        by_size = choose(sequence.prompt_tokens, self.threshold_tokens) is Mode.LAYERWISE
        return sequence in self._open or (sequence in self._expected and by_size)

    def _send_layer(self, sequence: Sequence, layer: int, final: int) -> None:
        """Send the blocks of a layer that have become final; with the first ones, those of the layers before."""
        first_layer = layer
        if sequence not in self._open:
            self._poll()
            if not self._opened(sequence):
                return
            first_layer = 0
        for each in range(first_layer, layer + 1):
            self._outgoing.send_layer(sequence.key, each, sequence.sent, final)

    def first_token(self, sequence: Sequence, scored: Scored) -> None:
        """Hand over the first token. KV that is not leaving yet does so from the next `ended` on, if its offer is here.

        Not at once: copying it would keep the client from the token that is here.
        """
        self._notes[sequence] = note_of(scored, sequence.stages.prefill_times)
        if sequence in self._open:
            self._note(sequence)

    def ended(self) -> list[tuple[Sequence, str | None]]:
        """Let serialized transfers begin whose offer has come; return those that ended, and why if they failed."""
        ended: list[tuple[Sequence, str | None]] = []
        for sequence in self._expected:
            if sequence in self._notes and sequence not in self._open:
                self._send_all(sequence)
            state = self._outgoing.state(sequence.key)
            if state is OutboundState.FAILED:
                ended.append((sequence, self._outgoing.why(sequence.key) or "the transfer failed"))
            elif state is OutboundState.COMPLETED and self._outgoing.may_free(sequence.key):
                ended.append((sequence, None))
        return ended

    def abort(self, sequence: Sequence, why: str) -> None:
        """Stop a transfer in any state, unless it is complete; its blocks are free once `may_free`."""
        self._expected.pop(sequence, None)
        self._notes.pop(sequence, None)
        self._open.discard(sequence)
        if self._outgoing.state(sequence.key) is not OutboundState.COMPLETED:
            self._outgoing.abort(sequence.key, why)

    def may_free(self, key: str) -> bool:
        """Return whether nothing will read a sequence's blocks any more."""
        return self._outgoing.may_free(key)

    def forget(self, key: str) -> None:
        """Drop what is known of a transfer whose blocks are free."""
        self._outgoing.forget(key)

    def _opened(self, sequence: Sequence) -> bool:
        """Open a transfer if its offer is here and fits; return whether it is open."""
        if self._outgoing.state(sequence.key) is not OutboundState.OFFERED:
            return False
        offer, blocks = self._outgoing.offer_for(sequence.key), self._blocks(sequence)
        if offer is None or offer.tokens != sequence.prompt_tokens or len(offer.blocks) != blocks:
            self._outgoing.abort(sequence.key, "the offer is not for this prompt")
            return False
        try:
            self._outgoing.open(sequence.key, sequence.holding.blocks[:blocks])
        except TransferError as error:
            self._outgoing.abort(sequence.key, str(error))
            return False
        sequence.leaving = Holding(sequence.key, Use.SEND)
        self._pool.share(sequence.leaving, sequence.holding.blocks[:blocks])
        self._open.add(sequence)
        return True

    def _send_all(self, sequence: Sequence) -> None:
        if self._opened(sequence):
            self._outgoing.send_all(sequence.key)
            self._note(sequence)

    def _note(self, sequence: Sequence) -> None:
        try:
            self._outgoing.note(sequence.key, self._notes.pop(sequence))
        except TransferError as error:
            self._outgoing.abort(sequence.key, str(error))

    def _blocks(self, sequence: Sequence) -> int:
        return blocks_for(sequence.prompt_tokens, self._block_tokens)


def note_of(scored: Scored, times: PrefillTimes | None) -> bytes:
    """Return a token, and how long its prompt took, as the text that travels with KV."""
    return json.dumps([scored, times]).encode()


def read_note(text: bytes) -> tuple[Scored, PrefillTimes | None]:
    """Return what `note_of` wrote.

    Raises:
        ValueError: It is something else.
    """
    try:
        (token, logprob, top), times = json.loads(text)
        likeliest = tuple((int(one), float(chance)) for one, chance in top)
        scored = Scored(int(token), None if logprob is None else float(logprob), likeliest)
        return scored, None if times is None else PrefillTimes(*map(float, times))
    except (TypeError, ValueError) as error:
        raise ValueError(f"not a first token: {error}") from None


_OVER = (InboundState.DRAINING, InboundState.RELEASED)


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
            if state is InboundState.READY:
                ended.append((sequence, self._taken(sequence)))
            elif state in _OVER:
                ended.append((sequence, self._incoming.why(sequence.key) or "the transfer failed"))
        return ended

    def _taken(self, sequence: Sequence) -> Scored | str:
        try:
            delivery = self._incoming.take(sequence.key)
            scored, sequence.remote_times = read_note(delivery.note)
        except (TransferError, ValueError) as error:
            return str(error)
        del self._awaited[sequence]
        # The blocks go from the transfer to the sequence: at no instant does nobody use them.
        self._pool.share(sequence.holding, delivery.blocks)
        self._incoming.release(sequence.key)
        return scored

    def abort(self, sequence: Sequence, why: str) -> None:
        """Stop a transfer that has not ended; its blocks are free once its sender is known to write to them no more."""
        if sequence in self._awaited:
            del self._awaited[sequence]
            self._incoming.abort(sequence.key, why)
