"""What a client asks for, choice by choice, and what has been made of a choice so far.

`choice_specs` makes one `ChoiceSpec` for each choice of a request, with its prompt as token ids. `Output` is the output
of one as it grows: ids, text up to a stop, log-probabilities.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasesplit.errors import RequestError, SpecError
from phasesplit.gateway.codec import Codec, named
from phasesplit.gateway.parsing import output_bound
from phasesplit.protocol.answers import AnswerPiece, FinishedChoice, FinishReason, TokenLogprob
from phasesplit.protocol.completions import (
    FOR_TEMPLATES,
    ChatMessage,
    ChatRequest,
    ClientRequest,
    CompletionRequest,
    extras,
)
from phasesplit.protocol.stop import StopScanner
from phasesplit.protocol.worker import Scored

_LOOK_BACK = ("bad_words", "repetition_detection", "thinking_token_budget", "truncate_prompt_tokens", "vllm_xargs")
"""Extensions of vLLM that ask where the output begins. Source: vllm/sampling_params.py, `SamplingParams`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSpec:
    """One choice to be made.

    Attributes:
        request: The client's request.
        number: The request's number, without prefix.
        index: The choice.
        prompt_ids: Its prompt, at least one id.
        prompt_text: Its prompt as the echo shows it; empty where there is none.
        most_tokens: Most output tokens, >= 0.
        seed: The gateway's seed for the request, the same for every choice.
        stop_token_ids: What ends the text by the model's own rule; empty where the client wants to go on.
    """

    request: ClientRequest
    number: str
    index: int
    prompt_ids: Sequence[int]
    prompt_text: str
    most_tokens: int
    seed: int
    stop_token_ids: frozenset[int]

    def can_resume(self, *, reports_output: bool) -> bool:
        """Return whether other machines can go on behind the output so far as if they had made it.

        What a grammar allows next is in no token. A machine that takes the output so far for prompt would not count it
        for presence and frequency (repetition counts both) or anything else that looks at the output, and would begin
        the draws of the client's seed again; the gateway's own seed is another one then.

        Args:
            reports_output: Whether the machines report an output that goes on from its prompt.
        """
        request = self.request
        if request.is_constrained:
            return False
        has_penalty = bool(request.presence_penalty or request.frequency_penalty)
        is_repeatable = request.seed is not None and request.temperature != 0
        given = extras(request)
        looks_back = any(given.get(name) is not None for name in _LOOK_BACK)
        return reports_output or not (has_penalty or is_repeatable or looks_back)

    def scanner(self) -> StopScanner:
        """Return what finds the choice's stops."""
        return StopScanner(
            self.request.stop_strings,
            self.request.stop_tokens,
            min_tokens=self.request.min_tokens or 0,
            include=bool(self.request.include_stop_str_in_output),
        )


def choice_specs(
    request: ClientRequest, codec: Codec, *, number: str, seed: int, context_tokens: int, most_held_tokens: int
) -> list[ChoiceSpec]:
    """Return the choices of a request, n of the first prompt first.

    Args:
        request: The client's request.
        codec: The model's.
        number: The request's number.
        seed: The gateway's seed for it.
        context_tokens: Prompt and output tokens that the model, and every machine that serves now, take.
        most_held_tokens: Prompt and output tokens that a machine can hold; 0 where that is not known now.

    Raises:
        RequestError: A prompt is empty, or too long with its output; an id is not one of the model's.
    """
    _check_ids(request, codec)
    chat = isinstance(request, ChatRequest)
    prompts = [_chat(request, codec)] if isinstance(request, ChatRequest) else _prompts(request, codec)
    specs: list[ChoiceSpec] = []
    for ids, text in prompts:
        if not ids:
            raise RequestError("the prompt has no tokens", param="messages" if chat else "prompt", code="invalid_value")
        context = min(context_tokens, most_held_tokens or context_tokens)
        # The dispatcher refuses a prompt that no machine can hold, with the machines' figures.
        bound = output_bound(request, len(ids), context_tokens)
        if request.most_tokens is None and len(ids) < context:
            bound = context - len(ids)
        stops = frozenset() if request.ignore_eos else codec.stop_token_ids
        for _ in range(request.n or 1):
            specs.append(
                ChoiceSpec(
                    request=request, number=number, index=len(specs), prompt_ids=ids, prompt_text=text,
                    most_tokens=bound, seed=seed, stop_token_ids=stops,
                )
            )  # fmt: skip
    return specs


def _prompts(request: ClientRequest, codec: Codec) -> list[tuple[Sequence[int], str]]:
    found: list[tuple[Sequence[int], str]] = []
    for prompt in request.prompt if isinstance(request, CompletionRequest) else ():
        if isinstance(prompt, str):
            found.append((_encoded(prompt, request, codec), prompt if request.has_echo else ""))
            continue
        if max(prompt) >= codec.vocabulary:
            raise _not_an_id("prompt", max(prompt), codec)
        text = b"".join(map(codec.token_bytes, prompt)).decode("utf-8", "replace") if request.has_echo else ""
        found.append((prompt, text))
    return found


def _encoded(prompt: str, request: ClientRequest, codec: Codec) -> Sequence[int]:
    try:
        return codec.encode(prompt, has_start=request.wants_start)
    except SpecError as error:
        raise RequestError(f"prompt: {error}", param="prompt", code="invalid_value") from None


