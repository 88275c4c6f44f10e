"""What goes into a naive simulation and what comes out, whatever the rule set."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["prefill", "decode", "unsplit"]
Knots: TypeAlias = Sequence[tuple[float, float]]
"""(x, seconds) in order of x, at least two."""


@dataclass(frozen=True)
class Model:
    """Bytes that the model takes on an instance: for each token of KV cache, and for its weights."""

    kv_bytes_per_token: float
    weights_bytes: float


@dataclass(frozen=True)
class Machine:
    """One instance to build: its role, how long its iterations take, and its memory (weights included)."""

    role: Role
    prefill_knots: Knots
    decode_knots: Knots
    capacity_bytes: float


@dataclass(frozen=True)
class Arrival:
    """One request of the trace."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass
class Outcome:
    """What became of one request; a time is NaN and an instance -1 until it is known."""

    ttft_s: float = math.nan
    e2e_s: float = math.nan
    queue_s: float = math.nan
    second_token_overhead_s: float = math.nan
    prefill_instance: int = -1
    decode_instance: int = -1

    @property
    def completed(self) -> bool:
        """Whether the last token was made."""
        return not math.isnan(self.e2e_s)


@dataclass
class Counters:
    """Sums over a run."""

    steps: int = 0
    iterations: int = 0
    task_iterations: int = 0
    preemptions: int = 0
    decode_to_mixed: int = 0
    prefill_to_mixed: int = 0
    back_from_mixed: int = 0
    same_instance: int = 0


@dataclass(frozen=True)
class Build:
    """One batch build that started a step, as an instance saw it; for comparison step by step.

    Tasks are (kind, request number, tokens left); waiting ones are (kind, request number, preemption count).
    """

    time_s: float
    instance: int
    batch: tuple[tuple[str, int, int], ...]
    iterations: int
    iteration_s: float
    waiting: tuple[tuple[str, int, int], ...]


@dataclass
class Result:
    """Outcomes in order of the requests, counters, and every build in order of time."""

    outcomes: list[Outcome]
    counters: Counters = field(default_factory=Counters)
    builds: list[Build] = field(default_factory=list)


def interpolate(knots: Knots, x: float) -> float:
    """Return piecewise-linear interpolation, the first and the last segment extended beyond the ends."""
    segment = 0
    while segment < len(knots) - 2 and x >= knots[segment + 1][0]:
        segment += 1
    (x0, y0), (x1, y1) = knots[segment], knots[segment + 1]
    return y0 + (y1 - y0) / (x1 - x0) * (x - x0)
