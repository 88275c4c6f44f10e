"""Machines derived from a machine: an instance on part of its accelerators, a power cap, other network cards."""

import math
import re
from dataclasses import replace

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.errors import SpecError

CAP_EXPONENT = math.log2(1.30)
"""Time of a phase grows as (draw / cap) to this power where a cap binds.

Source: the one figure known, prompts 1.30 times as long on an H100 at half its limit (published Splitwise simulator,
assumed there, not measured); the form is ours. Dynamic power that grows with the cube of the clock gives 1/3.
"""

PROVISIONED_W_PER_CAPPED_W = 0.3 * 10_200 / 2_800
"""Watts less to provision for each watt taken from the accelerators' limit: 1.09, the rest being losses and fans.

Source: 7,140 W in place of 10,200 W for eight H100 at 350 W in place of 700 W (published Splitwise simulator).
"""

LEAST_CAP, LARGEST_CAP = 0.2, 1.0
"""Power caps that are believed, as shares of the accelerators' limit."""

FITTING_SHARE = 0.9
"""Share of the memory that weights and KV cache may take up together, as by default in the scheduling rules."""

VARIANTS = "NAME, NAME/tp4, NAME@50% or NAME/tp4@50%"
"""Forms of a machine's name that `split_name` knows."""

_NAME = re.compile(r"(?P<base>.+?)(?P<slice>/tp(?P<tensor_parallel>\d{1,6}))?(?P<cap>@(?P<percent>\d{1,6}(\.\d+)?)%)?")
_FIGURES = (
    "hbm_bytes", "hbm_bytes_per_s", "flops_per_s", "nic_bytes_per_s", "provisioned_w", "idle_w", "prompt_w", "token_w",
    "accelerators_limit_w", "price_usd_per_hour", "embodied_kg_co2e",
)  # fmt: skip


def sliced(machine: Machine, tensor_parallel: int) -> Machine:
    """Return an instance on part of a server: so many of its accelerators, every figure in proportion.

    Args:
        machine: The server.
        tensor_parallel: Accelerators of the instance; a divisor of the server's. All of them: the server itself.

    Raises:
        SpecError: It is not a divisor.
    """
    if tensor_parallel not in tensor_parallel_degrees(machine):
        degrees = [str(degree) for degree in tensor_parallel_degrees(machine)]
        allowed = " or ".join(filter(None, [", ".join(degrees[:-1]), degrees[-1]]))
        raise SpecError.bad(f"machine {machine.name}, tensor parallelism", tensor_parallel, allowed)
    if tensor_parallel == machine.accelerators:
        return machine
    slices = machine.accelerators // tensor_parallel
    return replace(
        machine,
        name=f"{machine.name}/tp{tensor_parallel}",
        accelerators=tensor_parallel,
        server=machine.server or machine.name,
        instances_per_server=machine.instances_per_server * slices,
        link=None if machine.link is None else machine.link.scaled(1 / slices),
        **{figure: getattr(machine, figure) / slices for figure in _FIGURES},
    )


def tensor_parallel_degrees(machine: Machine) -> list[int]:
    """Return the numbers of accelerators that divide a server evenly, increasing."""
    return [degree for degree in range(1, machine.accelerators + 1) if machine.accelerators % degree == 0]


def capped(machine: Machine, share: float) -> Machine:
    """Return a machine whose accelerators' power is limited to a share of their limit.

    Less power must be provisioned. In a phase whose accelerators would draw more than the cap they draw the cap, and
    take longer; elsewhere the cap costs no time and saves no energy.

    Args:
        machine: The machine; `accelerators_limit_w` must be known.
        share: From LEAST_CAP to LARGEST_CAP; 1 is the machine itself.

    Raises:
        SpecError: The share is not allowed, or the accelerators' limit is not known.
    """
    if not LEAST_CAP <= share <= LARGEST_CAP:
        allowed = f"{LEAST_CAP:.0%} to {LARGEST_CAP:.0%} of the accelerators' limit"
        raise SpecError.bad(f"machine {machine.name}, power cap", f"{100 * share:g}%", allowed)
    if not machine.accelerators_limit_w:
        raise SpecError(f"machine {machine.name}, accelerators_limit_w: missing, a power cap is a share of it")
    if share == LARGEST_CAP:
        return machine
    limit_w = machine.accelerators_limit_w
    cap_w = share * limit_w
    # In prefill the accelerators are at their limit; what is left is the host's.
    host_w = machine.prompt_w - limit_w
    token_draw_w = machine.token_w - host_w
    return replace(
        machine,
        name=f"{machine.name}@{100 * share:g}%",
        server=machine.server or machine.name,
        accelerators_limit_w=cap_w,
        provisioned_w=machine.provisioned_w - PROVISIONED_W_PER_CAPPED_W * (limit_w - cap_w),
        prompt_w=host_w + cap_w,
        token_w=host_w + min(token_draw_w, cap_w),
        prompt_time_factor=machine.prompt_time_factor * _slower(limit_w, cap_w),
        token_time_factor=machine.token_time_factor * _slower(token_draw_w, cap_w),
    )


def _slower(draw_w: float, cap_w: float) -> float:
    return (draw_w / cap_w) ** CAP_EXPONENT if draw_w > cap_w else 1.0


def networked(machine: Machine, factor: float) -> Machine:
    """Return a machine with so many times the bandwidth of its network cards and of its link, where that was measured.

    Args:
        machine: The machine.
        factor: Above 0; what was measured of the link besides its bandwidth stays.
    """
    link = None if machine.link is None else machine.link.scaled(factor)
    return replace(machine, nic_bytes_per_s=machine.nic_bytes_per_s * factor, link=link)


def split_name(name: str) -> tuple[str, str]:
    """Return the machine's own name and the variant's ending: `dgx-h100/tp4@50%` -> `dgx-h100`, `/tp4@50%`."""
    found = _NAME.fullmatch(name)
    base = found["base"] if found else name
    return base, name[len(base) :]


def variant(machine: Machine, ending: str) -> Machine:
    """Return the variant of a machine that the ending of a name asks for.

    Args:
        machine: The machine.
        ending: As `split_name` returns it; may be empty.

    Raises:
        SpecError: The ending is none, or asks for a degree or a cap that is not allowed.
    """
    found = _NAME.fullmatch(f"x{ending}")
    if not found or found["base"] != "x":
        raise SpecError.bad("machine", machine.name + ending, VARIANTS)
    part = sliced(machine, int(found["tensor_parallel"])) if found["slice"] else machine
    return capped(part, float(found["percent"]) / 100) if found["cap"] else part


def fitting_degree(model: Model, machine: Machine) -> int | None:
    """Return the fewest of a server's accelerators whose memory holds a model, None where all of them do not.

    Args:
        model: The model; its weights may take up FITTING_SHARE of the memory.
        machine: The server, or a slice of one.
    """
    needed_bytes = model.weights_bytes * machine.accelerators / FITTING_SHARE
    server = replace(machine, accelerators=machine.accelerators * machine.instances_per_server)
    return next((many for many in tensor_parallel_degrees(server) if many * machine.hbm_bytes > needed_bytes), None)
