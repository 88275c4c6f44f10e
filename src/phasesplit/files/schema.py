"""What a machine, model or cluster file may hold, checked by pydantic. Imported only when a file is read."""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from phasesplit.domain.cluster import Role
from phasesplit.files.units import quantity

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
    """The link of a machine file: the fields of `domain.link.Link`, all of them, as they were measured."""

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
    prompt_w: WattsOrZero
    token_w: WattsOrZero
    accelerators_limit_w: Watts = 0.0
    has_fast_links: bool = True
    price_usd_per_hour: Annotated[float, quantity_or_zero("usd_per_hour", 1e6)]
    embodied_kg_co2e: Annotated[float, quantity_or_zero("kg_co2e", 1e8)]
    lifetime_s: Annotated[float, quantity_in("s", 1e10)] = 4 * 365 * 86_400.0
    profile: Name | None = None
    prompt_time_factor: Ratio = 1.0
    token_time_factor: Ratio = 1.0
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
