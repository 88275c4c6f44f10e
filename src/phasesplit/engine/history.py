"""The tokens of a sequence so far, counted for penalties."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 64


class History:
    """What a sequence holds, counted as it grows, and only where a penalty ever asks.

    Attributes:
        output_tokens: Output tokens so far: the position of the next one.
    """

    def __init__(self, prompt_ids: Sequence[int] | NDArray[np.integer], output_ids: Iterable[int] = ()) -> None:
        """Make a history.

        Args:
            prompt_ids: The prompt's tokens.
            output_ids: The output's tokens so far.
        """
        self.output_tokens = 0
        self._prompt_ids = prompt_ids
        self._prompt_only: NDArray[np.int64] | None = None
        self._places: dict[int, int] = {}
        self._ids = np.empty(_FIRST_ROOM, dtype=np.int64)
        self._counts = np.empty(_FIRST_ROOM, dtype=np.float32)
        for token in output_ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token."""
        self.output_tokens += 1
        place = self._places.get(token)
        if place is not None:
            self._counts[place] += 1
            return
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[place], self._counts[place] = token, 1

    def penalise(self, logits: NDArray[np.float32], *, repetition: float, presence: float, frequency: float) -> None:
        """Lower the logits of tokens that were there.

        Source: vllm/model_executor/layers/utils.py, `apply_penalties`: repetition over prompt and output, then
        frequency and presence over the output.

        Mutates: logits.

        Args:
            logits: float32 [vocab].
            repetition: Above 0; positive logits are divided by it, the others multiplied; 1 changes nothing.
            presence: Taken once.
            frequency: Taken once for each time the token is there.
        """
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        if repetition != 1:
            for seen in (ids, self._of_prompt_only()):
                found = logits[seen]
                logits[seen] = np.where(found > 0, found / np.float32(repetition), found * np.float32(repetition))
        logits[ids] -= np.float32(frequency) * counts + np.float32(presence)

    def _of_prompt_only(self) -> NDArray[np.int64]:
        """Return the tokens of the prompt that are not in the output, each once."""
        if self._prompt_only is None:
            self._prompt_only = np.unique(np.asarray(self._prompt_ids, dtype=np.int64))
        return np.setdiff1d(self._prompt_only, self._ids[: len(self._places)], assume_unique=True)
