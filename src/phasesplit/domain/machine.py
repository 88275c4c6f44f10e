"""A machine type: one server and what it offers, draws and costs."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from phasesplit.domain.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One server that holds one instance (replica) of the model, its accelerators used as one by tensor parallelism.

    All figures are totals over the server, not per accelerator. `domain.variants` makes slices of a server (an instance
    on some of its accelerators, all figures in proportion) and power-capped servers from it.

    Attributes:
        name: As in the command line (`dgx-h100`).
        accelerators: Number of accelerators.
        hbm_bytes: Accelerator memory.
        hbm_bytes_per_s: Accelerator memory bandwidth.
        flops_per_s: Dense 16-bit tensor operations per second.
        nic_bytes_per_s: Network bandwidth in each direction, all network cards together.
        link: The way of KV from there, as measured; None: it follows from the network cards (`domain.link.link_from`).
        provisioned_w: Power that must be provisioned for the server (nameplate, or less under a power cap).
        idle_w: Power drawn while no iteration runs.
        prompt_w: Power drawn during prompt and mixed iterations, all accelerators at their limit.
        token_w: Power drawn during decode iterations.
        accelerators_limit_w: Power limit of all accelerators together; 0 where it is not known.
        price_usd_per_hour: Rental price.
        embodied_kg_co2e: Greenhouse gases of making the server, kg CO2 equivalent.
        lifetime_s: Service life over which the embodied part is spread.
        profile: Name of the machine whose measured profile this one uses (itself, unless power-capped).
        server: Name of the whole, uncapped machine that this one is a variant of; empty where it is none.
        instances_per_server: How many of these make one server to rent: more than 1 for a slice.
        has_fast_links: Whether its accelerators are joined by links of their own (NVLink) and not by PCIe alone.
        prompt_time_factor: Factor on prefill times against that profile (a power cap or a lower clock makes it > 1).
        token_time_factor: Factor on decode times against that profile.
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
    prompt_w: float
    token_w: float
    accelerators_limit_w: float = 0.0
    price_usd_per_hour: float
    embodied_kg_co2e: float
    lifetime_s: float = 4 * 365 * 86_400.0
    profile: str = ""
    server: str = ""
    instances_per_server: int = 1
    has_fast_links: bool = True
    prompt_time_factor: float = 1.0
    token_time_factor: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def link_source(self) -> str | None:
        """Where the figures of its link come from, None where they follow from its network cards."""
        return None if self.link is None else self.sources.get("link", "as the machine's file has it")

    @property
    def profile_name(self) -> str:
        """Name of the machine whose measured profile applies."""
        return self.profile or self.server or self.name
