"""The fields of a worker's request: types and ranges, and what is refused because the engine does not do it.

Types are strict: a number in quotes is not a number. Null means the same as leaving a field out.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PlainValidator
from pydantic_core import PydanticCustomError

_MOST_TOKEN = (1 << 31) - 1
_MOST_STOPS, _MOST_STOP_CHARACTERS, _MOST_LOGPROBS = 16, 1024, 20
"""Ours: bounds of the work that one token may cost."""

_NO_GRAMMAR = "the engine cannot hold output to a grammar"
_NO_TOOLS = "the engine calls no tools"
_REFUSED = {
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "structured_outputs": _NO_GRAMMAR,
    "grammar": _NO_GRAMMAR,
    "use_beam_search": "beam search is not offered",
    "suffix": "text after the completion is not offered",
    "bad_words": "banning words is not offered; logit_bias bans tokens",
    "allowed_token_ids": "allowing a set of tokens is not offered; logit_bias biases them",
    "logits_processors": "the engine runs no code of clients",
    "truncate_prompt_tokens": "prompts are not cut; send the tokens that are meant",
    "prompt_embeds": "prompts are text or token ids",
    "messages": "a worker takes one prompt; the gateway makes it from the messages of a chat",
}
"""Fields that would change the answer, and why they cannot."""


def refusal(fields: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field that the engine cannot honour, and why; None where there is none.

    A field that asks for nothing (null, false, empty) is not refused.

    Args:
        fields: The body.
    """
    for name, value in fields.items():
        if not value:
            continue
        if name in _REFUSED:
            return name, _REFUSED[name]
        if name.startswith("guided_"):
            return name, _NO_GRAMMAR
        if name == "response_format" and (not isinstance(value, dict) or value.get("type") != "text"):
            return name, f'{_NO_GRAMMAR}; allowed is {{"type": "text"}}'
    return None


def _wrong(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_value", "Input should be {allowed}", {"allowed": allowed})


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MOST_TOKEN for item in value)


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if not value or not _is_ids(value):
        raise _wrong("one prompt: a string, or a list of token ids that is not empty")
    return tuple(value)


def _stop(value: Any) -> tuple[str, ...]:
    found = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(found, list) or len(found) > _MOST_STOPS:
        raise _wrong(f"a string, or a list of up to {_MOST_STOPS} strings")
    if not all(isinstance(item, str) and 0 < len(item) <= _MOST_STOP_CHARACTERS for item in found):
        raise _wrong(f"made of strings of 1 to {_MOST_STOP_CHARACTERS} characters")
    return tuple(found)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if value is not None and not _is_ids(value):
        raise _wrong("a list of token ids")
    return tuple(value or ())


def _logit_bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong("an object of token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= _MOST_TOKEN):
            raise _wrong("an object whose names are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _wrong("an object whose values are numbers from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


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


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


_One = Annotated[int, Field(ge=1, le=1)]
_Name = Annotated[str, Field(min_length=1, max_length=256)]
_Epoch = Annotated[int, Field(ge=0)]
_Logprobs = Annotated[int, Field(ge=0, le=_MOST_LOGPROBS)]
_Bound = Annotated[int, Field(ge=1, le=_MOST_TOKEN)]
_Penalty = Annotated[float, Field(ge=-2, le=2)]


class StreamFields(_Wire):
    """`stream_options`.

    Attributes:
        include_usage: Send usage in a last chunk of its own.
    """

    include_usage: bool | None = None


class AddressFields(_Wire):
    """`kv_transfer_params.address`, see `wire.Address`."""

    boot_id: Annotated[str, Field(max_length=256)]
    unix: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    tcp: Annotated[tuple[str, int] | None, PlainValidator(_tcp)] = None


class TransferFields(_Wire):
    """`kv_transfer_params`.

    Attributes:
        do_remote_decode: This worker computes the prompt phase alone.
        do_remote_prefill: This worker computes the token phase alone.
        key: Name of the transfer.
        peer: Name of the other worker.
        peer_epoch: Its epoch.
        address: Where it is; needed by the worker that sends.
        epoch: This worker's epoch, as the sender knows it.
    """

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    key: _Name | None = None
    peer: _Name | None = None
    peer_epoch: _Epoch | None = None
    address: AddressFields | None = None
    epoch: _Epoch | None = None


class Body(_Wire):
    """The body of POST /v1/completions. Source: OpenAI API reference; vLLM's extensions keep their names.

    Attributes:
        model: The model's name.
        prompt: One prompt.
        add_special_tokens: Whether a text prompt gets the model's start token; None is true.
        max_tokens: Most output tokens; None leaves it to the context.
        max_completion_tokens: The same, under its newer name.
        min_tokens: Fewest output tokens.
        resumed_tokens: So many of the prompt's last ids are output already; bounds count what is still to come.
        n: 1: the gateway asks for each choice on its own.
        best_of: 1.
        temperature: 0 to 2; None is 1.
        top_p: Above 0, up to 1.
        top_k: -1 and 0 are all.
        min_p: 0 to 1.
        seed: A signed 64-bit number.
        presence_penalty: -2 to 2.
        frequency_penalty: -2 to 2.
        repetition_penalty: Above 0, up to 10.
        logit_bias: By token id, -100 to 100.
        stop: Stop strings.
        stop_token_ids: Further stop tokens.
        include_stop_str_in_output: Keep the stop string.
        ignore_eos: Go on after the end of the text.
        logprobs: Likeliest tokens to tell; true where `top_logprobs` says how many.
        top_logprobs: Likeliest tokens to tell, as chats ask for them.
        prompt_logprobs: Likeliest tokens to tell at each place of the prompt.
        echo: Let the text begin with the prompt.
        stream: Send each token as it comes.
        stream_options: Options of the stream.
        return_token_ids: Tell token ids.
        return_tokens_as_token_ids: Name tokens `token_id:ID` where log-probabilities are told.
        kv_transfer_params: What happens to the KV.
    """

    model: _Name
    prompt: Annotated[str | tuple[int, ...], PlainValidator(_prompt)]
    add_special_tokens: bool | None = None
    max_tokens: _Bound | None = None
    max_completion_tokens: _Bound | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKEN)] | None = None
    resumed_tokens: Annotated[int, Field(ge=0, le=_MOST_TOKEN)] | None = None
    n: _One | None = None
    best_of: _One | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MOST_TOKEN)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias)] = {}
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], PlainValidator(_stop_token_ids)] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logprobs: Annotated[bool | int | None, PlainValidator(_logprobs)] = None
    top_logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamFields | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: TransferFields | None = None
