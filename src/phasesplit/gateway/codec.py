"""Text to token ids and back: what the gateway must know of a model, and the object that knows it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from phasesplit.protocol.answers import TokenLogprob
from phasesplit.protocol.worker import Scored


class Codec(Protocol):
    """One model's tokenizer and chat template.

    Attributes:
        context_tokens: The longest prompt and output together.
        vocabulary: Ids are 0 to `vocabulary` - 1.
        stop_token_ids: The ids that end a text by the model's own rule.
    """

    context_tokens: int
    vocabulary: int
    stop_token_ids: frozenset[int]

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        """Return the ids of a prompt.

        Args:
            text: The prompt.
            has_start: Whether the start of the text comes first, where the model wants one.
        """

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the ids of a chat's prompt.

        Args:
            messages: As the client sent them; a content is text or None.
            given: Further names for the template; `add_special_tokens` is true where the start of the text goes before
                what the template makes, which usually writes its own.

        Raises:
            SpecError: The template refuses the messages.
        """

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; a special token adds none."""

    def token_name(self, token: int) -> str:
        """Return what log-probabilities call a token; a special token's name included."""


def named(codec: Codec, scored: Scored) -> TokenLogprob:
    """Return a token's log-probability as clients see it."""
    return TokenLogprob(
        codec.token_name(scored.token),
        scored.logprob,
        codec.token_bytes(scored.token),
        tuple((codec.token_name(token), logprob, codec.token_bytes(token)) for token, logprob in scored.top),
    )
