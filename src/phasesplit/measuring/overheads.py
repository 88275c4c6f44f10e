"""What a live cluster takes beyond iterations and transfers, measured while it is idle."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.measuring.live import Run
from phasesplit.measuring.prediction import Overheads
from phasesplit.measuring.stages import FRONT, PROMPT, QUEUE

_ALONE, _CROWD = 6, 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 16
_APART = 3.0
"""How many times as far apart the requests are as each should take."""
_LEAST_APART_S = 0.2
_USUAL = 0.25
_FEWEST_GAPS = 3
"""Fewest output tokens of a request that has a gap besides the first one."""


def idle_trace(times: PhaseTimes, longest_tokens: int) -> Trace:
    """Return a few short requests, each of which finds the cluster idle, and then some at once, in batches.

    Args:
        times: What iterations take.
        longest_tokens: Longest sequence that the cluster takes.
    """
    output_tokens = min(_OUTPUT_TOKENS, longest_tokens // 2)
    prompt_tokens = min(_PROMPT_TOKENS, longest_tokens - output_tokens)
    alone_s = float(times.prompt_time_s(prompt_tokens)) + output_tokens * float(times.token_time_s(1, prompt_tokens))
    apart_s = max(_APART * alone_s, _LEAST_APART_S)
    count = _ALONE + _CROWD
    return Trace.from_columns(
        "idle",
        np.minimum(np.arange(count, dtype=np.float64), _ALONE) * apart_s,
        np.full(count, prompt_tokens, np.int32),
        np.full(count, output_tokens, np.int32),
    )


def idle_overheads(run: Run, times: PhaseTimes, trace: Trace) -> Overheads:
    """Return what the requests of `idle_trace` took longer than their iterations, never below 0.

    Of each the lower quartile counts: whatever else this machine does only makes some of the requests slower. What an
    iteration takes longer with one request and with several tells what each token adds: it is sent by itself.

    Args:
        run: Their replay.
        times: What iterations take.
        trace: The requests.
    """
    prompt_tokens, output_tokens = int(trace.prompt_tokens[0]), int(trace.output_tokens[0])
    seen_s = run.replay.columns()["ttft_s"]
    alone = [
        (record, float(first_s))
        for record, first_s in zip(run.records[:_ALONE], seen_s[:_ALONE], strict=True)
        if record is not None and record["outcome"] == "completed"
    ]
    one_s = _longer_s([record for record, _ in alone], times, prompt_tokens, output_tokens)
    token_s = 0.0
    by_machine: dict[str, list[Mapping[str, Any]]] = {}
    for record in run.records[_ALONE:]:
        if record is not None and record["outcome"] == "completed":
            by_machine.setdefault(record["token_machine"], []).append(record)
    for records in by_machine.values():
        if len(records) > 1:
            several_s = _longer_s(records, times, prompt_tokens, output_tokens, batch=len(records))
            token_s = max(token_s, (several_s - one_s) / (len(records) - 1))
    token_s = min(token_s, one_s)
    messages_s = _usual([record["first_token_s"] - (record["prompt_started_s"] or 0.0) for record, _ in alone])
    messages_s -= float(times.prompt_time_s(prompt_tokens)) + one_s
    # Times that were taken from outside have the front end in them: what is in the prompt's is not in the queue too.
    queue_s = _usual([record["prompt_started_s"] or 0.0 for record, _ in alone]) + min(messages_s, 0.0)
    front_s = _usual([first_s - record["first_token_s"] for record, first_s in alone])
    return Overheads(
        stages_s={
            QUEUE: max(queue_s, 0.0),
            PROMPT: max(messages_s, 0.0),
            FRONT: max(front_s, 0.0),
        },
        iteration_s=one_s - token_s,
        token_s=token_s,
    )


def _longer_s(
    records: Sequence[Mapping[str, Any]], times: PhaseTimes, prompt_tokens: int, output_tokens: int, batch: int = 1
) -> float:
    """Return what the decode iterations of requests that were in one batch took longer than they should, >= 0."""
    if output_tokens < _FEWEST_GAPS:
        return 0.0
    gaps_s = [(record["last_token_s"] - record["second_token_s"]) / (output_tokens - 2) for record in records]
    context_tokens = batch * (prompt_tokens + output_tokens / 2)
    return max(_usual(gaps_s) - float(times.token_time_s(batch, context_tokens)), 0.0)


def _usual(values: list[float]) -> float:
    return float(np.quantile(values, _USUAL)) if values else 0.0
