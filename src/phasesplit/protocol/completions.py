"""The schema of completions: what clients may send to the gateway, and what the gateway sends to machines.

Types are strict: a number in quotes is not a number. Null means the same as leaving a field out. Extensions carry the
names that vLLM gives them. Whatever of a client's request the gateway does not know is kept, and passed on to the
machines; a machine ignores what it does not know. This module imports pydantic: machines read it with their first
request.
"""

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

MOST_STOPS = 4
"""Of a client's request. Source: OpenAI API reference, `stop`."""
MOST_STOP_TOKENS = 128
"""Ours."""
MOST_STOP_CHARACTERS = 1024
"""Ours: text held back for a stop string is bounded by this."""
MOST_BIASES = 1024
"""Ours."""
MOST_TOKEN = (1 << 31) - 1
_MOST_STOPS_OF_MACHINES, _MOST_LOGPROBS = 16, 20
"""Ours: bounds of the work that one token may cost."""

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

Prompt = str | list[int]
"""One prompt: text, or token ids."""


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_TOKEN


def _are_tokens(value: object) -> bool:
    """Return whether something is a list of token ids, at least one."""
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST_TOKEN


def _wrong(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_value", "Input should be {allowed}", {"allowed": allowed})


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a client's request as one tuple, whichever of the four forms it has."""
    if isinstance(value, str) or _are_tokens(value):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(map(_are_tokens, value)):
            return tuple(value)
    raise _wrong("a string, a list of strings, a list of token ids, or a list of such lists, none of them empty")


def _prompt(value: Any) -> str | tuple[int, ...]:
    """Return the one prompt of a machine's request."""
    if isinstance(value, str):
        return value
    if not _are_tokens(value):
        raise _wrong("one prompt: a string, or a list of token ids that is not empty")
    return tuple(value)


def _stops(value: Any, most: int, *, has_ids: bool) -> tuple[str | int, ...]:
    """Return stop strings, and stop token ids among them where those are allowed."""
    found = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or len(found) > most:
        raise _wrong(f"a string, or a list of up to {most} strings" + (" or token ids" if has_ids else ""))
    for item in found:
        is_text = isinstance(item, str) and 0 < len(item) <= MOST_STOP_CHARACTERS
        if not (is_text or (has_ids and _is_token(item))):
            allowed = f"made of strings of 1 to {MOST_STOP_CHARACTERS} characters"
            raise _wrong(allowed + (", or token ids" if has_ids else ""))
    return tuple(found)


def _stop_token_ids(value: Any, most: int | None) -> tuple[int, ...]:
    found = [] if value is None else value
    if not isinstance(found, list) or len(found) > (most or len(found)) or not all(map(_is_token, found)):
        raise _wrong("a list of token ids" if most is None else f"a list of up to {most} token ids")
    return tuple(found)


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in value):
        return value
    raise _wrong("a string, or a list of parts that have a type")


