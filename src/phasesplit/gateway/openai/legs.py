"""What the two machines of a request are sent: the prompt leg and the token leg of one choice.

Both legs are OpenAI requests with `kv_transfer_params`. The token leg answers for the whole choice, its first token
included, so that its bounds, penalties and log-probabilities are those of an unsplit engine. The prompt leg asks for
one token, the same one: both legs carry the same seed. The gateway sends the client whichever copy comes first.

| client's field                       | prompt leg                          | token leg                            |
|--------------------------------------|-------------------------------------|--------------------------------------|
| max_tokens, max_completion_tokens    | 1                                   | as sent                              |
| min_tokens                           | at most 1 (it bans the end of text) | as sent                              |
| n, best_of, several prompts          | one choice each, seed + its number  | the same                             |
| seed                                 | as sent, or the gateway's if sampled| the same                             |
| stop, stop_token_ids                 | as sent, text not cut               | the same; the gateway cuts           |
| stream, stream_options               | not streamed                        | streamed, with usage                 |
| echo, prompt_logprobs                | as sent                             | left out                             |
| logprobs, top_logprobs, all others   | as sent                             | as sent                              |
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phasesplit.gateway.openai.requests import CompletionRequest, Sampled

_DERIVED = frozenset({
    "prompt", "n", "best_of", "suffix", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "stream",
    "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "echo", "prompt_logprobs",
    "return_token_ids",
})  # fmt: skip
"""Fields that the legs do not simply repeat."""

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Legs:
    """The bodies of one choice.

    Attributes:
        prompt: For the prompt machine.
        token: For the token machine, None where the first token is the only one.
    """

    prompt: dict[str, Any]
    token: dict[str, Any] | None


def split_legs(
    request: Sampled,
    choice: int,
    *,
    seed: int,
    prompt_transfer: Mapping[str, Any],
    token_transfer: Mapping[str, Any],
) -> Legs:
    """Return the bodies for a pair of machines.

    Args:
        request: The client's request.
        choice: Which choice, 0 to `choice_count` - 1; n choices of the first prompt come first.
        seed: The gateway's seed for this request, 0 to 2**63 - 1; the same for every attempt.
        prompt_transfer: The prompt machine's kv_transfer_params: where the KV goes.
        token_transfer: The token machine's kv_transfer_params: where the KV comes from.
    """
    one_token = request.most_tokens is not None and request.most_tokens <= 1
    prompt = _shared(request, choice, seed) | _of_prompt(request) | _bounds(request, most=1)
    prompt["stream"] = False
    if one_token:
        return Legs(prompt, None)
    token = _shared(request, choice, seed) | _bounds(request, most=None) | _streamed()
    return Legs(
        prompt | {"kv_transfer_params": dict(prompt_transfer)}, token | {"kv_transfer_params": dict(token_transfer)}
    )


def whole_leg(request: Sampled, choice: int, *, seed: int) -> dict[str, Any]:
    """Return the body for one machine that takes both phases.

    Args:
        request: The client's request.
        choice: Which choice, see `split_legs`.
        seed: The gateway's seed for this request, see `split_legs`.
    """
    body = _shared(request, choice, seed) | _of_prompt(request) | _streamed()
    # No engine computes zero tokens: one is asked for, and dropped.
    return body | _bounds(request, most=1 if request.most_tokens == 0 else None)


def _shared(request: Sampled, choice: int, seed: int) -> dict[str, Any]:
    """Return the fields that are the same for every machine that works on a choice."""
    sent = request.model_dump(exclude_unset=True, exclude=set(_DERIVED))
    body = {name: value for name, value in sent.items() if name not in _DERIVED and value is not None}
    each = request.n or 1
    if isinstance(request, CompletionRequest):
        body["prompt"] = request.prompt[choice // each]
    if request.seed is not None:
        # Source: vllm/v1/engine/parallel_sampling.py, a choice's seed is the request's plus the choice's number.
        body["seed"] = _wrapped(request.seed + choice % each)
    elif request.temperature != 0:
        body["seed"] = (seed + choice) % _SEEDS
    if request.stop_strings:
        body["stop"] = list(request.stop_strings)
    if request.stop_tokens:
        body["stop_token_ids"] = list(request.stop_tokens)
    if request.stop_strings or request.stop_tokens:
        # A machine that cuts the stop itself also holds text back, and the first token's text would no longer match.
        body["include_stop_str_in_output"] = True
    return body | {"return_token_ids": True}


def _wrapped(seed: int) -> int:
    """Return a signed 64-bit seed, the smallest after the largest."""
    return (seed + _SEEDS) % (2 * _SEEDS) - _SEEDS


def _of_prompt(request: Sampled) -> dict[str, Any]:
    """Return the fields that ask something about the prompt itself."""
    asked = {name: getattr(request, name, None) for name in ("echo", "prompt_logprobs")}
    return {name: value for name, value in asked.items() if value is not None}


def _bounds(request: Sampled, *, most: int | None) -> dict[str, Any]:
    """Return the bounds on output tokens, under the names the client uses; `most` instead of the client's bound."""
    newer = not isinstance(request, CompletionRequest)
    bound = request.most_tokens if most is None else most
    bounds: dict[str, Any] = {}
    if bound is not None:
        bounds["max_tokens"] = bound
        if newer:
            bounds["max_completion_tokens"] = bound
    least = request.min_tokens or 0
    if least:
        bounds["min_tokens"] = least if most is None else min(least, most)
    return bounds


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}
