"""Random small cases, drawn so that memory runs out, queues spill, transfers wait and machines move.

Times and sizes are multiples of powers of two: sums are exact, and no order of events depends on rounding.
"""

import itertools
from dataclasses import replace
from random import Random

import numpy as np

from agreement.twins import Case
from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer

TICK_S = 1 / 1024
KV_BYTES_PER_TOKEN = 1 << 20
MODEL = Model(
    name="small",
    layers=4,
    hidden=1 << 16,
    query_heads=1,
    kv_heads=1,
    head_dim=1 << 16,
    parameters=1.0,
    active_parameters=1.0,
    weights_bytes=float(1 << 30),
)
PLACEMENTS = [placement for placement in Placement if placement != Placement.CUSTOM]
ROLES = [
    ("unsplit",), ("unsplit", "unsplit"), ("prefill", "decode"), ("prefill", "decode"), ("decode", "prefill"),
    ("prefill", "decode", "mixed"), ("prefill", "prefill", "decode"), ("prefill", "decode", "decode"), ("mixed",),
    ("prefill", "mixed"), ("mixed", "decode"),
]  # fmt: skip


def seeded(seed: int) -> Random:
    """Return a source of draws that are the same in every run."""
    return Random(seed)  # noqa: S311 - nothing secret is drawn


def phase_times(random: Random) -> PhaseTimes:
    """Return times of which every sum is exact."""
    per_token = TICK_S / random.choice([1, 4, 32])
    decode_base = TICK_S * random.choice([5, 11, 37])
    per_request = TICK_S / random.choice([1, 8])
    return PhaseTimes(
        source="drawn",
        prefill_knots_tokens=np.array([0.0, 32.0, 160.0, 672.0]),
        prefill_knots_s=7 * TICK_S + per_token * np.array([0.0, 32.0, 96.0, 1120.0]),
        decode_knots_requests=np.array([1.0, 3.0, 19.0]),
        decode_knots_s=decode_base + per_request * np.array([0.0, 2.0, 34.0]),
        prefill_pair_s=random.choice([0.0, TICK_S / 4096]),
        decode_context_s=random.choice([0.0, 0.0, TICK_S / 256]),
        measured_prompt_tokens=300.0,
        measured_requests=6.0,
        mean_error=0.0,
    )


def machine(random: Random, capacity_tokens: int, hbm_share: float) -> Machine:
    """Return a machine that holds so many tokens of KV and half a token more."""
    held_bytes = MODEL.weights_bytes + (capacity_tokens + 0.5) * KV_BYTES_PER_TOKEN
    return Machine(
        name="small",
        accelerators=1,
        hbm_bytes=held_bytes / hbm_share,
        hbm_bytes_per_s=1e12,
        flops_per_s=1e12,
        nic_bytes_per_s=float(random.choice([1 << 28, 1 << 31, 1 << 34])),
        provisioned_w=1.0,
        idle_w=1.0,
        prefill_w=1.0,
        decode_w=1.0,
        price_usd_per_hour=1.0,
        embodied_kg_co2e=1.0,
    )


def cluster(random: Random, roles: tuple[str, ...], capacities_tokens: list[int], hbm_share: float) -> Cluster:
    """Return a cluster of one to six machines; in half of them all machines are alike."""
    alike = random.random() < 0.5
    same = machine(random, random.choice(capacities_tokens), hbm_share), phase_times(random)
    pools = []
    left = 6 - len(roles)
    for role in roles:
        more = random.randint(0, min(left, 2))
        left -= more
        of_pool = same if alike else (machine(random, random.choice(capacities_tokens), hbm_share), phase_times(random))
        pools.append(Pool(role=Role(role), count=1 + more, machine=of_pool[0], times=of_pool[1]))
    return Cluster(name="drawn", model=MODEL, pools=tuple(pools))


