"""A trace as text in the terminal: two tables, the rate over time, and the lengths against each other."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.request import Trace
from phasesplit.domain.trace_shape import PERCENTILES, Lengths, TraceShape, rate_over_time

_WIDEST = 100
_AXIS = 9
_RATE_ROWS = 6
_JOINT_ROWS = 10
_BARS = " ▁▂▃▄▅▆▇█"
_SHADES = " ·░▒▓█"


def print_trace(trace: Trace, shape: TraceShape) -> None:
    """Print a trace to standard output, as wide as the terminal but at most 100 columns."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    width = max(20, min(console.width, _WIDEST) - _AXIS - 1)
    console.print(Text.assemble((shape.name, "bold"), f"  {_summary(shape)}"))
    console.print(f"inter-arrival coefficient of variation {_defined(shape.inter_arrival_cv)} (Poisson: 1)")
    console.print(_windows_table(shape))
    console.print(_lengths_table(shape))
    console.print(
        f"prompt and output length: correlation {_defined(shape.pearson)} (Pearson), "
        f"{_defined(shape.spearman)} (Spearman)"
    )
    if shape.prefix_seen_share is not None:
        console.print(f"prefix blocks: {shape.prefix_blocks:,}, {shape.prefix_seen_share:.1%} of them seen before")
    if trace.duration_s == 0:
        return
    console.print("\n[bold]requests/s over time[/bold]")
    console.print(Text("\n".join(rate_lines(trace, width))))
    console.print("\n[bold]output tokens (up) against prompt tokens (right), darker is more[/bold]")
    console.print(Text("\n".join(joint_lines(trace, width))))


def rate_lines(trace: Trace, width: int) -> list[str]:
    """Return the lines of a bar chart of the arrival rate, `width` bars wide, with both axes."""
    edges, rates = rate_over_time(trace.arrival_s, width)
    top = float(rates.max())
    eighths = np.ceil(rates / top * _RATE_ROWS * 8).astype(int)
    lines = []
    for row in range(_RATE_ROWS - 1, -1, -1):
        label = _number(top) if row == _RATE_ROWS - 1 else "0" if row == 0 else ""
        bars = "".join(_BARS[min(8, max(0, bar - row * 8))] for bar in eighths)
        lines.append(f"{label:>{_AXIS - 1}} {bars}".rstrip())
    return [*lines, _axis(width, [_time(float(edges[0])), _time(float(edges[width // 2])), _time(float(edges[-1]))])]


def joint_lines(trace: Trace, width: int) -> list[str]:
    """Return the lines of a shaded map of prompt and output lengths on logarithmic axes."""
    across, x = _log_bins(trace.prompt_tokens, width)
    upward, y = _log_bins(trace.output_tokens, _JOINT_ROWS)
    counts = np.zeros((_JOINT_ROWS, width))
    np.add.at(counts, (upward, across), 1)
    # Logarithmic shades: a cell with one request stays visible beside one with thousands.
    shade = np.ceil(np.log1p(counts) / math.log1p(float(counts.max())) * (len(_SHADES) - 1)).astype(int)
    labels = {_JOINT_ROWS - 1: y[-1], _JOINT_ROWS // 2: y[_JOINT_ROWS // 2], 0: y[0]}
    lines = []
    for row in range(_JOINT_ROWS - 1, -1, -1):
        label = _number(labels[row]) if row in labels else ""
        lines.append(f"{label:>{_AXIS - 1}} {''.join(_SHADES[s] for s in shade[row])}".rstrip())
    return [*lines, _axis(width, [_number(x[0]), _number(x[width // 2]), _number(x[-1])])]


def _log_bins(tokens: NDArray[np.int32], bins: int) -> tuple[NDArray[np.int64], list[float]]:
    low, high = math.log(float(tokens.min())), math.log(float(tokens.max()) + 1)
    step = max((high - low) / bins, 1e-9)
    index = np.minimum(((np.log(tokens) - low) / step).astype(np.int64), bins - 1)
    return index, [math.exp(low + step * at) for at in range(bins)] + [float(tokens.max())]


def _axis(width: int, labels: list[str]) -> str:
    left, middle, right = labels
    before = width // 2 - len(left) - len(middle) // 2
    after = width - len(left) - max(1, before) - len(middle) - len(right)
    return f"{'':{_AXIS}}{left}{' ' * max(1, before)}{middle}{' ' * max(1, after)}{right}"


def _summary(shape: TraceShape) -> str:
    requests = "1 request" if shape.requests == 1 else f"{shape.requests:,} requests"
    return f"{requests} over {_time(shape.duration_s)}, {shape.rate_per_s:,.3g} requests/s"


def _windows_table(shape: TraceShape) -> Any:
    table = _table("window", "windows", "variance/mean", "peak/mean", "most", "empty")
    for counted in shape.windows:
        if counted.windows:
            table.add_row(
                f"{counted.window_s:g} s",
                f"{counted.windows:,}",
                f"{counted.dispersion:.2f}",
                f"{counted.peak_to_mean:.2f}",
                f"{counted.most:,}",
                f"{counted.empty_share:.1%}",
            )
    return table


def _lengths_table(shape: TraceShape) -> Any:
    table = _table("tokens", "mean", *("max" if p == 100 else f"p{p}" for p in PERCENTILES))

    def row(name: str, lengths: Lengths) -> None:
        mean = f"{lengths.mean:,.0f}" if lengths.mean >= 1000 else f"{lengths.mean:.1f}"
        table.add_row(name, mean, *(f"{tokens}" for tokens in lengths.percentiles.values()))

    row("prompt", shape.prompt)
    row("output", shape.output)
    return table


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right", no_wrap=True)
    return table


def _time(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.3g} s"


def _defined(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.2f}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
