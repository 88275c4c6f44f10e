"""A machine's answers, written and read: completions as OpenAI and vLLM shape them, with the ids of all tokens.

The gateway asks with `return_token_ids` and `return_tokens_as_token_ids`, fields of vLLM, so that it makes texts, bytes
and counts from ids itself.

Beyond vLLM's shape, `logprobs` carries `token_ids`, `top_token_ids` and `top_token_logprobs`: in OpenAI's shape two
tokens of equal text are one, and a part of a character is no text.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

from phasesplit.protocol.answers import TokenLogprob, answer_head, completion_logprobs, usage_chunk, with_null_usage
from phasesplit.protocol.worker import Chunk, PrefillTimes, Scored

TOKEN_NAME = "token_id:"
"""Before a token's id, where tokens are named by id. Source: vLLM, `return_tokens_as_token_ids`."""
_STOPPED = "repetition"
"""vLLM's reason for an output that it stops because the client has sent it which repetition to look for. Source: vllm
0.32, v1/engine/__init__.py."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPart:
    """What one chunk adds to the choice, or all of it.

    Attributes:
        text: Its text, an echoed prompt included.
        output: Its output tokens.
        prompt: The prompt's tokens, where the request asks about them: in a stream, with the first chunk only.
        text_offset: Characters of the choice's text before it.
        finish_reason: Why the choice ends here, None where it goes on.
        stop_reason: The stop string or stop token that ended it, None for neither.
        times: How long its prompt took, with the first token; sent in a field of its own, `phasesplit`.
    """

    text: str = ""
    output: Sequence[Scored] = ()
    prompt: Sequence[Scored] = ()
    text_offset: int = 0
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    times: PrefillTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAnswer:
    """What all parts of one answer share.

    Attributes:
        request: The request's id.
        created_s: Whole seconds since 1970.
        model: The model's name, as asked for.
        spelled: A token's text, bytes that are no character as U+FFFD.
        has_token_ids: Tell token ids.
        names_by_id: Where log-probabilities are sent, name tokens `token_id:ID`, as vLLM does, which no two share.
        has_logprobs: Tell the output's log-probabilities.
        has_echo: Begin text and log-probabilities with the prompt.
        has_prompt_logprobs: Tell the prompt's log-probabilities in a field of their own.
    """

    request: str
    created_s: int
    model: str
    spelled: Callable[[int], str]
    has_token_ids: bool = False
    names_by_id: bool = False
    has_logprobs: bool = False
    has_echo: bool = False
    has_prompt_logprobs: bool = False

    def completion(
        self, part: ChunkPart, used: Mapping[str, int], kv_transfer_params: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return a whole answer.

        Args:
            part: All of the choice.
            used: The answer's `usage`.
            kv_transfer_params: What the sender gets to know about the KV.
        """
        answer = self._head() | {"choices": [self._choice(part)], "usage": dict(used)} | _extension(part)
        return answer if kv_transfer_params is None else answer | {"kv_transfer_params": dict(kv_transfer_params)}

    def chunk(self, part: ChunkPart, *, with_usage: bool) -> dict[str, Any]:
        """Return a chunk of a stream.

        Args:
            part: What it adds.
            with_usage: Whether the stream ends with a chunk of usage; the others then say null.
        """
        chunk = self._head() | {"choices": [self._choice(part)]} | _extension(part)
        return with_null_usage(chunk) if with_usage else chunk

    def usage_chunk(self, used: Mapping[str, int]) -> dict[str, Any]:
        """Return the last chunk of a stream whose client wants usage."""
        return usage_chunk(self._head(), used)

    def _head(self) -> dict[str, Any]:
        return answer_head(self.request, "text_completion", self.created_s, self.model)

    def _choice(self, part: ChunkPart) -> dict[str, Any]:
        sent = [*part.prompt, *part.output] if self.has_echo else part.output
        choice: dict[str, Any] = {
            "index": 0,
            "text": part.text,
            "logprobs": self._logprobs(sent, part.text_offset) if self.has_logprobs else None,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        if self.has_token_ids:
            choice["token_ids"] = [one.token for one in part.output]
            if part.prompt:
                choice["prompt_token_ids"] = [one.token for one in part.prompt]
        if self.has_prompt_logprobs and part.prompt:
            choice["prompt_logprobs"] = [self._prompt_logprobs(one) for one in part.prompt]
        return choice

    def _logprobs(self, tokens: Sequence[Scored], text_offset: int) -> dict[str, Any]:
        named = [TokenLogprob(self._named(one.token), one.logprob, b"", self._top(one)) for one in tokens]
        return completion_logprobs(named, text_offset) | {
            "token_ids": [one.token for one in tokens],
            "top_token_ids": [[token for token, _ in one.top] for one in tokens],
            "top_token_logprobs": [[logprob for _, logprob in one.top] for one in tokens],
        }

    def _named(self, token: int) -> str:
        return f"{TOKEN_NAME}{token}" if self.names_by_id else self.spelled(token)

    def _top(self, one: Scored) -> tuple[tuple[str, float, bytes], ...]:
        """Return the likeliest tokens by name; of equal names the likeliest stays."""
        by_name: dict[str, float] = {}
        for token, logprob in one.top:
            by_name.setdefault(self._named(token), logprob)
        return tuple((name, logprob, b"") for name, logprob in by_name.items())

    def _prompt_logprobs(self, one: Scored) -> dict[str, dict[str, Any]] | None:
        """Return a place of the prompt as vLLM shapes it; the rank of a token beyond the likeliest is not known."""
        if one.logprob is None:
            return None
        ranked: dict[int, tuple[float, int | None]] = {one.token: (one.logprob, None)}
        ranked |= {token: (logprob, rank) for rank, (token, logprob) in enumerate(one.top, start=1)}
        return {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": self.spelled(token)}
            for token, (logprob, rank) in ranked.items()
        }


def _extension(part: ChunkPart) -> dict[str, Any]:
    """Return what a gateway gets beyond OpenAI's and vLLM's shapes."""
    return {} if part.times is None else {"phasesplit": part.times._asdict()}


def read_answer(answer: Mapping[str, Any]) -> Chunk:
    """Return what an answer, or one event of a stream, says.

    Args:
        answer: The JSON object.

    Raises:
        KeyError: It is not an answer; also TypeError, ValueError, AttributeError or IndexError.
    """
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
    return Chunk(
        tokens,
        _scored(tokens, logprobs) if logprobs else (),
        finish,
        tuple(_of_prompt(place) for place in prompt) if prompt else (),
        _times(answer.get("phasesplit")),
    )


def _scored(tokens: Sequence[int], logprobs: Mapping[str, Any]) -> tuple[Scored, ...]:
    """Return the output's log-probabilities: by id where a machine tells ids, by vLLM's names for ids elsewhere."""
    sent = logprobs["token_logprobs"]
    ids = logprobs.get("top_token_ids")
    if ids is not None:
        tops = [tuple(zip(*top, strict=True)) for top in zip(ids, logprobs["top_token_logprobs"], strict=True)]
    else:
        named = logprobs.get("top_logprobs") or [None] * len(tokens)
        tops = [
            tuple((int(name.removeprefix(TOKEN_NAME)), value) for name, value in (top or {}).items()) for top in named
        ]
    return tuple(map(Scored, tokens, sent, tops))


def _times(sent: Mapping[str, Any] | None) -> PrefillTimes | None:
    """Return how long a prompt took, None where the machine does not tell; raises ValueError for what no time is."""
    if sent is None:
        return None
    times = PrefillTimes(float(sent["queued_s"]), float(sent["prefill_s"]))
    if not (0 <= times.queued_s < inf and 0 <= times.prefill_s < inf):
        raise ValueError(times)
    return times


def _of_prompt(place: Mapping[str, Any] | None) -> Scored:
    """Return one place of a prompt; the first of its entries is the token that is there."""
    if place is None:
        return Scored(-1, None)
    entries = [(int(name), entry["logprob"]) for name, entry in place.items()]
    return Scored(*entries[0], tuple(sorted(entries, key=lambda entry: -entry[1])))