def _chat(request: ChatRequest, codec: Codec) -> tuple[Sequence[int], str]:
    given = {name: value for name, value in extras(request).items() if name in FOR_TEMPLATES and value is not None}
    if request.add_special_tokens:
        given["add_special_tokens"] = True
    try:
        return codec.chat([_shown(place, message) for place, message in enumerate(request.messages)], given), ""
    except SpecError as error:
        raise RequestError(f"messages: {error}", param="messages", code="invalid_value") from None


def _shown(place: int, message: ChatMessage) -> Mapping[str, Any]:
    """Return a message as templates read it: parts of text are joined."""
    shown: dict[str, Any] = {**extras(message), "role": message.role, "content": message.content}
    if isinstance(message.content, list):
        for part in message.content:
            if part["type"] not in ("text", "input_text") or not isinstance(part.get("text"), str):
                param = f"messages.{place}.content"
                raise RequestError(f"{param}: parts other than text are not offered", param=param, code="invalid_value")
        shown["content"] = "".join(part["text"] for part in message.content)
    return shown


def _check_ids(request: ClientRequest, codec: Codec) -> None:
    for token in request.stop_tokens:
        if token >= codec.vocabulary:
            raise _not_an_id("stop_token_ids", token, codec)
    for name in request.logit_bias or {}:
        if int(name) >= codec.vocabulary:
            raise _not_an_id("logit_bias", int(name), codec)


def _not_an_id(param: str, token: int, codec: Codec) -> RequestError:
    return RequestError(
        f"{param}: got token id {token}, allowed are 0 to {codec.vocabulary - 1}", param=param, code="invalid_value"
    )


class Output:
    """What one attempt at a choice has made.

    Attributes:
        ids: The output's ids, a stop token included.
        finish_reason: Why it ended, None while it grows.
    """

    def __init__(self, spec: ChoiceSpec, codec: Codec) -> None:
        self.ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._spec, self._codec = spec, codec
        self._scanner = spec.scanner()
        self._texts: list[str] = []
        self._characters = 0
        self._logprobs: list[TokenLogprob] | None = None if spec.request.scored_tokens is None else []
        self._has_begun = False
        self._sent = 0
        self._sent_ids = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string or a stop token of the client's has ended the text."""
        return self._scanner.found is not None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after the last token, by what the client and the model say of ids and counts."""
        return len(self.ids) >= self._spec.most_tokens or self._is_end

    @property
    def _is_end(self) -> bool:
        return self.ids[-1] in self._spec.stop_token_ids and len(self.ids) > (self._spec.request.min_tokens or 0)

    def begin(self, prompt: Sequence[Scored]) -> None:
        """Let the output begin with the prompt, where the client wants an echo; a second time changes nothing.

        Args:
            prompt: The prompt's log-probabilities, empty where they are not wanted.
        """
        if self._has_begun or not self._spec.request.has_echo:
            return
        self._has_begun = True
        self._texts.append(self._spec.prompt_text)
        if self._logprobs is not None:
            ids = self._spec.prompt_ids
            self._logprobs += [
                named(self._codec, place._replace(token=token)) for token, place in zip(ids, prompt, strict=True)
            ]

    def push(self, token: int, scored: Scored | None) -> None:
        """Add a token, unless the client wants none at all."""
        if self._spec.most_tokens == 0:
            return
        self.ids.append(token)
        raw = self._codec.token_bytes(token)
        if not raw and self._spec.request.shows_special_tokens and not self._is_end:
            raw = self._codec.token_name(token).encode()
        self._texts.append(self._scanner.push(raw, token))
        if self._logprobs is not None and scored is not None:
            self._logprobs.append(named(self._codec, scored))

    def finish(self, reported: str | None) -> None:
        """End the output.

        Args:
            reported: The machine's reason, where it has given one for the whole output.
        """
        self._texts.append(self._scanner.flush())
        is_stop = self.is_stopped or reported == "stop" or (bool(self.ids) and self._is_end)
        self.finish_reason = "stop" if is_stop else "length"

    def piece(self) -> AnswerPiece | None:
        """Return what the client has not seen yet, None where there is nothing to see."""
        text = "".join(self._texts[self._sent :])
        self._sent = len(self._texts)
        logprobs = self._logprobs
        if logprobs is not None:
            # Sent once: a stream keeps none of them.
            self._logprobs = []
        ids = self.ids[self._sent_ids :] if self._spec.request.wants_token_ids else None
        self._sent_ids = len(self.ids)
        if not text and not logprobs and not ids and self.finish_reason is None:
            return None
        offset = self._characters
        self._characters += sum(len(one.token) for one in logprobs) if logprobs is not None else len(text)
        return AnswerPiece(self._spec.index, text, logprobs, offset, self.finish_reason, self._scanner.found, ids)

    def finished(self) -> FinishedChoice:
        """Return all of it.

        Raises:
            ValueError: It has not ended.
        """
        if self.finish_reason is None:
            raise ValueError("an output that still grows is not finished")
        ids = self._spec.request.wants_token_ids
        return FinishedChoice(
            self._spec.index,
            "".join(self._texts),
            self.finish_reason,
            self._logprobs,
            0,
            self._scanner.found,
            self.ids if ids else None,
            self._spec.prompt_ids if ids else None,
        )
