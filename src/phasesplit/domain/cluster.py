"""A cluster: pools of machines that serve one model."""

from dataclasses import dataclass
from enum import StrEnum

from phasesplit.domain.machine import Link, Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.errors import SpecError


class Role(StrEnum):
    """What the machines of a pool are for.

    The paper's words for the first two, "prompt" and "token", are understood wherever a role is read.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    UNSPLIT = "unsplit"

    @classmethod
    def _missing_(cls, value: object) -> "Role | None":
        return {"prompt": cls.PREFILL, "token": cls.DECODE}.get(str(value))

    @classmethod
    def parse(cls, text: object, where: str) -> "Role":
        """Return the role that a person wrote.

        Args:
            text: One of the roles, or the paper's word for one.
            where: Where it was written, for the message.

        Raises:
            SpecError: There is no such role.
        """
        try:
            return cls(str(text))
        except ValueError:
            raise SpecError.unknown(where, str(text), cls) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Machines of one type with one role.

    Attributes:
        role: What they are for.
        count: How many, >= 1.
        machine: Their type.
        times: Phase times of the cluster's model on that type.
        link: The way of KV from there, where it is not that of every machine of its type; None: the machine's.
    """

    role: Role
    count: int
    machine: Machine
    times: PhaseTimes
    link: Link | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Pools that serve one model; instances are numbered through the pools in order, one per machine.

    Attributes:
        name: As in reports.
        model: The model that every instance holds.
        pools: At least one; either all unsplit, or a way for both phases (prefill and decode machines, or mixed ones).
        reference: Phase times of the model on the machine that slowdowns compare with; None: no slowdowns.

    Raises:
        SpecError: The pools cannot serve both phases, or mix unsplit with split machines, or one is empty.
    """

    name: str
    model: Model
    pools: tuple[Pool, ...]
    reference: PhaseTimes | None = None

    def __post_init__(self) -> None:
        for pool in self.pools:
            if not isinstance(pool.count, int) or isinstance(pool.count, bool) or pool.count < 1:
                raise SpecError.bad(
                    f"pool {pool.role}:{pool.count}:{pool.machine.name}, count",
                    pool.count,
                    "a whole number of at least 1",
                )
        roles = {pool.role for pool in self.pools}
        if Role.UNSPLIT in roles and len(roles) > 1:
            raise SpecError.bad(
                "pools",
                [str(role) for role in sorted(roles)],
                "either only unsplit pools, or prefill, decode and mixed ones",
            )
        if not (roles & {Role.PREFILL, Role.MIXED, Role.UNSPLIT}):
            raise SpecError.bad(
                "pools",
                [str(role) for role in sorted(roles)],
                "at least one prefill, mixed or unsplit pool for prefill",
            )
        if not (roles & {Role.DECODE, Role.MIXED, Role.UNSPLIT}):
            raise SpecError.bad(
                "pools",
                [str(role) for role in sorted(roles)],
                "at least one decode, mixed or unsplit pool for decode",
            )

    @property
    def machines(self) -> int:
        """Number of machines over all pools."""
        return sum(pool.count for pool in self.pools)

    @property
    def split(self) -> bool:
        """Whether prefill and decode may run on different machines."""
        return all(pool.role != Role.UNSPLIT for pool in self.pools)
