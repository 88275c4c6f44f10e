"""What the simulator says of a live cluster: the same requests, rules, KV memory and link, times from a profile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.link import Link, layerwise_exposed_s, serialized_time_s
from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.files.serve_files import ServedCluster
from phasesplit.gateway.estimates import OutputLength
from phasesplit.measuring.comparison import Side
from phasesplit.measuring.cores import shared_factors
from phasesplit.measuring.pool_moves import KINDS
from phasesplit.measuring.stages import FIRST, STAGES, simulated_stages
from phasesplit.scheduling.rules import Rules
from phasesplit.simulation.result import Result
from phasesplit.simulation.run import simulate
from phasesplit.simulation.setup import capacity_blocks

if TYPE_CHECKING:
    from phasesplit.files.profile_schema import LinkFacts, ProfileSpec

_ROUNDS = 4
"""Simulations until the shares of a core settle."""
_BUSIEST = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What the simulator knows nothing of, measured on the idle cluster; seconds.

    Attributes:
        stages_s: Stage to what it takes longer for each request: messages, tokenizing, HTTP.
        iteration_s: What every iteration takes longer than its forward pass: forming a batch, telling of it.
        token_s: What each token of it adds: sampling and sending it.
    """

    stages_s: Mapping[str, float]
    iteration_s: float
    token_s: float

    @property
    def first_s(self) -> float:
        """What the first token comes later."""
        return sum(self.stages_s.get(stage, 0.0) for stage in FIRST)


