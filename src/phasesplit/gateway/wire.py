"""A machine's answers, read: completions with token ids, and log-probabilities by id.

Machines are asked with `return_token_ids` and `return_tokens_as_token_ids`, fields of vLLM, so that texts, bytes and
counts are all made in the gateway from ids.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from phasesplit.gateway.states import Event
from phasesplit.gateway.worker import LegError
from phasesplit.protocol.worker import Chunk, PromptTimes, Scored

_NAME = "token_id:"
_REFUSED = frozenset({400, 404, 413, 422})
_FULL = frozenset({409, 429, 503})
_STOPPED = "repetition"
"""vLLM's word for an output that it stops because the client has told it which repetition to look for. Source: vllm
0.32, v1/engine/__init__.py."""


def read_chunk(answer: Mapping[str, Any], lost: Event) -> Chunk:
    """Return what an answer, or one event of a stream, says.

    Args:
        answer: The JSON object.
        lost: The event that a machine's failure means on this leg.

    Raises:
        LegError: It is an error, or not an answer.
    """
    if "error" in answer:
        raise read_error(answer, None, lost)
    try:
        choices = answer["choices"]
        if not choices:
            return Chunk(())
        choice = choices[0]
        tokens = tuple(choice.get("token_ids") or ())
        if any(type(token) is not int or token < 0 for token in tokens):
            raise ValueError(tokens)
        logprobs, prompt = choice.get("logprobs"), choice.get("prompt_logprobs")
        finish = choice.get("finish_reason")
        finish = "stop" if finish == _STOPPED else finish
        chunk = Chunk(
            tokens,
            _scored(tokens, logprobs) if logprobs else (),
            finish,
            tuple(_of_prompt(place) for place in prompt) if prompt else (),
            _times(answer.get("phasesplit")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise LegError("a machine sent something that is not an answer", lost) from None
    if finish not in (None, "stop", "length"):
        raise LegError(f"a machine ended a request with {finish!r}", lost)
    return chunk


def read_error(answer: Any, status: int | None, lost: Event) -> LegError:
    """Return what a machine's error means.

    Args:
        answer: Its body, where it has one.
        status: Its HTTP status, None for an error within a stream.
        lost: See `read_chunk`.
    """
    error = answer.get("error") if isinstance(answer, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"a machine answered with status {status}")
    if error.get("code") == "transfer_failed":
        return LegError(message, Event.TRANSFER_FAILED)
    if status in _FULL or error.get("code") == "no_capacity":
        return LegError(message, Event.WORKER_REFUSED, machine_status=status or 503)
    if status in _REFUSED or (status is None and error.get("type") == "invalid_request_error"):
        param, code = error.get("param"), error.get("code")
        return LegError(
            message,
            Event.INPUT_REFUSED,
            machine_status=status or 400,
            param=param if isinstance(param, str) else None,
            code=code if isinstance(code, str) else None,
        )
    return LegError(message, lost, machine_status=status or 502)


def _scored(tokens: Sequence[int], logprobs: Mapping[str, Any]) -> tuple[Scored, ...]:
    """Return the output's log-probabilities: by id where a machine tells ids, by vLLM's names for ids elsewhere."""
    told = logprobs["token_logprobs"]
    ids = logprobs.get("top_token_ids")
    if ids is not None:
        tops = [tuple(zip(*top, strict=True)) for top in zip(ids, logprobs["top_token_logprobs"], strict=True)]
    else:
        named = logprobs.get("top_logprobs") or [None] * len(tokens)
        tops = [tuple((int(name.removeprefix(_NAME)), value) for name, value in (top or {}).items()) for top in named]
    return tuple(map(Scored, tokens, told, tops))


def _times(told: Mapping[str, Any] | None) -> PromptTimes | None:
    """Return how long a prompt took, None where the machine does not tell; raises ValueError for what no time is."""
    if told is None:
        return None
    times = PromptTimes(float(told["queued_s"]), float(told["prompt_s"]))
    if not (0 <= times.queued_s < inf and 0 <= times.prompt_s < inf):
        raise ValueError(times)
    return times


def _of_prompt(place: Mapping[str, Any] | None) -> Scored:
    """Return one place of a prompt; the first of its entries is the token that is there."""
    if place is None:
        return Scored(-1, None)
    entries = [(int(name), entry["logprob"]) for name, entry in place.items()]
    return Scored(*entries[0], tuple(sorted(entries, key=lambda entry: -entry[1])))
