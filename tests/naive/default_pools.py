"""Placement and pools by the default rules: section 2 of docs/rules.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from naive.agenda import Agenda
from naive.default_machine import Machine
from naive.default_parts import Counters, Request, Role, Rules

M32 = 0xFFFFFFFF


def scramble(x: int) -> int:
    """The function h of the rules."""
    x ^= x >> 16
    x = x * 0x21F0AAAD & M32
    x ^= x >> 15
    x = x * 0x735A2D97 & M32
    return x ^ x >> 15


class Pools:
    """Who is where, and who takes the next request."""

    def __init__(self, machines: Sequence[Machine], rules: Rules, agenda: Agenda, counters: Counters) -> None:
        self.rules = rules
        self.agenda = agenda
        self.counters = counters
        self.draws = 0
        self.ranks = 0
        self.turns = {"prefill": 0, "decode": 0}
        self.members: dict[Role, list[Machine]] = {"prefill": [], "decode": [], "mixed": [], "unsplit": []}
        for machine in machines:
            self.enter(machine, machine.home)

    def draw(self) -> int:
        self.draws += 1
        return scramble((self.draws + self.rules.seed % 2**31 * 0x61C88647) % 2**32)

    def rank_last(self, machine: Machine) -> None:
        self.ranks += 1
        machine.rank = self.ranks

    def enter(self, machine: Machine, pool: Role) -> None:
        self.members[pool].append(machine)
        self.rank_last(machine)

    # Loads

    def prefill_load(self, machine: Machine) -> int:
        match self.rules.prefill_placement:
            case "jsq-requests":
                return machine.prefill_phases + machine.decode_phases
            case "jsq-kv":
                return machine.committed_blocks
        return machine.pending_tokens

    def decode_load(self, machine: Machine) -> int:
        match self.rules.decode_placement:
            case "jsq-requests":
                return machine.prefill_phases + machine.decode_phases
            case "jsq-tokens":
                return machine.pending_output_tokens
        return machine.committed_blocks

    def least(self, load: Callable[[Machine], int], machines: Sequence[Machine]) -> Machine:
        return min(machines, key=lambda machine: (load(machine), machine.rank))

    def pick(self, phase: Literal["prefill", "decode"], pool: Role) -> Machine | None:
        members = self.members[pool]
        if not members:
            return None
        rule = self.rules.prefill_placement if phase == "prefill" else self.rules.decode_placement
        load = self.prefill_load if phase == "prefill" else self.decode_load
        if rule == "round-robin":
            turn = self.turns[phase]
            self.turns[phase] += 1
            return members[turn % len(members)]
        if rule == "random":
            return members[self.draw() % len(members)]
        if rule == "two-choices":
            return self.least(load, [members[self.draw() % len(members)], members[self.draw() % len(members)]])
        return self.least(load, members)

    # Choosing

    def choose(self, request: Request) -> tuple[Machine, Machine]:
        if self.members["unsplit"]:
            machine = self.pick("prefill", "unsplit")
            assert machine is not None
            return machine, machine
        prefill_side = self.pick_for_prefill("prefill", request) or self.pick_for_prefill("mixed", request)
        decode_side = self.pick_for_tokens("decode", request) or self.pick_for_tokens("mixed", request)
        if not self.rules.elastic:
            return prefill_side or self.queue_for_prefill(), decode_side or self.queue_for_tokens()
        if prefill_side is None and self.members["decode"]:
            prefill_side = self.least(self.prefill_load, self.members["decode"])
            self.counters.decode_to_mixed += 1
            self.move_to_mixed(prefill_side)
        if decode_side is None and self.members["prefill"]:
            decode_side = self.least(self.decode_load, self.members["prefill"])
            self.counters.prefill_to_mixed += 1
            self.move_to_mixed(decode_side)
        if prefill_side is None or decode_side is None:
            self.counters.both_to_least_loaded += 1
            pools: list[Role] = ["prefill", "mixed", "decode"]
            best = [self.least(self.prefill_load, self.members[pool]) for pool in pools if self.members[pool]]
            prefill_side = decode_side = min(best, key=self.prefill_load)
        return prefill_side, decode_side

    def queue_for_prefill(self) -> Machine:
        self.counters.prompt_queued_static += 1
        best = [
            self.least(self.prefill_load, self.members[pool]) for pool in ("prefill", "mixed") if self.members[pool]
        ]
        return min(best, key=self.prefill_load)

    def queue_for_tokens(self) -> Machine:
        self.counters.tokens_queued_static += 1
        best = [self.least(self.decode_load, self.members[pool]) for pool in ("decode", "mixed") if self.members[pool]]
        return min(best, key=self.decode_load)

    def pick_for_prefill(self, pool: Role, request: Request) -> Machine | None:
        machine = self.pick("prefill", pool)
        if machine is None:
            return None
        queue = machine.waiting or machine.ready or machine.preempted
        too_long = machine.pending_tokens + request.arrival.prompt_tokens > self.rules.spill_tokens
        return None if queue and too_long else machine

    def pick_for_tokens(self, pool: Role, request: Request) -> Machine | None:
        machine = self.pick("decode", pool)
        if machine is None or machine.committed_blocks + request.expected_blocks > machine.capacity_blocks:
            return None
        return machine

    def assign(self, request: Request, prefill_side: Machine, decode_side: Machine) -> None:
        request.assigned = request.prefill_machine = prefill_side
        request.decode_machine = decode_side
        prefill_side.prefill_phases += 1
        prefill_side.pending_tokens += request.arrival.prompt_tokens
        decode_side.decode_phases += 1
        decode_side.pending_tokens += 1
        decode_side.pending_output_tokens += request.arrival.expected_tokens
        decode_side.committed_blocks += request.expected_blocks
        if prefill_side is not decode_side:
            prefill_side.committed_blocks += request.first_blocks
            self.rank_last(prefill_side)
        else:
            self.counters.one_machine += 1
        self.rank_last(decode_side)

    # The mixed pool

    def move_to_mixed(self, machine: Machine) -> None:
        self.members[machine.home].remove(machine)
        self.enter(machine, "mixed")
        machine.mixed_since_s = self.agenda.now_s

    def leave_mixed(self, machine: Machine) -> None:
        if machine not in self.members["mixed"] or machine.home == "mixed":
            return
        foreign = machine.prefill_phases if machine.home == "decode" else machine.decode_phases
        if foreign == 0:
            self.counters.returns += 1
        elif self.agenda.now_s - machine.mixed_since_s >= self.rules.repurpose_after_s and self.members[machine.home]:
            self.counters.repurposed += 1
            machine.home = "prefill" if machine.home == "decode" else "decode"
        else:
            return
        self.members["mixed"].remove(machine)
        self.enter(machine, machine.home)
