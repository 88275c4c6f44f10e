"""Hypothesis strategies: clusters, traces and rules so small that memory runs out, queues spill and machines move."""

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from doubles import tiny_cluster, tiny_trace
from phasesplit.domain.cluster import Cluster
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer

BUILT_IN = [placement for placement in Placement if placement != Placement.CUSTOM]
MOST_TOKENS = 400


@dataclass(frozen=True)
class Case:
    """One run to simulate."""

    cluster: Cluster
    trace: Trace
    rules: Rules


POOLS = st.one_of(
    st.tuples(st.just("unsplit"), st.integers(1, 3)).map(lambda pool: (pool,)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda n: (("prefill", n[0]), ("decode", n[1]))),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 2)).map(
        lambda n: (("prefill", n[0]), ("decode", n[1]), ("mixed", n[2]))
    ),
    st.just((("mixed", 2),)),
)


def traces(
    *, least_output_tokens: int = 1, most_output_tokens: int = 60, most_requests: int = 30
) -> st.SearchStrategy[Trace]:
    """Traces of a few requests, some of them at the same instant, in bursts or far apart."""
    gaps_s = st.one_of(st.just(0.0), st.sampled_from([0.001, 0.01, 0.05, 0.1, 0.3, 1.0]), st.floats(0, 2))
    row = st.tuples(gaps_s, st.integers(1, MOST_TOKENS), st.integers(least_output_tokens, most_output_tokens))

    def assembled(rows: list[tuple[float, int, int]], oracle: bool) -> Trace:
        arrivals_s = itertools.accumulate(gap_s for gap_s, _, _ in rows)
        return tiny_trace(*((at, *tokens) for at, (_, *tokens) in zip(arrivals_s, rows, strict=True)), oracle=oracle)

    return st.builds(assembled, st.lists(row, min_size=1, max_size=most_requests), st.booleans())


def clusters(*, hbm_share: float = 0.9) -> st.SearchStrategy[Cluster]:
    """Clusters with ample or scarce memory, fast or slow links, and times with or without context."""
    return st.builds(
        lambda pools, **times: tiny_cluster(*pools, hbm_share=hbm_share, **times),
        POOLS,
        prefill_s_per_token=st.sampled_from([1e-4, 1e-3]),
        prefill_base_s=st.sampled_from([0.0, 0.01]),
        prefill_pair_s=st.sampled_from([0.0, 1e-6]),
        decode_s=st.sampled_from([0.01, 0.05]),
        decode_s_per_request=st.sampled_from([0.0, 0.001]),
        decode_context_s=st.sampled_from([0.0, 1e-5]),
        capacity_tokens=st.sampled_from([300, 480, 700, 2_000, 100_000]),
        nic_bytes_per_s=st.sampled_from([1e9, 1e10, 1e12]),
    )


RULES = st.builds(
    Rules,
    prefill_placement=st.sampled_from(BUILT_IN),
    decode_placement=st.sampled_from(BUILT_IN),
    batching=st.sampled_from(Batching),
    unsplit_batching=st.sampled_from(Batching),
    batch_prompt_tokens=st.sampled_from([1, 50, 200, 2_048]),
    batch_requests=st.sampled_from([1, 2, 5, 64]),
    spill_tokens=st.sampled_from([0, 200, 1_000, 8_192]),
    elastic=st.booleans(),
    preemption_limit=st.sampled_from([0, 1, 4]),
    repurpose_after_s=st.sampled_from([0.01, 0.5, 60.0]),
    block_tokens=st.sampled_from([1, 4, 16]),
    kv_headroom=st.sampled_from([0.0, 0.01, 0.2]),
    transfer=st.sampled_from(Transfer),
    streaming_slowdown=st.sampled_from([None, 0.0, 0.5]),
    seed=st.integers(0, 1_000),
)


def cases() -> st.SearchStrategy[Case]:
    """Runs by the default rules' many settings."""
    return st.builds(Case, clusters(), traces(), RULES)


def published_cases() -> st.SearchStrategy[Case]:
    """Runs by the published rules, with memory enough for any one request and outputs of two tokens or more."""
    split = st.tuples(st.integers(1, 3), st.integers(1, 3)).map(lambda n: (("prefill", n[0]), ("decode", n[1])))
    cluster = st.builds(
        lambda pools, **times: tiny_cluster(*pools, hbm_share=1.0, **times),
        st.one_of(st.integers(1, 3).map(lambda count: (("unsplit", count),)), split),
        prefill_s_per_token=st.sampled_from([1e-4, 1e-3]),
        decode_s=st.sampled_from([0.01, 0.05]),
        capacity_tokens=st.sampled_from([500, 1_000, 100_000]),
    )
    return st.builds(Case, cluster, traces(least_output_tokens=2), st.just(Rules.as_published()))
