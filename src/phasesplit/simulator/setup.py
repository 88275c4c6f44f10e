"""A cluster and its rules as the columns that the kernel runs on."""

from dataclasses import dataclass, replace

import numpy as np

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.latency import BINS_PER_OCTAVE, OCTAVES
from phasesplit.domain.machine import (
    Link,
    blocks_for,
    kv_capacity_bytes,
    layerwise_threshold_tokens,
    link_from,
    published_kv_bytes_per_token,
)
from phasesplit.errors import SpecError
from phasesplit.scheduler.ledger import DECODE, MIXED, POOLS, PREFILL, UNSPLIT, Ledger, empty_ledger, with_slots
from phasesplit.scheduler.pools import open_pools
from phasesplit.scheduler.rules import Rules, Transfer
from phasesplit.simulator.events import empty_future
from phasesplit.simulator.published_events import HORIZON_S
from phasesplit.simulator.world import CLOCK, DECODE_S, DONE, KINDS, KNOT_S, KNOT_TOKENS, SAMPLE_FIELDS, World

HOMES = {Role.PREFILL: PREFILL, Role.DECODE: DECODE, Role.MIXED: MIXED, Role.UNSPLIT: UNSPLIT}
"""The number of each role in the ledger."""

SAMPLES = 512
"""Samples of the timeline at most; an even number."""
_FIRST_SLOTS = 2_048


@dataclass(frozen=True, slots=True)
class RunState:
    """The columns of one run.

    Attributes:
        ledger: The scheduler's.
        world: The simulator's.
    """

    ledger: Ledger
    world: World


def build_state(cluster: Cluster, rules: Rules, *, done_rows: int, sample_every_s: float, start_s: float) -> RunState:
    """Return the state of a run that has not begun.

    Args:
        cluster: The cluster.
        rules: The scheduler's settings.
        done_rows: Room for records of ended requests, > rules.batch_requests + 1.
        sample_every_s: First spacing of the timeline, > 0.
        start_s: Time of the first arrival.

    Raises:
        SpecError: The model leaves no room for KV on one of the machines.
    """
    kinds = np.repeat(np.arange(len(cluster.pools)), [pool.count for pool in cluster.pools])
    homes = np.array([HOMES[pool.role] for pool in cluster.pools], np.int32)
    blocks = np.array([capacity_blocks(cluster, pool, rules) for pool in cluster.pools], np.int64)
    ledger = empty_ledger(rules, homes[kinds], kinds.astype(np.int32), blocks[kinds])
    # A request's check adds one token, for the KV of the last one.
    longest = blocks_for(cluster.model.max_context_tokens + 1, rules.block_tokens)
    ledger.settings["most_blocks"] = min(int(blocks.min()), longest)
    ledger = with_slots(ledger, _FIRST_SLOTS)
    open_pools(ledger)
    world = _world(cluster, rules, cluster.machines + _FIRST_SLOTS, done_rows)
    world.clock["pending_slot"] = -1
    world.clock["sample_every_s"] = sample_every_s
    world.clock["next_sample_s"] = start_s + sample_every_s
    world.clock["pause_at_s"] = np.inf
    world.clock["horizon_s"] = HORIZON_S if rules.published else np.inf
    return RunState(ledger, world)


def kv_bytes_per_token(cluster: Cluster, rules: Rules) -> float:
    """Return the KV bytes of one token under these rules."""
    return published_kv_bytes_per_token(cluster.model) if rules.published else cluster.model.kv_bytes_per_token


def capacity_blocks(cluster: Cluster, pool: Pool, rules: Rules) -> int:
    """Return how many KV blocks an instance of the pool holds next to the weights.

    Raises:
        SpecError: Not even one.
    """
    free = kv_capacity_bytes(cluster.model, pool.machine, reserved_share=1.0 - rules.hbm_share)
    blocks = int(free // (kv_bytes_per_token(cluster, rules) * rules.block_tokens))
    if blocks < 1:
        raise SpecError.bad(
            f"pool {pool.role}:{pool.count}:{pool.machine.name}, KV blocks next to {cluster.model.name}",
            blocks,
            f"at least 1: the weights take {cluster.model.weights_bytes / 1e9:.0f} GB"
            f" of the {pool.machine.hbm_bytes * rules.hbm_share / 1e9:.0f} GB that may be filled",
        )
    return blocks


def layerwise_from_tokens(cluster: Cluster, pool: Pool, rules: Rules) -> float:
    """Return the shortest prompt that a machine of the pool sends layer by layer."""
    if rules.published or rules.transfer == Transfer.SERIALIZED:
        return np.inf
    if rules.transfer == Transfer.LAYERWISE:
        return 0.0
    if rules.layerwise_from_tokens is not None:
        return float(rules.layerwise_from_tokens)
    return float(layerwise_threshold_tokens(cluster.model, pool.times.prefill_time_s, _link(pool, rules)))


def _link(pool: Pool, rules: Rules) -> Link:
    link = pool.link or link_from(pool.machine)
    return link if rules.streaming_slowdown is None else replace(link, streaming_slowdown=rules.streaming_slowdown)


def _world(cluster: Cluster, rules: Rules, entities: int, done_rows: int) -> World:
    count = len(cluster.pools)
    kinds = np.zeros(count, KINDS)
    requests = np.arange(rules.batch_requests + 1)
    points = max(requests.size, *(pool.times.prefill_knots_tokens.size for pool in cluster.pools))
    curves = np.zeros((count, 3, points))
    for index, pool in enumerate(cluster.pools):
        times = pool.times
        link = _link(pool, rules)
        size = times.prefill_knots_tokens.size
        curves[index, KNOT_TOKENS, :size] = times.prefill_knots_tokens
        curves[index, KNOT_S, :size] = times.prefill_knots_s
        curves[index, DECODE_S, : requests.size] = times.decode_time_s(requests, 0)
        kinds[index] = (
            size,
            times.prefill_pair_s,
            times.decode_context_s,
            times.measured_prompt_tokens or np.inf,  # a roofline has no range to leave
            times.measured_requests or np.inf,
            link.bytes_per_s,
            layerwise_from_tokens(cluster, pool, rules),
            link.latency_s,
            link.latency_s + link.per_layer_s * cluster.model.layers,
            link.streaming_slowdown,
            cluster.model.layers,
            kv_bytes_per_token(cluster, rules),
        )
    return World(
        clock=np.zeros(1, CLOCK),
        future=empty_future(entities),
        kinds=kinds,
        curves=curves,
        done=np.zeros(done_rows, DONE),
        gaps=np.zeros(BINS_PER_OCTAVE * OCTAVES, np.int64),
        batch_s=np.zeros((POOLS, rules.batch_requests + 1)),
        samples=np.zeros((SAMPLES, POOLS, len(SAMPLE_FIELDS))),
    )
