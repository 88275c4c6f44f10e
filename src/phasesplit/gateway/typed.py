"""Fields of JSON objects that must be there and of one type."""

from collections.abc import Mapping
from typing import Any

import orjson

from phasesplit.errors import RequestError

_ALLOWED = {str: "a text", int: "a whole number", bool: "true or false"}
_LONGEST = 80


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
    told = orjson.dumps(value, default=repr).decode("utf-8", "replace")
    told = told if len(told) <= _LONGEST else f"{told[: _LONGEST - 3]}..."
    raise RequestError(f"{param}: got {told}, allowed is {_ALLOWED[kind]}", param=param, code="invalid_type")
