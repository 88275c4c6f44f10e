"""The calls of a decision log made again: they see the same facts and come to the same decisions, or not.

The log is input like any other: a call that this ledger cannot take is refused before it is made.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import orjson

from phasesplit.errors import SpecError
from phasesplit.gateway.decisions import KIND, VERSION, Decisions
from phasesplit.scheduling.ledger import POOLS, SERVING
from phasesplit.scheduling.rules import Rules

_MOST_MACHINES = 4_096
_MOST_NUMBER = 1 << 40
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Difference:
    """A call that came out otherwise than logged.

    Attributes:
        line: Its line in the log, from 1.
        call: The call.
        logged: What differs, as logged, as JSON.
        now: The same, as it comes out now.
    """

    line: int
    call: str
    logged: str
    now: str


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay found.

    Attributes:
        decisions: Calls in the log.
        equal: Calls before the first that came out otherwise; all of them where none did.
        placements: Calls that placed a request, or found it too long, among the equal ones.
        moves: Changes of a machine's pool that followed from load, among the equal ones.
        difference: The first call that came out otherwise; those behind it are not made.
        cut: The last line was cut off, as by a crash, and is left out.
    """

    decisions: int
    equal: int
    placements: int
    moves: int
    difference: Difference | None
    cut: bool


def replay(lines: Iterable[bytes], where: str = "decision log") -> Replay:
    """Return what comes out when the calls of a log are made again on a new ledger.

    Args:
        lines: The log's lines, each with its line feed.
        where: How the person knows the log, for messages.

    Raises:
        SpecError: It is no decision log, or a line of it is not a call that can be made.
    """
    numbered = enumerate(lines, start=1)
    made: list[bytes] = []
    decisions = _begun(next(numbered, (1, b""))[1], where, made.append)
    equal = placements = 0
    difference = None
    for number, line in numbered:
        if not line.endswith(b"\n"):
            return Replay(equal, equal, placements, sum(decisions.moves().values()), None, cut=True)
        made.clear()
        logged = _made_again(decisions, line, f"{where}, line {number}")
        if made != [line]:
            difference = _difference(number, logged, made)
            if difference is not None:
                break
        equal += 1
        placements += logged["call"] == "place"
    moves = sum(decisions.moves().values())
    rest, cut = _counted(numbered)
    return Replay(equal + (difference is not None) + rest, equal, placements, moves, difference, cut)


def _counted(numbered: Iterator[tuple[int, bytes]]) -> tuple[int, bool]:
    """Return how many whole lines are left, and whether the last one is cut off."""
    count = 0
    cut = False
    for _, line in numbered:
        cut = not line.endswith(b"\n")
        count += not cut
    return count, cut


def _begun(line: bytes, where: str, sink: Callable[[bytes], object]) -> Decisions:
    """Return a new ledger by a log's first line."""
    if not line:
        raise SpecError(f"{where}: not a decision log, it is empty")
    first = _mapping(line)
    if first.get("kind") != KIND:
        raise SpecError(f"{where}: not a decision log")
    if first.get("version") != VERSION:
        raise SpecError.bad(f"{where}, line 1, version", first.get("version"), f"{VERSION}")
    machines = first.get("machines")
    if type(machines) is not int or not 1 <= machines <= _MOST_MACHINES:
        raise SpecError.bad(f"{where}, line 1, machines", machines, f"a whole number from 1 to {_MOST_MACHINES:,}")
    try:
        return Decisions(_rules(first.get("rules")), machines, sink=sink)
    except SpecError as problem:
        raise SpecError(f"{where}, line 1: {problem}") from None
    except (AttributeError, KeyError, TypeError):
        raise SpecError(f"{where}, line 1: these are not the rules of this version of phasesplit") from None


def _rules(written: Any) -> Rules:
    by_default = Rules()
    values: dict[str, Any] = {}
    for name, value in written.items():
        kind = type(getattr(by_default, name))
        values[name] = kind[value.upper()] if issubclass(kind, IntEnum) else value
    return Rules(**values)


