"""The engine: requests come in, iterations are computed, tokens and KV go out.

One request on this machine, step by step. `Engine.step` is one turn of 2 to 6.

1. `Engine.submit` checks it. `RequestTable.admit` gives it a place in the ledger, where it waits for its prefill, or
   for room for the KV that another machine computes.
2. `RequestTable.end_transfers` takes in KV that has arrived, with its first token, and ends requests whose KV has left
   or whose transfer failed.
3. `MachineScheduler.form` forms the next batch by the scheduler's rules. Sequences that it evicts give their blocks
   back (`evict`), prompts that begin like earlier ones get their blocks (`KvMemory.share`).
4. `RequestTable.offer_room` takes blocks for KV that waits for room, and offers them to its prefill machine.
5. `_begin` gives each sequence of the batch the blocks that it will write to; `iteration.compute` runs the forward
   passes, during which KV leaves layer by layer (`sending`), and samples.
6. `_emit` reports each token, and the end where it is the last.
7. `RequestTable.end` takes the request from the ledger and gives its blocks back. Blocks that a transfer still reads or
   writes linger under its key until the transfer has ended.

Batches are formed on a ledger of this machine alone. One thread drives it, and no call waits. A request's tokens depend
on the request alone, not on other requests, on where its KV was computed or on evictions.
"""

import time
from collections import deque
from collections.abc import Callable

from phasesplit.domain.machine import blocks_for
from phasesplit.engine.cache import KvCache
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.engine_events import (
    Event,
    Failed,
    Finished,
    KvLeft,
    KvReady,
    PromptScored,
    Refused,
    Started,
    Token,
)
from phasesplit.engine.facts import EngineFacts
from phasesplit.engine.iteration import Computes, compute
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.machine_scheduler import MachineScheduler, RunningEntry
from phasesplit.engine.memory import KvMemory
from phasesplit.engine.sending import Sending, Taking
from phasesplit.engine.sequences import MachineStages, OnEvent, Sequence, sequence_of
from phasesplit.engine.wire import WorkerRequest
from phasesplit.errors import SpecError, TransferError
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.chooser import Mode
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.protocol.worker import Scored
from phasesplit.scheduler.rules import Rules

