"""Writing traces: our own CSV and Parquet, and what the published simulator and Mooncake's tools read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.errors import SpecError
from phasesplit.io.compression import csv_bytes, extra_module, write_bytes

_BLOCK_TOKENS = 512
_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".jsonl": "mooncake"}


def write_trace(path: str | Path, trace: Trace, *, format: str | None = None) -> None:  # noqa: A002
    """Write a trace as a whole or not at all; a name that ends in .gz or .zst compresses it.

    `csv` and `parquet` keep every bit of the three columns, and `parquet` the prefix blocks too. `splitwise-sim`
    keeps the three columns. `mooncake` rounds arrivals to whole milliseconds, as its published files have them, and
    gives a trace without prefix blocks blocks that are never seen again.

    Args:
        path: The file, or `-` for standard output.
        trace: What to write.
        format: csv, parquet, splitwise-sim or mooncake; by default from the name (.csv, .parquet, .jsonl).

    Raises:
        SpecError: The format is unknown or does not follow from the name, or the file cannot be written.
    """
    write_bytes(path, _WRITERS[_format_of(path, format)](trace))


def _format_of(path: str | Path, name: str | None) -> str:
    if name is not None:
        if name not in _WRITERS:
            raise SpecError.unknown("--format", name, _WRITERS)
        return name
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in (".gz", ".zst")]
    if str(path) == "-":
        return "csv"
    if not suffixes or suffixes[-1] not in _SUFFIXES:
        raise SpecError.bad(
            "output file", str(path), f"a name ending in {', '.join(_SUFFIXES)} (.gz, .zst), or --format"
        )
    return _SUFFIXES[suffixes[-1]]


def _csv(trace: Trace) -> bytes:
    return csv_bytes(
        {
            "arrival_s": trace.arrival_s,
            "prompt_tokens": trace.prompt_tokens,
            "output_tokens": trace.output_tokens,
        }
    )


def _splitwise_sim(trace: Trace) -> bytes:
    count = len(trace)
    return csv_bytes(
        {
            "request_id": np.arange(count),
            "request_type": np.full(count, 2),
            "application_id": np.zeros(count, dtype=np.int64),
            "arrival_timestamp": trace.arrival_s,
            "batch_size": np.ones(count, dtype=np.int64),
            "prompt_size": trace.prompt_tokens,
            "token_size": trace.output_tokens,
        }
    )


def _parquet(trace: Trace) -> bytes:
    pa: Any = extra_module("pyarrow", "parquet", "traces in Parquet")
    parquet: Any = extra_module("pyarrow.parquet", "parquet", "traces in Parquet")
    columns: dict[str, Any] = {
        "arrival_s": trace.arrival_s,
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
    }
    if trace.prefix_offsets is not None and trace.prefix_ids is not None:
        columns["prefix_ids"] = pa.LargeListArray.from_arrays(trace.prefix_offsets, trace.prefix_ids)
    sink = pa.BufferOutputStream()
    parquet.write_table(pa.table(columns), sink, compression="zstd")
    return bytes(sink.getvalue())


def _mooncake(trace: Trace) -> bytes:
    import orjson

    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    if offsets is None or ids is None:
        blocks = -(-trace.prompt_tokens.astype(np.int64) // _BLOCK_TOKENS)
        offsets = np.concatenate([[0], np.cumsum(blocks)])
        ids = np.arange(int(offsets[-1]))
    milliseconds = np.rint(trace.arrival_s * 1e3).astype(np.int64).tolist()
    prompts, outputs, every_id = trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), ids.tolist()
    starts = offsets.tolist()
    return b"".join(
        orjson.dumps(
            {
                "timestamp": milliseconds[row],
                "input_length": prompts[row],
                "output_length": outputs[row],
                "hash_ids": every_id[starts[row] : starts[row + 1]],
            },
            option=orjson.OPT_APPEND_NEWLINE,
        )
        for row in range(len(trace))
    )


_WRITERS: dict[str, Callable[[Trace], bytes]] = {
    "csv": _csv,
    "parquet": _parquet,
    "splitwise-sim": _splitwise_sim,
    "mooncake": _mooncake,
}
