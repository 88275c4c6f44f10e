"""Log-probabilities in the shapes of the two endpoints."""

from collections.abc import Sequence
from typing import Any, NamedTuple


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
