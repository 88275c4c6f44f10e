"""What the simulator says of a live cluster: the same requests, rules, KV memory and link, times from a profile."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Link, Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.gateway.estimates import OutputLength
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate
from phasesplit.simulator.setup import capacity_blocks
from phasesplit.validation.comparison import FIRST, STAGES, Side, simulated_stages
from phasesplit.validation.live import KINDS

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import LinkFacts, ProfileSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What the simulator knows nothing of, measured on the idle cluster; seconds.

    Attributes:
        stages_s: Stage to what it takes longer for each request: messages, tokenizing, HTTP.
        iteration_s: What every iteration takes longer than its forward pass: forming a batch, telling of it.
        decode_s: What each token of it adds: sampling and sending it.
    """

    stages_s: Mapping[str, float]
    iteration_s: float
    decode_s: float

    @property
    def first_s(self) -> float:
        """What the first token comes later."""
        return sum(self.stages_s.get(stage, 0.0) for stage in FIRST)


NO_OVERHEADS = Overheads(stages_s={}, iteration_s=0.0, decode_s=0.0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction:
    """A simulation of a live cluster.

    Attributes:
        result: What it found.
        side: The same, to be compared.
    """

    result: Result
    side: Side


class Predictor:
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
        from phasesplit.io.profiles import measured_times, profiled_model

        self.model = profiled_model(path)
        self.names, self.roles = list(cluster.workers), list(cluster.workers.values())
        if profile.link is None and len(set(self.roles)) > 1:
            raise SpecError(f"{path}: has no link ({profile.unknown.get('link', 'not measured')})")
        self.link = None if profile.link is None else _link(profile.link)
        self.rules = replace(
            cluster.rules,
            layerwise_from_tokens=cluster.rules.layerwise_from_tokens or threshold_tokens,
            streaming_slowdown=None if self.link is None else self.link.streaming_slowdown,
        )
        self._machine = _machine(profile.machine.name, self.model, _kv_blocks(cluster, profile, self.model), self.rules)
        self.times = measured_times(path, self.model, self._machine)

    @property
    def kv_blocks(self) -> int:
        """KV blocks that each simulated worker has."""
        cluster = self._cluster(NO_OVERHEADS, 1.0)
        return capacity_blocks(cluster, cluster.pools[0], self.rules)

    def predict(
        self, trace: Trace, overheads: Overheads, core_share: float = 1.0, earlier: Iterable[int] = ()
    ) -> Prediction:
        """Return what the simulator says of a trace.

        Args:
            trace: The requests.
            overheads: What comes on top.
            core_share: What each worker has of a core, 0 to 1.
            earlier: Output tokens of what the gateway served before.
        """
        trace = as_gateways_expect(trace, earlier)
        result = simulate(self._cluster(overheads, core_share), trace, self.rules)
        return Prediction(result=result, side=self._side(result, overheads))

    def _cluster(self, overheads: Overheads, core_share: float) -> Cluster:
        times = _longer(self.times.scaled(1 / core_share, 1 / core_share), overheads)
        pools = tuple(
            Pool(role=Role(role), count=1, machine=self._machine, times=times, link=self.link) for role in self.roles
        )
        return Cluster(name="live", model=self.model, pools=pools)

    def _side(self, result: Result, overheads: Overheads) -> Side:
        columns = result.columns
        assert columns is not None  # noqa: S101 - `simulate` keeps them by default
        stages_s = simulated_stages(columns, overheads.stages_s)
        done = columns["status"] == "completed"
        pairs = [
            (self.names[int(prompt)], self.names[int(token)]) if is_done else None
            for prompt, token, is_done in zip(columns["prefill_machine"], columns["decode_machine"], done, strict=True)
        ]
        return Side(
            ttft_s=columns["ttft_s"] + overheads.first_s,
            e2e_s=np.sum([stages_s[stage] for stage in STAGES], axis=0),
            itl=result.metrics["itl_s"],
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


def _longer(times: PhaseTimes, overheads: Overheads) -> PhaseTimes:
    return replace(
        times,
        prefill_knots_s=times.prefill_knots_s + overheads.iteration_s + overheads.decode_s,
        decode_knots_s=times.decode_knots_s + overheads.iteration_s + overheads.decode_s * times.decode_knots_requests,
    )


def _link(facts: "LinkFacts") -> Link:
    return Link(
        bytes_per_s=facts.bytes_per_s,
        latency_s=facts.latency_s,
        per_layer_s=facts.per_layer_s,
        streaming_slowdown=facts.streaming_slowdown,
    )


def _kv_blocks(cluster: ServedCluster, profile: "ProfileSpec", model: Model) -> int:
    """Return the KV blocks of a worker: whole ones in its memory; vLLM says by itself how many it makes of that."""
    if cluster.vllm is not None and profile.kv is not None:
        return profile.kv.blocks
    return int(cluster.kv_bytes // (model.kv_bytes_per_token * cluster.rules.block_tokens))


def _machine(name: str, model: Model, blocks: int, rules: Rules) -> Machine:
    """Return a machine whose memory holds the weights and so many KV blocks."""
    block_bytes = model.kv_bytes_per_token * rules.block_tokens
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
        prefill_w=0.0,
        decode_w=0.0,
        price_usd_per_hour=0.0,
        embodied_kg_co2e=0.0,
    )
