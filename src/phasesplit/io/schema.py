"""What a machine, model or cluster file may hold, checked by pydantic. Imported only when a file is read.

Quantities are read as people write them ("80 GB", "400 Gb/s", "10.2 kW") and kept in base units.
"""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phasesplit.domain.cluster import Role

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _with_prefixes(unit: str, scale: float = 1.0, *, binary: bool = False) -> dict[str, float]:
    prefixes = _DECIMAL | (_BINARY if binary else {})
    return {f"{prefix}{unit}": size * scale for prefix, size in prefixes.items()}


_BYTES = _with_prefixes("B", binary=True)
_BITS_PER_S = _with_prefixes("b/s", 1 / 8) | _with_prefixes("bit/s", 1 / 8) | _with_prefixes("bps", 1 / 8)
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_s": {f"{unit}/s": size for unit, size in _BYTES.items()} | _BITS_PER_S,
    "flops_per_s": _with_prefixes("FLOP/s") | _with_prefixes("FLOPS") | _with_prefixes("FLOPs"),
    "w": _with_prefixes("W"),
    "usd_per_hour": {"USD/h": 1.0, "USD/hour": 1.0, "$/h": 1.0, "$/hour": 1.0},
    "kg_co2e": {"kg": 1.0, "t": 1e3, "kgCO2e": 1.0, "tCO2e": 1e3, "kg CO2e": 1.0, "t CO2e": 1e3},
    "kg_co2e_per_hour": {
        "kg/h": 1.0, "t/h": 1e3, "kgCO2e/h": 1.0, "tCO2e/h": 1e3, "kg CO2e/h": 1.0, "t CO2e/h": 1e3,
    },
    "s": {
        "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0, "d": 86_400.0, "days": 86_400.0,
        "years": 365 * 86_400.0,
    },
    "count": {},
    "ratio": {},
}  # fmt: skip
"""Kind of quantity to the units it may be written in and their size in the base unit."""

_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?(?:[\d_]*\.?\d+|\d+\.)(?:[eE][-+]?\d+)?|[-+]?\.?(?:inf|nan))\s*(.*?)\s*", re.I)


def quantity(value: object, kind: str, *, most: float, or_zero: bool = False) -> float:
    """Return a quantity in its base unit.

    Args:
        value: A number, already in the base unit, or text with a number and, unless in the base unit, a unit.
        kind: A key of `UNITS`.
        most: Largest value that is believed.
        or_zero: Whether it may be 0.

    Raises:
        ValueError: What is allowed, as a phrase that follows "allowed is".
    """
    units = UNITS[kind]
    example = f" or text with a unit ({', '.join(list(units)[1:4] or units)})" if units else ""
    bounds = f"from 0 to {most:g}" if or_zero else f"above 0 and at most {most:g}"
    allowed = f"a number {bounds}{example}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(allowed)
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
        if match is None:
            raise ValueError(allowed)
        number, unit = float(match[1].replace("_", "")), match[2]
        if unit and unit not in units:
            raise ValueError(_about_unit(unit, kind, units))
        value = number * units[unit] if unit else number
    # Compared before it is converted: a whole number of hundreds of digits has no float.
    if not (0 < value <= most or (or_zero and value == 0)):
        raise ValueError(allowed)
    return float(value)


def _about_unit(unit: str, kind: str, units: Mapping[str, float]) -> str:
    if not units:
        return f"a plain number without a unit (not {unit!r})"
    other = next((name for name, table in UNITS.items() if unit in table), None)
    reason = f"{unit!r} is a unit of {other}" if other else f"{unit!r} is not a unit"
    near = get_close_matches(unit, units, n=3, cutoff=0.3) or list(units)[:4]
    return f"a unit of {kind} such as {', '.join(near)} ({reason})"


MOST_MACHINES = 1_000_000
"""Largest pool that is believed."""


