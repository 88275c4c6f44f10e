"""Where a request's time goes: waiting, prefill, exposed transfer, waiting again, decode."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.figures import readable
from phasesplit.figures.style import colour, note, title
from phasesplit.simulation.result import Result

Floats = NDArray[np.float64]

STAGES = (
    ("prefill queue", "prefill-wait"),
    ("prefill", "prefill"),
    ("transfer", "transfer"),
    ("decode queue", "decode-wait"),
    ("decode", "decode"),
)
"""The stages in the order in which a request goes through them, and the names of their colours."""
_LEAST_LABELLED = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """The time of some requests by stage.

    Attributes:
        of: Which requests.
        stage_s: float64 (5,), mean time in each of `STAGES`.
    """

    of: str
    stage_s: Floats


def mean_split(result: Result) -> Split | None:
    """Return the time of the mean completed request by stage, None where none completed."""
    total_s = {
        name: _total_s(result, name) for name in ("queue_s", "ttft_s", "transfer_exposed_s", "decode_queue_s", "e2e_s")
    }
    requests = result.metrics["e2e_s"].count if "e2e_s" in result.metrics else 0
    if not requests:
        return None
    return Split("mean request", _by_stage(*total_s.values()) / requests)


def slowest_split(result: Result, *, stages: int) -> Split | None:
    """Return the time of the slowest hundredth of requests by stage, None where rows were not kept or none completed.

    Args:
        result: The result.
        stages: Slowest by the time in so many stages from the first on.
    """
    if result.columns is None:
        return None
    completed = result.columns["status"] == "completed"
    if not completed.any():
        return None
    columns = [
        np.nan_to_num(result.columns[name][completed])
        for name in ("queue_s", "ttft_s", "transfer_exposed_s", "decode_queue_s", "e2e_s")
    ]
    stage_s = _by_stage(*columns)
    order = np.argsort(stage_s[:stages].sum(axis=0), kind="stable")
    slowest = order[-max(1, round(order.size / 100)) :]
    return Split("slowest 1 %", stage_s[:, slowest].mean(axis=1))


def _total_s(result: Result, metric: str) -> float:
    """Return a metric's sum over requests; a request for which it is undefined spent no time there."""
    found = result.metrics.get(metric)
    return found.mean * found.count if found is not None and found.count else 0.0


def _by_stage(queue_s: Any, ttft_s: Any, transfer_s: Any, decode_queue_s: Any, e2e_s: Any) -> Floats:
    stages = [queue_s, ttft_s - queue_s, transfer_s, decode_queue_s, e2e_s - ttft_s - transfer_s - decode_queue_s]
    held: Floats = np.maximum(np.array(stages), 0.0)
    return held


def draw_start(axes: Any, result: Result) -> None:
    """Draw the time before decode begins, of the mean request and of the slowest hundredth."""
    _draw(axes, result, "Until decode begins", 4)


def draw_whole(axes: Any, result: Result) -> None:
    """Draw the time of whole requests, of the mean one and of the slowest hundredth."""
    _draw(axes, result, "From arrival to last token", 5)


def _draw(axes: Any, result: Result, name: str, stages: int) -> None:
    title(axes, name, STAGES[:stages], columns=-(-stages // 2))
    mean = mean_split(result)
    if mean is None:
        note(axes, "No request completed.")
        return
    splits = [mean, slowest_split(result, stages=stages)]
    longest_s = max(float(split.stage_s[:stages].sum()) for split in splits if split is not None) or 1e-3
    unit, size_s = ("ms", 1e-3) if longest_s < 2 else ("s", 1.0) if longest_s < 600 else ("min", 60.0)
    for row, split in zip((1.0, 0.0), splits, strict=True):
        if split is not None:
            _draw_bar(axes, row, split.stage_s[:stages], longest_s, size_s)
            total = readable.seconds(float(split.stage_s[:stages].sum()))
            axes.text(0, row + 0.31, f"{split.of}: {total}", va="bottom", fontweight="bold")
        else:
            axes.text(
                0,
                row,
                "the slowest need a row per request,\nwhich this run did not keep",
                va="center",
                color=colour("faint"),
            )
    axes.set(ylim=(-0.45, 1.65), xlim=(0, 1.02 * longest_s / size_s), xlabel=unit)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_bar(axes: Any, row: float, stage_s: Floats, longest_s: float, size_s: float) -> None:
    begin_s = 0.0
    for time_s, (_, tint) in zip(stage_s, STAGES, strict=False):
        axes.barh(row, time_s / size_s, left=begin_s / size_s, height=0.5, color=colour(tint))
        if time_s > _LEAST_LABELLED * longest_s:
            text = readable.seconds(float(time_s))
            ink = colour("ink" if tint.endswith("-wait") else "on-strong")
            axes.text((begin_s + time_s / 2) / size_s, row, text, ha="center", va="center", color=ink)
        begin_s += float(time_s)
