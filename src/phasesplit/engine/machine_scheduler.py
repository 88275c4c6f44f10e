"""The scheduler's ledger of this machine: thin calls of the rules that the simulator uses too."""

from typing import NamedTuple

import numpy as np

from phasesplit.engine.sequences import Sequence
from phasesplit.scheduler.accounts import open_slot, use_blocks
from phasesplit.scheduler.ledger import AWAITING_ROOM, CHOSEN, ENTRY_TASK, PREFILL, WAITING, Ledger
from phasesplit.scheduler.live_cluster import with_place_for_one
from phasesplit.scheduler.live_machine import (
    HERE,
    NO_ROOM_NOW,
    STUCK,
    await_kv,
    end_iteration,
    end_prefill_here,
    form_batch,
    hold_room,
    kv_arrived,
    machine_ledger,
    take_prefill,
)
from phasesplit.scheduler.queues import entry, length
from phasesplit.scheduler.rules import Rules
from phasesplit.scheduler.withdrawal import withdraw


class RunningEntry(NamedTuple):
    """What one sequence computes in an iteration.

    Attributes:
        sequence: The sequence.
        first: Position of its first row.
        rows: How many rows, >= 1.
        is_prefill: Whether it is in its prefill.
        gives_token: Whether a token follows from its last row.
    """

    sequence: Sequence
    first: int
    rows: int
    is_prefill: bool
    gives_token: bool


class MachineScheduler:
    """The ledger of one machine, and which sequence is in which slot.

    Args:
        rules: The scheduler's settings.
        capacity_blocks: KV blocks of the machine, >= 1.
    """

    def __init__(self, rules: Rules, capacity_blocks: int) -> None:
        self._sequences: dict[int, Sequence] = {}
        self._seen_evictions = self._lingering_blocks = 0
        self._use(machine_ledger(rules, capacity_blocks))

    def _use(self, ledger: Ledger) -> None:
        """Take a ledger with the columns that are read in every iteration at hand."""
        self.ledger = ledger
        self._computed, self._chunk = ledger.requests["computed"], ledger.requests["chunk"]
        self._held, self._phase = ledger.requests["blocks"], ledger.requests["phase"]
        self._tasks, self._chosen = ledger.running_entries[ENTRY_TASK, HERE], ledger.running_entries[CHOSEN, HERE]
        self._evicted = ledger.counters["evictions"]

    @property
    def machine(self) -> np.void:
        """The machine's record in the ledger."""
        record: np.void = self.ledger.machines[HERE]
        return record

    @property
    def waiting_prompts(self) -> int:
        """How many requests wait for their prefill."""
        return length(self.ledger.lists[WAITING, HERE])

    @property
    def evictions(self) -> int:
        """How often KV had to go for lack of memory."""
        return int(self._evicted[0])

    def open(self, sequence: Sequence, now_s: float) -> None:
        """Let a new request wait: for its prefill, or for room for the KV that comes to it."""
        grown = with_place_for_one(self.ledger)
        if grown is not self.ledger:
            self._use(grown)
        sequence.slot = open_slot(self.ledger, now_s, sequence.prompt_tokens, sequence.limit, sequence.limit)
        self._sequences[sequence.slot] = sequence
        if sequence.takes is not None:
            await_kv(self.ledger, sequence.slot)
        else:
            take_prefill(self.ledger, sequence.slot, sequence.sends is None)

    def withdraw(self, sequence: Sequence, now_s: float) -> None:
        """End a request in any state."""
        withdraw(self.ledger, sequence.slot, now_s)
        del self._sequences[sequence.slot]

    def hold_room(self, now_s: float) -> Sequence | None:
        """Hold room for the KV that has waited longest, and return its sequence; None where none may come now."""
        slot = hold_room(self.ledger, now_s)
        return None if slot in (NO_ROOM_NOW, STUCK) else self._sequences[slot]

    def stuck(self) -> Sequence | None:
        """Return the sequence whose KV has waited longest for room, where nothing runs or arrives that would make any.

        Only KV that waits to leave may be in its way then, for as long as another machine takes.
        """
        row = self.ledger.lists[AWAITING_ROOM, HERE]
        if length(row) == 0 or self.machine["running_entries"] > 0 or self.machine["arriving"] > 0:
            return None
        return self._sequences[entry(row, 0)]

    def kv_arrived(self, sequence: Sequence, now_s: float) -> None:
        """Let decode of a sequence run whose KV and first token are here."""
        kv_arrived(self.ledger, sequence.slot, now_s)

    def waiting(self) -> list[Sequence]:
        """Return the sequences that wait for their prefill, in order."""
        row = self.ledger.lists[WAITING, HERE]
        return [self._sequences[entry(row, index) // 2] for index in range(length(row))]

    def know(self, sequence: Sequence, tokens: int) -> None:
        """Write down how many first tokens of a waiting sequence need no computing, fewer than it has."""
        self._computed[sequence.slot] = tokens

    def form(self, now_s: float) -> list[RunningEntry]:
        """Form the next batch, and return what each sequence in it computes, if it computes anything."""
        running_entries = form_batch(self.ledger, now_s)
        formed = []
        for task in self._tasks[:running_entries].tolist():
            slot = task // 2
            sequence = self._sequences[slot]
            if task % 2 != PREFILL:
                formed.append(RunningEntry(sequence, sequence.length - 1, 1, False, True))
                continue
            first, rows = int(self._computed[slot]), int(self._chunk[slot])
            if rows > 0:
                formed.append(RunningEntry(sequence, first, rows, True, first + rows == sequence.length))
        return formed

    def evicted(self) -> list[Sequence]:
        """Return the sequences whose KV had to go in the batch just formed: they are in their prefill again."""
        if self.evictions == self._seen_evictions:
            return []
        self._seen_evictions = self.evictions
        return [
            sequence
            for slot, sequence in self._sequences.items()
            if sequence.holding.count > 0 and self._phase[slot] == PREFILL and self._held[slot] == 0
        ]

    def end_iteration(self, now_s: float) -> None:
        """Book the iteration just computed: prompts that ended go on to their decode, here or elsewhere."""
        ended = end_iteration(self.ledger, now_s)
        for task in self._chosen[:ended].tolist():
            if task % 2 == PREFILL:
                end_prefill_here(self.ledger, task // 2, now_s)

    def linger(self, blocks: int, now_s: float) -> None:
        """Set how many blocks count as used that no request of the ledger has: transfers of ended requests use them."""
        use_blocks(self.ledger.machines, HERE, blocks - self._lingering_blocks, now_s)
        self._lingering_blocks = blocks
