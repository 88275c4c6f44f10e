"""Results in files: a row for each request (CSV or Parquet), and a summary that JSON can hold."""

import contextlib
import gzip
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit._version import __version__
from phasesplit.atomic_files import atomic_path
from phasesplit.domain.latency import Distribution
from phasesplit.domain.money import Bill
from phasesplit.errors import SpecError
from phasesplit.io.compression import csv_bytes, extra_module, undefined
from phasesplit.io.rule_settings import rules_settings
from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.simulator.result import Autoscaling, Result

_PARQUET = ".parquet"
REQUEST_ENDINGS = (".csv", ".csv.gz", _PARQUET)
"""Endings of files with a row for each request."""

PERCENTILES = (50, 90, 95, 99)
"""Of a metric, in a summary."""


def check_output(path: str | Path, endings: Sequence[str], where: str) -> None:
    """Raise unless a file can be written: called before the work whose outcome it is to hold.

    Args:
        path: The file.
        endings: What its name may end in.
        where: How the person knows the place the path came from, for the message.

    Raises:
        SpecError: The name ends in something else, its folder is missing or not writable, it is not a plain file, or
            what writes such a file is not installed.
    """
    target = Path(path)
    if not any(target.name.lower().endswith(ending) and len(target.name) > len(ending) for ending in endings):
        raise SpecError.bad(where, str(path), f"a file name ending in {' or '.join(endings)}")
    if target.name.lower().endswith(_PARQUET):
        extra_module("pyarrow", "parquet", f"{where} {path}")
    if target.exists() and not target.is_file():
        raise SpecError.bad(where, str(path), "a file, and this is a folder" if target.is_dir() else "a plain file")
    if not target.parent.is_dir():
        raise SpecError.bad(where, str(path), f"a file in a folder that exists, and there is no {target.parent}")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise SpecError.bad(where, str(path), f"a file in a folder that can be written to, and {target.parent} cannot")


