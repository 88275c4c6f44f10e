"""JSON objects that somebody sent, and their fields that must be there and of one type."""

from collections.abc import Mapping
from typing import Any

import orjson

from phasesplit.errors import RequestError
from phasesplit.protocol.openai_errors import shortened

_ALLOWED = {str: "a text", int: "a whole number", bool: "true or false"}


def json_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body is.

    Raises:
        RequestError: It is none.
    """
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    return found


def typed_field(found: Mapping[str, Any], name: str, kind: type[Any], place: str = "") -> Any:
    """Return a field of a JSON object.

    Args:
        found: The object.
        name: The field's name.
        kind: `str`, `int` or `bool`; true is no whole number.
        place: What stands before the name in messages, such as `facts.`.

    Raises:
        RequestError: It is not there, or of another type.
    """
    param, value = f"{place}{name}", found.get(name)
    if type(value) is kind:
        return value
    if value is None:
        raise RequestError(f"{param} is required, {_ALLOWED[kind]}", param=param, code="missing_required_parameter")
    shown = orjson.dumps(value, default=repr).decode("utf-8", "replace")
    raise RequestError(
        f"{param}: got {shortened(shown)}, allowed is {_ALLOWED[kind]}", param=param, code="invalid_type"
    )
