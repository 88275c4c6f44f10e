"""The scheduling ledger of a live cluster, and a record of every call that changes it.

A record is one line of JSON: the call, its arguments, for a placement what the rules saw, what came out, and the
machines that changed their pool. The calls are deterministic and get all that they know by argument, so making them
again (see `replay`) gives the same lines, byte for byte.

Inside a machine only the machine knows, so `placement.has_waiting` finds waiting prompts here, but no token tasks that
wait for a place in the batch. That changes an answer only where a machine does token work beside prompts, no prompt
waits there, and one more would exceed `spill_tokens`: the simulator may see a queue and pass on, here it takes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import orjson

from phasesplit.errors import SpecError
from phasesplit.scheduling import live_cluster, pools
from phasesplit.scheduling.accounts import free_slot, open_slot
from phasesplit.scheduling.ledger import (
    COUNTERS,
    LENGTH,
    MACHINES,
    OFF,
    PROMPT,
    SERVING,
    TOKEN,
    WAITING,
    Ledger,
    empty_ledger,
)
from phasesplit.scheduling.placement import PLACED
from phasesplit.scheduling.rules import Placement, Rules

KIND = "phasesplit decisions"
VERSION = 1

SEEN = ("pool", "pending_tokens", "pending_output_tokens", "committed_blocks", "prompt_requests", "token_requests")
"""What a placement's record tells of each serving machine, after its number; behind it comes `waiting`, its prompts
that wait."""

Sink = Callable[[bytes], object]
"""Where lines go, each with its line feed."""

_FIELDS = MACHINES.names or ()
_SEEN = np.array([[_FIELDS.index(name)] for name in SEEN])
_MOVES = ("prompt_to_mixed", "token_to_mixed", "returns", "repurposed")
_FIRST_MOVE = (COUNTERS.names or ()).index(_MOVES[0])
# Compiled to be written out in compiled callers; called from Python, its plain source saves compiling it.
_free_slot: Callable[[Ledger, int], None] = getattr(free_slot, "py_func", free_slot)


class Placed(NamedTuple):
    """Where a request was booked.

    Attributes:
        slot: Its slot in the ledger, which names it in all later calls.
        prompt_machine: Number of the machine of its prompt phase.
        token_machine: Number of the machine of its token phase; may be the same.
    """

    slot: int
    prompt_machine: int
    token_machine: int


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
            ("prompt_placement", rules.prompt_placement is Placement.CUSTOM),
            ("token_placement", rules.token_placement is Placement.CUSTOM),
        ):
            if wrong:
                raise SpecError.bad(f"rules, field {field}", getattr(rules, field), "a rule that a live cluster has")
        self._rows = np.zeros(machines, np.int32)
        self.ledger = empty_ledger(rules, self._rows, self._rows, np.zeros(machines, np.int64))
        self.ledger.machines["state"] = OFF
        self.moved: tuple[int, ...] = ()
        self._serving: Any = np.zeros(0, np.int64)
        self._words = self.ledger.machines.view(np.int64).reshape(machines, -1)
        self._pools = [PROMPT] * machines
        self._moves = self.ledger.counters.view(np.int64)[_FIRST_MOVE : _FIRST_MOVE + len(_MOVES)]
        self._moves_seen = self._moves.tobytes()
        self._sink = sink
        if sink is not None:
            sink(header(rules, machines))

    def serves(self) -> bool:
        """Return whether the machines that are in pools can take a request."""
        prompt, token, mixed, unsplit = self.ledger.members[:, 0].tolist()
        if self.ledger.settings[0]["elastic"]:
            return bool(prompt or token or mixed or unsplit)
        return bool(unsplit or mixed or (prompt and token))

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
            placed = Placed(slot, int(request["prompt_machine"]), int(request["token_machine"]))
        else:
            _free_slot(ledger, slot)
        arguments = (key, arrival_s, prompt_tokens, most_output_tokens, expected_tokens, tuple(avoided))
        self._record("place", arguments, placed, saw)
        return placed

    def begin_prompt(self, slot: int, now_s: float) -> None:
        """Book that a request's prompt phase has begun to run."""
        live_cluster.begin_prompt(self.ledger, slot, now_s)
        self._record("begin_prompt", (slot, now_s))

    def end_prompt_phase(self, slot: int, now_s: float) -> None:
        """Book a request's first token."""
        live_cluster.end_prompt_phase(self.ledger, slot, now_s)
        self._record("end_prompt_phase", (slot, now_s))

    def end_transfer(self, slot: int, now_s: float) -> None:
        """Book that a request's KV is on its token machine, and gone from its prompt machine, which is another one."""
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
    decisions.enlist("", 0, PROMPT, 1 << 30)
    decisions.enlist("", 1, TOKEN, 1 << 30)
    for machine in (0, 1):
        placed = decisions.place("", 0.0, 1, 2, 2, (machine,))
        if placed is not None:
            decisions.begin_prompt(placed.slot, 0.0)
            decisions.end_prompt_phase(placed.slot, 0.0)
            decisions.end_request(placed.slot, 0.0)
    placed = decisions.place("", 0.0, 1, 2, 2)
    if placed is not None:
        decisions.end_prompt_phase(placed.slot, 0.0)
        if placed.prompt_machine != placed.token_machine:
            decisions.end_transfer(placed.slot, 0.0)
        decisions.end_request(placed.slot, 0.0)
    decisions.look_home(0, 0.0)
    decisions.retire(0)
    decisions.switch_off(1)
