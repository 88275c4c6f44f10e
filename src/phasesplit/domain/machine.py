"""A machine type: one server, what it offers, draws and costs, and how it moves and holds KV caches.

- `Machine` and its network: `Link`, the time of a KV transfer, and how much of it the user waits for.
- Machines derived from a machine: an instance on part of its accelerators, a power cap, other network cards.
- KV memory: the size of a KV cache, and how much KV an instance holds next to the weights.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.model import Model
from phasesplit.errors import SpecError

Floats = NDArray[np.float64]

HANDSHAKE_S = 0.5e-3
"""Before the first and after the last byte: agree on blocks, signal completion. Source: assumed."""

STREAMING_SLOWDOWN = 0.189
"""Share of the streaming time by which prefill computes longer while its KV cache streams out.

Source: arXiv 2507.03114: 18.9 % on average, 40 % at worst.
"""

_MEASURED_LAYERS = 75
_EXPOSED_BASE_S = 2e-3
_EXPOSED_BYTES = 1.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way of KV from a machine, all network cards of a machine used as one.

    Between machines of two types the smaller bandwidth counts, and of all else the sender's: it sends, and chooses how.

    Attributes:
        bytes_per_s: Bandwidth in one direction, > 0.
        latency_s: Fixed time of any transfer, >= 0.
        per_layer_s: Time that each layer adds to a layer-wise transfer and that no computing hides, >= 0.
        streaming_slowdown: Share of the streaming time by which a layer-wise transfer makes prefill longer.
    """

    bytes_per_s: float
    latency_s: float = HANDSHAKE_S
    per_layer_s: float = 0.0
    streaming_slowdown: float = STREAMING_SLOWDOWN

    def scaled(self, factor: float) -> "Link":
        """Return a link with so many times the bandwidth; its fixed times and its slowdown stay."""
        return replace(self, bytes_per_s=self.bytes_per_s * factor)


def link_from(machine: "Machine") -> Link:
    """Return the way of KV from machines of a type: as it was measured, else as it follows from their network cards.

    The time exposed after overlap that the paper measured does not depend on the prompt's size: 8 ms over 8 x 200 Gb/s
    and 5 ms over 8 x 400 Gb/s. The straight line in 1 / bandwidth through both (2 ms + 1.2 GB / bandwidth), less the
    handshake, is spread over the 75 layers that its two models have on average.

    Source: Splitwise section VI (exposed times); the line through them: ours.
    """
    if machine.link is not None:
        return machine.link
    exposed_s = _EXPOSED_BASE_S + _EXPOSED_BYTES / machine.nic_bytes_per_s
    return Link(bytes_per_s=machine.nic_bytes_per_s, per_layer_s=(exposed_s - HANDSHAKE_S) / _MEASURED_LAYERS)


def serialized_time_s(kv_bytes: ArrayLike, bytes_per_s: float, latency_s: float = 0.0) -> Floats:
    """Return the time of a transfer that starts when prefill ends: all of it is exposed.

    Args:
        kv_bytes: Bytes to move, any shape, >= 0.
        bytes_per_s: Bandwidth, > 0.
        latency_s: Fixed part, >= 0.
    """
    return latency_s + np.asarray(kv_bytes, dtype=np.float64) / bytes_per_s


def layerwise_exposed_s(
    kv_bytes: ArrayLike, layers: int, prefill_s: ArrayLike, bytes_per_s: float, latency_s: float = 0.0
) -> Floats:
    """Return what is left of a layer-wise transfer when prefill ends.

    Each layer's KV cache leaves when the layer is computed. A link that keeps up has only the last layer left. One
    that does not has been busy since the end of the first layer: left is the whole transfer less that time.

    Args:
        kv_bytes: Bytes to move, >= 0.
        layers: Layers of the model, >= 1, equal in bytes and time.
        prefill_s: Time of prefill, >= 0; broadcasts with `kv_bytes`.
        bytes_per_s: Bandwidth, > 0.
        latency_s: Fixed part, >= 0.

    Source: Splitwise section IV (layer-wise transfer); the two cases follow from a first-in-first-out link.
    """
    whole_s = np.asarray(kv_bytes, dtype=np.float64) / bytes_per_s
    overlapped_s = np.asarray(prefill_s, dtype=np.float64) * (layers - 1) / layers
    return latency_s + np.maximum(whole_s / layers, whole_s - overlapped_s)


