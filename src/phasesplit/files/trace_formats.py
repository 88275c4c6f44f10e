"""Which trace layouts are known: their columns, their clock, and how a file's layout is told from its columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from phasesplit.errors import SpecError

TIME_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of each unit that a column of arrival times can be in."""

_ROLES = ("arrival", "prompt", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """The layout of a trace file.

    Attributes:
        name: What the layout is called on the command line.
        arrival: Column of the arrival times.
        prompt: Column of the prompt lengths.
        output: Column of the output lengths.
        prefix: Column with the list of prefix block ids, or None.
        time_unit: Unit of arrival times given as numbers, a key of `TIME_UNITS_S`.
        rebased: Whether numbers are counted from the first arrival; calendar times always are.
    """

    name: str
    arrival: str
    prompt: str
    output: str
    prefix: str | None = None
    time_unit: str = "s"
    rebased: bool = False

    @property
    def columns(self) -> tuple[str, str, str]:
        """The columns that a file of this layout must have: arrival, prompt, output."""
        return self.arrival, self.prompt, self.output


FORMATS = {
    layout.name: layout
    for layout in (
        TraceFormat(
            name="phasesplit", arrival="arrival_s", prompt="prompt_tokens", output="output_tokens", prefix="prefix_ids"
        ),
        # Azure/AzurePublicDataset, AzureLLMInferenceDataset2023.md and 2024.md.
        TraceFormat(name="azure", arrival="TIMESTAMP", prompt="ContextTokens", output="GeneratedTokens"),
        # kvcache-ai/Mooncake, FAST25-release/traces: JSON lines, one id for each 512-token block of the prompt.
        TraceFormat(
            name="mooncake",
            arrival="timestamp",
            prompt="input_length",
            output="output_length",
            prefix="hash_ids",
            time_unit="ms",
        ),
        # HPMLL/BurstGPT, README.md, Schema: seconds since midnight of the first day, so a later file starts far off 0.
        TraceFormat(
            name="burstgpt", arrival="Timestamp", prompt="Request tokens", output="Response tokens", rebased=True
        ),
        # Mutinifni/splitwise-sim, generate_trace.py.
        TraceFormat(name="splitwise-sim", arrival="arrival_timestamp", prompt="prompt_size", output="token_size"),
        # microsoft/vidur, data/processed_traces.
        TraceFormat(name="vidur", arrival="arrived_at", prompt="num_prefill_tokens", output="num_decode_tokens"),
    )
}
"""The known layouts by name."""


def mapped_format(columns: str, time_unit: str = "s") -> TraceFormat:
    """Return the layout that a column map such as `arrival=ts,prompt=in,output=out` describes; numbers are rebased.

    Raises:
        SpecError: The map does not name each of arrival, prompt and output once.
    """
    pairs = [part.partition("=")[::2] for part in columns.split(",")]
    names = {role.strip(): column.strip() for role, column in pairs}
    if sorted(names) != sorted(_ROLES) or len(pairs) != len(_ROLES) or not all(names.values()):
        raise SpecError.bad("--columns", columns, "arrival=NAME,prompt=NAME,output=NAME")
    if time_unit not in TIME_UNITS_S:
        raise SpecError.unknown("--time-unit", time_unit, TIME_UNITS_S)
    return TraceFormat(name="mapped", time_unit=time_unit, rebased=True, **names)


def known_format(name: str) -> TraceFormat:
    """Return the layout of a name.

    Raises:
        SpecError: No layout has that name.
    """
    if name not in FORMATS:
        raise SpecError.unknown("--format", name, FORMATS)
    return FORMATS[name]


def detect_format(place: str, found: Sequence[str]) -> TraceFormat:
    """Return the known layout whose columns a file has, letter case aside.

    Args:
        place: File and line of the header, for the message.
        found: The file's column names.

    Raises:
        SpecError: The columns fit no known layout; the nearest layout's missing column is named.
    """
    lower = {name.strip().lower() for name in found}
    present = {layout.name: sum(column.lower() in lower for column in layout.columns) for layout in FORMATS.values()}
    nearest = FORMATS[max(present, key=lambda name: present[name])]
    if present[nearest.name] == len(_ROLES):
        return nearest
    if present[nearest.name] < len(_ROLES) - 1:
        layouts = "; ".join(",".join(layout.columns) for layout in FORMATS.values())
        raise SpecError.bad(
            place, _shortened(found), f"the columns of a known trace ({layouts}), or name yours with --columns"
        )
    match_columns(place, found, nearest)
    return nearest


def match_columns(place: str, found: Sequence[str], layout: TraceFormat) -> dict[str, int]:
    """Return the position in a file of each column that a layout needs (and of its prefix column, if there).

    Raises:
        SpecError: A column is missing, or stands there twice; the nearest name found is given.
    """
    lower = [name.strip().lower() for name in found]
    for column in layout.columns:
        if lower.count(column.lower()) > 1:
            raise SpecError.bad(place, _shortened(found), f"one column {column}, not several")
        if column.lower() not in lower:
            near = get_close_matches(column.lower(), lower, n=1, cutoff=0.5)
            hint = f" (nearest is {found[lower.index(near[0])].strip()!r})" if near else ""
            raise SpecError(f"{place}: column {column!r} is missing{hint}; found are {_shortened(found)}")
    wanted = (*layout.columns, *(() if layout.prefix is None else (layout.prefix,)))
    return {column: lower.index(column.lower()) for column in wanted if column.lower() in lower}


def _shortened(names: Sequence[str]) -> str:
    text = ", ".join(name.strip() for name in names)
    return text if len(text) <= 120 else f"{text[:117]}..."
