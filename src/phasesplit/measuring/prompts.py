"""Prompts of exact token lengths."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phasesplit.errors import SpecError

USUAL_IDS = range(1_000, 20_000)
"""Ids that are ordinary tokens in every vocabulary in use: special tokens stand at its ends."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Makes prompts of random tokens, the same for the same seed and row, and different for different rows.

    Attributes:
        ids: Token ids to draw from.
        seed: Of the draws, >= 0.
        decode: Token ids to text, where the endpoint takes no token ids; None sends ids. Text is only as exact as the
            endpoint's tokenizer is that of `decode`.
    """

    ids: range = USUAL_IDS
    seed: int = 0
    decode: Callable[[list[int]], str] | None = None

    def __post_init__(self) -> None:
        if not self.ids or self.ids[0] < 0:
            raise SpecError.bad(
                "token ids to draw prompts from", f"{self.ids.start}:{self.ids.stop}", "a range FROM:TO"
            )

    def of(self, tokens: int, row: int) -> list[int] | str:
        """Return the prompt of a request.

        Args:
            tokens: Its length, >= 1.
            row: Its number, >= 0.
        """
        drawn = np.random.default_rng((self.seed, row)).integers(0, len(self.ids), tokens)
        ids = [self.ids[place] for place in drawn.tolist()]
        return ids if self.decode is None else self.decode(ids)