def layerwise_slowdown_s(kv_bytes: ArrayLike, prefill_s: ArrayLike, link: Link) -> Floats:
    """Return by how much streaming makes prefill longer: a share of the time in which both go on."""
    whole_s = np.asarray(kv_bytes, dtype=np.float64) / link.bytes_per_s
    return link.streaming_slowdown * np.minimum(whole_s, np.asarray(prefill_s, dtype=np.float64))


def layerwise_delay_s(kv_bytes: ArrayLike, layers: int, prefill_s: ArrayLike, link: Link) -> Floats:
    """Return by how much a layer-wise transfer delays the second token: slowdown, cost per layer, exposed rest."""
    slowdown_s = layerwise_slowdown_s(kv_bytes, prefill_s, link)
    streaming_s = np.asarray(prefill_s, dtype=np.float64) + slowdown_s
    exposed_s = layerwise_exposed_s(kv_bytes, layers, streaming_s, link.bytes_per_s, link.latency_s)
    return slowdown_s + layers * link.per_layer_s + exposed_s


def layerwise_threshold_tokens(
    model: Model,
    prefill_time_s: Callable[[Floats], Floats],
    link: Link,
    *,
    kv_bytes_per_token: float | None = None,
    limit_tokens: int = 131_072,
) -> int:
    """Return the smallest prompt whose second token comes sooner with a layer-wise than with a serialized transfer.

    Between DGX H100 this gives 526 tokens for BLOOM-176B, where the paper switches at 512; for Llama2-70B 918 with the
    published KV size and 7,338 with the true one, which is 8 times smaller: its serialized transfers stay short.

    Args:
        model: The model.
        prefill_time_s: Prompt tokens, float64 (n,), to the time of prefill (`PhaseTimes.prefill_time_s`).
        link: The link.
        kv_bytes_per_token: By default the model's.
        limit_tokens: Largest prompt looked at, returned plus 1 where none is better.

    Source: the choice by size is Splitwise section IV; choosing by the second token's delay: ours.
    """

    def first_better(tokens: Floats) -> int:
        kv_bytes = tokens * (kv_bytes_per_token or model.kv_bytes_per_token)
        layerwise_s = layerwise_delay_s(kv_bytes, model.layers, prefill_time_s(tokens), link)
        better = layerwise_s < serialized_time_s(kv_bytes, link.bytes_per_s, link.latency_s)
        return int(np.argmax(better)) if better.any() else -1

    # A coarse look finds the interval, a fine one the prompt: a hundred times fewer points than all prompts.
    coarse = np.unique(np.geomspace(1, limit_tokens, 400).round())
    found = first_better(coarse)
    if found <= 0:
        return limit_tokens + 1 if found < 0 else 1
    fine = np.arange(coarse[found - 1] + 1, coarse[found] + 1)
    return int(fine[first_better(fine)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One server that holds one instance (replica) of the model, its accelerators used as one by tensor parallelism.

    All figures are totals over the server, not per accelerator. `domain.machine` makes slices of a server (an instance
    on some of its accelerators, all figures in proportion) and power-capped servers from it.

    Attributes:
        name: As in the command line (`dgx-h100`).
        accelerators: Number of accelerators.
        hbm_bytes: Accelerator memory.
        hbm_bytes_per_s: Accelerator memory bandwidth.
        flops_per_s: Dense 16-bit tensor operations per second.
        nic_bytes_per_s: Network bandwidth in each direction, all network cards together.
        link: The way of KV from there, as measured; None: it follows from the network cards (`link_from`).
        provisioned_w: Power that must be provisioned for the server (nameplate, or less under a power cap).
        idle_w: Power drawn while no iteration runs.
        prefill_w: Power drawn during prefill and mixed iterations, all accelerators at their limit.
        decode_w: Power drawn during decode iterations.
        accelerators_limit_w: Power limit of all accelerators together; 0 where it is not known.
        price_usd_per_hour: Rental price.
        embodied_kg_co2e: Greenhouse gases of making the server, kg CO2 equivalent.
        lifetime_s: Service life over which the embodied part is spread.
        profile: Name of the machine whose measured profile this one uses (itself, unless power-capped).
        server: Name of the whole, uncapped machine that this one is a variant of; empty where it is none.
        instances_per_server: How many of these make one server to rent: more than 1 for a slice.
        has_fast_links: Whether its accelerators are joined by links of their own (NVLink) and not by PCIe alone.
        prefill_time_factor: Factor on prefill times against that profile (a power cap or a lower clock makes it > 1).
        decode_time_factor: Factor on decode times against that profile.
        sources: Field name to where its figure comes from.
    """

    name: str
    accelerators: int
    hbm_bytes: float
    hbm_bytes_per_s: float
    flops_per_s: float
    nic_bytes_per_s: float
    link: Link | None = None
    provisioned_w: float
    idle_w: float
    prefill_w: float
    decode_w: float
    accelerators_limit_w: float = 0.0
    price_usd_per_hour: float
    embodied_kg_co2e: float
    lifetime_s: float = 4 * 365 * 86_400.0
    profile: str = ""
    server: str = ""
    instances_per_server: int = 1
    has_fast_links: bool = True
    prefill_time_factor: float = 1.0
    decode_time_factor: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def link_source(self) -> str | None:
        """Where the figures of its link come from, None where they follow from its network cards."""
        return None if self.link is None else self.sources.get("link", "as the machine's file has it")

    @property
    def profile_name(self) -> str:
        """Name of the machine whose measured profile applies."""
        return self.profile or self.server or self.name


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
    "hbm_bytes", "hbm_bytes_per_s", "flops_per_s", "nic_bytes_per_s", "provisioned_w", "idle_w", "prefill_w",
    "decode_w", "accelerators_limit_w", "price_usd_per_hour", "embodied_kg_co2e",
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
    host_w = machine.prefill_w - limit_w
    decode_draw_w = machine.decode_w - host_w
    return replace(
        machine,
        name=f"{machine.name}@{100 * share:g}%",
        server=machine.server or machine.name,
        accelerators_limit_w=cap_w,
        provisioned_w=machine.provisioned_w - PROVISIONED_W_PER_CAPPED_W * (limit_w - cap_w),
        prefill_w=host_w + cap_w,
        decode_w=host_w + min(decode_draw_w, cap_w),
        prefill_time_factor=machine.prefill_time_factor * _slower(limit_w, cap_w),
        decode_time_factor=machine.decode_time_factor * _slower(decode_draw_w, cap_w),
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


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Return the KV blocks that hold so many tokens; the last one may be partly used.

    Args:
        tokens: Tokens, >= 0.
        block_tokens: Tokens of a block, >= 1.
    """
    return -(-tokens // block_tokens)


def kv_capacity_bytes(model: Model, machine: Machine, *, reserved_share: float = 0.0) -> float:
    """Return the memory left for KV cache on an instance: all memory less a reserve and the weights, never below 0.

    Args:
        model: The model.
        machine: The machine.
        reserved_share: Share of the memory kept for activations and the runtime, from 0 (as the published simulator
            has it) to 1; serving engines keep about 0.1.
    """
    return max(machine.hbm_bytes * (1.0 - reserved_share) - model.weights_bytes, 0.0)


def published_kv_bytes_per_token(model: Model) -> float:
    """Return the KV bytes of one token as the published simulator counts them, grouped-query attention ignored.

    2 x bytes per value x layers x hidden: 8 times too much for Llama2-70B, right for BLOOM-176B.

    Source: the published simulator's model description.
    """
    return 2 * model.value_bytes * model.layers * model.hidden
