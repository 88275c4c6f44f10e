"""From logits to the next token.

Same order as vLLM: ban what must not come yet, bias, penalties; then greedy, or temperature, min-p, top-k, top-p and a
draw. Source: vllm/v1/sample/sampler.py (0.10), `Sampler.forward`. The draw is made from the seed and the position
alone, so that the two machines of a request, and an unsplit engine, draw the same token from the same logits.

- `Sampling`: what a request asks for. `sample`: the next token.
- `History`: the tokens of a sequence so far, counted for penalties.
- `drawn`: a draw; temperature, then min-p, top-k and top-p. Nothing is sorted that need not be: a vocabulary has some
  50,000 tokens, and few of them matter.
- `scored`: log-probabilities of the model itself.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.protocol.worker import Scored

_GREEDY_BELOW = 1e-5
"""Temperatures that count as 0. Source: vllm/sampling_params.py, `_SAMPLING_EPS`."""
_FIRST_ROOM = 64
_SCORED_RUN = 128
"""Values whose maxima are looked at first. Any number gives the same answers."""
_RUN = 256
"""Tokens whose weights are added up first, so that only one run needs a running sum. Any number gives a fair draw."""
_BORDERS = tuple(2.0**-power for power in (4, 8, 10, 12, 14, 16, 20))
"""Weights, the largest being 1, by which a nucleus is narrowed down."""
_STEP, _64_BITS = 0x9E3779B97F4A7C15, (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request chooses its tokens.

    Attributes:
        temperature: >= 0; 0 is greedy.
        top_p: The likeliest tokens whose probability adds up to it, above 0, up to 1.
        top_k: The k likeliest tokens; 0 and below are all.
        min_p: Least probability relative to the likeliest token's, 0 to 1.
        seed: Any whole number; its low 64 bits count.
        presence_penalty: Taken from the logit of every token of the output.
        frequency_penalty: The same, once for each time it is there.
        repetition_penalty: Above 0; divides positive and multiplies negative logits of tokens of prompt and output.
        logit_bias: Token ids, and what is added to their logits.
        min_tokens: Fewest output tokens, before which no token that ends the text comes.
        ignore_eos: Go on after the model's own end of the text.
        stop_token_ids: Further tokens that end the text.
        logprobs: How many of the likeliest tokens to return at each place, 0 or more; None for no log-probabilities.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def is_end(self, token: int, end_ids: Collection[int]) -> bool:
        """Return whether a token ends the text.

        Args:
            token: The token just sampled.
            end_ids: The model's own ends of a text.
        """
        return token in self.stop_token_ids or (not self.ignore_eos and token in end_ids)


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


def sample(logits: NDArray[np.float32], sampling: Sampling, history: History, end_ids: Collection[int] = ()) -> Scored:
    """Return the next token, with its log-probability where the request wants it.

    Log-probabilities are those of the model itself, before bans, biases, penalties and temperature, as vLLM's default
    (`raw_logprobs`) has them.

    Args:
        logits: float32 [vocab], finite; left as they are.
        sampling: How to choose.
        history: The tokens before; the caller adds the new one.
        end_ids: The model's own ends of a text, banned while fewer than `min_tokens` are out, ignored or not.
    """
    shaped = _shaped(logits, sampling, history, end_ids)
    if sampling.temperature < _GREEDY_BELOW:
        token = int(np.argmax(shaped))
    else:
        token = drawn(
            shaped,
            uniform(sampling.seed, history.output_tokens),
            temperature=sampling.temperature,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
    return Scored(token) if sampling.logprobs is None else scored(logits, token, sampling.logprobs)


def _shaped(
    logits: NDArray[np.float32], sampling: Sampling, history: History, end_ids: Collection[int]
) -> NDArray[np.float32]:
    """Return the logits after bans, biases and penalties: the same array where there are none."""
    is_short = history.output_tokens < sampling.min_tokens
    has_penalty = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if not (is_short or has_penalty or sampling.logit_bias):
        return logits
    shaped = logits.copy()
    if is_short:
        shaped[[*end_ids, *(token for token in sampling.stop_token_ids if token < len(logits))]] = -np.inf
    for token, bias in sampling.logit_bias:
        shaped[token] += np.float32(bias)
    if has_penalty:
        history.penalise(
            shaped,
            repetition=sampling.repetition_penalty,
            presence=sampling.presence_penalty,
            frequency=sampling.frequency_penalty,
        )
    return shaped


def uniform(seed: int, position: int) -> float:
    """Return the number that decides a draw, 0 <= u < 1, in steps of 2**-53.

    Source: SplitMix64 (Steele, Lea, Flood 2014; constants of Vigna's splitmix64.c). The sequence starts at the mixed
    seed: neighbouring seeds, which the choices of a request have, would otherwise share numbers.

    Args:
        seed: Any whole number; its low 64 bits count.
        position: Output tokens before this one, >= 0.
    """
    return (_mixed(_mixed(seed) + (position + 1) * _STEP) >> 11) * 2.0**-53


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


def scored(logits: NDArray[np.float32], token: int, count: int) -> Scored:
    """Return a token's log-probability, and the likeliest tokens at its place.

    Serves sampled tokens and those of a prompt: the logits at a place score the token that comes next.

    Args:
        logits: float32 [vocab], as the model gave them.
        token: The token that came.
        count: How many of the likeliest to return, 0 or more; of equally likely ones the lowest ids.
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


def nth_largest(values: NDArray[np.float32], n: int) -> np.float32:
    """Return the n-th largest value, equal ones counted each.

    Args:
        values: float32 [N].
        n: 1 to N.
    """
    runs = values[: len(values) - len(values) % _SCORED_RUN].reshape(-1, _SCORED_RUN).max(axis=1)
    if n < len(runs):
        # The n-th largest of the runs' maxima is no larger than the n-th largest of all: little is left to look at.
        values = values[values >= np.partition(runs, len(runs) - n)[len(runs) - n]]
    found: np.float32 = np.partition(values, len(values) - n)[len(values) - n]
    return found
