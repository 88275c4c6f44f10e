"""The fields of requests whose type is more than one: what is allowed, checked as a whole."""

from typing import Annotated, Any

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

MOST_STOPS = 4
"""Source: OpenAI API reference, `stop`."""
MOST_STOP_TOKENS = 128
"""Ours."""
MOST_STOP_CHARACTERS = 1024
"""Ours: text held back for a stop string is bounded by this."""
MOST_BIASES = 1024
"""Ours."""
MOST_TOKEN = (1 << 31) - 1

Prompt = str | list[int]
"""One prompt: text, or token ids."""


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value <= MOST_TOKEN


def _tokens(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= MOST_TOKEN


def _wrong(allowed: str) -> PydanticCustomError:
    return PydanticCustomError("wrong_value", "Input should be {allowed}", {"allowed": allowed})


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts of a completion request as one tuple, whichever of the four forms it has."""
    if isinstance(value, str) or _tokens(value):
        return (value,)
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(map(_tokens, value)):
            return tuple(value)
    raise _wrong("a string, a list of strings, a list of token ids, or a list of such lists, none of them empty")


def _stops(value: Any) -> tuple[str | int, ...]:
    """Return stop strings and stop token ids."""
    found = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or len(found) > MOST_STOPS:
        raise _wrong(f"a string, or a list of up to {MOST_STOPS} strings or token ids")
    for item in found:
        if not (_is_token(item) or (isinstance(item, str) and 0 < len(item) <= MOST_STOP_CHARACTERS)):
            raise _wrong(f"made of strings of 1 to {MOST_STOP_CHARACTERS} characters, or token ids")
    return tuple(found)


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    found = [] if value is None else value
    if not isinstance(found, list) or len(found) > MOST_STOP_TOKENS or not all(map(_is_token, found)):
        raise _wrong(f"a list of up to {MOST_STOP_TOKENS} token ids")
    return tuple(found)


def _content(value: Any) -> str | list[dict[str, Any]] | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in value):
        return value
    raise _wrong("a string, or a list of parts that have a type")


def _biases(value: Any) -> dict[str, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        raise _wrong(f"an object of up to {MOST_BIASES} token ids")
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= MOST_TOKEN):
            raise _wrong("an object whose names are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _wrong("an object whose values are numbers from -100 to 100")
    return value


Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]
Stops = Annotated[tuple[str | int, ...], PlainValidator(_stops)]
StopTokens = Annotated[tuple[int, ...], PlainValidator(_stop_token_ids)]
Content = Annotated[str | list[dict[str, Any]] | None, PlainValidator(_content)]
Biases = Annotated[dict[str, float] | None, PlainValidator(_biases)]