def _biases(value: Any, most: int | None) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > (most or len(value)):
        raise _wrong("an object of token ids" if most is None else f"an object of up to {most} token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= MOST_TOKEN):
            raise _wrong("an object whose names are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _wrong("an object whose values are numbers from -100 to 100")
    return value


def _logprobs(value: Any) -> bool | int | None:
    if value is None or isinstance(value, bool) or (type(value) is int and 0 <= value <= _MOST_LOGPROBS):
        return value
    raise _wrong(f"a number from 0 to {_MOST_LOGPROBS}, or whether top_logprobs is meant")


def _tcp(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        host, port = value
        if isinstance(host, str) and host and type(port) is int and 0 < port < 1 << 16:
            return host, port
    raise _wrong("a host and a port")


def _printable(value: str) -> str:
    if not value.isprintable():
        raise _wrong("made of printable characters")
    return value


Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
Stops = Annotated[tuple[str | int, ...], PlainValidator(partial(_stops, most=MOST_STOPS, has_ids=True))]
StopTokens = Annotated[tuple[int, ...], PlainValidator(partial(_stop_token_ids, most=MOST_STOP_TOKENS))]
Content = Annotated[str | list[dict[str, Any]] | None, PlainValidator(_content)]
Biases = Annotated[dict[str, float] | None, PlainValidator(partial(_biases, most=MOST_BIASES))]
Tokens = Annotated[int, Field(ge=0, le=MOST_TOKEN)]
LONGEST_NAME = 256
"""Characters of a key, or of the name of a machine or model."""
Name = Annotated[str, Field(min_length=1, max_length=LONGEST_NAME)]
_One = Annotated[int, Field(ge=1, le=1)]
_Epoch = Annotated[int, Field(ge=0)]
_Logprobs = Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


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
    """The fields that clients and machines share. Source: OpenAI API reference, and vLLM's extensions where marked.

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
        add_special_tokens: Extension: the model's start token comes first; None is true for prompts, and false for
            chats, whose templates write their own.
    """

    model: Name
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
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Biases = None
    add_special_tokens: bool | None = None


class ClientRequest(Sampled):
    """The fields that the gateway's two endpoints share.

    Attributes:
        user: Passed on.
        response_format: Passed on where the machines can keep to it.
    """

    user: Annotated[str, Field(max_length=1024)] | None = None
    response_format: ResponseFormat | None = None

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


class CompletionRequest(ClientRequest):
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
        return self.logprobs

    @property
    def has_echo(self) -> bool:
        return bool(self.echo)


class ChatMessage(_Wire):
    """One message of a chat.

    Attributes:
        role: Who speaks.
        content: Text, a list of parts, or nothing (an assistant's tool calls).
    """

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content = None


class ChatRequest(ClientRequest):
    """The body of POST /v1/chat/completions.

    Attributes:
        messages: The chat so far.
        max_completion_tokens: The newer name of max_tokens.
        logprobs: Tell each token's log-probability.
        top_logprobs: The likeliest tokens to tell for each position, 0 to 20; needs `logprobs`.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """The most output tokens that the client wants, None without a bound."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def scored_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def extras(request: BaseModel) -> dict[str, Any]:
    """Return the fields that phasesplit does not know."""
    return dict(request.model_extra or {})


class _Ignoring(_Wire):
    """A JSON object that a machine reads: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class AddressFields(_Ignoring):
    """`kv_transfer_params.address`, see `worker.Address`."""

    boot_id: Annotated[str, Field(max_length=256)]
    unix: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tcp: Annotated[tuple[str, int] | None, PlainValidator(_tcp)] = None


class TransferNames(_Ignoring):
    """`kv_transfer_params` but for the address, as every machine reads them.

    Attributes:
        do_remote_decode: This machine computes the prompt alone.
        do_remote_prefill: This machine computes the output alone.
        key: Name of the transfer.
        peer: Name of the other machine.
        peer_epoch: Its epoch.
        epoch: This machine's epoch, as the sender knows it.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    key: Name | None = None
    peer: Name | None = None
    peer_epoch: _Epoch | None = None
    epoch: _Epoch | None = None


class TransferFields(TransferNames):
    """`kv_transfer_params` of the embedded engine.

    Attributes:
        address: Where the other machine is; needed by the machine that sends.
    """

    address: AddressFields | None = None


class OpenTransferFields(TransferNames):
    """`kv_transfer_params` of vLLM's connector, whose names also go into reports of bounded length.

    Attributes:
        key: Name of the transfer, printable.
        peer: Name of the other machine, printable.
        peer_epoch: Its epoch, below 2**63.
        address: Where it is, as the connector's transports read it.
    """

    key: Annotated[Name, AfterValidator(_printable)] | None = None
    peer: Annotated[Name, AfterValidator(_printable)] | None = None
    peer_epoch: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    address: dict[str, Any] | None = None


class WorkerBody(Sampled):
    """The body of POST /v1/completions of a machine: one prompt, one choice.

    Attributes:
        prompt: One prompt.
        max_completion_tokens: The same as `max_tokens`, under its newer name.
        min_p: Least probability relative to the likeliest token's, 0 to 1.
        resumed_tokens: So many of the prompt's last ids are output already; bounds count what is still to come.
        best_of: 1.
        logprobs: Likeliest tokens to tell; true where `top_logprobs` says how many.
        top_logprobs: Likeliest tokens to tell, as chats ask for them.
        prompt_logprobs: Likeliest tokens to tell at each place of the prompt.
        echo: Let the text begin with the prompt.
        return_token_ids: Tell token ids.
        return_tokens_as_token_ids: Name tokens `token_id:ID` where log-probabilities are sent.
        kv_transfer_params: What happens to the KV.
    """

    model_config = ConfigDict(extra="ignore")

    # The gateway asks for each choice on its own, and bounds what clients may send.
    n: _One | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MOST_TOKEN)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(partial(_stops, most=_MOST_STOPS_OF_MACHINES, has_ids=False))] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(partial(_stop_token_ids, most=None))] = ()
    logit_bias: Annotated[dict[str, float] | None, PlainValidator(partial(_biases, most=None))] = None

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_prompt)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    resumed_tokens: Tokens | None = None
    best_of: _One | None = None
    logprobs: Annotated[bool | int | None, PlainValidator(_logprobs)] = None
    top_logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: TransferFields | None = None
