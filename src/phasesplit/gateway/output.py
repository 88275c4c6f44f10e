"""A choice's output as it grows: ids, text up to a stop, log-probabilities."""

from collections.abc import Sequence

from phasesplit.gateway.codec import Codec, named
from phasesplit.gateway.order import Order
from phasesplit.protocol.answers import FinishedChoice, FinishReason, Piece, TokenLogprob
from phasesplit.protocol.worker import Scored


class Output:
    """What one attempt at a choice has made.

    Attributes:
        ids: The output's ids, a stop token included.
        finish_reason: Why it ended, None while it grows.
    """

    def __init__(self, order: Order, codec: Codec) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._order, self._codec = order, codec
        self._scanner = order.scanner()
        self._texts: list[str] = []
        self._characters = 0
        self._logprobs: list[TokenLogprob] | None = None if order.request.scored_tokens is None else []
        self._has_begun = False
        self._told = 0
        self._told_ids = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a stop token of the client's has ended the text."""
        return self._scanner.found is not None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after the last token, by what the client and the model say of ids and counts."""
        return len(self.ids) >= self._order.most_tokens or self._is_end

    @property
    def _is_end(self) -> bool:
        return self.ids[-1] in self._order.stop_token_ids and len(self.ids) > (self._order.request.min_tokens or 0)

    def begin(self, prompt: Sequence[Scored]) -> None:
        """Let the output begin with the prompt, where the client wants an echo; a second time changes nothing.

        Args:
            prompt: The prompt's log-probabilities, empty where they are not wanted.
        """
        if self._has_begun or not self._order.request.has_echo:
            return
        self._has_begun = True
        self._texts.append(self._order.prompt_text)
        if self._logprobs is not None:
            ids = self._order.prompt_ids
            self._logprobs += [
                named(self._codec, place._replace(token=token)) for token, place in zip(ids, prompt, strict=True)
            ]

    def push(self, token: int, scored: Scored | None) -> None:
        """Add a token, unless the client wants none at all."""
        if self._order.most_tokens == 0:
            return
        self.ids.append(token)
        raw = self._codec.token_bytes(token)
        if not raw and self._order.request.shows_special_tokens and not self._is_end:
            raw = self._codec.token_name(token).encode()
        self._texts.append(self._scanner.push(raw, token))
        if self._logprobs is not None and scored is not None:
            self._logprobs.append(named(self._codec, scored))

    def finish(self, word: str | None) -> None:
        """End the output.

        Args:
            word: The machine's own word for it, where it has said one about the whole output.
        """
        self._texts.append(self._scanner.flush())
        is_stop = self.is_stopped or word == "stop" or (bool(self.ids) and self._is_end)
        self.finish_reason = "stop" if is_stop else "length"

    def piece(self) -> Piece | None:
        """Return what the client has not seen yet, None where there is nothing to see."""
        text = "".join(self._texts[self._told :])
        self._told = len(self._texts)
        logprobs = self._logprobs
        if logprobs is not None:
            # Told once: a stream keeps none of them.
            self._logprobs = []
        ids = self.ids[self._told_ids :] if self._order.request.wants_token_ids else None
        self._told_ids = len(self.ids)
        if not text and not logprobs and not ids and self.finish_reason is None:
            return None
        offset = self._characters
        self._characters += sum(len(one.token) for one in logprobs) if logprobs is not None else len(text)
        return Piece(self._order.index, text, logprobs, offset, self.finish_reason, self._scanner.found, ids)

    def finished(self) -> FinishedChoice:
        """Return all of it.

        Raises:
            ValueError: It has not ended.
        """
        if self.finish_reason is None:
            raise ValueError("an output that still grows is not finished")
        ids = self._order.request.wants_token_ids
        return FinishedChoice(
            self._order.index,
            "".join(self._texts),
            self.finish_reason,
            self._logprobs,
            0,
            self._scanner.found,
            self.ids if ids else None,
            self._order.prompt_ids if ids else None,
        )
