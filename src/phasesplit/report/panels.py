"""The panels of a result, in the order in which a reader needs them. Each draws itself onto axes.

1. Latencies: distribution functions that show their tails, and how near each limit of the SLO is.
2. The pools over time: machines, running and waiting requests, KV memory.
3. How machines are used: the sizes of their batches, and what they spend their time on.
4. Where a request's time goes: queue, prefill, exposed transfer, second queue, decode.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Binned, Distribution
from phasesplit.domain.slo import Limit, LimitFinding, SloVerdict
from phasesplit.report import readable
from phasesplit.report.page import colour, note, title
from phasesplit.report.readable import time_unit
from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.simulator.result import PoolUse, Result

Floats = NDArray[np.float64]

MARKED = (50.0, 90.0, 99.0)
"""Percentiles whose values are written at the curve."""
HIGHEST = 99.9
"""The percentile at which curves end."""
_TICKS = (0.0, 50.0, 90.0, 99.0, HIGHEST)
_LEAST_SPAN = 5.0
_SHOWN_RATIO = 1.6

METRIC_COLOURS = {"ttft": "prefill", "itl": "decode", "e2e": "unsplit"}
"""Names of the colours of a metric, by the first part of its name."""


def metric_colour(metric: str) -> str:
    """Return the colour of a metric: that of the phase it tells about."""
    return colour(METRIC_COLOURS.get(metric.partition("_")[0], "ink"))


def nines(percentile: float) -> float:
    """Return where a percentile lies on an axis with equal room for each further nine: 0 at 0, 1 at 90, 2 at 99."""
    return -float(np.log10(1 - percentile / 100))


def tail_curve(distribution: Distribution, top_percentile: float) -> tuple[Floats, Floats]:
    """Return the values of a distribution and their places on the axis of `nines`, (201,) each, up to a percentile."""
    places = np.linspace(0.0, nines(top_percentile), 201)
    values = [distribution.quantile(float(1 - 10**-place)) for place in places]
    return np.maximum(np.array(values), 1e-6), places


def draw_latency(
    axes: Any, metric: str, distribution: Distribution, *, name: str, of: str, limits: Iterable[Limit] = ()
) -> None:
    """Draw a metric's distribution function with its percentiles and the SLO's limits on them.

    Args:
        axes: Where to.
        metric: Name of the metric: in seconds where it ends in "_s", else a factor.
        distribution: Its values.
        name: Title.
        of: What is counted ("requests").
        limits: Limits on percentiles; those on other metrics are left out.
    """
    title(axes, name)
    if not distribution.count:
        note(axes, f"No {of} to show.")
        return
    tint = metric_colour(metric)
    values, places = tail_curve(distribution, HIGHEST)
    axes.plot(values, places, color=tint, linewidth=1.8)
    for percentile in MARKED:
        _mark(axes, metric, distribution.quantile(percentile / 100), percentile, tint)
    own = [limit for limit in limits if limit.metric == metric]
    for limit in own:
        place = nines(min(limit.percentile, HIGHEST))
        axes.plot(limit.below, place, "|", markersize=9, markeredgewidth=1.6, color=colour("alarm"))
        is_right = limit.below >= distribution.quantile(limit.percentile / 100)
        axes.annotate(
            "limit", (limit.below, place), xytext=(4 if is_right else -4, 0), textcoords="offset points",
            ha="left" if is_right else "right", va="center", color=colour("alarm"),
        )  # fmt: skip
    axis = duration_axis if metric.endswith("_s") else factor_axis
    axis(axes, [*values, *(limit.below for limit in own)], room_right=0.3)
    percentile_axis(axes, of)


def draw_curves(axes: Any, curves: Sequence[tuple[str, str, Distribution]], *, name: str, of: str) -> None:
    """Draw distribution functions of one metric from several results, to compare their tails.

    Args:
        axes: Where to.
        curves: What each is, the name of its colour, and its values, of which there is at least one.
        name: Title.
        of: What is counted ("requests").
    """
    title(axes, name, [(what, tint) for what, tint, _ in curves], columns=1)
    values_s: list[float] = []
    for _, tint, distribution in curves:
        values, places = tail_curve(distribution, HIGHEST)
        axes.plot(values, places, color=colour(tint), linewidth=1.8)
        values_s += values.tolist()
    duration_axis(axes, values_s)
    percentile_axis(axes, of)


def duration_axis(axes: Any, values_s: Iterable[float], *, room_right: float = 0.0) -> None:
    """Give axes a logarithmic x axis of readable durations around values, a share of it left free at the right."""
    low, high = _widened(values_s, room_right)
    _logarithmic(axes, low, high, {tick: readable.seconds(tick) for tick in readable.time_ticks(low, high)})


def factor_axis(axes: Any, values: Iterable[float], *, room_right: float = 0.0) -> None:
    """Give axes a logarithmic x axis of round factors around values, a share of it left free at the right."""
    low, high = _widened(values, room_right)
    _logarithmic(axes, low, high, {tick: f"{tick:g}" for tick in readable.factor_ticks(low, high)})


def _widened(values: Iterable[float], room_right: float) -> tuple[float, float]:
    """Return the ends of a logarithmic axis around values."""
    known = np.array([value for value in values if value > 0])
    low, high = float(known.min()) / 1.1, float(known.max()) * 1.1
    widen = max(1.0, _LEAST_SPAN / (high / low)) ** 0.5
    low, high = low / widen, high * widen
    return low, high * (high / low) ** room_right


def _logarithmic(axes: Any, low: float, high: float, ticks: dict[float, str]) -> None:
    axes.set(xscale="log", xlim=(low, high))
    axes.set_xticks(list(ticks), labels=list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.grid(visible=True)


def percentile_axis(axes: Any, of: str) -> None:
    """Give axes a y axis with equal room for each further nine."""
    axes.set(ylim=(0, nines(HIGHEST) + 0.08), ylabel=f"share of {of} at most this long")
    axes.set_yticks([nines(tick) for tick in _TICKS], labels=[f"{tick:g} %" for tick in _TICKS])


def _mark(axes: Any, metric: str, value: float, percentile: float, tint: str) -> None:
    axes.plot(value, nines(percentile), "o", markersize=3.6, color=tint)
    axes.annotate(
        readable.measure(metric, value), (value, nines(percentile)), xytext=(6, -5), textcoords="offset points",
        va="top", fontweight="bold", color=tint,
    )  # fmt: skip


def draw_slo(axes: Any, verdict: SloVerdict | None) -> None:
    """Draw each limit of the SLO and the share of it that the run took up; bars that pass the line break it."""
    if verdict is None:
        title(axes, "SLO")
        note(axes, "Not judged: the model does not fit\non the reference machine.")
        return
    title(axes, f"Limits of the SLO: {'kept' if verdict.holds else 'broken'}")
    findings = verdict.findings
    rows = np.arange(len(findings), 0, -1)
    for row, finding in zip(rows, findings, strict=True):
        _draw_finding(axes, float(row), finding)
    axes.axvline(1.0, color=colour("ink"), linewidth=1.0)
    axes.set(xlim=(0, _SHOWN_RATIO + 0.5), ylim=(0.4, len(findings) + 0.6), xlabel="value as a share of its limit")
    axes.set_xticks([0, 0.5, 1.0, 1.5], labels=["0", "50 %", "limit", "150 %"])
    axes.set_yticks(
        rows, labels=[f"{short_name(finding.limit.metric)} p{finding.limit.percentile:g}" for finding in findings]
    )
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


def _draw_finding(axes: Any, row: float, finding: LimitFinding) -> None:
    limit = finding.limit
    ratio = finding.value / limit.below
    shown = 0.0 if np.isnan(ratio) else min(ratio, _SHOWN_RATIO)
    axes.barh(row, shown, height=0.62, color=metric_colour(limit.metric))
    if ratio > _SHOWN_RATIO:
        axes.plot(_SHOWN_RATIO, row, ">", markersize=7, color=metric_colour(limit.metric))
    axes.text(
        max(shown, 1.0 if shown > 0.5 else 0.0) + (0.08 if ratio > _SHOWN_RATIO else 0.04),
        row,
        readable.against(limit.metric, finding.value, limit.below),
        va="center",
        fontsize=6.5,
        color=colour("ink" if finding.holds else "alarm"),
        fontweight="normal" if finding.holds else "bold",
    )


def short_name(metric: str) -> str:
    """Return TTFT, ITL or E2E for any metric of it."""
    return metric.partition("_")[0].upper()


MACHINES, BUSY, RUNNING, WAITING, KV_SHARE = range(5)
"""Fields of a sample, as `simulator.world.SAMPLE_FIELDS` names them."""


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


_LEAST_LABELLED_USAGE = 0.12
_LONGEST_NAME = 34


def batch_bins(batch_share: Floats) -> tuple[list[int], Floats]:
    """Return ranges of batch sizes that double (1, 2, 3-4, 5-8, ...), and the share of busy time in each.

    Args:
        batch_share: float64 (pools, n + 1), share of busy time with batches of 0 .. n requests.

    Returns:
        The largest size in each range, and float64 (pools, ranges).
    """
    sizes: list[int] = []
    shares: list[Floats] = []
    largest = int(np.flatnonzero(batch_share.sum(axis=0)).max(initial=1))
    least, most = 1, 1
    while least <= largest:
        sizes.append(most)
        shares.append(batch_share[:, least : most + 1].sum(axis=1))
        least, most = most + 1, 2 * most
    return sizes, np.array(shares).T


def draw_batches(axes: Any, result: Result) -> None:
    """Draw the share of each pool's busy time by the size of the batch."""
    sizes, shares = batch_bins(result.batch_share)
    pools = [pool for pool in range(len(POOL_NAMES)) if shares[pool].any()]
    title(axes, "Requests in a batch", [(POOL_NAMES[pool], POOL_NAMES[pool]) for pool in pools])
    width = 0.84 / max(len(pools), 1)
    for index, pool in enumerate(pools):
        left = np.arange(len(sizes)) + (index - (len(pools) - 1) / 2) * width
        axes.bar(left, shares[pool], width=0.92 * width, color=colour(POOL_NAMES[pool]))
    axes.set(ylim=(0, None), ylabel="share of the pool's busy time", xlabel="requests in the batch, at most")
    axes.set_xticks(np.arange(len(sizes)), labels=[f"{size:,}" for size in sizes])
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.grid(visible=True, axis="y")


def draw_use(axes: Any, result: Result) -> None:
    """Draw what the machines of each pool of the cluster spend their time on."""
    uses = result.pools
    title(axes, "What machines do", [(name, name) for name in ("prefill", "decode", "mixed", "idle")])
    for row, use in zip(range(len(uses), 0, -1), uses, strict=True):
        _draw_shares(axes, row, use)
        axes.text(0, row + 0.27, readable.shortened(use.name, _LONGEST_NAME), va="bottom", fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(min(0.55, len(uses) - 1.45), len(uses) + 0.62), xlabel="share of machine time")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_shares(axes: Any, row: int, use: PoolUse) -> None:
    begin = 0.0
    idle = max(0.0, 1 - use.busy_share)
    parts = ((use.prefill_share, "prefill"), (use.decode_share, "decode"), (use.mixed_share, "mixed"), (idle, "idle"))
    for share, tint in parts:
        axes.barh(row, share, left=begin, height=0.46, color=colour(tint))
        if share > _LEAST_LABELLED_USAGE:
            ink = colour("ink" if tint == "idle" else "on-strong")
            axes.text(begin + share / 2, row, readable.percent(share), ha="center", va="center", color=ink)
        begin += share


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