@contextlib.contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Give a temporary file next to `path` to write to; it takes the place of `path` unless the block fails.

    Raises:
        SpecError: The file cannot be written (the disk is full, say).
    """
    try:
        with atomic_path(path) as part:
            yield part
    except OSError as problem:
        raise SpecError(f"{path}: cannot be written ({problem.strerror or problem})") from None


def write_requests(result: Result, path: str | Path) -> None:
    """Write a row for each request; undefined values are empty in CSV and null in Parquet.

    Floats keep every bit. The same result gives the same bytes.

    Args:
        result: A result that kept its rows.
        path: A file with one of REQUEST_ENDINGS.

    Raises:
        SpecError: Rows were not kept.
    """
    if result.columns is None:
        raise SpecError(f"{path}: the simulation kept no rows, simulate with keep=True")
    write_columns(result.columns, path)


def write_columns(columns: Mapping[str, NDArray[Any]], path: str | Path) -> None:
    """Write columns of one length as `write_requests` does; texts must hold no comma and no quote.

    Args:
        columns: Name to values.
        path: A file with one of REQUEST_ENDINGS.
    """
    if str(path).lower().endswith(_PARQUET):
        pa: Any = extra_module("pyarrow", "parquet", str(path))
        parquet: Any = extra_module("pyarrow.parquet", "parquet", str(path))
        table = {name: pa.array(column, mask=undefined(column)) for name, column in columns.items()}
        parquet.write_table(pa.table(table), path, compression="zstd")
        return
    content = csv_bytes(columns)
    Path(path).write_bytes(gzip.compress(content, mtime=0) if str(path).lower().endswith(".gz") else content)


def result_summary(result: Result) -> dict[str, Any]:
    """Return what a result says apart from its rows and its timeline, in base units, as JSON can hold it.

    Numbers that are not defined are NaN, which `orjson.dumps` writes as null.
    """
    pools = [
        {
            "role": str(pool.role),
            "count": pool.count,
            "machine": pool.machine.name,
            "times_source": pool.times.source,
            "link_source": pool.machine.link_source,
        }
        for pool in result.cluster.pools
    ]
    reference = result.cluster.reference
    return {
        "model": result.cluster.model.name,
        "cluster": {
            "name": result.cluster.name,
            "pools": pools,
            "reference_times_source": reference.source if reference is not None else None,
        },
        "rules": rules_settings(result.rules),
        "trace": result.trace,
        "oracle": result.oracle,
        "requests": result.requests,
        "statuses": result.statuses,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "rate_per_s": result.rate_per_s,
        "throughput_per_s": result.throughput_per_s,
        "output_tokens_per_s": output_tokens_per_s(result),
        "duration_s": result.end_s - result.first_arrival_s,
        "metrics": {name: _metric(values) for name, values in result.metrics.items()},
        "slo": _slo(result),
        "pools": [
            {
                "name": pool.name,
                "busy_share": pool.busy_share,
                "prefill_share": pool.prefill_share,
                "decode_share": pool.decode_share,
                "mixed_share": pool.mixed_share,
                "kv_share": pool.kv_share,
                "mean_batch": pool.mean_batch,
                "machine_hours": pool.machine_hours,
            }
            for pool in result.pools
        ],
        "batch_sizes": {
            name: _batch_sizes(share)
            for name, share in zip(POOL_NAMES, result.batch_share, strict=True)
            if share[1:].any()
        },
        "counts": result.counts,
        "overload": _overload(result),
        "autoscaling": _autoscaling(result.autoscaling),
        "bill": _bill(result.bill),
        "warnings": list(result.warnings),
        "version": __version__,
    }


def output_tokens_per_s(result: Result) -> float:
    """Return the output tokens of completed requests per second, from the first arrival to the end."""
    return result.output_tokens / max(result.end_s - result.first_arrival_s, 1e-12)


def _metric(values: Distribution) -> dict[str, Any]:
    return {
        "count": values.count,
        "mean": values.mean,
        **{f"p{p}": values.quantile(p / 100) for p in PERCENTILES},
        "max": values.largest,
        "exact": values.exact,
    }


def _slo(result: Result) -> dict[str, Any] | None:
    if result.slo is None or not result.slo.findings:
        return None
    return {
        "name": result.slo.slo.name,
        "holds": result.slo.holds,
        "complete": result.slo.complete,
        "findings": [
            {
                "metric": finding.limit.metric,
                "percentile": finding.limit.percentile,
                "below": finding.limit.below,
                "value": finding.value,
                "holds": bool(finding.holds),
            }
            for finding in result.slo.findings
        ],
    }


def _batch_sizes(share: NDArray[np.float64]) -> dict[str, int]:
    """Return percentiles and the largest of the batch sizes of one pool, weighted by time; (n + 1,) shares by size."""
    cumulative = np.cumsum(share) / share.sum()
    sizes = {f"p{p}": int(np.searchsorted(cumulative, p / 100)) for p in (50, 90)}
    return {**sizes, "max": int(np.flatnonzero(share)[-1])}


def _overload(result: Result) -> dict[str, Any] | None:
    found = result.overload
    if found is None:
        return None
    return {
        "growth_per_s": found.growth_per_s,
        "backlog": found.backlog,
        "drain_s": found.drain_s,
        "binding": found.binding,
    }


def _autoscaling(found: Autoscaling | None) -> dict[str, Any] | None:
    if found is None:
        return None
    misses = found.misses
    return {
        "policy": {"name": found.policy.name, **asdict(found.policy)},
        "starts": found.starts,
        "stops": found.stops,
        "stale": found.stale,
        "miss_limits": dict(misses.limits),
        "missed_share": misses.share,
        "worst_hour_missed_share": misses.worst_hour_share,
        "requests_by_hour": misses.requests_by_hour.tolist(),
        "missed_by_hour": misses.missed_by_hour.tolist(),
    }


def _bill(bill: Bill) -> dict[str, float]:
    names = (
        "duration_s", "requests", "output_tokens", "usd_per_hour", "provisioned_w", "mean_w", "usd", "energy_j",
        "operational_kg_co2e", "embodied_kg_co2e", "kg_co2e", "usd_per_request", "energy_j_per_request",
        "kg_co2e_per_request", "usd_per_million_tokens", "energy_j_per_million_tokens", "kg_co2e_per_million_tokens",
    )  # fmt: skip
    return {name: getattr(bill, name) for name in names}
