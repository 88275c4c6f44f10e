"""The engine: requests come in, iterations are computed, tokens and KV go out.

Batches are formed by the scheduler's rules, on a ledger of this machine alone. One thread drives it, and no call waits.
A request's tokens depend on the request alone, not on other requests, on where its KV was computed or on evictions.
"""

import time
from collections import deque
from collections.abc import Callable

from phasesplit.engine.bookings import Lane, MachineScheduler
from phasesplit.engine.cache import KvCache
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.events import Event, Failed, Finished, PromptScored, Refused, Started, Token
from phasesplit.engine.facts import EngineFacts
from phasesplit.engine.iteration import Computes, compute
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.memory import Memory
from phasesplit.engine.roster import RequestTable
from phasesplit.engine.sequences import OnEvent, Sequence, Stages, sequence_of
from phasesplit.engine.wire import WorkerRequest
from phasesplit.errors import SpecError, TransferError
from phasesplit.protocol.worker import Scored
from phasesplit.scheduling.rules import Rules
from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.chooser import Mode
from phasesplit.transfer.endpoint import KvEndpoint

_NO_TEXT = b""


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
        self._memory = Memory(pool, cache, BLOCK_TOKENS, prefix_identity, poison=poison)
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
    def stages(self) -> deque[Stages]:
        """When the latest requests that ended reached each stage."""
        return self._requests.stages

    def submit(self, key: str, request: WorkerRequest, on_event: OnEvent) -> None:
        """Take a request, or refuse it with an event.

        Args:
            key: Its name here, the one of its transfer where it has one.
            request: What is asked for.
            on_event: Who is told what happens to it, see `take_events`.
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
        """Give a request up, in any state; one that is not known, or has ended, changes nothing."""
        sequence = self._requests.sequences.get(key)
        if sequence is not None:
            self._requests.end(sequence, None, self._clock(), "the request was given up")

    def drain(self) -> None:
        """Take no more requests; those that are here go on."""
        self._is_draining = True

    def set_threshold(self, tokens: int) -> None:
        """Set the shortest prompt that is sent layer by layer."""
        if self._requests.sending is not None:
            self._requests.sending.threshold_tokens = tokens

    def take_events(self) -> list[tuple[OnEvent, Event]]:
        """Return what has happened since the last call, in order, with those who are to be told."""
        events, self._requests.events = self._requests.events, []
        return events

    def fail_all(self, why: str) -> list[tuple[OnEvent, Event]]:
        """Return what is left to tell when the engine cannot go on: what has happened, and that every request fails."""
        failed: list[tuple[OnEvent, Event]] = []
        while self._requests.sequences:
            failed.append((self._requests.sequences.popitem()[1].on_event, Failed(why)))
        return self.take_events() + failed

    def step(self, before_computing: Callable[[], None] | None = None) -> bool:
        """Do what there is to do: move KV, form a batch, and compute one iteration of it.

        Args:
            before_computing: Called when the batch is formed and something is to be told already: that a prompt phase
                has begun, say, which may take long.

        Returns:
            Whether anything happened: there may be more to do at once.
        """
        now_s = self._clock()
        if self._endpoint is not None:
            self._endpoint.poll()
            for sequence, first in self._requests.end_transfers(now_s):
                self._emit(sequence, first, now_s)
        self._look_up_prefixes()
        lanes = self._scheduler.form(now_s)
        for sequence in self._scheduler.evicted():
            self._requests.evict(sequence, now_s)
        for sequence, first_row, _, is_prompt, _ in lanes:
            if is_prompt and sequence.holding.count == 0:
                # All that are known before anyone takes more: that might push them out.
                self._memory.share(sequence, first_row)
        has_landed = self._requests.land(now_s)
        if has_landed and self._endpoint is not None:
            # The offers leave now: a long iteration may come before the next turn.
            self._endpoint.poll()
        self._begin(lanes, now_s)
        has_news = bool(self._requests.events)
        if has_news and before_computing is not None:
            before_computing()
        if lanes:
            self._iterate(lanes)
        return bool(lanes) or has_landed or has_news

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
            running=int(machine["lanes"]),
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

    def _begin(self, lanes: list[Lane], now_s: float) -> None:
        """Give every sequence of a batch the blocks that it will write to."""
        for sequence, first, rows, is_prompt, _ in lanes:
            self._memory.cover(sequence, sequence.length if is_prompt else first + rows)
            if is_prompt and sequence.stages.started_s is None:
                sequence.stages.started_s = now_s
                self._requests.tell(sequence, Started())

    def _iterate(self, lanes: list[Lane]) -> None:
        """Compute one iteration and say what came of it."""
        tokens = compute(lanes, self._forward, self._requests.sending, self._config.stop_token_ids)
        now_s = self._clock()
        self._steps += 1
        self._tokens += len(tokens)
        self._scheduler.end_iteration(now_s)
        for lane in lanes:
            if lane.is_prompt and lane.gives_token:
                self._memory.keep(lane.sequence)
        for sequence, token in tokens:
            self._emit(sequence, token, now_s)

    def _emit(self, sequence: Sequence, token: Scored, now_s: float) -> None:
        """Tell of a token, and of the end where it is the last."""
        stages, tell = sequence.stages, self._requests.tell
        times = None
        if stages.first_token_s is None:
            stages.first_token_s = now_s
            times = stages.prompt_times or sequence.told_times
            if sequence.request.wants_prompt_logprobs is not None:
                tell(sequence, PromptScored(tuple(sequence.scores)))
        piece = _NO_TEXT if sequence.stops is None or self._token_bytes is None else self._token_bytes(token.token)
        finished = sequence.add(token.token, piece, self._config.stop_token_ids)
        tell(sequence, Token(token, times))
        if sequence.sends is not None and self._requests.sending is not None:
            # The machine that takes the KV sees the same token, and ends there too where the text does.
            tell(sequence, finished or Finished("length"))
            self._requests.sending.first_token(sequence, token)
        elif finished is not None:
            self._requests.end(sequence, finished, now_s)
