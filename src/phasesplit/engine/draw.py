"""A draw from the distribution that logits stand for.

Temperature, then min-p, top-k and top-p, as vLLM orders them. Source: vllm/v1/sample/sampler.py, `Sampler.sample`.
Nothing is sorted that need not be: a vocabulary has some 50,000 tokens, and few of them matter.
"""

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.logprobs import nth_largest

_RUN = 256
"""Tokens whose weights are added up first, so that only one run needs a running sum. Any number gives a fair draw."""
_BORDERS = tuple(2.0**-power for power in (4, 8, 10, 12, 14, 16, 20))
"""Weights, the largest being 1, by which a nucleus is narrowed down."""


def uniform(seed: int, position: int) -> float:
    """Return the number that decides a draw, 0 <= u < 1, in steps of 2**-53.

    Source: SplitMix64 (Steele, Lea, Flood 2014; constants of Vigna's splitmix64.c). The sequence starts at the mixed
    seed: neighbouring seeds, which the choices of a request have, would otherwise share numbers.

    Args:
        seed: Any whole number; its low 64 bits count.
        position: Output tokens before this one, >= 0.
    """
    return (_mixed(_mixed(seed) + (position + 1) * _STEP) >> 11) * 2.0**-53


_STEP, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _mixed(word: int) -> int:
    word &= _64_BITS
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _64_BITS
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _64_BITS
    return word ^ (word >> 31)


def drawn(
    logits: NDArray[np.float32], chance: float, *, temperature: float, min_p: float, top_k: int, top_p: float
) -> int:
    """Return the token at `chance` of the distribution that temperature, min-p, top-k and top-p leave.

    Args:
        logits: float32 [vocab]; -inf for tokens that must not come, not all of them.
        chance: 0 <= chance < 1, see `uniform`.
        temperature: Above 0.
        min_p: Least probability relative to the likeliest token's, 0 to 1.
        top_k: The k likeliest tokens; 0 and below are all.
        top_p: The likeliest tokens whose probability adds up to it, above 0, up to 1.
    """
    weights: NDArray[np.float32] = np.exp((logits - logits.max()) / np.float32(temperature))
    has_top_k = 0 < top_k < len(logits)
    kept = np.ones(len(logits), dtype=np.bool_) if min_p > 0 or has_top_k else None
    if kept is None and top_p >= 1:
        return _at(weights, chance)
    if kept is None:
        ids = np.arange(len(logits))
    else:
        if min_p > 0:
            kept &= weights >= np.float32(min_p)
        if has_top_k:
            # Equals at the border all stay, as in vLLM: none of them is likelier than another.
            kept &= logits >= nth_largest(logits, top_k)
        ids = np.flatnonzero(kept)
        weights = weights[ids]
    if top_p < 1:
        kept = _nucleus(weights, top_p)
        ids, weights = ids[kept], weights[kept]
    return int(ids[_at(weights, chance)])


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.bool_]:
    """Return which weights are the fewest, largest ones whose share is at least `top_p`; of equal ones the first."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    few = weights
    for border in _BORDERS:
        # Mostly few weights hold the share, and only those need sorting.
        large = weights[weights >= border]
        if large.sum(dtype=np.float64) >= wanted:
            few = large
            break
    falling = np.sort(few)[::-1]
    count = min(int(np.searchsorted(np.cumsum(falling, dtype=np.float64), wanted)) + 1, len(falling))
    least = falling[count - 1]
    kept: NDArray[np.bool_] = weights > least
    kept[np.flatnonzero(weights == least)[: count - np.count_nonzero(kept)]] = True
    return kept


def _at(weights: NDArray[np.float32], chance: float) -> int:
    """Return the first place at which the running sum of the weights exceeds `chance` of their sum."""
    starts = np.arange(0, len(weights), _RUN)
    runs = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = chance * runs[-1]
    # Rounded up, the target may be the whole sum: the run that reaches it is meant.
    run = min(int(np.searchsorted(runs, target, side="right")), int(np.searchsorted(runs, runs[-1])))
    before = runs[run - 1] if run else 0.0
    inside = before + np.cumsum(weights[run * _RUN : (run + 1) * _RUN], dtype=np.float64)
    place = run * _RUN + int(np.searchsorted(inside, target, side="right"))
    # Sums in another order may end a rounding below: the last possible token of the run is meant.
    last = run * _RUN + int(np.flatnonzero(weights[run * _RUN : (run + 1) * _RUN])[-1])
    return min(place, last)
