"""Clusters and traces small enough to work out by hand, without any file."""

import numpy as np

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace

KV_BYTES_PER_TOKEN = 1_000_000
"""KV bytes of one token of `tiny_cluster`'s model: 2 x 2 bytes x 4 layers x 1 head x 62,500 wide."""
LAYERS = 4
"""Layers of `tiny_cluster`'s model."""

_FAR_TOKENS = 1e6
_FAR_REQUESTS = 4_096.0


def tiny_cluster(
    *pools: tuple[str, int],
    prefill_s_per_token: float = 1e-3,
    prefill_base_s: float = 0.0,
    prefill_pair_s: float = 0.0,
    decode_s: float = 0.1,
    decode_s_per_request: float = 0.0,
    decode_context_s: float = 0.0,
    capacity_tokens: int = 100_000,
    hbm_share: float = 0.9,
    nic_bytes_per_s: float = 1e9,
) -> Cluster:
    """Return a cluster of equal machines whose phase times are straight lines.

    An iteration with B prompt tokens takes `prefill_base_s + prefill_s_per_token x B`, one with n requests in decode
    phase `decode_s + decode_s_per_request x n`; `domain.profile.PhaseTimes` says what the other two terms add.

    Args:
        pools: Role and number of machines of each pool ("prefill", 2); by default one prompt and one decode machine.
        prefill_s_per_token: Seconds, > 0.
        prefill_base_s: Seconds, >= 0.
        prefill_pair_s: Seconds for each pair of a prompt token and a token it attends to, >= 0.
        decode_s: Seconds, > 0.
        decode_s_per_request: Seconds, >= 0.
        decode_context_s: Seconds for each token of context, >= 0.
        capacity_tokens: Tokens of KV that a machine holds under rules with this `hbm_share`, and half a token more.
        hbm_share: As in `Rules.hbm_share`: 0.9 by default, 1 under the published rules.
        nic_bytes_per_s: Network bandwidth of a machine in each direction, > 0.
    """
    model = Model(
        name="tiny",
        layers=LAYERS,
        hidden=62_500,
        query_heads=1,
        kv_heads=1,
        head_dim=62_500,
        parameters=1.0,
        active_parameters=1.0,
        weights_bytes=0.0,
    )
    machine = Machine(
        name="tiny",
        accelerators=1,
        hbm_bytes=(capacity_tokens + 0.5) * KV_BYTES_PER_TOKEN / hbm_share,
        hbm_bytes_per_s=1e12,
        flops_per_s=1e12,
        nic_bytes_per_s=nic_bytes_per_s,
        provisioned_w=400.0,
        idle_w=100.0,
        prefill_w=300.0,
        decode_w=200.0,
        price_usd_per_hour=1.0,
        embodied_kg_co2e=1.0,
    )
    times = PhaseTimes(
        source="made up for a test",
        prefill_knots_tokens=np.array([0.0, _FAR_TOKENS]),
        prefill_knots_s=prefill_base_s + prefill_s_per_token * np.array([0.0, _FAR_TOKENS]),
        decode_knots_requests=np.array([0.0, _FAR_REQUESTS]),
        decode_knots_s=decode_s + decode_s_per_request * np.array([0.0, _FAR_REQUESTS]),
        prefill_pair_s=prefill_pair_s,
        decode_context_s=decode_context_s,
        measured_prompt_tokens=_FAR_TOKENS,
        measured_requests=_FAR_REQUESTS,
        mean_error=0.0,
    )
    return Cluster(
        name="tiny",
        model=model,
        pools=tuple(
            Pool(role=Role(role), count=count, machine=machine, times=times)
            for role, count in pools or (("prefill", 1), ("decode", 1))
        ),
        reference=times,
    )


def tiny_trace(*requests: tuple[float, int, int], oracle: bool = False, name: str = "tiny") -> Trace:
    """Return a trace of a few requests.

    Args:
        requests: Arrival in seconds, prompt tokens and output tokens of each, in order of arrival.
        oracle: Let the rules see the true output lengths, not their mean.
        name: As in reports.

    Raises:
        SpecError: A value is not allowed, or the arrivals go back in time.
    """
    arrival_s, prompt_tokens, output_tokens = zip(*requests, strict=True) if requests else ((), (), ())
    return Trace.from_columns(
        name,
        np.array(arrival_s, np.float64),
        np.array(prompt_tokens, np.int32),
        np.array(output_tokens, np.int32),
        oracle=oracle,
    )
