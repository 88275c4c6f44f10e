"""Autoscaling policies as a person writes them: `threshold:high=4000,low=500`, `schedule:0h=4+2,8h=10+6,20h=4+2`."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from phasesplit.errors import SpecError
from phasesplit.scheduler.autoscaling import Joint, Policy, Schedule, Static, Threshold

_HOUR_S = 3_600.0


def _number(text: str) -> float:
    return float(text)


def _whole(text: str) -> int:
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+"))


Reader = tuple[str, Callable[[str], Any], str]
_NUMBER, _WHOLE = "a number", "a whole number"
_COUNTS = "machines of each role, such as 4+2"

_COMMON: dict[str, Reader] = {
    "initial": ("initial", _counts, _COUNTS),
    "least": ("least", _whole, _WHOLE),
    "every": ("interval_s", _number, _NUMBER),
    "cooldown": ("cooldown_s", _number, _NUMBER),
    "startup": ("startup_s", _number, _NUMBER),
    "load": ("load_bytes_per_s", _number, _NUMBER),
    "delay": ("signal_delay_s", _number, _NUMBER),
    "stale": ("stale_after_s", _number, _NUMBER),
}
_OWN: dict[type[Policy], dict[str, Reader]] = {
    Static: {},
    Threshold: {
        "high": ("high_tokens", _number, _NUMBER),
        "low": ("low_tokens", _number, _NUMBER),
        "decode-high": ("decode_high_tokens", _number, _NUMBER),
        "decode-low": ("decode_low_tokens", _number, _NUMBER),
        "full": ("full_share", _number, _NUMBER),
        "step": ("step", _whole, _WHOLE),
    },
    Joint: {
        "target": ("target_tokens_per_s", _number, _NUMBER),
        "ratio": ("ratio", _number, _NUMBER),
        "slack": ("slack", _number, _NUMBER),
    },
    Schedule: {},
}
_PAPERS_WORDS = {"token-high": "decode-high", "token-low": "decode-low"}
"""Keys that are read as others: the paper's words for the phases."""
_POLICIES = {policy.name: policy for policy in _OWN}
_EXAMPLES = {
    "static": "static:initial=4+2",
    "threshold": "threshold:high=4000,low=500",
    "joint": "joint:target=1000,ratio=2",
    "schedule": "schedule:0h=4+2,8h=10+6,20h=4+2",
}


def parse_policy(text: str, where: str = "autoscale") -> Policy:
    """Return the policy that a text names; times are in seconds, but in a schedule hours of the day.

    Args:
        text: A name, then perhaps `:` and settings `name=value` with commas between them.
        where: How the person knows the place the text came from, for the message.

    Raises:
        SpecError: The policy or a setting is unknown, missing, doubled or not what the policy allows.
    """
    name, _, rest = text.strip().partition(":")
    if name not in _POLICIES:
        raise SpecError.unknown(where, name, _POLICIES)
    readers = _COMMON | _OWN[_POLICIES[name]]
    values: dict[str, Any] = {}
    entries: list[tuple[float, tuple[int, ...]]] = []
    for part in filter(None, rest.split(",")):
        key, _, written = (piece.strip() for piece in part.partition("="))
        key = _PAPERS_WORDS.get(key, key)
        hour = _hour(key) if name == "schedule" else None
        if hour is not None:
            entries.append((hour * _HOUR_S, _read(f"{where}, {key}", written, _counts, _COUNTS)))
            continue
        if key not in readers:
            known = ", ".join([*readers, *(["hours of the day such as 8h"] if name == "schedule" else [])])
            raise SpecError.bad(where, part, f"settings of {name} as in {_EXAMPLES[name]}: {known}")
        field, read, allowed = readers[key]
        if field in values:
            raise SpecError.bad(f"{where}, {key}", written, "each setting once")
        values[field] = _read(f"{where}, {key}", written, read, allowed)
    if name == "schedule":
        values["entries"] = tuple(entries)
    try:
        return _POLICIES[name](**values)
    except TypeError:
        raise SpecError.bad(where, text, f"all settings, as in {_EXAMPLES[name]}") from None


def policy_text(policy: Policy) -> str:
    """Return a policy of a kind that ships as `parse_policy` reads it; settings that are as usual are left out.

    Numbers are given to twelve digits.

    Args:
        policy: The policy.
    """
    usual = {field.name: field.default for field in fields(policy)}
    parts = []
    if isinstance(policy, Schedule):
        parts += [f"{at_s / _HOUR_S:g}h={'+'.join(map(str, counts))}" for at_s, counts in policy.entries]
    for key, (field, read, _) in (_COMMON | _OWN[type(policy)]).items():
        value = getattr(policy, field)
        if value != usual[field]:
            parts.append(f"{key}={'+'.join(map(str, value)) if read is _counts else format(value, '.12g')}")
    return f"{policy.name}:{','.join(parts)}" if parts else policy.name


def _hour(key: str) -> float | None:
    """Return the hour that a key of a schedule names, None if it is none."""
    try:
        return float(key.removesuffix("h")) if key.endswith("h") else None
    except ValueError:
        return None


def _read(where: str, written: str, read: Callable[[str], Any], allowed: str) -> Any:
    try:
        return read(written)
    except ValueError:
        raise SpecError.bad(where, written, allowed) from None
