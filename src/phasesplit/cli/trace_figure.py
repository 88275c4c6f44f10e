"""A trace as a picture: rate over time, distributions of lengths, and the lengths against each other."""

import io
from typing import Any

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.domain.trace_shape import rate_over_time

_MOST_BINS = 240
_PROMPT, _OUTPUT, _RATE = "#2b6cb0", "#dd6b20", "#4a5568"


def trace_png(trace: Trace) -> bytes:
    """Return a PNG picture of a trace that has at least one request; the same trace gives the same bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[1, 1.25])
    figure.suptitle(
        f"{trace.name}: {len(trace):,} requests, {trace.rate_per_s:,.3g} requests/s", fontsize=14, fontweight="bold"
    )
    _draw_rate(figure.add_subplot(grid[0, :]), trace)
    _draw_lengths(figure.add_subplot(grid[1, 0]), trace)
    _draw_joint(figure, figure.add_subplot(grid[1, 1]), trace)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130, metadata={"Software": None})
    return picture.getvalue()


def _draw_rate(axes: Any, trace: Trace) -> None:
    edges, rates = rate_over_time(trace.arrival_s, min(_MOST_BINS, 10 + len(trace) // 10))
    unit, size = (
        ("h", 3_600.0) if trace.duration_s > 4 * 3_600 else ("min", 60.0) if trace.duration_s > 300 else ("s", 1.0)
    )
    axes.stairs(rates, edges / size, fill=True, color=_RATE, alpha=0.75)
    axes.axhline(trace.rate_per_s, color=_OUTPUT, linewidth=1.2, linestyle="--")
    axes.set(
        title=f"Arrival rate (bins of {np.diff(edges)[0]:.3g} s; dashed: mean)",
        xlabel=f"time ({unit})",
        ylabel="requests/s",
        xlim=(edges[0] / size, edges[-1] / size),
        ylim=(0, None),
    )
    _plain(axes)


def _draw_lengths(axes: Any, trace: Trace) -> None:
    share = np.linspace(0, 1, 1001)
    for tokens, name, colour in ((trace.prompt_tokens, "prompt", _PROMPT), (trace.output_tokens, "output", _OUTPUT)):
        median = int(np.median(tokens))
        at_most = np.quantile(tokens, share, method="inverted_cdf")
        axes.step(at_most, share, where="post", color=colour, linewidth=1.8, label=f"{name}, median {median:,}")
    axes.set(xlabel="tokens", ylabel="share of requests at most this long", xscale="log", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    _whole_numbers(axes.xaxis, axes.get_xlim())
    _plain(axes)


def _draw_joint(figure: Any, axes: Any, trace: Trace) -> None:
    cells = axes.hexbin(
        trace.prompt_tokens,
        trace.output_tokens,
        gridsize=45,
        xscale="log",
        yscale="log",
        bins="log",
        mincnt=1,
        cmap="viridis",
        linewidths=0.1,
    )
    figure.colorbar(cells, ax=axes, label="requests")
    axes.set(title="Output against prompt", xlabel="prompt tokens", ylabel="output tokens")
    _whole_numbers(axes.xaxis, axes.get_xlim())
    _whole_numbers(axes.yaxis, axes.get_ylim())
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(visible=True, color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _whole_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """Label a logarithmic axis with plain numbers, between the powers of ten only where these are too few."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    whole = StrMethodFormatter("{x:,.0f}")
    axis.set_major_formatter(whole)
    axis.set_minor_formatter(whole if limits[1] < 10 * limits[0] else NullFormatter())
