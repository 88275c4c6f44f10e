"""The same iterations as each source of phase times has them: measured, aiconfigurator, roofline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.errors import SpecError
from phasesplit.files.catalog import phase_times
from phasesplit.files.operator_engine import engine_named

COMPARED_PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
COMPARED_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
COMPARED_CONTEXT_TOKENS = 512
"""Context of each request of the decode iterations that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComparison:
    """One iteration as several sources have it.

    Attributes:
        phase: "prompt": one prompt, alone; "token": requests of `COMPARED_CONTEXT_TOKENS` each.
        size: Tokens of the prompt, or requests.
        seconds: Source, as `TimeSources` names it, to its time of the iteration.
    """

    phase: Literal["prompt", "token"]
    size: int
    seconds: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Source to its time as a multiple of the roofline's."""
        return {name: time_s / self.seconds["roofline"] for name, time_s in self.seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSources:
    """What each source has for one model on one machine, the machine's time factors applied.

    Attributes:
        times: Source to its phase times: "measured" and "aiconfigurator" where they cover the pair, "roofline" always.
        absent: Source to why it has none, in one line.
    """

    times: Mapping[str, PhaseTimes]
    absent: Mapping[str, str]


def time_sources(model: Model, machine: Machine, *, source: str | None = "aiconfigurator") -> TimeSources:
    """Return the phase times of every source that covers a model on a machine.

    The roofline is the one that `phase_times` would take: with the overhead of the 2023 engine for models that were
    measured with it, otherwise with that of a modern engine.

    Args:
        model: The model.
        machine: The machine.
        source: `aiconfigurator[:engine[:version]]`: which of its tables; None: none of them, which saves the seconds
            that the first answer takes.

    Raises:
        SpecError: `source` is not of that form, or the model does not fit into the machine's memory.
    """
    times: dict[str, PhaseTimes] = {}
    absent: dict[str, str] = {}
    if source is not None:
        engine_named(source)
    for name in ("measured", *([] if source is None else [source]), "roofline"):
        kind = name.partition(":")[0]
        try:
            times[kind] = phase_times(model, machine, source=name)
        except SpecError as problem:
            if kind == "roofline":
                raise
            absent[kind] = str(problem)
    return TimeSources(times=times, absent=absent)


def compare_sources(model: Model, machine: Machine, *, source: str = "aiconfigurator") -> list[SourceComparison]:
    """Return the same iterations from every source that covers a model on a machine; see `compare_times`.

    Args:
        model: The model.
        machine: The machine.
        source: `aiconfigurator[:engine[:version]]`: which of its tables.

    Raises:
        SpecError: As `time_sources`.
    """
    return compare_times(time_sources(model, machine, source=source).times)


def compare_times(found: Mapping[str, PhaseTimes]) -> list[SourceComparison]:
    """Return the same iterations from every source that covers them, prompts first.

    A source covers what lies inside the data it rests on; the roofline, which rests on none, covers everything.
    Where no other source covers an iteration it is left out, so without any the list is empty.

    Args:
        found: Source to its phase times, "roofline" among them.
    """
    rows = [_row("prompt", tokens, found) for tokens in COMPARED_PROMPT_TOKENS]
    rows += [_row("token", requests, found) for requests in COMPARED_REQUESTS]
    return [row for row in rows if len(row.seconds) > 1]


def _row(phase: Literal["prompt", "token"], size: int, found: Mapping[str, PhaseTimes]) -> SourceComparison:
    seconds: dict[str, float] = {}
    for name, times in found.items():
        knots = times.prompt_knots_tokens if phase == "prompt" else times.token_knots_requests
        largest = times.measured_prompt_tokens if phase == "prompt" else times.measured_requests
        if name == "roofline" or knots[0] <= size <= largest:
            context_tokens = size * COMPARED_CONTEXT_TOKENS
            at = times.prompt_time_s(size) if phase == "prompt" else times.token_time_s(size, context_tokens)
            seconds[name] = float(at)
    return SourceComparison(phase=phase, size=size, seconds=seconds)
