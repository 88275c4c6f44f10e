"""From logits to the next token.

Same order as vLLM: ban what must not come yet, bias, penalties; then greedy, or temperature, min-p, top-k, top-p and a
draw. Source: vllm/v1/sample/sampler.py (0.10), `Sampler.forward`. The draw is made from the seed and the position
alone, so that the two machines of a request, and an unsplit engine, draw the same token from the same logits.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.draw import drawn, uniform
from phasesplit.engine.history import History
from phasesplit.engine.logprobs import scored
from phasesplit.protocol.worker import Scored

_GREEDY_BELOW = 1e-5
"""Temperatures that count as 0. Source: vllm/sampling_params.py, `_SAMPLING_EPS`."""


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
        logprobs: How many of the likeliest tokens to tell at each place, 0 or more; None for no log-probabilities.
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
