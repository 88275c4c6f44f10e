"""The pools over time: machines, running and waiting requests, KV memory."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.figures.readable import time_unit
from phasesplit.figures.style import colour, note, title
from phasesplit.scheduling.pools import POOL_NAMES
from phasesplit.simulation.result import Result

MACHINES, BUSY, RUNNING, WAITING, KV_SHARE = range(5)
"""Fields of a sample, as `simulation.world.SAMPLE_FIELDS` names them."""


def pools_seen(result: Result) -> list[int]:
    """Return the numbers of the pools that ever had a machine."""
    return [pool for pool in range(len(POOL_NAMES)) if (result.timeline.samples[:, pool, MACHINES] > 0).any()]


def draw_machines(axes: Any, result: Result) -> None:
    """Draw how many machines each pool has, one on top of the other."""
    pools = pools_seen(result)
    title(axes, "Machines in each pool", [(POOL_NAMES[pool], POOL_NAMES[pool]) for pool in pools])
    if not pools:
        note(axes, "The run was too short for samples.")
        return
    time = _time_axis(axes, result)
    machines = result.timeline.samples[:, pools, MACHINES].T
    axes.stackplot(time, machines, colors=[colour(POOL_NAMES[pool]) for pool in pools], step="pre", linewidth=0)
    axes.set(ylim=(0, result.cluster.machines), ylabel="machines")
    _whole(axes)


def draw_running(axes: Any, result: Result) -> None:
    """Draw the requests in the running batches of each pool."""
    _draw_lines(axes, result, RUNNING, "Requests running", "requests")


def draw_waiting(axes: Any, result: Result) -> None:
    """Draw the requests that wait in each pool."""
    _draw_lines(axes, result, WAITING, "Requests waiting", "requests")


def draw_kv(axes: Any, result: Result) -> None:
    """Draw the share of KV memory in use, averaged over the machines of each pool."""
    _draw_lines(axes, result, KV_SHARE, "KV memory in use", "share of the pool's memory")
    if axes.axison:
        axes.set_ylim(0, 1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25 %", "50 %", "75 %", "100 %"])


def _draw_lines(axes: Any, result: Result, field: int, name: str, unit: str) -> None:
    pools = pools_seen(result)
    title(axes, name, [(POOL_NAMES[pool], POOL_NAMES[pool]) for pool in pools])
    if not pools:
        note(axes, "The run was too short for samples.")
        return
    time = _time_axis(axes, result)
    samples = result.timeline.samples
    for pool in pools:
        values = np.where(samples[:, pool, MACHINES] > 0, samples[:, pool, field], np.nan)
        axes.plot(time, values, color=colour(POOL_NAMES[pool]), linewidth=1.1)
    highest = float(samples[:, pools, field].max())
    axes.set(ylim=(0, max(1.0, 1.08 * highest)), ylabel=unit)
    if field != KV_SHARE:
        _whole(axes)


def _time_axis(axes: Any, result: Result) -> NDArray[np.float64]:
    """Give axes the run's time axis and a mark at the last arrival; return the times of the samples on it."""
    span_s = max(result.end_s - result.first_arrival_s, 1e-9)
    unit, size_s = time_unit(span_s)
    axes.set(xlim=(0, span_s / size_s))
    axes.grid(visible=True, axis="y")
    last = (result.last_arrival_s - result.first_arrival_s) / size_s
    marked = 0 < last < 0.98 * span_s / size_s
    if marked:
        axes.axvline(last, color=colour("ink"), linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xlabel(f"{unit} since the first arrival{' (dashed: the last)' if marked else ''}")
    times: NDArray[np.float64] = (result.timeline.time_s - result.first_arrival_s) / size_s
    return times


def _whole(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
