"""What a plan file, or the options of a plan, may hold, checked by pydantic. Imported only when a plan is asked for."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from phasesplit.io.schema import MOST_MACHINES, EntryError, Name, Spec, quantity, quantity_in, whole
from phasesplit.planner.problem import Measure

UNIT_KINDS = {
    Measure.COST: "usd_per_hour",
    Measure.POWER: "w",
    Measure.ENERGY: "w",
    Measure.CARBON: "kg_co2e_per_hour",
    Measure.MACHINES: "count",
}
"""Kind of quantity, a key of `units.UNITS`, of each measure."""

_MOST_TYPES = 5
_MOST_SEED = 1 << 31
_MOST_SEEDS = 100
_MEASURES = ", ".join(Measure)


def _listed(value: object) -> object:
    """Return the parts of a text with commas; anything else unchanged."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _paired(value: object) -> Mapping[str, Any]:
    """Return a mapping from itself, from a text `a=1,b=2`, or from a list of such texts."""
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    pairs: dict[str, Any] = {}
    parts = _listed(value)
    for part in parts if isinstance(parts, list | tuple) else [value]:
        name, equals, one = str(part).partition("=")
        if not equals or name.strip() in pairs:
            raise ValueError("NAME=VALUE with commas between, each name once")
        pairs[name.strip()] = one.strip()
    return pairs


def _names(value: object) -> object:
    parts = _listed(value)
    if not isinstance(parts, list | tuple) or not parts:
        raise ValueError("names with commas between")
    return parts


def _budgets(value: object) -> dict[Measure, float]:
    found = {}
    for name, one in _paired(value).items():
        if name not in list(Measure):
            raise EntryError(name, one, f"MEASURE=VALUE with a measure among {_MEASURES}")
        try:
            found[Measure(name)] = quantity(one, UNIT_KINDS[Measure(name)], most=1e12)
        except ValueError as problem:
            raise EntryError(name, one, str(problem)) from None
    return found


def _counts(value: object) -> dict[str, int]:
    found = {}
    for name, one in _paired(value).items():
        try:
            number = quantity(one, "count", most=MOST_MACHINES)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number != math.floor(number):
            raise EntryError(name, one, f"MACHINE=COUNT with a whole number of servers from 1 to {MOST_MACHINES:,}")
        found[name] = int(number)
    if not 1 <= len(found) <= _MOST_TYPES:
        raise ValueError(f"MACHINE=COUNT with commas between, at most {_MOST_TYPES} types")
    return found


def _percentiles(value: object) -> dict[float, float]:
    found: dict[float, float] = {}
    for name, tokens in _paired(value).items():
        try:
            found[float(name.removeprefix("p"))] = float(tokens)
        except (TypeError, ValueError):
            raise EntryError(name, tokens, "percentiles and tokens, such as p50=1020,p90=2734,p99=4142") from None
    return found


def _seeds(value: object) -> tuple[int, ...]:
    allowed = f"a number of seeds up to {_MOST_SEEDS}, or a list of different ones such as 0,1,2"
    parts = _listed(value) if isinstance(value, str) and "," in value else value
    numbers = parts if isinstance(parts, list | tuple) else range(_whole_number(parts, 1, _MOST_SEEDS, allowed))
    seeds = tuple(_whole_number(one, 0, _MOST_SEED, allowed) for one in numbers)
    if not seeds or len(set(seeds)) < len(seeds) or len(seeds) > _MOST_SEEDS:
        raise ValueError(allowed)
    return seeds


def _whole_number(value: object, least: int, most: int, allowed: str) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,12}", text) or not least <= int(text) <= most:
        raise ValueError(allowed)
    return int(text)


def _degrees(value: object) -> tuple[int, ...] | None:
    if value == "auto":
        return None
    parts = _listed(value)
    parts = parts if isinstance(parts, list | tuple) else [parts]
    return tuple(_whole_number(part, 1, 4096, "auto, or degrees such as 2,4,8") for part in parts)


def _shares(value: object) -> tuple[float, ...] | None:
    """Return power caps as shares: `70%,50%`, 0.7 or a list; `none` is an empty one, `auto` is None."""
    if value == "auto":
        return None
    if value == "none":
        return ()
    parts = _listed(value)
    found = []
    for part in parts if isinstance(parts, list | tuple) else [parts]:
        text = str(part).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = math.nan
        if not 0 < share <= 1:
            raise ValueError("auto, none, or shares of the accelerators' power limit such as 70%,50%")
        found.append(share)
    return tuple(found)


