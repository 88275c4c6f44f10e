"""What a profile file may hold, checked by pydantic. Imported only when one is read or written."""

from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from phasesplit.io.schema import Spec

FORMAT: Literal["phasesplit profile"] = "phasesplit profile"
VERSION: Literal[1] = 1

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Whole = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=500)]


class MachineFacts(Spec):
    """The machine that was measured.

    Attributes:
        name: As a machine file names it.
        processor: Its model.
        cores: Cores that the process could use.
        threads: Threads that computed; None where it cannot be seen.
        features: Instruction sets that matter to the engine.
        memory_bytes: Of the host.
        system: Operating system.
    """

    name: Text
    processor: str
    cores: Whole
    threads: Whole | None
    features: tuple[str, ...]
    memory_bytes: Number
    system: str


class ModelFacts(Spec):
    """The model that was measured.

    Attributes:
        name: As a model file names it.
        digest: Tells it from others; empty where it cannot be seen.
        sizes: Fields of `domain.model.Model`, without the name; None where they are not known.
    """

    name: Text
    digest: str = ""
    sizes: dict[str, float] | None = None


class TimedRuns(Spec):
    """One iteration and its runs; fields as of `profiling.record`."""

    prompts: Whole = 0
    prompt_tokens: Whole = 0
    behind_tokens: Whole = 0
    requests: Whole = 0
    context_tokens: Whole = 0
    held_out: bool = False
    median_s: Positive
    spread_s: Number
    runs: Whole
    rejected: Whole
    runs_s: Annotated[tuple[Positive, ...], Field(min_length=1)]


class Knots(Spec):
    """Fields of `domain.profile.PhaseTimes`."""

    prefill_knots_tokens: Annotated[tuple[Positive, ...], Field(min_length=2)]
    prefill_knots_s: Annotated[tuple[Number, ...], Field(min_length=2)]
    decode_knots_requests: Annotated[tuple[Positive, ...], Field(min_length=2)]
    decode_knots_s: Annotated[tuple[Number, ...], Field(min_length=2)]
    prefill_pair_s: Number
    decode_context_s: Number
    measured_prompt_tokens: Positive
    measured_requests: Positive

    @model_validator(mode="after")
    def _pair_up(self) -> "Knots":
        for x, y in (("prefill_knots_tokens", "prefill_knots_s"), ("decode_knots_requests", "decode_knots_s")):
            places, times = getattr(self, x), getattr(self, y)
            if len(places) != len(times) or any(one >= other for one, other in pairwise(places)):
                raise ValueError(f"{x} that increase, with as many {y}")
        return self


class PhaseErrors(Spec):
    """Relative errors of held-out iterations: how many, their mean, the largest, and where that is."""

    count: Whole
    mean: Number | None
    worst: Number | None
    worst_at: str


class KvFacts(Spec):
    """How much KV there is room for."""

    blocks: Whole
    block_tokens: Whole
    bytes_per_token: Number | None
    source: str


class LinkFacts(Spec):
    """How fast KV moves: fields of `domain.machine.Link`."""

    bytes_per_s: Positive
    latency_s: Number
    per_layer_s: Number
    streaming_slowdown: Number
    source: str


class PowerFacts(Spec):
    """Mean power, in watts, while idle and while each phase computes."""

    idle_w: Number
    prefill_w: Number
    decode_w: Number
    source: str


class ProfileSpec(Spec):
    """A profile file.

    Attributes:
        format: What kind of file it is.
        version: Of its layout.
        target: `engine`, or the endpoint's address.
        taken: When, as an ISO date with its zone.
        versions: Of the software, by name.
        machine: The machine.
        model: The model.
        settings: What was asked for.
        ending: Why measuring stopped, as `profiling.profiler.Profiled` has it.
        elapsed_s: Time that measuring took, resumed times included.
        times: Phase times; None where there are too few iterations for any.
        errors: Held-out errors, of `all` and by phase.
        iterations: Everything that was timed.
        interrupted_share: Share of runs during which another process had the core; None where it cannot be seen.
        kv: Room for KV.
        link: The way between two machines of this kind.
        start_up_s: From starting a process to its first token.
        power: Power.
        unknown: What is not known, with the reason.
        notes: What a reader of the figures should know.
    """

    format: Literal["phasesplit profile"] = FORMAT
    version: Literal[1] = VERSION
    target: Text
    taken: Text
    versions: dict[str, str]
    machine: MachineFacts
    model: ModelFacts
    settings: dict[str, Any]
    ending: str
    elapsed_s: Number
    times: Knots | None
    errors: dict[str, PhaseErrors]
    iterations: tuple[TimedRuns, ...]
    interrupted_share: Number | None = None
    kv: KvFacts | None = None
    link: LinkFacts | None = None
    start_up_s: Number | None = None
    power: PowerFacts | None = None
    unknown: dict[str, str] = Field(default_factory=dict)
    notes: tuple[str, ...] = ()