_REMEMBERED = 1_000
_LONGEST_STUCK_S = 2.0
_NO_TEXT = b""


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
        events: What has happened and was not delivered, with its receivers.
        stages: Of the latest requests that ended.
    """

    def __init__(
        self,
        scheduler: MachineScheduler,
        memory: KvMemory,
        *,
        vocab: int,
        block_tokens: int,
        endpoint: KvEndpoint | None,
        threshold_tokens: int,
    ) -> None:
        self.sequences: dict[str, Sequence] = {}
        self.sending = None if endpoint is None else Sending(endpoint, memory.pool, threshold_tokens, block_tokens)
        self.events: list[tuple[OnEvent, Event]] = []
        self.stages: deque[MachineStages] = deque(maxlen=_REMEMBERED)
        self._taking = None if endpoint is None else Taking(endpoint.incoming, memory.pool)
        self._scheduler, self._memory = scheduler, memory
        self._vocab, self._block_tokens = vocab, block_tokens
        self._lingering: dict[str, Sequence] = {}  # ended, but a transfer uses blocks under their key
        self._stuck: Sequence | None = None
        self._stuck_since_s = 0.0

    def report(self, sequence: Sequence, event: Event) -> None:
        """Keep an event for the one who submitted the request."""
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
        """End a request in any state, and free all its blocks as soon as nothing moves in them.

        Args:
            sequence: The request.
            last: The event that reports its end, None for none.
            now_s: The instant.
            why: The reason for a peer whose transfer ends too early.
        """
        key = sequence.key
        del self.sequences[key]
        self._scheduler.withdraw(sequence, now_s)
        sequence.stages.last_s = now_s
        self.stages.append(sequence.stages)
        if last is not None:
            self.report(sequence, last)
        if self.sending is not None and sequence.sends is not None:
            self.sending.abort(sequence, why)
        if self._taking is not None and sequence.takes is not None:
            self._taking.abort(sequence, why)
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

    def offer_room(self, now_s: float) -> bool:
        """Offer room to the KV that waits for it, in order; return whether any may come now."""
        has_offered = False
        while self._taking is not None and (sequence := self._scheduler.hold_room(now_s)) is not None:
            self._memory.make_room(blocks_for(sequence.prompt_tokens, self._block_tokens))
            has_offered = True
            try:
                self._taking.expect(sequence)
            except TransferError as error:
                self.end(sequence, Failed(str(error)), now_s)
        self._fail_stuck(now_s)
        return has_offered

    def end_transfers(self, now_s: float) -> list[tuple[Sequence, Scored]]:
        """Free the blocks that transfers no longer use, and end requests whose transfers have ended or failed.

        Returns:
            The sequences whose KV has come, with their first token: they are in the decode phase.
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
                self.report(sequence, KvReady())
                arrived.append((sequence, found))
            else:
                why = found if isinstance(found, str) else f"not a token of this model: {found.token}"
                self.end(sequence, Failed(why), now_s)
        return arrived

    def held(self) -> dict[str, int]:
        """Return how many blocks each request holds, those that are over but not free yet too."""
        return dict(self._memory.pool.held())

    def _fail_stuck(self, now_s: float) -> None:
        """Fail the request whose KV waits in vain for room, so that two machines full of KV for each other go on."""
        stuck = None if self._taking is None else self._scheduler.stuck()
        if stuck is not self._stuck:
            self._stuck, self._stuck_since_s = stuck, now_s
        elif stuck is not None and now_s - self._stuck_since_s > _LONGEST_STUCK_S:
            self.end(stuck, Failed("its KV finds no room: this machine is full of KV that waits to leave"), now_s)

    def _count_lingering(self, now_s: float) -> None:
        """Count the blocks that transfers of ended requests use in the ledger."""
        self._scheduler.linger(sum(map(self._memory.pool.used_under, self._lingering)), now_s)

    def _has_left(self, sequence: Sequence) -> bool:
        """Return whether no transfer uses blocks of an ended request; the first time for a prompt's KV, report it."""
        if self.sending is None or sequence.sends is None:
            return sequence.takes is None or self._memory.pool.used_under(sequence.key) == 0
        if not self.sending.may_free(sequence.key):
            return False
        if sequence.leaving is not None:
            self._memory.give_back(sequence.leaving)
        self.sending.forget(sequence.key)
        self.report(sequence, KvLeft())
        return True


