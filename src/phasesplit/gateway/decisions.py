"""The scheduling ledger of a live cluster, the record of every call that changes it, and the replay of such a record.

1. `Decisions` makes each call on the ledger, and writes it to the log.
2. `header` begins a log: the rules, and the names of what a placement saw.
3. `replay` makes the calls of a log again on a new ledger, and compares what comes out.

A record is one line of JSON: the call, its arguments, for a placement what the rules saw, what came out, and the
machines that changed their pool. The calls are deterministic and get all that they know by argument, so making them
again gives the same lines, byte for byte. The log is input like any other: a call that the ledger cannot take is
refused before it is made.

Inside a machine only the machine knows, so `placement.has_waiting` finds waiting prompts here, but no decode tasks that
wait for a place in the batch. That changes an answer only where a machine does decode work in addition to prompts, no
prompt waits there, and one more would exceed `spill_tokens`: the simulator may see a queue and skip the machine, the
gateway takes it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import orjson

from phasesplit.errors import SpecError
from phasesplit.scheduler import live_cluster, pools
from phasesplit.scheduler.accounts import free_slot, open_slot
from phasesplit.scheduler.ledger import (
    COUNTERS,
    DECODE,
    LENGTH,
    MACHINES,
    OFF,
    POOLS,
    PREFILL,
    SERVING,
    WAITING,
    Ledger,
    empty_ledger,
)
from phasesplit.scheduler.placement import PLACED
from phasesplit.scheduler.rules import Placement, Rules

KIND = "phasesplit decisions"
VERSION = 2
_OLD_VERSION = 1
"""Logs of this version say prompt and token for the phases; what they tell is the same."""

SEEN = ("pool", "pending_tokens", "pending_output_tokens", "committed_blocks", "prefill_requests", "decode_requests")
"""What a placement's record tells of each serving machine, after its number; behind it comes `waiting`, its prompts
that wait."""

Sink = Callable[[bytes], object]
"""Where lines go, each with its line feed."""

_FIELDS = MACHINES.names or ()
_SEEN = np.array([[_FIELDS.index(name)] for name in SEEN])
_MOVES = ("prefill_to_mixed", "decode_to_mixed", "returns", "repurposed")
_FIRST_MOVE = (COUNTERS.names or ()).index(_MOVES[0])
# Compiled to be written out in compiled callers; called from Python, its plain source saves compiling it.
_free_slot: Callable[[Ledger, int], None] = getattr(free_slot, "py_func", free_slot)


class Placed(NamedTuple):
    """Where a request was booked.

    Attributes:
        slot: Its slot in the ledger, which names it in all later calls.
        prefill_machine: Number of the machine of its prefill phase.
        decode_machine: Number of the machine of its decode phase; may be the same.
    """

    slot: int
    prefill_machine: int
    decode_machine: int


class Decisions:
    """A ledger with a row for each machine that may ever serve at once, all of them off at first.

    Machines are numbers here, and every call makes the transition that it is named for in `scheduling`.

    Attributes:
        ledger: The columns; to be read only.
        moved: Machines that the last call brought into another pool.
    """

    def __init__(self, rules: Rules, machines: int, *, sink: Sink | None = None) -> None:
        """Make one.

        Args:
            rules: The scheduler's settings.
            machines: Rows for machines, >= 1.
            sink: Where records go; None: nowhere.

        Raises:
            SpecError: The rules cannot place requests as they come: a custom rule, or the published simulator's.
        """
        for field, wrong in (
            ("published", rules.published),
            ("prefill_placement", rules.prefill_placement is Placement.CUSTOM),
            ("decode_placement", rules.decode_placement is Placement.CUSTOM),
        ):
            if wrong:
                raise SpecError.bad(f"rules, field {field}", getattr(rules, field), "a rule that a live cluster has")
        self._rows = np.zeros(machines, np.int32)
        self.ledger = empty_ledger(rules, self._rows, self._rows, np.zeros(machines, np.int64))
        self.ledger.machines["state"] = OFF
        self.moved: tuple[int, ...] = ()
        self._serving: Any = np.zeros(0, np.int64)
        self._words = self.ledger.machines.view(np.int64).reshape(machines, -1)
        self._pools = [PREFILL] * machines
        self._moves = self.ledger.counters.view(np.int64)[_FIRST_MOVE : _FIRST_MOVE + len(_MOVES)]
        self._moves_seen = self._moves.tobytes()
        self._sink = sink
        if sink is not None:
            sink(header(rules, machines))

    def serves(self) -> bool:
        """Return whether the machines that are in pools can take a request."""
        prefill, decode, mixed, unsplit = self.ledger.members[:, 0].tolist()
        if self.ledger.settings[0]["elastic"]:
            return bool(prefill or decode or mixed or unsplit)
        return bool(unsplit or mixed or (prefill and decode))

    def moves(self) -> dict[str, int]:
        """Return how many moves between pools load has caused, by kind."""
        return dict(zip(_MOVES, self._moves.tolist(), strict=True))

    def enlist(self, name: str, machine: int, home: int, capacity_blocks: int) -> None:
        """Let a machine that does not serve enter the pool of a home; its name is for those who read the record."""
        self.ledger.machines[machine]["capacity_blocks"] = capacity_blocks
        pools.enlist(self.ledger, machine, home)
        self._serving_changed()
        self._record("enlist", (name, machine, home, capacity_blocks))

    def retire(self, machine: int) -> None:
        """Take a serving machine out of its pool; it keeps the requests it has."""
        pools.retire(self.ledger, machine)
        self._serving_changed()
        self._record("retire", (machine,))

    def switch_off(self, machine: int) -> None:
        """Take a machine out of service whose requests have all ended."""
        live_cluster.switch_off(self.ledger, machine)
        self._serving_changed()
        self._record("switch_off", (machine,))

    def place(
        self,
        key: str,
        arrival_s: float,
        prompt_tokens: int,
        most_output_tokens: int,
        expected_tokens: int,
        avoided: Sequence[int] = (),
    ) -> Placed | None:
        """Choose the two machines of a new request and book it there; None: it is too long for the smallest machine.

        Args:
            key: Its name, for those who read the record.
            arrival_s: The instant.
            prompt_tokens: Tokens of its prompt, >= 1.
            most_output_tokens: Tokens at which its output ends at the latest, >= 1.
            expected_tokens: Output tokens that rules count on, >= 1.
            avoided: Serving machines that get it only where the others cannot serve; afterwards they come last among
                equals.
        """
        self.ledger = live_cluster.with_place_for_one(self.ledger)
        ledger = self.ledger
        saw = self._seen() if self._sink is not None else None
        slot = open_slot(ledger, arrival_s, prompt_tokens, most_output_tokens, expected_tokens)
        out = []
        for machine in avoided:
            pools.leave(ledger, machine)
            if self.serves():
                out.append(machine)
            else:
                pools.enter(ledger, machine, self._pools[machine])
        verdict = live_cluster.assign_pair(ledger, slot, arrival_s)
        for machine in out:
            pools.enter(ledger, machine, self._pools[machine])
        placed = None
        if verdict == PLACED:
            request = ledger.requests[slot]
            placed = Placed(slot, int(request["prefill_machine"]), int(request["decode_machine"]))
        else:
            _free_slot(ledger, slot)
        arguments = (key, arrival_s, prompt_tokens, most_output_tokens, expected_tokens, tuple(avoided))
        self._record("place", arguments, placed, saw)
        return placed

    def begin_prefill(self, slot: int, now_s: float) -> None:
        """Book that a request's prefill phase has begun to run."""
        live_cluster.begin_prefill(self.ledger, slot, now_s)
        self._record("begin_prefill", (slot, now_s))

    def end_prefill_phase(self, slot: int, now_s: float) -> None:
        """Book a request's first token."""
        live_cluster.end_prefill_phase(self.ledger, slot, now_s)
        self._record("end_prefill_phase", (slot, now_s))

    def end_transfer(self, slot: int, now_s: float) -> None:
        """Book that a request's KV is on its decode machine, and gone from another machine, its prefill machine."""
        live_cluster.end_transfer(self.ledger, slot, now_s)
        self._record("end_transfer", (slot, now_s))

    def end_request(self, slot: int, now_s: float) -> None:
        """Book a request's end, whatever state it is in."""
        live_cluster.end_request_anywhere(self.ledger, slot, now_s)
        self._record("end_request", (slot, now_s))

    def look_home(self, machine: int, now_s: float) -> bool:
        """Let a machine of the mixed pool go home, or change its home, if the time has come; return whether it moved.

        Where it did not, nothing has changed, and nothing is recorded.
        """
        if not live_cluster.look_home(self.ledger, machine, now_s):
            return False
        self._record("look_home", (machine, now_s))
        return True

    def _serving_changed(self) -> None:
        """Take notice of a machine that has come or gone; the longest request follows the smallest that serves."""
        machines = self.ledger.machines
        self._serving = np.flatnonzero(machines["state"] == SERVING)
        if self._serving.size:
            self.ledger.settings["most_blocks"] = machines["capacity_blocks"][self._serving].min()
        self._moves_seen = b""

    def _seen(self) -> list[list[int]]:
        """Return what the rules see, as columns over serving machines."""
        seen: list[list[int]] = self._words[self._serving, _SEEN].tolist()
        waiting = self.ledger.lists[WAITING, self._serving, LENGTH].tolist()
        return [self._serving.tolist(), *seen, waiting]

    def _record(self, call: str, arguments: tuple[Any, ...], gives: Placed | None = None, saw: Any = None) -> None:
        """Take notice of the machines that moved, and write a line."""
        moves = self._moves.tobytes()
        self.moved = ()
        if moves != self._moves_seen:
            self._moves_seen = moves
            now = self.ledger.machines["pool"].tolist()
            self.moved = tuple(row for row, pool in enumerate(now) if pool != self._pools[row])
            self._pools = now
        if self._sink is None:
            return
        line: dict[str, Any] = {"call": call, "args": arguments}
        if saw is not None:
            line["saw"] = saw
            line["gives"] = gives and tuple(gives)  # a plain tuple: orjson takes no other
        if self.moved:
            machines = self.ledger.machines
            line["moved"] = [(row, self._pools[row], int(machines[row]["home"])) for row in self.moved]
        self._sink(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))


