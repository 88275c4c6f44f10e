"""A tokenizer without a vocabulary: one token a byte."""

from collections.abc import Mapping, Sequence
from typing import Any

END = 256
"""The id that ends a text."""


class ByteCodec:
    """Ids 0 to 255 are bytes, 256 is the end of the text; satisfies `gateway.codec.Codec`.

    Attributes:
        context_tokens: The longest prompt and output together.
        vocabulary: Ids.
        stop_token_ids: The end of the text.
    """

    def __init__(self, context_tokens: int = 4096) -> None:
        self.context_tokens = context_tokens
        self.vocabulary = END + 1
        self.stop_token_ids = frozenset({END})
        self._bytes = (*(bytes([token]) for token in range(END)), b"")
        self._names = (*(raw.decode("utf-8", "replace") for raw in self._bytes[:END]), "<end>")

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:  # noqa: ARG002 - it has no start
        """Return the bytes of a text."""
        return list(text.encode())

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:  # noqa: ARG002
        """Return a prompt with a line for each message."""
        return self.encode("".join(f"{message['role']}: {message['content'] or ''}\n" for message in messages))

    def token_bytes(self, token: int) -> bytes:
        """Return a token's byte."""
        return self._bytes[token]

    def token_name(self, token: int) -> str:
        """Return a token's text."""
        return self._names[token]
