"""Answers and chunks of streams, as OpenAI clients know them; machines build theirs of the same parts.

A choice ends with "stop" or "length". There is no way to build a finished choice out of an error.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length"]


class TokenLogprob(NamedTuple):
    """One token's log-probability.

    Attributes:
        token: Its text.
        logprob: Natural logarithm, <= 0; None for a prompt's first token, which nothing comes before.
        raw: Its bytes, which may be part of a character only.
        top: The likeliest tokens at its place, likeliest first, each with text, log-probability and bytes.
    """

    token: str
    logprob: float | None
    raw: bytes
    top: tuple[tuple[str, float, bytes], ...] = ()


def completion_logprobs(tokens: Sequence[TokenLogprob], text_offset: int) -> dict[str, Any]:
    """Return the `logprobs` of a completion.

    Args:
        tokens: The tokens of this piece of text.
        text_offset: Characters of the choice's text before this piece, >= 0.
    """
    offsets = []
    for token in tokens:
        offsets.append(text_offset)
        text_offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if token.logprob is None else {text: logprob for text, logprob, _ in token.top} for token in tokens
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return the `logprobs` of a chat's choice."""
    return {
        "content": [
            {
                "token": token.token,
                "logprob": token.logprob,
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": text, "logprob": logprob, "bytes": list(raw)} for text, logprob, raw in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What one chunk adds to a choice.

    Attributes:
        index: The choice.
        text: Its text, empty in a chunk that only ends the choice.
        logprobs: Its tokens', None where the client did not ask.
        text_offset: Characters of the choice's text before it.
        finish_reason: Why the choice ends here, None where it goes on.
        stop_reason: As in `FinishedChoice`.
        token_ids: Its tokens' ids, None where the client did not ask. Extension of vLLM.
    """

    index: int
    text: str = ""
    logprobs: Sequence[TokenLogprob] | None = None
    text_offset: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class FinishedChoice:
    """A choice that has come to its normal end.

    Attributes:
        index: The choice.
        text: All of it, an echoed prompt included.
        finish_reason: "stop" for the end of the text or a stop, "length" for the bound on tokens.
        logprobs: Its tokens', None where the client did not ask.
        text_offset: Where in the text the first of these tokens begins.
        stop_reason: The stop string or stop token that ended it, None for neither. Extension of vLLM.
        token_ids: Its output's ids, None where the client did not ask. Extension of vLLM.
        prompt_token_ids: Its prompt's ids, likewise.
    """

    index: int
    text: str
    finish_reason: FinishReason
    logprobs: Sequence[TokenLogprob] | None = None
    text_offset: int = 0
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class ClientAnswer:
    """What all parts of one answer share.

    Attributes:
        request: The request's number, without prefix.
        created_s: Whole seconds since 1970.
        model: The model's name, as the client gave it.
    """

    request: str
    created_s: int
    model: str

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return answer_head(f"{prefix}-{self.request}", kind, self.created_s, self.model)

    def completion(self, choices: Sequence[FinishedChoice], used: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer of /v1/completions.

        Args:
            choices: All choices, in order.
            used: The answer's `usage`.
        """
        return self._head("cmpl", "text_completion") | {
            "choices": [{"text": choice.text} | _end(choice, _completion_logprobs(choice)) for choice in choices],
            "usage": used,
        }

    def chat(self, choices: Sequence[FinishedChoice], used: dict[str, int]) -> dict[str, Any]:
        """Return the whole answer of /v1/chat/completions.

        Args:
            choices: All choices, in order.
            used: The answer's `usage`.
        """
        return self._head("chatcmpl", "chat.completion") | {
            "choices": [
                {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
                | _end(choice, _chat_logprobs(choice))
                for choice in choices
            ],
            "usage": used,
        }

    def completion_chunk(self, piece: AnswerPiece, *, with_usage: bool) -> dict[str, Any]:
        """Return a chunk of a /v1/completions stream.

        Args:
            piece: What it adds to its choice.
            with_usage: Whether the stream ends with a chunk of usage; the others then say null.
        """
        added = {"text": piece.text, "logprobs": _completion_logprobs(piece)}
        return self._chunk("cmpl", "text_completion", piece, added, with_usage)

    def chat_chunk(self, piece: AnswerPiece, *, with_usage: bool) -> dict[str, Any]:
        """Return a chunk of a /v1/chat/completions stream; an empty piece has an empty delta.

        Args:
            piece: What it adds to its choice.
            with_usage: Whether the stream ends with a chunk of usage; the others then say null.
        """
        delta = {"content": piece.text} if piece.text or piece.logprobs else {}
        added = {"delta": delta, "logprobs": _chat_logprobs(piece)}
        return self._chunk("chatcmpl", "chat.completion.chunk", piece, added, with_usage)

    def role_chunk(self, index: int, *, with_usage: bool) -> dict[str, Any]:
        """Return the first chunk of a chat's choice: who speaks. It is not a token.

        Args:
            index: The choice.
            with_usage: See `chat_chunk`.
        """
        added = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        return self._chunk("chatcmpl", "chat.completion.chunk", AnswerPiece(index), added, with_usage)

    def completion_usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """Return the last chunk of a /v1/completions stream whose client wants usage."""
        return usage_chunk(self._head("cmpl", "text_completion"), used)

    def chat_usage_chunk(self, used: dict[str, int]) -> dict[str, Any]:
        """Return the last chunk of a /v1/chat/completions stream whose client wants usage."""
        return usage_chunk(self._head("chatcmpl", "chat.completion.chunk"), used)

    def _chunk(
        self, prefix: str, kind: str, piece: AnswerPiece, added: dict[str, Any], with_usage: bool
    ) -> dict[str, Any]:
        chunk = self._head(prefix, kind)
        choice = {"index": piece.index} | added | {"finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.token_ids is not None:
            choice["token_ids"] = list(piece.token_ids)
        chunk["choices"] = [choice]
        return with_null_usage(chunk) if with_usage else chunk


def answer_head(answer_id: str, kind: str, created_s: int, model: str) -> dict[str, Any]:
    """Return what every answer and every chunk begins with.

    Args:
        answer_id: The same in all chunks of an answer.
        kind: OpenAI's name of the shape, such as "text_completion".
        created_s: Whole seconds since 1970.
        model: The model's name, as the client gave it.
    """
    return {"id": answer_id, "object": kind, "created": created_s, "model": model}


def with_null_usage(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chunk of a stream whose last one tells usage; the others say null."""
    return {**chunk, "usage": None}


def usage_chunk(head: Mapping[str, Any], used: Mapping[str, int]) -> dict[str, Any]:
    """Return the last chunk of a stream whose client wants usage.

    Args:
        head: See `answer_head`.
        used: The answer's `usage`.
    """
    return {**head, "choices": [], "usage": dict(used)}


def _completion_logprobs(part: AnswerPiece | FinishedChoice) -> dict[str, Any] | None:
    return None if part.logprobs is None else completion_logprobs(part.logprobs, part.text_offset)


def _chat_logprobs(part: AnswerPiece | FinishedChoice) -> dict[str, Any] | None:
    return None if part.logprobs is None else chat_logprobs(part.logprobs)


def _end(choice: FinishedChoice, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    end: dict[str, Any] = {
        "index": choice.index,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.token_ids is not None:
        end |= {"token_ids": list(choice.token_ids), "prompt_token_ids": list(choice.prompt_token_ids or ())}
    return end


def usage(prompt_tokens: Iterable[int], output_tokens: Iterable[int]) -> dict[str, int]:
    """Return the `usage` of an answer, counted from token ids.

    Args:
        prompt_tokens: Tokens of each prompt; a prompt with n choices counts once.
        output_tokens: Output tokens of each choice, a stop token included.
    """
    prompt, output = sum(prompt_tokens), sum(output_tokens)
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def model_list(names: Sequence[str], created_s: int, context_tokens: int | None = None) -> dict[str, Any]:
    """Return the answer of /v1/models.

    Args:
        names: The models served.
        created_s: Whole seconds since 1970.
        context_tokens: Longest prompt and output together, under vLLM's name for it; None where it is not told.
    """
    shared: dict[str, Any] = {"object": "model", "created": created_s, "owned_by": "phasesplit"}
    if context_tokens is not None:
        shared["max_model_len"] = context_tokens
    return {"object": "list", "data": [{"id": name, **shared} for name in names]}
