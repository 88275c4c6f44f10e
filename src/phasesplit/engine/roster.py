"""The requests that are on this machine: how each comes, waits for KV or room, and goes with all its blocks."""

from collections import deque

from phasesplit.domain.kv import blocks_for
from phasesplit.engine.bookings import MachineScheduler
from phasesplit.engine.events import Event, Failed, KvLeft, KvReady
from phasesplit.engine.memory import Memory
from phasesplit.engine.sending import Sending
from phasesplit.engine.sequences import OnEvent, Sequence, Stages
from phasesplit.engine.taking import Taking
from phasesplit.errors import TransferError
from phasesplit.protocol.worker import Scored
from phasesplit.transfer.endpoint import KvEndpoint

_REMEMBERED = 1_000
_LONGEST_STUCK_S = 2.0


class RequestTable:
    """All requests of a machine, in step with its ledger, its memory and its transfers.

    Args:
        scheduler: The ledger.
        memory: The blocks.
        vocab: Tokens of the vocabulary.
        block_tokens: Tokens of a block.
        endpoint: What moves KV; None where nothing does.
        threshold_tokens: The shortest prompt that is sent layer by layer.

    Attributes:
        sequences: Those that have not ended, by key.
        sending: KV that leaves; None without an endpoint.
        events: What is to be told, and to whom.
        stages: Of the latest requests that ended.
    """

    def __init__(
        self,
        scheduler: MachineScheduler,
        memory: Memory,
        *,
        vocab: int,
        block_tokens: int,
        endpoint: KvEndpoint | None,
        threshold_tokens: int,
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.sending = None if endpoint is None else Sending(endpoint, memory.pool, threshold_tokens, block_tokens)
        self.events: list[tuple[OnEvent, Event]] = []
        self.stages: deque[Stages] = deque(maxlen=_REMEMBERED)
        self._taking = None if endpoint is None else Taking(endpoint.incoming, memory.pool)
        self._scheduler, self._memory = scheduler, memory
        self._vocab, self._block_tokens = vocab, block_tokens
        self._lingering: dict[str, Sequence] = {}  # ended, but a transfer uses blocks under their key
        self._stuck: Sequence | None = None
        self._stuck_since_s = 0.0

    def tell(self, sequence: Sequence, event: Event) -> None:
        """Keep an event for those who asked."""
        self.events.append((sequence.on_event, event))

    def is_known(self, key: str) -> bool:
        """Return whether a request of that name, or blocks of it, are here."""
        return key in self.sequences or key in self._lingering

    def admit(self, sequence: Sequence, now_s: float) -> None:
        """Let a new request wait.

        Raises:
            TransferError: Its KV cannot go where it should.
        """
        if self.sending is not None and sequence.sends is not None:
            self.sending.expect(sequence)
        self.sequences[sequence.key] = sequence
        self._scheduler.open(sequence, now_s)

    def end(self, sequence: Sequence, last: Event | None, now_s: float, why: str = "the request has ended") -> None:
        """Let go of a request in any state, and of all its blocks as soon as nothing moves in them.

        Args:
            sequence: The request.
            last: What is told of its end, None for nothing.
            now_s: The instant.
            why: What a peer is told whose transfer ends too early.
        """
        key = sequence.key
        del self.sequences[key]
        self._scheduler.withdraw(sequence, now_s)
        sequence.stages.last_s = now_s
        self.stages.append(sequence.stages)
        if last is not None:
            self.tell(sequence, last)
        if self.sending is not None and sequence.sends is not None:
            self.sending.give_up(sequence, why)
        if self._taking is not None and sequence.takes is not None:
            self._taking.give_up(sequence, why)
        self._memory.give_back(sequence.holding)
        if not self._has_left(sequence):
            self._lingering[key] = sequence
        if self._lingering:
            self._count_lingering(now_s)

    def evict(self, sequence: Sequence, now_s: float) -> None:
        """Take the blocks of a sequence that will compute its KV again."""
        sequence.stages.evictions += 1
        sequence.seen_version = -1
        if self.sending is not None and self.sending.is_open(sequence):
            self.end(sequence, Failed("memory ran out while the KV was leaving"), now_s)
            return
        self._memory.give_back(sequence.holding)

    def land(self, now_s: float) -> bool:
        """Offer room to the KV that waits for it, in order; return whether any may come now."""
        has_landed = False
        while self._taking is not None and (sequence := self._scheduler.land(now_s)) is not None:
            self._memory.make_room(blocks_for(sequence.prompt_tokens, self._block_tokens))
            has_landed = True
            try:
                self._taking.expect(sequence)
            except TransferError as error:
                self.end(sequence, Failed(str(error)), now_s)
        self._give_up_stuck(now_s)
        return has_landed

    def end_transfers(self, now_s: float) -> list[tuple[Sequence, Scored]]:
        """Let go of what transfers have done with, and of requests whose transfers failed.

        Returns:
            The sequences whose KV has come, with their first token: they are in the token phase.
        """
        if self._lingering:
            self._lingering = {key: ended for key, ended in self._lingering.items() if not self._has_left(ended)}
            self._count_lingering(now_s)
        if self.sending is not None:
            for sequence, why in self.sending.ended():
                self.end(sequence, None if why is None else Failed(why), now_s)
        arrived = []
        for sequence, found in self._taking.ended() if self._taking is not None else ():
            if isinstance(found, Scored) and 0 <= found.token < self._vocab:
                sequence.stages.kv_ready_s = now_s
                self._scheduler.kv_arrived(sequence, now_s)
                self.tell(sequence, KvReady())
                arrived.append((sequence, found))
            else:
                why = found if isinstance(found, str) else f"not a token of this model: {found.token}"
                self.end(sequence, Failed(why), now_s)
        return arrived

    def held(self) -> dict[str, int]:
        """Return how many blocks each request holds, those that are over but not free yet too."""
        return dict(self._memory.pool.held())

    def _give_up_stuck(self, now_s: float) -> None:
        """Fail the request whose KV waits in vain for room, so that two machines full of KV for each other go on."""
        stuck = None if self._taking is None else self._scheduler.stuck()
        if stuck is not self._stuck:
            self._stuck, self._stuck_since_s = stuck, now_s
        elif stuck is not None and now_s - self._stuck_since_s > _LONGEST_STUCK_S:
            self.end(stuck, Failed("its KV finds no room: this machine is full of KV that waits to leave"), now_s)

    def _count_lingering(self, now_s: float) -> None:
        """Tell the ledger of the blocks that transfers of ended requests use."""
        self._scheduler.linger(sum(map(self._memory.pool.used_under, self._lingering)), now_s)

    def _has_left(self, sequence: Sequence) -> bool:
        """Return whether no transfer uses blocks of an ended request; the first time for a prompt's KV, tell so."""
        if self.sending is None or sequence.sends is None:
            return sequence.takes is None or self._memory.pool.used_under(sequence.key) == 0
        if not self.sending.may_free(sequence.key):
            return False
        if sequence.leaving is not None:
            self._memory.give_back(sequence.leaving)
        self.sending.forget(sequence.key)
        self.tell(sequence, KvLeft())
        return True
