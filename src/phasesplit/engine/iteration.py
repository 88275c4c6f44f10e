"""One iteration: forward passes over its lanes, KV that leaves meanwhile, and the tokens that follow."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.batch import Batch
from phasesplit.engine.bookings import Lane
from phasesplit.engine.logprobs import scored
from phasesplit.engine.rows import batch_of, is_scored, passes
from phasesplit.engine.sampling import sample
from phasesplit.engine.sending import Sending
from phasesplit.engine.sequences import Sequence
from phasesplit.protocol.worker import Scored

Logits = NDArray[np.float32]


class Computes(Protocol):
    """What computes iterations, see `forward.Forward`."""

    def run(self, batch: Batch, after_layer: Callable[[int], None] | None = None) -> Logits:
        """Compute one batch and return the logits of its wanted rows, float32 [wanted, vocab]."""
        ...


def compute(
    lanes: list[Lane], forward: Computes, sending: Sending | None, end_ids: tuple[int, ...]
) -> list[tuple[Sequence, Scored]]:
    """Compute one iteration.

    Args:
        lanes: Its lanes; every sequence has the blocks that it will write to.
        forward: What computes.
        sending: What sends the KV of prompts that goes layer by layer.
        end_ids: The model's own ends of a text.

    Returns:
        The sequences that have a new token, with it; it is not added to them yet.

    Mutates: scores of the prompts whose tokens are scored.
    """
    tokens: list[tuple[Sequence, Scored]] = []
    for together in passes(lanes):
        after_layer = None if sending is None else sending.before_pass(together)
        logits = forward.run(batch_of(together), after_layer)
        if sending is not None and after_layer is not None:
            sending.after_pass(together)
        if is_scored(together):
            _score(together[0], logits)
            logits = logits[-1:]
        chosen = [lane.sequence for lane in together if lane.gives_token]
        # A scored prompt's last row of a pass gives no token unless it is the prompt's last.
        for sequence, row in zip(chosen, logits, strict=False):
            tokens.append((sequence, sample(row, sequence.request.sampling, sequence.history, end_ids)))
    return tokens


def _score(lane: Lane, logits: Logits) -> None:
    """Score the prompt's tokens that come after the rows of a pass; those that were computed before have a score."""
    sequence, count = lane.sequence, lane.sequence.request.wants_prompt_logprobs or 0
    for position, row in enumerate(logits, lane.first):
        if position + 1 == len(sequence.scores) < sequence.prompt_tokens:
            sequence.scores.append(scored(row, int(sequence.ids[position + 1]), count))