def header(rules: Rules, machines: int) -> bytes:
    """Return a log's first line."""
    settings = {field.name: getattr(rules, field.name) for field in fields(rules)}
    line = {
        "kind": KIND,
        "version": VERSION,
        "machines": machines,
        "rules": {
            name: value.name.lower() if isinstance(value, IntEnum) else value for name, value in settings.items()
        },
        "saw": ("machine", *SEEN, "waiting"),
        "pools": pools.POOL_NAMES,
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def warm(rules: Rules) -> None:
    """Make every call once on a ledger that is thrown away, so that compiled code is loaded before requests come."""
    decisions = Decisions(rules, 2)
    decisions.enlist("", 0, PREFILL, 1 << 30)
    decisions.enlist("", 1, DECODE, 1 << 30)
    for machine in (0, 1):
        placed = decisions.place("", 0.0, 1, 2, 2, (machine,))
        if placed is not None:
            decisions.begin_prefill(placed.slot, 0.0)
            decisions.end_prefill_phase(placed.slot, 0.0)
            decisions.end_request(placed.slot, 0.0)
    placed = decisions.place("", 0.0, 1, 2, 2)
    if placed is not None:
        decisions.end_prefill_phase(placed.slot, 0.0)
        if placed.prefill_machine != placed.decode_machine:
            decisions.end_transfer(placed.slot, 0.0)
        decisions.end_request(placed.slot, 0.0)
    decisions.look_home(0, 0.0)
    decisions.retire(0)
    decisions.switch_off(1)


_OLD_RULES = {"prompt_placement": "prefill_placement", "token_placement": "decode_placement"}
_OLD_CALLS = {"begin_prompt": "begin_prefill", "end_prompt_phase": "end_prefill_phase"}
"""Names in logs of version 1, and what they are now."""

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
class DecisionReplay:
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


def replay(lines: Iterable[bytes], where: str = "decision log") -> DecisionReplay:
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
            return DecisionReplay(equal, equal, placements, sum(decisions.moves().values()), None, cut=True)
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
    return DecisionReplay(equal + (difference is not None) + rest, equal, placements, moves, difference, cut)


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
    if first.get("version") not in (_OLD_VERSION, VERSION):
        raise SpecError.bad(f"{where}, line 1, version", first.get("version"), f"{_OLD_VERSION} or {VERSION}")
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
        name = _OLD_RULES.get(name, name)
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
    """Make the call of a line, and return the line's content, with the present name of the call."""
    logged = _mapping(line)
    call, arguments = logged.get("call"), logged.get("args")
    if isinstance(call, str) and call in _OLD_CALLS:
        call = logged["call"] = _OLD_CALLS[call]
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
    "begin_prefill": _REQUEST,
    "end_prefill_phase": _REQUEST,
    "end_transfer": _REQUEST,
    "end_request": _REQUEST,
    "look_home": (("a machine that serves", _serving), _TIME),
}
"""The calls, and what each argument of theirs has to be."""