class Engine:
    """Serves requests whole, or one leg of them.

    Args:
        forward: What computes iterations, over `cache`.
        cache: The KV cache.
        pool: Which of its blocks are free; the endpoint draws from it too.
        config: The model.
        rules: How batches are formed; `block_tokens` as the cache has it.
        endpoint: What moves KV; None: requests are served whole only.
        token_bytes: The text of a token, none for one that is not text; needed where requests bring stop strings.
        clock: Returns the instant.
        threshold_tokens: The shortest prompt that is sent layer by layer.
        prefix_identity: What KV depends on besides tokens, such as the model's digest: prompts' KV is kept for prompts
            that begin alike. None keeps none.
        poison: Fill blocks with a large number when they are freed, so that a late reader is found out.

    Raises:
        SpecError: The rules' blocks are not those of the cache.
    """

    def __init__(
        self,
        forward: Computes,
        cache: KvCache,
        pool: BlockPool,
        config: ModelConfig,
        rules: Rules,
        *,
        endpoint: KvEndpoint | None = None,
        token_bytes: Callable[[int], bytes] | None = None,
        clock: Callable[[], float] = time.monotonic,
        threshold_tokens: int = 0,
        prefix_identity: bytes | None = None,
        poison: bool = False,
    ) -> None:
        if rules.block_tokens != BLOCK_TOKENS:
            raise SpecError.bad("rules, field block_tokens", rules.block_tokens, f"{BLOCK_TOKENS}, as the KV cache's")
        self._forward, self._config, self._clock, self._endpoint = forward, config, clock, endpoint
        self._token_bytes = token_bytes
        self._context_tokens = min(config.context_tokens, pool.blocks * BLOCK_TOKENS)
        self._memory = KvMemory(pool, cache, BLOCK_TOKENS, prefix_identity, poison=poison)
        self._scheduler = MachineScheduler(rules, pool.blocks)
        self._requests = RequestTable(
            self._scheduler,
            self._memory,
            vocab=config.vocab,
            block_tokens=BLOCK_TOKENS,
            endpoint=endpoint,
            threshold_tokens=threshold_tokens,
        )
        self._is_draining = False
        self._steps = self._tokens = 0

    @property
    def stages(self) -> deque[MachineStages]:
        """When the latest requests that ended reached each stage."""
        return self._requests.stages

    def submit(self, key: str, request: WorkerRequest, on_event: OnEvent) -> None:
        """Take a request, or refuse it with an event.

        Args:
            key: Its name here, the one of its transfer where it has one.
            request: What is asked for.
            on_event: Receives what happens to it, see `take_events`.
        """
        now_s = self._clock()
        refused = self._refusal(key, request)
        if refused is None:
            limit = min(request.max_tokens, self._context_tokens - len(request.prompt_ids))
            try:
                self._requests.admit(sequence_of(key, request, on_event, limit, now_s), now_s)
            except TransferError as error:
                refused = Refused(409, str(error))
        if refused is not None:
            self._requests.events.append((on_event, refused))

    def abort(self, key: str) -> None:
        """Abort a request in any state; one that is not known, or has ended, changes nothing."""
        sequence = self._requests.sequences.get(key)
        if sequence is not None:
            self._requests.end(sequence, None, self._clock(), "the request was aborted")

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._is_draining = True

    def set_threshold(self, tokens: int) -> None:
        """Set the shortest prompt that is sent layer by layer."""
        if self._requests.sending is not None:
            self._requests.sending.threshold_tokens = tokens

    def take_events(self) -> list[tuple[OnEvent, Event]]:
        """Return what has happened since the last call, in order, with the receiver of each."""
        events, self._requests.events = self._requests.events, []
        return events

    def fail_all(self, why: str) -> list[tuple[OnEvent, Event]]:
        """Return the last events of an engine that cannot go on: what has happened, and that every request fails."""
        failed: list[tuple[OnEvent, Event]] = []
        while self._requests.sequences:
            failed.append((self._requests.sequences.popitem()[1].on_event, Failed(why)))
        return self.take_events() + failed

    def step(self, before_computing: Callable[[], None] | None = None) -> bool:
        """Do what there is to do: move KV, form a batch, and compute one iteration of it.

        Args:
            before_computing: Called when the batch is formed and there are events already, such as the start of a
                prefill, which may take long.

        Returns:
            Whether anything happened: there may be more to do at once.
        """
        now_s = self._clock()
        if self._endpoint is not None:
            self._endpoint.poll()
            for sequence, first in self._requests.end_transfers(now_s):
                self._emit(sequence, first, now_s)
        self._look_up_prefixes()
        running_entries = self._scheduler.form(now_s)
        for sequence in self._scheduler.evicted():
            self._requests.evict(sequence, now_s)
        for sequence, first_row, _, is_prefill, _ in running_entries:
            if is_prefill and sequence.holding.count == 0:
                # All that are known before anyone takes more: that might push them out.
                self._memory.share(sequence, first_row)
        has_offered = self._requests.offer_room(now_s)
        if has_offered and self._endpoint is not None:
            # The offers leave now: a long iteration may come before the next turn.
            self._endpoint.poll()
        self._begin(running_entries, now_s)
        has_news = bool(self._requests.events)
        if has_news and before_computing is not None:
            before_computing()
        if running_entries:
            self._iterate(running_entries)
        return bool(running_entries) or has_offered or has_news

    def facts(self) -> EngineFacts:
        """Return a snapshot."""
        machine = self._scheduler.machine
        sent = self._endpoint.outgoing.sent.transfers if self._endpoint is not None else {}
        return EngineFacts(
            context_tokens=self._context_tokens,
            capacity_blocks=self._memory.pool.blocks,
            used_blocks=int(machine["used_blocks"]),
            block_tokens=BLOCK_TOKENS,
            held=self._requests.held(),
            kept_blocks=self._memory.pool.idle,
            waiting_prompts=self._scheduler.waiting_prompts,
            running=int(machine["running_entries"]),
            pending_tokens=int(machine["pending_tokens"]),
            steps=self._steps,
            tokens=self._tokens,
            layerwise=sent.get(Mode.LAYERWISE, 0),
            serialized=sent.get(Mode.SERIALIZED, 0),
            evictions=self._scheduler.evictions,
            is_draining=self._is_draining,
        )

    def _refusal(self, key: str, request: WorkerRequest) -> Refused | None:
        tokens, room = len(request.prompt_ids), self._context_tokens
        if self._is_draining:
            return Refused(503, "this worker takes no more requests")
        if self._requests.is_known(key):
            return Refused(409, f"a request called {key} is here already")
        if tokens >= room:
            bound = "the context" if room == self._config.context_tokens else "the KV memory"
            return Refused(400, f"{tokens} prompt tokens leave no room for output: {bound} holds {room} tokens")
        if request.transfer is not None and self._endpoint is None:
            return Refused(400, "this worker moves no KV: it serves requests whole")
        return None

    def _look_up_prefixes(self) -> None:
        """Write down which first tokens of waiting prompts are known."""
        prefixes = self._memory.prefixes
        if prefixes is None:
            return
        for sequence in self._scheduler.waiting():
            if sequence.seen_version != prefixes.version:
                sequence.seen_version = prefixes.version
                self._scheduler.know(sequence, self._memory.known_tokens(sequence))

    def _begin(self, running_entries: list[RunningEntry], now_s: float) -> None:
        """Give every sequence of a batch the blocks that it will write to."""
        for sequence, first, rows, is_prefill, _ in running_entries:
            self._memory.cover(sequence, sequence.length if is_prefill else first + rows)
            if is_prefill and sequence.stages.started_s is None:
                sequence.stages.started_s = now_s
                self._requests.report(sequence, Started())

    def _iterate(self, running_entries: list[RunningEntry]) -> None:
        """Compute one iteration and report its tokens."""
        tokens = compute(running_entries, self._forward, self._requests.sending, self._config.stop_token_ids)
        now_s = self._clock()
        self._steps += 1
        self._tokens += len(tokens)
        self._scheduler.end_iteration(now_s)
        for running_entry in running_entries:
            if running_entry.is_prefill and running_entry.gives_token:
                self._memory.keep(running_entry.sequence)
        for sequence, token in tokens:
            self._emit(sequence, token, now_s)

    def _emit(self, sequence: Sequence, token: Scored, now_s: float) -> None:
        """Report a token, and the end where it is the last."""
        stages, report = sequence.stages, self._requests.report
        times = None
        if stages.first_token_s is None:
            stages.first_token_s = now_s
            times = stages.prefill_times or sequence.remote_times
            if sequence.request.wants_prompt_logprobs is not None:
                report(sequence, PromptScored(tuple(sequence.scores)))
        piece = _NO_TEXT if sequence.stops is None or self._token_bytes is None else self._token_bytes(token.token)
        finished = sequence.add(token.token, piece, self._config.stop_token_ids)
        report(sequence, Token(token, times))
        if sequence.sends is not None and self._requests.sending is not None:
            # The machine that takes the KV sees the same token, and ends there too where the text does.
            report(sequence, finished or Finished("length"))
            self._requests.sending.first_token(sequence, token)
        elif finished is not None:
            self._requests.end(sequence, finished, now_s)
