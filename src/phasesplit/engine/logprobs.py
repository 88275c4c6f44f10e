"""How likely the model itself finds a token, and which tokens it finds likeliest."""

import numpy as np
from numpy.typing import NDArray

from phasesplit.protocol.worker import Scored

_RUN = 128
"""Values whose maxima are looked at first. Any number gives the same answers."""


def nth_largest(values: NDArray[np.float32], n: int) -> np.float32:
    """Return the n-th largest value, equal ones counted each.

    Args:
        values: float32 [N].
        n: 1 to N.
    """
    runs = values[: len(values) - len(values) % _RUN].reshape(-1, _RUN).max(axis=1)
    if n < len(runs):
        # The n-th largest of the runs' maxima is no larger than the n-th largest of all: little is left to look at.
        values = values[values >= np.partition(runs, len(runs) - n)[len(runs) - n]]
    found: np.float32 = np.partition(values, len(values) - n)[len(values) - n]
    return found


def scored(logits: NDArray[np.float32], token: int, count: int) -> Scored:
    """Return a token's log-probability, and the likeliest tokens at its place.

    Serves sampled tokens and those of a prompt: the logits at a place score the token that comes next.

    Args:
        logits: float32 [vocab], as the model gave them.
        token: The token that came.
        count: How many of the likeliest to tell, 0 or more; of equally likely ones the lowest ids.
    """
    highest = logits.max()
    whole = float(highest) + float(np.log(np.exp(logits - highest).sum(dtype=np.float64)))
    return Scored(token, min(0.0, float(logits[token]) - whole), _likeliest(logits, min(count, len(logits)), whole))


def _likeliest(logits: NDArray[np.float32], count: int, whole: float) -> tuple[tuple[int, float], ...]:
    if count < 1:
        return ()
    few = np.flatnonzero(logits >= nth_largest(logits, count))
    order = few[np.argsort(-logits[few], kind="stable")][:count]
    return tuple((int(one), min(0.0, float(logits[one]) - whole)) for one in order)