def _mapping(line: bytes) -> dict[str, Any]:
    """Return a line's content, nothing where it is not a mapping in JSON."""
    try:
        content = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return content if isinstance(content, dict) else {}


def _made_again(decisions: Decisions, line: bytes, where: str) -> dict[str, Any]:
    """Make the call of a line, and return the line's content."""
    logged = _mapping(line)
    call, arguments = logged.get("call"), logged.get("args")
    kinds = _ARGUMENTS.get(call) if isinstance(call, str) else None
    if kinds is None:
        raise SpecError(f"{where}: not a call of a decision log")
    if not isinstance(arguments, list) or len(arguments) != len(kinds):
        raise SpecError.bad(f"{where}, args of {call}", arguments, f"{len(kinds)} values")
    for argument, (allowed, fits) in zip(arguments, kinds, strict=True):
        if not fits(decisions, argument):
            raise SpecError.bad(f"{where}, {call}", argument, allowed)
    if call == "place" and not decisions.serves():
        raise SpecError(f"{where}: a request is placed, but no machine serves")
    getattr(decisions, str(call))(*arguments)
    return logged


def _difference(number: int, logged: dict[str, Any], made: Sequence[bytes]) -> Difference | None:
    """Return how the record of a call differs from the logged one; None where it does not, but for its spelling."""
    now = _mapping(made[0]) if made else {"call": logged["call"], "args": logged["args"], "moved": []}
    fields = [name for name in (*logged, *now) if logged.get(name) != now.get(name)]
    if not fields:
        return None
    return Difference(number, logged["call"], _only(fields, logged), _only(fields, now))


def _only(fields: Iterable[str], content: dict[str, Any]) -> str:
    return orjson.dumps({name: content.get(name) for name in fields}).decode()


def _machine(decisions: Decisions, value: Any) -> bool:
    return type(value) is int and 0 <= value < decisions.ledger.machines.size


def _serving(decisions: Decisions, value: Any) -> bool:
    return _machine(decisions, value) and decisions.ledger.machines[value]["state"] == SERVING


def _idle(decisions: Decisions, value: Any) -> bool:
    return _machine(decisions, value) and decisions.ledger.machines[value]["state"] != SERVING


def _slot(decisions: Decisions, value: Any) -> bool:
    requests = decisions.ledger.requests
    return type(value) is int and 0 <= value < requests.size and requests[value]["row"] >= 0


def _several(decisions: Decisions, value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(set(map(repr, value))) == len(value)
        and all(_serving(decisions, one) for one in value)
    )


_Fits = Callable[[Decisions, Any], bool]
_Kind = tuple[str, _Fits]
_NAME: _Kind = ("a name", lambda _, value: isinstance(value, str))
_TIME: _Kind = ("a time in seconds", lambda _, value: type(value) is float)
_TOKENS: _Kind = ("tokens", lambda _, value: type(value) is int and 1 <= value < _MOST_TOKENS)
_BLOCKS: _Kind = ("blocks", lambda _, value: type(value) is int and 1 <= value < _MOST_NUMBER)
_POOL: _Kind = ("a pool's number", lambda _, value: type(value) is int and 0 <= value < POOLS)
_REQUEST: tuple[_Kind, ...] = (("a slot that a request has", _slot), _TIME)
_ARGUMENTS: dict[str, tuple[_Kind, ...]] = {
    "enlist": (_NAME, ("a machine that does not serve", _idle), _POOL, _BLOCKS),
    "retire": (("a machine that serves", _serving),),
    "switch_off": (("a machine's number", _machine),),
    "place": (_NAME, _TIME, _TOKENS, _TOKENS, _TOKENS, ("machines that serve, each once", _several)),
    "begin_prompt": _REQUEST,
    "end_prompt_phase": _REQUEST,
    "end_transfer": _REQUEST,
    "end_request": _REQUEST,
    "look_home": (("a machine that serves", _serving), _TIME),
}
"""The calls, and what each argument of theirs has to be."""