def _intensity(value: object) -> float:
    try:
        kg_per_kwh = math.nan if isinstance(value, bool) else float(str(value))
    except ValueError:
        kg_per_kwh = math.nan
    if not 0 <= kg_per_kwh <= 10:
        raise ValueError("0 to 10 kg of CO2 per kWh")
    return kg_per_kwh


def _baseline(value: object) -> tuple[int, str]:
    servers, colon, name = str(value).partition(":")
    if not colon or not servers.isdecimal() or not 1 <= int(servers) <= 100_000:
        raise ValueError("SERVERS:MACHINE, such as 40:dgx-h100")
    return int(servers), name


def _rules(value: object) -> Mapping[str, Any]:
    if value in ("default", "published"):
        return {"published": value == "published"}
    if isinstance(value, str):
        raise ValueError("default, published, or a mapping of fields of the rules")
    return _paired(value)


def _day(value: object) -> object:
    """Return policies as texts, none of them for `true`; None for `false`."""
    if value is None or isinstance(value, bool):
        return () if value else None
    parts = (value,) if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        raise ValueError("true, or a list of policies such as joint:target=9000,ratio=3 (in a file each on its line)")
    return tuple(parts)


def _workload(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


class WorkloadSpec(Spec):
    """Which requests a plan is for.

    Attributes:
        source: Trace file, `-`, or name of a shipped workload.
        prompt: Instead, percentile to prompt tokens.
        output: And percentile to output tokens.
        format: Layout of a trace file.
        columns: Map of a trace file's columns.
        time_unit: Unit of the mapped arrivals.
        skip_bad: Drop wrong rows of a trace file.
        sort: Sort a trace file's rows.
    """

    source: Name | None = None
    prompt: Annotated[dict[float, float] | None, BeforeValidator(_percentiles)] = None
    output: Annotated[dict[float, float] | None, BeforeValidator(_percentiles)] = None
    format: Name | None = None
    columns: Name | None = None
    time_unit: Name | None = None
    skip_bad: bool = False
    sort: bool = False


class PlanSpec(Spec):
    """A plan file: the options of `phasesplit plan` by the same names.

    Attributes:
        model: Name of a model or path of its file.
        machines: Names of machines or paths of their files, variants as `domain.machine` names them.
        existing: Instead of machines, how many servers there are of each.
        workload: Which requests.
        rate: Mean requests per second.
        duration: Seconds of each simulated trace.
        arrivals: Arrival model instead of the source's own.
        seeds: Seeds of the traces.
        slo: What has to hold.
        minimize: What is to be as little as possible.
        maximize: The rate, within budgets.
        within: Budgets.
        preset: Question as in the paper, about a baseline.
        baseline: Servers of a machine, written SERVERS:MACHINE.
        tensor_parallel: Degrees to look at; None: those that are known.
        power_caps: Shares to look at; None: as the objective makes sensible.
        rules: Settings of the scheduling rules.
        reference: Machine that slowdowns compare with.
        profile: File of phase times of one's own, as `--profile` of the command line takes it.
        times: Source of phase times.
        grid_intensity: kg CO2 per kWh.
        most_servers: Largest cluster that is looked at.
        day: Policies of one's own for a day, next to those fitted; None: no day.
    """

    model: Name
    machines: Annotated[tuple[Name, ...] | None, BeforeValidator(_names)] = None
    existing: Annotated[dict[str, int] | None, BeforeValidator(_counts)] = None
    workload: Annotated[WorkloadSpec, BeforeValidator(_workload)]
    rate: Annotated[float | None, quantity_in("ratio", 1e6)] = None
    duration: Annotated[float | None, quantity_in("s", 1e7)] = None
    arrivals: Name | None = None
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds)] = (0, 1, 2)
    slo: Name = "splitwise"
    minimize: Measure | None = None
    maximize: Literal["throughput"] | None = None
    within: Annotated[dict[Measure, float], BeforeValidator(_budgets)] = Field(default_factory=dict)
    preset: Literal["iso-power", "iso-cost", "iso-throughput"] | None = None
    baseline: Annotated[tuple[int, str], BeforeValidator(_baseline)] | None = None
    tensor_parallel: Annotated[tuple[int, ...] | None, BeforeValidator(_degrees)] = None
    power_caps: Annotated[tuple[float, ...] | None, BeforeValidator(_shares)] = None
    rules: Annotated[dict[str, Any], BeforeValidator(_rules)] = Field(default_factory=dict)
    reference: Name = "dgx-a100"
    profile: Name | None = None
    times: Name = "auto"
    grid_intensity: Annotated[float | None, BeforeValidator(_intensity)] = None
    most_servers: Annotated[int, whole(100_000)] = 2_000
    day: Annotated[tuple[Name, ...] | None, BeforeValidator(_day)] = None
