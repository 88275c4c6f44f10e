"""Latencies: distribution functions that show their tails, and how near each limit of the SLO is."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Distribution
from phasesplit.domain.slo import Finding, Limit, SloVerdict
from phasesplit.figures import readable
from phasesplit.figures.style import colour, note, title

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


def _draw_finding(axes: Any, row: float, finding: Finding) -> None:
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