class EntryError(ValueError):
    """One entry of a mapping is wrong; its text says what is allowed.

    Args:
        name: Name of the entry.
        value: What stands there.
        allowed: What would have been accepted.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(allowed)
        self.name, self.value = name, value


def quantity_in(kind: str, most: float) -> BeforeValidator:
    """Return what reads a quantity of a kind, a key of `units.UNITS`, above 0 and at most `most` in its base unit."""

    def read(value: object) -> float:
        return quantity(value, kind, most=most)

    return BeforeValidator(read)


def quantity_or_zero(kind: str, most: float) -> BeforeValidator:
    """Return what reads a quantity as `quantity_in` does, or 0: there is none, or nobody knows it."""

    def read(value: object) -> float:
        return quantity(value, kind, most=most, or_zero=True)

    return BeforeValidator(read)


def whole(most: int) -> BeforeValidator:
    """Return what reads a whole number from 1 to `most`."""

    def read(value: object) -> int:
        allowed = f"a whole number from 1 to {most}"
        try:
            number = quantity(value, "count", most=most)
        except ValueError as problem:
            raise ValueError(allowed) from problem
        if number != int(number):
            raise ValueError(allowed)
        return int(number)

    return BeforeValidator(read)


def _name(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 200 or not value.isprintable():
        raise ValueError("a name in plain text, in quotes where YAML would read a number")
    return value.strip()


def _role(value: object) -> Role:
    try:
        return Role(str(value))
    except ValueError:
        raise ValueError(" or ".join(Role)) from None


def _pools(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("a list of pools, each with role, count and machine")
    return value


Name = Annotated[str, BeforeValidator(_name)]
Bytes = Annotated[float, quantity_in("bytes", 1e18)]
BytesPerS = Annotated[float, quantity_in("bytes_per_s", 1e18)]
FlopsPerS = Annotated[float, quantity_in("flops_per_s", 1e21)]
Watts = Annotated[float, quantity_in("w", 1e8)]
WattsOrZero = Annotated[float, quantity_or_zero("w", 1e8)]
SecondsOrZero = Annotated[float, quantity_or_zero("s", 3_600.0)]
Count = Annotated[float, quantity_in("count", 1e16)]
Ratio = Annotated[float, quantity_in("ratio", 100.0)]


class Spec(BaseModel):
    """Fields of a file: only known ones, and they do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LinkSpec(Spec):
    """The link of a machine file: the fields of `domain.machine.Link`, all of them, as they were measured."""

    bytes_per_s: BytesPerS
    latency_s: SecondsOrZero
    per_layer_s: SecondsOrZero
    streaming_slowdown: Annotated[float, quantity_or_zero("ratio", 10.0)]


class MachineSpec(Spec):
    """A machine file: the fields of `Machine`."""

    name: Name
    accelerators: Annotated[int, whole(4096)]
    hbm_bytes: Bytes
    hbm_bytes_per_s: BytesPerS
    flops_per_s: FlopsPerS
    nic_bytes_per_s: BytesPerS
    link: LinkSpec | None = None
    provisioned_w: WattsOrZero
    idle_w: WattsOrZero
    prefill_w: WattsOrZero
    decode_w: WattsOrZero
    accelerators_limit_w: Watts = 0.0
    has_fast_links: bool = True
    price_usd_per_hour: Annotated[float, quantity_or_zero("usd_per_hour", 1e6)]
    embodied_kg_co2e: Annotated[float, quantity_or_zero("kg_co2e", 1e8)]
    lifetime_s: Annotated[float, quantity_in("s", 1e10)] = 4 * 365 * 86_400.0
    profile: Name | None = None
    prefill_time_factor: Ratio = 1.0
    decode_time_factor: Ratio = 1.0
    sources: dict[str, str] = Field(default_factory=dict)


class ModelSpec(Spec):
    """A model file: the fields of `Model`."""

    name: Name
    layers: Annotated[int, whole(10_000)]
    hidden: Annotated[int, whole(1_000_000)]
    query_heads: Annotated[int, whole(100_000)]
    kv_heads: Annotated[int, whole(100_000)]
    head_dim: Annotated[int, whole(100_000)]
    parameters: Count
    active_parameters: Count
    weights_bytes: Bytes
    value_bytes: Annotated[float, quantity_in("bytes", 8.0)] = 2.0
    experts: Annotated[int, whole(100_000)] = 1
    experts_per_token: Annotated[int, whole(100_000)] = 1
    max_context_tokens: Annotated[int, whole(100_000_000)] = 131_072
    sources: dict[str, str] = Field(default_factory=dict)


class PoolSpec(Spec):
    """One pool of a cluster file.

    Attributes:
        role: What the machines are for.
        count: How many.
        machine: Name of a machine or path of its file.
    """

    role: Annotated[Role, BeforeValidator(_role)]
    count: Annotated[int, whole(MOST_MACHINES)]
    machine: Name


class ClusterSpec(Spec):
    """A cluster file.

    Attributes:
        name: As in reports.
        model: Name of a model or path of its file.
        pools: At least one.
        rules: Settings of the scheduling rules, as they stand in the file; whoever builds the rules checks them.
        engine: What `phasesplit serve` runs; nobody else asks, so that one file can be served and simulated.
        serve: How it is served; the same.
    """

    name: Name = "cluster"
    model: Name
    pools: Annotated[tuple[PoolSpec, ...], BeforeValidator(_pools)]
    rules: dict[str, Any] = Field(default_factory=dict)
    engine: Any = Field(default=None, exclude=True)
    serve: Any = Field(default=None, exclude=True)


SpecType = TypeVar("SpecType", bound=Spec)
