"""A request as the engine works on it: its tokens, its blocks, and when things happened."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.engine_events import Event, Finished
from phasesplit.engine.sampling import History
from phasesplit.engine.wire import WorkerRequest
from phasesplit.kv_transfer.block_pool import Holding, Use
from phasesplit.protocol.stop import StopScanner
from phasesplit.protocol.worker import PrefillTimes, Scored, SendKv, TakeKv

OnEvent = Callable[[Event], None]
Numbers = NDArray[np.int32]

_FIRST_ROOM = 64


@dataclass(slots=True)
class MachineStages:
    """When a request reached each stage on this machine, in seconds of the engine's clock; None for not at all.

    Attributes:
        key: The request.
        leg: `whole`, `prefill` or `decode`.
        prompt_tokens: Tokens of its prompt.
        arrived_s: It was submitted.
        started_s: Its prefill began.
        first_token_s: Its first token was out, or had come with its KV.
        kv_ready_s: Its KV was here, whole, from another machine.
        last_s: Its last token was out, or its KV had left.
        output_tokens: Tokens so far.
        evictions: How often its KV was lost for lack of memory and computed again.
    """

    key: str
    leg: str
    prompt_tokens: int
    arrived_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    last_s: float | None = None
    output_tokens: int = 0
    evictions: int = 0

    @property
    def prefill_times(self) -> PrefillTimes | None:
        """How long its prompt took, None as long as it has no token, and where another machine computed it."""
        if self.started_s is None or self.first_token_s is None:
            return None
        return PrefillTimes(self.started_s - self.arrived_s, self.first_token_s - self.started_s)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, from its arrival to its end.

    Attributes:
        request: What was asked for.
        on_event: Receives its events.
        slot: Its place in the ledger.
        limit: Most output tokens, >= 1.
        ids: Its tokens, of which the first `length` count, int32.
        length: Tokens of prompt and output.
        holding: Its blocks, in the pool.
        leaving: The same blocks once a transfer takes their KV away, for as long as it may read them; else None.
        remote_times: How long its prompt took on the machine that sent its KV.
        sent: How many of its blocks, from the first on, have been handed to the transfer that takes them away.
        scores: What the model thinks of its prompt's tokens, as far as they are computed.
        digests: Those of its full blocks, as far as anyone asked.
        seen_version: State of the prefix cache in which it was last looked for there.
    """

    request: WorkerRequest
    on_event: OnEvent
    slot: int
    limit: int
    stages: MachineStages
    ids: Numbers
    length: int
    history: History
    stops: StopScanner | None
    holding: Holding
    leaving: Holding | None = None
    remote_times: PrefillTimes | None = None
    sent: int = 0
    scores: list[Scored] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    seen_version: int = -1

    @property
    def key(self) -> str:
        """Its name."""
        return self.stages.key

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return self.stages.prompt_tokens

    @property
    def wants_scores(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        return self.request.wants_prompt_logprobs is not None and len(self.scores) < self.prompt_tokens

    @property
    def sends(self) -> SendKv | None:
        """Where its KV goes, if it goes."""
        return self.request.transfer if isinstance(self.request.transfer, SendKv) else None

    @property
    def takes(self) -> TakeKv | None:
        """Where its KV comes from, if it comes."""
        return self.request.transfer if isinstance(self.request.transfer, TakeKv) else None

    def add(self, token: int, piece: bytes, end_ids: tuple[int, ...]) -> Finished | None:
        """Add an output token; return how it ends the request, if it does.

        Args:
            token: The token.
            piece: Its text, where there are stop strings.
            end_ids: The model's own ends of a text.
        """
        if self.length == len(self.ids):
            longer = np.zeros(2 * self.length, np.int32)
            longer[: self.length] = self.ids
            self.ids = longer
        self.ids[self.length] = token
        self.length += 1
        self.stages.output_tokens += 1
        self.history.add(token)
        sampling = self.request.sampling
        if sampling.is_end(token, end_ids):
            is_own_end = not sampling.ignore_eos and token in end_ids
            return Finished("stop", None if is_own_end else token)
        if self.stops is not None:
            self.stops.push(piece)
            if self.stops.found is not None:
                return Finished("stop", self.stops.found)
        return Finished("length") if self.stages.output_tokens == self.limit else None


def sequence_of(key: str, request: WorkerRequest, on_event: OnEvent, limit: int, now_s: float) -> Sequence:
    """Return a request's sequence before it has a slot.

    Args:
        key: Its name on this machine.
        request: What is asked for.
        on_event: Receives its events.
        limit: Most output tokens, >= 1.
        now_s: The instant.
    """
    tokens = len(request.prompt_ids)
    leg = {SendKv: "prefill", TakeKv: "decode"}.get(type(request.transfer), "whole")
    ids = np.zeros(tokens + min(limit, _FIRST_ROOM), np.int32)
    ids[:tokens] = request.prompt_ids
    resumed = request.resumed_tokens
    # A stop that began in what another machine put out is the gateway's to find, which has all of the text.
    exempt = max(0, request.sampling.min_tokens - resumed)
    stops = StopScanner(request.stop, min_tokens=exempt) if request.stop else None
    given = tokens - resumed
    return Sequence(
        request=request,
        on_event=on_event,
        slot=-1,
        limit=limit,
        stages=MachineStages(key, leg, tokens, now_s),
        ids=ids,
        length=tokens,
        history=History(request.prompt_ids[:given], request.prompt_ids[given:]),
        stops=stops,
        holding=Holding(key, Use.COMPUTE),
        scores=[Scored(request.prompt_ids[0])],
    )