NO_OVERHEADS = Overheads(stages_s={}, iteration_s=0.0, token_s=0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """A simulation of a live cluster.

    Attributes:
        result: What it found.
        side: The same, to be compared.
        factors: Worker to how much longer its iterations take because it shares its core.
    """

    result: Result
    side: Side
    factors: Mapping[str, float]


class Twin:
    """A live cluster as the simulator has it: a pool for each worker, in the order of the gateway's.

    Args:
        cluster: The cluster.
        profile: The machine's profile.
        path: Where that is.
        threshold_tokens: Shortest prompt that workers send layer by layer; None: as the profile's link says.

    Attributes:
        names: The workers.
        rules: The rules.

    Raises:
        SpecError: The profile does not have what it takes.
    """

    def __init__(
        self, cluster: ServedCluster, profile: "ProfileSpec", path: Path, *, threshold_tokens: int | None = None
    ) -> None:
        from phasesplit.files.profile_files import measured_times, profiled_model

        self.model = profiled_model(path)
        self.roles = [role for role, count in cluster.pools.items() for _ in range(count)]
        self.names = [f"{role}-{number}" for role, count in cluster.pools.items() for number in range(count)]
        if profile.link is None and len(set(self.roles)) > 1:
            raise SpecError(f"{path}: tells nothing of the link ({profile.unknown.get('link', 'not measured')})")
        self.link = None if profile.link is None else _link(profile.link)
        self.rules = replace(
            cluster.rules,
            layerwise_from_tokens=cluster.rules.layerwise_from_tokens or threshold_tokens,
            streaming_slowdown=None if self.link is None else self.link.streaming_slowdown,
        )
        self._machine = _machine(profile.machine.name, self.model, cluster.kv_bytes, self.rules)
        self.times = measured_times(path, self.model, self._machine)

    @property
    def kv_blocks(self) -> int:
        """KV blocks that each simulated worker has."""
        cluster = self._cluster(NO_OVERHEADS, dict.fromkeys(self.names, 1.0))
        return capacity_blocks(cluster, cluster.pools[0], self.rules)

    def machine(self, nic_bytes_per_s: float) -> Machine:
        """Return a worker as the simulator has it, its link with that bandwidth."""
        return replace(self._machine, nic_bytes_per_s=nic_bytes_per_s)

    def predict(
        self, trace: Trace, overheads: Overheads, plan: Mapping[str, int], earlier: Iterable[int] = ()
    ) -> Prediction:
        """Return what the simulator says of a trace.

        Args:
            trace: The requests.
            overheads: What comes on top.
            plan: Worker to its core: those on one core slow each other.
            earlier: Output tokens of what the gateway served before.
        """
        trace = as_gateways_expect(trace, earlier)
        if self.link is not None:
            self._machine = self.machine(equivalent_bytes_per_s(self.link, self.model, self.times, trace, self.rules))
        factors = dict.fromkeys(self.names, 1.0)
        for _ in range(_ROUNDS):
            result = simulate(self._cluster(overheads, factors), trace, self.rules)
            busy = {name: min(pool.busy_share, _BUSIEST) for name, pool in zip(self.names, result.pools, strict=True)}
            wanted = shared_factors(plan, busy)
            if all(abs(wanted[name] - factors[name]) < 0.01 for name in self.names):
                break
            factors = {name: (wanted[name] + factors[name]) / 2 for name in self.names}
        return Prediction(result=result, side=self._side(result, overheads), factors=factors)

    def _cluster(self, overheads: Overheads, factors: Mapping[str, float]) -> Cluster:
        pools = tuple(
            Pool(role=Role(role), count=1, machine=self._machine, times=_slower(self.times, overheads, factors[name]))
            for role, name in zip(self.roles, self.names, strict=True)
        )
        return Cluster(name="live", model=self.model, pools=pools)

    def _side(self, result: Result, overheads: Overheads) -> Side:
        columns = result.columns
        assert columns is not None  # noqa: S101 - `simulate` keeps them by default
        stages_s = simulated_stages(columns, overheads.stages_s)
        done = columns["status"] == "completed"
        pairs = [
            (self.names[int(prompt)], self.names[int(token)]) if is_done else None
            for prompt, token, is_done in zip(columns["prompt_instance"], columns["token_instance"], done, strict=True)
        ]
        return Side(
            ttft_s=columns["ttft_s"] + overheads.first_s,
            e2e_s=np.sum([stages_s[stage] for stage in STAGES], axis=0),
            tbt=result.metrics["tbt_s"],
            stages_s=stages_s,
            pairs=pairs,
            wall_s=result.end_s - result.first_arrival_s,
            output_tokens=result.output_tokens,
            busy={name: pool.busy_share for name, pool in zip(self.names, result.pools, strict=True)},
            moves={kind: result.counts[kind] for kind in KINDS},
        )


def as_gateways_expect(trace: Trace, earlier: Iterable[int] = ()) -> Trace:
    """Return a trace whose rules expect what a gateway would: the running mean of the outputs so far, or the limit.

    A replay asks for exactly as many tokens as the trace has, so an expectation is never above the true length.
    Outputs are taken to end in the order in which they began.

    Args:
        trace: The requests.
        earlier: Output tokens of what the gateway served before.
    """
    lengths, expected = OutputLength(), np.empty(len(trace), np.int32)
    for tokens in earlier:
        lengths.add(tokens)
    for row, tokens in enumerate(trace.output_tokens.tolist()):
        expected[row] = lengths.expected(tokens)
        lengths.add(tokens)
    return replace(trace, expected_tokens=expected)


def equivalent_bytes_per_s(link: Link, model: Model, times: PhaseTimes, trace: Trace, rules: Rules) -> float:
    """Return the bandwidth with which the simulator's link exposes as much of the trace's transfers as the real one.

    The simulator takes the costs of a transfer other than its bytes from the bandwidth, by the paper's measurements
    between servers. Shared memory within a host has other costs; only their sum over the trace is kept.

    Args:
        link: The link as measured.
        model: The model.
        times: Its phase times.
        trace: The requests.
        rules: The rules.
    """
    from phasesplit.domain.link import link_between

    tokens = trace.prompt_tokens.astype(np.float64)
    size, prompt_s = tokens * model.kv_bytes_per_token, times.prompt_time_s(tokens)
    layerwise = tokens >= (rules.layerwise_from_tokens or 0)

    def exposed_s(one: Link) -> float:
        streamed = layerwise_exposed_s(size, model.layers, prompt_s, one.bytes_per_s, one.latency_s)
        whole = serialized_time_s(size, one.bytes_per_s, one.latency_s)
        return float(np.where(layerwise, streamed + one.per_layer_s * model.layers, whole).sum())

    wanted_s = exposed_s(link)
    machine = _machine("link", model, model.kv_bytes_per_token * rules.block_tokens, rules)
    tried = np.geomspace(link.bytes_per_s, 1e4 * link.bytes_per_s, 200)
    found = [
        exposed_s(link_between(one, one)) for one in (replace(machine, nic_bytes_per_s=float(rate)) for rate in tried)
    ]
    return float(tried[int(np.argmin(np.abs(np.array(found) - wanted_s)))])


def _slower(times: PhaseTimes, overheads: Overheads, factor: float) -> PhaseTimes:
    longer = replace(
        times,
        prompt_knots_s=times.prompt_knots_s + overheads.iteration_s + overheads.token_s,
        token_knots_s=times.token_knots_s + overheads.iteration_s + overheads.token_s * times.token_knots_requests,
    )
    return longer.scaled(factor, factor)


def _link(facts: "LinkFacts") -> Link:
    return Link(
        bytes_per_s=facts.bytes_per_s,
        latency_s=facts.latency_s,
        per_layer_s=facts.per_layer_s,
        streaming_slowdown=facts.streaming_slowdown,
    )


def _machine(name: str, model: Model, kv_bytes: float, rules: Rules) -> Machine:
    """Return a machine whose memory holds the weights and so many bytes of whole KV blocks."""
    block_bytes = model.kv_bytes_per_token * rules.block_tokens
    blocks = int(kv_bytes // block_bytes)
    # Half a block more than the blocks: no rounding may take one away.
    return Machine(
        name=name,
        accelerators=1,
        hbm_bytes=(model.weights_bytes + (blocks + 0.5) * block_bytes) / rules.hbm_share,
        hbm_bytes_per_s=1.0,
        flops_per_s=1.0,
        nic_bytes_per_s=1.0,
        provisioned_w=0.0,
        idle_w=0.0,
        prompt_w=0.0,
        token_w=0.0,
        price_usd_per_hour=0.0,
        embodied_kg_co2e=0.0,
    )
