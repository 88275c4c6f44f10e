"""The same case for the kernel and for its naive twins: clusters, traces and rules put in the twins' words."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from naive import default_parts, parts
from phasesplit.domain.cluster import Cluster, Pool
from phasesplit.domain.machine import Link, layerwise_threshold_tokens, link_from
from phasesplit.domain.request import Trace
from phasesplit.scheduler.rules import NAMES, Rules, Transfer


@dataclass(frozen=True)
class Case:
    """One run to simulate."""

    cluster: Cluster
    trace: Trace
    rules: Rules


def _knots(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> parts.Knots:
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _machines(cluster: Cluster) -> Iterator[Pool]:
    """Yield each machine's pool, in order of the machines."""
    for pool in cluster.pools:
        for _ in range(pool.count):
            yield pool


def _build(case: Case, pool: Pool) -> default_parts.Build:
    times, link = pool.times, pool.link or link_from(pool.machine)
    if case.rules.streaming_slowdown is not None:
        link = replace(link, streaming_slowdown=case.rules.streaming_slowdown)
    return default_parts.Build(
        role=pool.role.value,
        times=default_parts.Times(
            prefill_knots=_knots(times.prefill_knots_tokens, times.prefill_knots_s),
            decode_knots=_knots(times.decode_knots_requests, times.decode_knots_s),
            prefill_pair_s=times.prefill_pair_s,
            decode_context_s=times.decode_context_s,
        ),
        card=default_parts.Card(
            bytes_per_s=link.bytes_per_s,
            serialized_latency_s=link.latency_s,
            layerwise_latency_s=link.latency_s + link.per_layer_s * case.cluster.model.layers,
            layerwise_from_tokens=_layerwise_from_tokens(case, pool, link),
            streaming_slowdown=link.streaming_slowdown,
        ),
        hbm_bytes=pool.machine.hbm_bytes,
    )


def _layerwise_from_tokens(case: Case, pool: Pool, link: Link) -> float:
    if case.rules.transfer == Transfer.SERIALIZED:
        return math.inf
    if case.rules.transfer == Transfer.LAYERWISE:
        return 0
    if case.rules.layerwise_from_tokens is not None:
        return case.rules.layerwise_from_tokens
    return layerwise_threshold_tokens(case.cluster.model, pool.times.prefill_time_s, link)


def default_input(
    case: Case,
) -> tuple[list[default_parts.Arrival], list[default_parts.Build], default_parts.Model, default_parts.Rules]:
    """Return what `naive.default.simulate` takes."""
    trace, model, rules = case.trace, case.cluster.model, case.rules
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens, trace.expected_tokens)
    arrivals = [default_parts.Arrival(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    spelled: dict[str, Any] = {
        field: next(name for name, member in NAMES[type(value)].items() if member == value)
        for field in ("prefill_placement", "decode_placement", "batching", "unsplit_batching")
        for value in [getattr(rules, field)]
    }
    same = {field: getattr(rules, field) for field in default_parts.Rules.__dataclass_fields__ if field not in spelled}
    return (
        arrivals,
        [_build(case, pool) for pool in _machines(case.cluster)],
        default_parts.Model(model.kv_bytes_per_token, model.weights_bytes, model.layers),
        default_parts.Rules(**spelled, **same),
    )


def published_input(case: Case) -> tuple[list[parts.Arrival], list[parts.Machine], parts.Model]:
    """Return what `naive.published.simulate` takes."""
    trace, model = case.trace, case.cluster.model
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    arrivals = [parts.Arrival(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    machines = [
        parts.Machine(
            cast("parts.Role", pool.role.value),
            _knots(pool.times.prefill_knots_tokens, pool.times.prefill_knots_s),
            _knots(pool.times.decode_knots_requests, pool.times.decode_knots_s),
            pool.machine.hbm_bytes,
        )
        for pool in _machines(case.cluster)
    ]
    return arrivals, machines, parts.Model(2 * model.value_bytes * model.layers * model.hidden, model.weights_bytes)
