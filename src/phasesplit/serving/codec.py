"""Text and tokens for the gateway, over a model's own tokenizer and chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.tokens import Tokenizer
from phasesplit.errors import SpecError


class ModelCodec:
    """A `gateway.codec.Codec`.

    Attributes:
        context_tokens: Longest prompt plus output of the model.
        vocabulary: Token ids are 0 to this, exclusive.
        stop_token_ids: The model's own ends of a text.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.context_tokens = config.context_tokens
        self.vocabulary = config.vocab
        self.stop_token_ids = frozenset(config.stop_token_ids)
        self._tokenizer, self._template = tokenizer, template

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        """Return the tokens of a text, with the start token where that is asked for and the model wants one."""
        return self._tokenizer.encode(text, has_start=has_start)

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a chat, up to where the assistant's answer starts.

        Args:
            messages: As the client sent them.
            given: Further names for the template; `add_generation_prompt` is one of them, and `add_special_tokens` puts
                the start token before what it makes.

        Raises:
            SpecError: The model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise SpecError("this model has no chat template; use /v1/completions")
        names = dict(given)
        wanted = names.pop("add_generation_prompt", True)
        has_start = names.pop("add_special_tokens", False)
        text = self._template.render(messages, has_generation_prompt=bool(wanted), **names)
        return self._tokenizer.encode(text, has_start=bool(has_start))

    def token_bytes(self, token: int) -> bytes:
        """Return what a token stands for, nothing for a special token."""
        return b"" if token in self._tokenizer.special else self._tokenizer.token_bytes(token)

    def token_name(self, token: int) -> str:
        """Return how log-probabilities show a token; bytes that are no character are U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
