"""The scheduler's rules as people write them: a YAML mapping, or settings of the command line."""

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from enum import IntEnum
from types import NoneType
from typing import Any, get_args, get_type_hints

from phasesplit.errors import SpecError
from phasesplit.io.text import Where, fields_of
from phasesplit.scheduler.rules import NAMES, Placement, Rules

FREE_UNDER_PUBLISHED = (
    "published", "batch_prompt_tokens", "batch_requests", "spill_tokens", "preemption_limit", "seed",
)  # fmt: skip
"""Fields that still mean something under the published rules; those fix all others."""

ANYWHERE = fields_of("rules")
"""The place of settings that come from nowhere in particular."""

_TYPES = get_type_hints(Rules)
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PAPERS_WORDS = {"prompt_placement": "prefill_placement", "token_placement": "decode_placement"}
"""Fields that are read as others: the paper's words for the phases."""
_NONE = ("auto", "none", "null")


def rules_setting(text: str) -> tuple[str, str]:
    """Return field and value of a setting as the command line takes it.

    Args:
        text: FIELD=VALUE.

    Raises:
        SpecError: There is no equals sign.
    """
    field, equals, value = text.partition("=")
    if not equals:
        raise SpecError.bad("--set", text, "FIELD=VALUE, such as transfer=serialized")
    return field, value


def rules_from(settings: Mapping[str, Any], where: Where = ANYWHERE, base: Rules | None = None) -> Rules:
    """Return rules with some fields set.

    Args:
        settings: Field of `Rules` to value, as a person writes both: hyphens or underscores, enums by name
            (`two-choices`), numbers as numbers or text. `published: true` starts from `Rules.as_published()`.
        where: From a field to how the person knows its place, for messages.
        base: The rules to change, by default `Rules()`.

    Raises:
        SpecError: A field or an enum's member is unknown, a value is not allowed, or the published rules fix the field.
    """
    values: dict[str, Any] = {}
    for written, value in settings.items():
        field = str(written).strip().lower().replace("-", "_")
        field = _PAPERS_WORDS.get(field, field)
        if field not in _TYPES:
            raise SpecError.unknown(where(str(written)), str(written), _TYPES)
        values[field] = _value(where(field), _TYPES[field], value)
    before = base or Rules()
    if values.get("published", before.published) != before.published:
        before = Rules.as_published() if values["published"] else Rules()
    try:
        rules = replace(before, **values)
    except SpecError as problem:
        said = re.sub(r"rules, field (\w+)", lambda found: where(found[1]), str(problem), count=1)
        raise SpecError(said) from None
    if rules.published:
        _check_published(rules, where)
    return rules


def rules_settings(rules: Rules) -> dict[str, Any]:
    """Return every field of the rules by name, enums by the names that people write; `rules_from` reads it back."""
    return {field.name: _written(getattr(rules, field.name)) for field in fields(rules)}


def _written(value: Any) -> Any:
    if isinstance(value, IntEnum):
        return next(name for name, member in NAMES[type(value)].items() if member is value)
    return value


def _check_published(rules: Rules, where: Where) -> None:
    fixed = Rules.as_published()
    for name, asked in rules_settings(rules).items():
        if name not in FREE_UNDER_PUBLISHED and getattr(rules, name) != getattr(fixed, name):
            only = _written(getattr(fixed, name))
            raise SpecError.bad(where(name), asked, f"only {only} under the published rules, which fix it")


def _value(where: str, kind: Any, value: Any) -> Any:
    """Return a value in a field's type."""
    optional = NoneType in get_args(kind)
    if optional:
        if value is None or str(value).strip().lower() in _NONE:
            return None
        kind = next(part for part in get_args(kind) if part is not NoneType)
    if kind is bool:
        word = value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())
        if word is None:
            raise SpecError.bad(where, value, "true or false")
        return word
    if issubclass(kind, IntEnum):
        return _member(where, kind, value)
    allowed = f"a {'whole number' if kind is int else 'number'}{' or auto' if optional else ''}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SpecError.bad(where, value, allowed)
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise SpecError.bad(where, value, allowed) from None
    if isinstance(value, float) and number != value:
        raise SpecError.bad(where, value, allowed)
    return number


def _member(where: str, kind: type[IntEnum], value: Any) -> IntEnum:
    # A custom rule is a Python function, which text cannot give.
    known = {name: member for name, member in NAMES[kind].items() if member is not Placement.CUSTOM}
    name = str(value).strip().lower().replace("_", "-")
    if name not in known:
        raise SpecError.bad(where, value, f"one of {', '.join(known)}")
    return known[name]
