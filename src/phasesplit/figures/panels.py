"""The panels of a result, in the order in which they are read: each draws itself onto axes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phasesplit.domain.latency import Binned, Distribution
from phasesplit.figures.latency import draw_latency, draw_slo
from phasesplit.figures.stages import draw_start, draw_whole
from phasesplit.figures.timeline import draw_kv, draw_machines, draw_running, draw_waiting
from phasesplit.figures.usage import draw_batches, draw_use
from phasesplit.simulation.result import Result

COLUMNS = 4
"""Panels in a row of a sheet; the rows are latencies, pools over time, and where the time goes."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        name: In one word, for identifiers.
        draw: Draws it onto axes.
    """

    name: str
    draw: Callable[[Any, Result], None]


def _latency(metric: str, name: str, of: str) -> Callable[[Any, Result], None]:
    def draw(axes: Any, result: Result) -> None:
        limits = () if result.slo is None else result.slo.slo.limits
        draw_latency(axes, metric, metric_of(result, metric), name=name, of=of, limits=limits)

    return draw


def metric_of(result: Result, metric: str) -> Distribution:
    """Return a metric's distribution, an empty one where nothing of it was recorded."""
    return result.metrics.get(metric) or Binned()


LATENCY_PANELS = (
    Panel("ttft", _latency("ttft_s", "TTFT: time to first token", "requests")),
    Panel("itl", _latency("itl_s", "ITL: gaps between tokens", "gaps")),
    Panel("e2e", _latency("e2e_s", "E2E: whole requests", "requests")),
)
SLO_PANEL = Panel("slo", lambda axes, result: draw_slo(axes, result.slo))
TIMELINE_PANELS = (
    Panel("machines", draw_machines),
    Panel("running", draw_running),
    Panel("waiting", draw_waiting),
    Panel("kv", draw_kv),
)
USAGE_PANELS = (
    Panel("start", draw_start),
    Panel("whole", draw_whole),
    Panel("batches", draw_batches),
    Panel("use", draw_use),
)
