"""What the two machines of a request are sent: the prefill leg and the decode leg of one choice.

Both legs are completions with token ids and `kv_transfer_params`; a chat has been made into a prompt before. The decode
leg answers for the whole choice, its first token included, so that its bounds, penalties and log-probabilities are
those of an unsplit engine. The prefill leg asks for one token, the same one: both legs carry the same seed. The gateway
sends the client whichever copy comes first.

| client's field                       | prefill leg                         | decode leg                           |
|--------------------------------------|-------------------------------------|--------------------------------------|
| prompt, messages                     | the prompt's token ids              | the same                             |
| max_tokens, max_completion_tokens    | max_tokens 1                        | max_tokens, as sent or by the context|
| min_tokens                           | at most 1 (it bans the end of text) | as sent                              |
| n, best_of, several prompts          | one choice each, seed + its number  | the same                             |
| seed                                 | as sent, or the gateway's if sampled| the same                             |
| stop, stop_token_ids                 | as sent, text not cut               | the same; the gateway cuts           |
| stream, stream_options               | not streamed                        | streamed, with usage                 |
| logprobs, top_logprobs               | logprobs, by token id               | the same                             |
| echo                                 | prompt_logprobs, if any are wanted  | left out                             |
| what only a chat template reads      | left out                            | left out                             |
| all others                           | as sent                             | as sent                              |

Where an output goes on after the loss of a machine, its tokens so far follow the prompt's, `resumed_tokens` says how
many they are, and the bounds are those of what is still to come. Stop strings are left out: they may have begun in text
that the new machines do not make, or seem to begin in half a character. The gateway's own seed is another one then: a
machine that takes the output for prompt would use the draws of the same seed a second time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasesplit.protocol.completions import FOR_TEMPLATES, ClientRequest

_DERIVED = frozenset({
    "prompt", "n", "best_of", "suffix", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "stream",
    "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "echo", "logprobs", "top_logprobs",
    "return_token_ids", "resumed_tokens", "messages", *FOR_TEMPLATES,
})  # fmt: skip
"""Fields that the legs do not simply repeat."""

_SEEDS = 1 << 63
_APART = 1 << 32
"""Between the seeds of outputs that go on behind one token more; choices of a request are one apart."""


@dataclass(frozen=True, slots=True)
class LegBodies:
    """The bodies of one choice.

    Attributes:
        prefill: For the prefill machine.
        decode: For the decode machine, None where the first token is the only one.
    """

    prefill: dict[str, Any]
    decode: dict[str, Any] | None


def split_legs(
    request: ClientRequest,
    choice: int,
    prompt_ids: Sequence[int],
    *,
    most_tokens: int,
    seed: int,
    emitted: Sequence[int] = (),
    prefill_transfer: Mapping[str, Any],
    decode_transfer: Mapping[str, Any],
) -> LegBodies:
    """Return the bodies for a pair of machines.

    Args:
        request: The client's request.
        choice: Which choice, 0 to `choice_count` - 1; n choices of the first prompt come first.
        prompt_ids: The choice's prompt.
        most_tokens: Most output tokens in all, >= 0.
        seed: The gateway's seed for this request, 0 to 2**63 - 1; that of an attempt depends on `emitted` too.
        emitted: The output so far, fewer than `most_tokens`, where it goes on.
        prefill_transfer: The prefill machine's kv_transfer_params: where the KV goes.
        decode_transfer: The decode machine's kv_transfer_params: where the KV comes from.
    """
    shared = _shared(request, choice, prompt_ids, seed, emitted)
    left = most_tokens - len(emitted)
    prefill = shared | _of_prompt(request, emitted) | _bounds(request, 1, emitted) | {"stream": False}
    if left <= 1:
        return LegBodies(prefill, None)
    decode = shared | _bounds(request, left, emitted) | _streamed()
    return LegBodies(
        prefill | {"kv_transfer_params": dict(prefill_transfer)}, decode | {"kv_transfer_params": dict(decode_transfer)}
    )


def whole_leg(
    request: ClientRequest,
    choice: int,
    prompt_ids: Sequence[int],
    *,
    most_tokens: int,
    seed: int,
    emitted: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the body for one machine that takes both phases; see `split_legs`."""
    # No engine computes zero tokens: one is asked for, and dropped.
    bounds = _bounds(request, max(1, most_tokens - len(emitted)), emitted)
    shared = _shared(request, choice, prompt_ids, seed, emitted)
    return shared | _of_prompt(request, emitted) | _streamed() | bounds


def _shared(
    request: ClientRequest, choice: int, prompt_ids: Sequence[int], seed: int, emitted: Sequence[int]
) -> dict[str, Any]:
    """Return the fields that are the same for every machine that works on a choice."""
    sent = request.model_dump(exclude_unset=True, exclude=set(_DERIVED))
    body = {name: value for name, value in sent.items() if value is not None}
    body["prompt"] = [*prompt_ids, *emitted]
    if emitted:
        body["resumed_tokens"] = len(emitted)
    if request.seed is not None:
        # Source: vllm/v1/engine/parallel_sampling.py, a choice's seed is the request's plus the choice's number.
        body["seed"] = _wrapped(request.seed + choice % (request.n or 1))
    elif request.temperature != 0:
        body["seed"] = (seed + choice + len(emitted) * _APART) % _SEEDS
    stops = () if emitted else request.stop_strings
    if stops:
        body["stop"] = list(stops)
    if request.stop_tokens:
        body["stop_token_ids"] = list(request.stop_tokens)
    if stops or request.stop_tokens:
        # A machine that cuts the stop itself also holds text back, and the first token's text would no longer match.
        body["include_stop_str_in_output"] = True
    if request.scored_tokens is not None:
        body["logprobs"] = request.scored_tokens
        body["return_tokens_as_token_ids"] = True
    return body | {"return_token_ids": True}


def _wrapped(seed: int) -> int:
    """Return a signed 64-bit seed, the smallest after the largest."""
    return (seed + _SEEDS) % (2 * _SEEDS) - _SEEDS


def _of_prompt(request: ClientRequest, emitted: Sequence[int]) -> dict[str, Any]:
    """Return the fields that ask something about the prompt itself, which is answered once."""
    return {"prompt_logprobs": request.scored_tokens} if request.scores_prompt and not emitted else {}


def _bounds(request: ClientRequest, most: int, emitted: Sequence[int]) -> dict[str, Any]:
    """Return the bounds on output tokens that are still to come."""
    least = min(max(0, (request.min_tokens or 0) - len(emitted)), most)
    return {"max_tokens": most} | ({"min_tokens": least} if least else {})


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}
