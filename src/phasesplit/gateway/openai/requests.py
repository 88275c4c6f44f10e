"""What clients may send to /v1/completions and /v1/chat/completions.

Types are strict: a number in quotes is not a number. Null means the same as leaving a field out. Fields that are not
named here are kept, and passed on to the machines. Extensions carry the names that vLLM gives them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from phasesplit.gateway.openai.fields import MOST_TOKEN, Biases, Content, Prompts, Stops, StopTokens

FOR_TEMPLATES = (
    "add_generation_prompt",
    "add_special_tokens",
    "chat_template_kwargs",
    "continue_final_message",
    "documents",
    "function_call",
    "functions",
    "parallel_tool_calls",
    "tool_choice",
    "tools",
)
"""Fields that matter while a prompt is made; machines get the prompt."""

Tokens = Annotated[int, Field(ge=0, le=MOST_TOKEN)]


class _Wire(BaseModel):
    """A JSON object of the wire: strict, unknown fields kept, never changed after parsing."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


class StreamOptions(_Wire):
    """Options of a stream.

    Attributes:
        include_usage: Send usage in a last chunk of its own.
    """

    include_usage: bool | None = None


class ResponseFormat(_Wire):
    """What form the output must have.

    Attributes:
        type: "text" is any text; the others hold output to JSON, or to a schema.
    """

    type: Literal["text", "json_object", "json_schema"]


class Sampled(_Wire):
    """The fields that both endpoints share. Source: OpenAI API reference, and vLLM's extensions where marked.

    Attributes:
        model: The model's name.
        n: Choices per prompt, 1 to 128; None is 1.
        max_tokens: Most output tokens, 0 included; None leaves it to the context.
        min_tokens: Extension: fewest output tokens, before which nothing stops.
        stop: Up to 4 stop strings, or token ids.
        stop_token_ids: Extension: further stop tokens.
        include_stop_str_in_output: Extension: the stop string ends the text instead of being cut.
        ignore_eos: Extension: go on after the end of the text.
        temperature: 0 to 2; None is 1; 0 is greedy.
        top_p: Above 0, up to 1.
        top_k: Extension: the k likeliest tokens; -1 and 0 are all.
        presence_penalty: -2 to 2.
        frequency_penalty: -2 to 2.
        repetition_penalty: Extension: above 0, up to 10.
        seed: A signed 64-bit number.
        stream: Send the answer as it grows.
        stream_options: Options of the stream.
        logit_bias: By token id, -100 to 100.
        user: Passed on.
        response_format: Passed on where the machines can keep to it.
        add_special_tokens: Extension: the model's start token comes first; None is true for prompts, and false for
            chats, whose templates write their own.
    """

    model: Annotated[str, Field(min_length=1, max_length=256)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Tokens | None = None
    min_tokens: Tokens | None = None
    stop: Stops = ()
    stop_token_ids: StopTokens = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKEN)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Biases = None
    user: Annotated[str, Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens that the client wants, None without a bound."""
        return self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings."""
        return tuple(stop for stop in self.stop if isinstance(stop, str))

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Stop tokens of both fields."""
        return (*(stop for stop in self.stop if isinstance(stop, int)), *self.stop_token_ids)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream carries usage in a last chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prompt_count(self) -> int:
        """Prompts of the request, >= 1."""
        return 1

    @property
    def scored_tokens(self) -> int | None:
        """Likeliest tokens to tell with each token's log-probability, None where none is wanted."""
        return None

    @property
    def has_echo(self) -> bool:
        """Whether the text begins with the prompt."""
        return False

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log-probabilities are wanted."""
        return self.has_echo and self.scored_tokens is not None

    @property
    def wants_token_ids(self) -> bool:
        """Whether choices carry their token ids. Extension of vLLM."""
        return bool((self.model_extra or {}).get("return_token_ids"))

    @property
    def is_constrained(self) -> bool:
        """Whether the output is held to a grammar."""
        form, more = self.response_format, self.model_extra or {}
        return (form is not None and form.type != "text") or any(
            value and (name.startswith("guided_") or name == "structured_outputs") for name, value in more.items()
        )

    @property
    def shows_special_tokens(self) -> bool:
        """Whether special tokens have a text in the output. Extension of vLLM."""
        return (self.model_extra or {}).get("skip_special_tokens") is False

    @property
    def wants_start(self) -> bool:
        """Whether a completion's prompt in text begins with the model's start token. Extension of vLLM."""
        return self.add_special_tokens is not False

    @property
    def choice_count(self) -> int:
        """Choices of the answer: prompts x n."""
        return self.prompt_count * (self.n or 1)


class CompletionRequest(Sampled):
    """The body of POST /v1/completions.

    Attributes:
        prompt: One or more prompts, as text or token ids.
        echo: Let the text begin with the prompt.
        logprobs: The likeliest tokens to tell for each position, 0 to 20.
        best_of: Not more than n: choosing among more is not offered.
        suffix: Not offered, except empty.
    """

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: str | None = None

    @property
    def prompt_count(self) -> int:
        """Prompts of the request, >= 1."""
        return len(self.prompt)

    @property
    def scored_tokens(self) -> int | None:
        """See `Sampled`."""
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        """See `Sampled`."""
        return bool(self.echo)


class Message(_Wire):
    """One message of a chat.

    Attributes:
        role: Who speaks.
        content: Text, a list of parts, or nothing (an assistant's tool calls).
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content = None


class ChatRequest(Sampled):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: The chat so far.
        max_completion_tokens: The newer name of max_tokens.
        logprobs: Tell each token's log-probability.
        top_logprobs: The likeliest tokens to tell for each position, 0 to 20; needs `logprobs`.
    """

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens that the client wants, None without a bound."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def scored_tokens(self) -> int | None:
        """See `Sampled`."""
        return (self.top_logprobs or 0) if self.logprobs else None


def extras(request: BaseModel) -> dict[str, Any]:
    """Return the fields that phasesplit does not know."""
    return dict(request.model_extra or {})