def trace(random: Random, *, most_prompt_tokens: int, least_output: int, most_output: int, most_requests: int) -> Trace:
    """Return up to so many requests in bursts, some at the same instant."""
    count = random.randint(1, most_requests)
    pace = random.choice([1, 8, 64, 256])
    gaps = [0 if random.random() < 0.4 else random.randint(0, pace) for _ in range(count)]
    longest = random.choice([most_prompt_tokens, most_prompt_tokens // 4])
    lengths = [
        (random.randint(1, longest), random.choice([least_output, random.randint(least_output, most_output)]))
        for _ in range(count)
    ]
    return Trace.from_columns(
        "drawn",
        TICK_S * np.array(list(itertools.accumulate(gaps)), np.float64),
        np.array([prompt for prompt, _ in lengths], np.int32),
        np.array([output for _, output in lengths], np.int32),
        oracle=random.random() < 0.3,
    )


def default_case(random: Random) -> Case:
    """Return a case for the default rules."""
    rules = Rules(
        prefill_placement=random.choice(PLACEMENTS),
        decode_placement=random.choice(PLACEMENTS),
        batching=random.choice(list(Batching)),
        unsplit_batching=random.choice(list(Batching)),
        batch_prompt_tokens=random.choice([1, 16, 100, 400, 2_048]),
        batch_requests=random.choice([1, 2, 3, 8, 64]),
        spill_tokens=random.choice([0, 100, 400, 8_192]),
        preemption_limit=random.randint(0, 4),
        repurpose_after_s=random.choice([TICK_S, 64 * TICK_S, 60.0]),
        block_tokens=random.choice([1, 2, 4, 8, 16]),
        kv_headroom=random.choice([0.0, 0.01, 0.2]),
        hbm_share=random.choice([0.9, 1.0]),
        transfer=random.choice(list(Transfer)),
        layerwise_from_tokens=random.choice([None, 0, 40, 100]),
        streaming_slowdown=random.choice([None, 0.0, 0.25]),
        seed=random.choice([0, 1, 2**31 + 5, random.randrange(2**40)]),
    )
    if random.random() < 0.1:
        case = crowded(random, rules)
    else:
        memory = [[100], [150, 250], [400, 600], [3000]]
        case = Case(
            cluster(random, random.choice(ROLES), random.choice(memory), rules.hbm_share),
            trace(random, most_prompt_tokens=120, least_output=1, most_output=60, most_requests=40),
            rules,
        )
    return replace(case, rules=replace(case.rules, elastic=random.random() < 0.7))


def crowded(random: Random, rules: Rules) -> Case:
    """Return a case of mixed machines full of KV for each other, so that some of it can never be sent."""
    blind = [Placement.ROUND_ROBIN, Placement.RANDOM]
    rules = replace(rules, prefill_placement=random.choice(blind), decode_placement=random.choice(blind))
    return Case(
        cluster(random, ("mixed", "mixed"), [130], rules.hbm_share),
        trace(random, most_prompt_tokens=120, least_output=2, most_output=8, most_requests=40),
        replace(rules, spill_tokens=8_192, transfer=random.choice([Transfer.SERIALIZED, Transfer.LAYERWISE])),
    )


def published_case(random: Random) -> Case:
    """Return a case for the published rules, in which any machine holds any request alone."""
    capacities_tokens = [[3_300], [3_500, 5_000], [9_000, 20_000]]
    splits = [roles for roles in ROLES if "mixed" not in roles]
    return Case(
        without_attention(cluster(random, random.choice(splits), random.choice(capacities_tokens), 1.0)),
        trace(random, most_prompt_tokens=3_000, least_output=2, most_output=250, most_requests=40),
        Rules.as_published(),
    )


def without_attention(of_default: Cluster) -> Cluster:
    """Return the cluster with times that depend on nothing but the batch's tokens, as published times do."""
    pools = [
        replace(pool, times=replace(pool.times, prefill_pair_s=0.0, decode_context_s=0.0)) for pool in of_default.pools
    ]
    return replace(of_default, pools=tuple(pools))
