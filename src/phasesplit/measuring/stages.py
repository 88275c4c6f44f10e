"""The stages of a request, cut at the same instants in a simulation and in a gateway's records.

A request waits in the queue until its prefill runs, and is in prefill until its first token. Transfer is
what of the KV cache's way that token did not hide; wait is from whole KV until the second token, decode from there
to the last one. Front end is what the client sees beyond that: HTTP, and its own reading.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

QUEUE, PROMPT, TRANSFER, WAIT, TOKEN, FRONT = (
    "queue", "prefill", "exposed transfer", "wait", "decode", "front end",
)  # fmt: skip
STAGES = (QUEUE, PROMPT, TRANSFER, WAIT, TOKEN, FRONT)
"""All of them; together they are the E2E latency that a client sees."""
FIRST = (QUEUE, PROMPT, FRONT)
"""Those of the TTFT; the front end counts once, with the first token."""


def simulated_stages(columns: Mapping[str, NDArray[Any]], overheads_s: Mapping[str, float]) -> dict[str, Floats]:
    """Return the stages of simulated requests, in seconds, (n,) each; NaN for one that did not complete.

    A simulation tells when the first decode iteration of a request begins, not when it ends: its length is taken to be
    the mean of the request's decode iterations.

    Args:
        columns: `Result.columns` of a simulation.
        overheads_s: Stage to seconds that the simulation knows nothing of, for each request.
    """
    several = columns["output_tokens"] > 1
    transfer_s, idle_s = (np.where(several, columns[name], 0.0) for name in ("transfer_exposed_s", "decode_queue_s"))
    computing_s = columns["e2e_s"] - columns["ttft_s"] - transfer_s - idle_s
    step_s = np.where(several, computing_s / np.maximum(columns["output_tokens"] - 1, 1), 0.0)
    stages = {
        QUEUE: columns["queue_s"],
        PROMPT: columns["ttft_s"] - columns["queue_s"],
        TRANSFER: transfer_s,
        WAIT: idle_s + step_s,
        TOKEN: computing_s - step_s,
        FRONT: np.zeros(several.shape),
    }
    return {stage: values + overheads_s.get(stage, 0.0) for stage, values in stages.items()}


def queue_in_prompt(stages_s: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the same stages as they look where nobody tells when a prefill begins."""
    return {**stages_s, QUEUE: np.zeros_like(stages_s[QUEUE]), PROMPT: stages_s[QUEUE] + stages_s[PROMPT]}


def measured_stages(records: Sequence[Mapping[str, Any] | None], e2e_s: Floats) -> dict[str, Floats]:
    """Return the stages of requests that a cluster served, in seconds, (n,) each; NaN for one that did not complete.

    Machines report the start of a prefill and the arrival of KV beside the tokens: a report that comes before or
    after the tokens that it lies between counts as with them, so no stage is negative. Where one machine does both
    phases there is no transfer. Where the start of prefill is not reported, the queue is in it.

    Args:
        records: The gateway's record of each, None where it has none.
        e2e_s: float64 (n,) E2E as the client saw it.
    """
    cuts = np.full((len(records), len(STAGES)), np.nan)
    for row, record in enumerate(records):
        if record is not None and record["outcome"] == "completed":
            cuts[row] = _cuts(record)
    stages = dict(zip(STAGES, np.diff(cuts, axis=1).T, strict=False))
    stages[FRONT] = e2e_s - cuts[:, -1]
    return stages


def _cuts(record: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the instants between the stages, from the arrival on, never going back."""
    first_s, last_s = float(record["first_token_s"]), float(record["last_token_s"])
    second_s = last_s if record["second_token_s"] is None else float(record["second_token_s"])
    started_s, ready_s = record["prompt_started_s"], record["kv_ready_s"]
    started_s = 0.0 if started_s is None else min(float(started_s), first_s)
    has_transfer = ready_s is not None and record["prompt_machine"] != record["token_machine"]
    ready_s = min(max(float(ready_s), first_s), second_s) if has_transfer else first_s
    return 0.0, started_s, first_s, ready_s, second_s, last_s
