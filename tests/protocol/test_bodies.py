"""Fields of the gateway's own JSON: what a person reads who left one out or wrote another type."""

from typing import Any

import pytest

from phasesplit.errors import RequestError
from phasesplit.protocol.bodies import typed_field


@pytest.mark.parametrize(
    ("value", "kind", "message", "code"),
    [
        (None, str, "facts.x is required, a text", "missing_required_parameter"),
        (5, str, "facts.x: got 5, allowed is a text", "invalid_type"),
        ("yes", bool, 'facts.x: got "yes", allowed is true or false', "invalid_type"),
        (True, int, "facts.x: got true, allowed is a whole number", "invalid_type"),
        ({"a": None}, int, 'facts.x: got {"a":null}, allowed is a whole number', "invalid_type"),
        ("a" * 1000, int, f'facts.x: got "{"a" * 76}..., allowed is a whole number', "invalid_type"),
    ],
)
def test_a_wrong_field_is_refused_in_words(value: Any, kind: type[Any], message: str, code: str) -> None:
    """Who moves a machine with curl would read about Python's None and str, or a page of his own text."""
    with pytest.raises(RequestError) as caught:
        typed_field({"x": value}, "x", kind, "facts.")
    assert (str(caught.value), caught.value.param, caught.value.code) == (message, "facts.x", code)


@pytest.mark.parametrize(("value", "kind"), [("", str), (0, int), (False, bool)])
def test_a_right_field_is_returned(value: Any, kind: type[Any]) -> None:
    """A machine could not be let out of draining, for false would count as left out."""
    assert typed_field({"x": value}, "x", kind) == value
