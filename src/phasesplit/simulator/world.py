"""What the simulator keeps next to the ledger: the clock, the future, phase times, the link, and what it saw."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CLOCK = np.dtype(
    [
        ("now_s", "f8"), ("events_pending", "i8"), ("sequence", "i8"), ("next_arrival", "i8"), ("first_row", "i8"),
        ("pending_slot", "i8"), ("done", "i8"), ("events", "i8"), ("horizon_s", "f8"), ("pause_at_s", "f8"),
        ("next_sample_s", "f8"), ("sample_every_s", "f8"), ("samples", "i8"), ("steps_beyond_prompt", "i8"),
        ("steps_beyond_requests", "i8"), ("layerwise", "i8"), ("serialized", "i8"), ("recomputed", "i8"),
    ]
)  # fmt: skip
"""One record: model time, the position in the trace, and counts."""

KINDS = np.dtype(
    [
        ("knots", "i8"), ("prefill_pair_s", "f8"), ("decode_context_s", "f8"), ("measured_prompt_tokens", "f8"),
        ("measured_requests", "f8"), ("nic_bytes_per_s", "f8"), ("layerwise_from_tokens", "f8"),
        ("serialized_latency_s", "f8"), ("layerwise_latency_s", "f8"), ("streaming_slowdown", "f8"), ("layers", "f8"),
        ("kv_bytes_per_token", "f8"),
    ]
)  # fmt: skip
"""One record per machine type: scalars of its phase times, of its network cards, and of the model's KV."""

FUTURE = np.dtype([("time_s", "f8"), ("sequence", "i8"), ("place", "i8"), ("order", "i8")], align=True)
"""One record per entity that can have an event, see `events`: when, the number of its scheduling, its index in the
heap (-1: no event); and, apart from the entity, the heap itself."""

KNOT_TOKENS, KNOT_S, DECODE_S = range(3)
"""Rows of `curves`: prompt tokens at the knots of f, prefill times there, and g at 0, 1, 2, ... requests."""

DONE = np.dtype(
    [
        ("row", "i8"), ("status", "i4"), ("prefill_machine", "i4"), ("decode_machine", "i4"), ("preemptions", "i4"),
        ("prompt_tokens", "i4"), ("output_tokens", "i4"), ("arrival_s", "f8"), ("prefill_start_s", "f8"),
        ("first_token_s", "f8"), ("kv_ready_s", "f8"), ("decode_start_s", "f8"), ("last_token_s", "f8"),
        ("gap_max_s", "f8"),
    ],
    align=True,
)  # fmt: skip
"""One record per request that ended: its instants; `row` is its number in the trace."""

COMPLETED, REFUSED, UNFINISHED = range(3)
"""Status of a request: all tokens emitted; longer than a machine's memory; still in the system when the run ended."""

SAMPLE_FIELDS = ("machines", "busy", "running", "waiting", "used_share")
"""Fields of a timeline sample for each pool: its machines that are switched on, busy ones, requests in batches, tasks
waiting, and the mean share of KV blocks in use."""


class World(NamedTuple):
    """The simulator's own columns.

    Attributes:
        clock: CLOCK (1,).
        future: FUTURE (m + slots,): the heap of pending events.
        kinds: KINDS (k,), one per machine type.
        curves: float64 (k, 3, p): f and g of `domain.profile.PhaseTimes`; rows KNOT_TOKENS, KNOT_S, DECODE_S.
        done: DONE (d,): requests that ended since the driver last took them.
        gaps: int64 (bins,): histogram of all gaps between output tokens.
        batch_s: float64 (POOLS, batch_requests + 1): time that machines of a pool spent with a batch of that size.
        samples: float64 (s, POOLS, len(SAMPLE_FIELDS)): the timeline.
    """

    clock: NDArray[np.void]
    future: NDArray[np.void]
    kinds: NDArray[np.void]
    curves: NDArray[np.float64]
    done: NDArray[np.void]
    gaps: NDArray[np.int64]
    batch_s: NDArray[np.float64]
    samples: NDArray[np.float64]


class Arrivals(NamedTuple):
    """A stretch of the trace that the kernel may take from.

    Attributes:
        arrival_s: float64 (n,).
        prompt_tokens: int32 (n,).
        output_tokens: int32 (n,).
        expected_tokens: int32 (n,).
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    expected_tokens: NDArray[np.int32]
