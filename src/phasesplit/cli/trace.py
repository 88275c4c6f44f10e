"""`phasesplit trace`: look at a trace as text or as a picture, change its format, or its rate."""

import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from phasesplit.console.options import TraceFileOptions, with_groups
from phasesplit.domain.request import PERCENTILES, Lengths, Trace, TraceShape, rate_over_time

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
    _plain_axis(axes)


def _draw_lengths(axes: Any, trace: Trace) -> None:
    share = np.linspace(0, 1, 1001)
    for tokens, name, colour in ((trace.prompt_tokens, "prompt", _PROMPT), (trace.output_tokens, "output", _OUTPUT)):
        median = int(np.median(tokens))
        at_most = np.quantile(tokens, share, method="inverted_cdf")
        axes.step(at_most, share, where="post", color=colour, linewidth=1.8, label=f"{name}, median {median:,}")
    axes.set(xlabel="tokens", ylabel="share of requests at most this long", xscale="log", ylim=(0, 1.02))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    _whole_numbers(axes.xaxis, axes.get_xlim())
    _plain_axis(axes)


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
    _plain_axis(axes)


def _plain_axis(axes: Any) -> None:
    axes.grid(visible=True, color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _whole_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """Label a logarithmic axis with plain numbers, between the powers of ten only where these are too few."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    whole = StrMethodFormatter("{x:,.0f}")
    axis.set_major_formatter(whole)
    axis.set_minor_formatter(whole if limits[1] < 10 * limits[0] else NullFormatter())


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
    # Logarithmic shades: a cell with one request stays visible next to one with thousands.
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


app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at a trace, convert it, or give it another rate."
)

Input = Annotated[str, typer.Argument(help="Trace file, - for standard input, or the name of a shipped workload.")]
Output = Annotated[str, typer.Argument(help="File to write (.csv, .parquet, .jsonl; .gz and .zst compress), or -.")]
WrittenOption = Annotated[
    str | None, typer.Option("--format", help="csv, parquet, splitwise-sim or mooncake; by default from the name.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything drawn at random.")]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions(TraceFileOptions):
    """How the input is read, where `--format` is how the output is written."""

    layout: Annotated[
        str | None,
        typer.Option("--input-format", help="Layout of the input instead of telling it from the columns, as azure."),
    ] = None


@app.command()
@with_groups
def inspect(
    *,
    file: Input,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the trace into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    read_as: InputOptions,
) -> None:
    """Show rate, burstiness and lengths of a trace.

    Example: phasesplit trace inspect azure-coding --png coding.png
    """
    from phasesplit.domain.request import describe_trace

    trace = _read(file, read_as)
    shape = describe_trace(trace)
    if png is not None:
        from phasesplit.io.compression import write_bytes

        write_bytes(png, trace_png(trace))
    if as_json:
        typer.echo(json.dumps(_plain(dataclasses.asdict(shape)), indent=2))
        return

    print_trace(trace, shape)


@app.command()
@with_groups
def convert(
    *,
    file: Input,
    out: Output,
    written: WrittenOption = None,
    read_as: InputOptions,
) -> None:
    """Write a trace in another format.

    Example: phasesplit trace convert BurstGPT_1.csv burst.csv.gz --skip-bad
    """
    from phasesplit.io.trace_writers import write_trace

    _check_apart(file, out)
    trace = _read(file, read_as)
    write_trace(out, trace, format=written)
    typer.echo(f"{out}: {len(trace):,} requests", err=True)


@app.command()
@with_groups
def resample(
    *,
    file: Input,
    out: Output,
    rate: Annotated[float, typer.Option("--rate", help="Mean requests per second wanted.")],
    duration: Annotated[float | None, typer.Option("--duration", help="Seconds wanted.")] = None,
    start: Annotated[float, typer.Option("--start", help="Use the input from this second on.")] = 0.0,
    end: Annotated[float | None, typer.Option("--end", help="Use the input up to this second.")] = None,
    arrivals: Annotated[
        str,
        typer.Option(
            "--arrivals",
            help="keep scales the trace's own pattern; or poisson, gamma:cv=2, weibull:cv=2, on-off:on=5,off=60, "
            "diurnal:amplitude=0.5 (times in s).",
        ),
    ] = "keep",
    seed: SeedOption = 0,
    written: WrittenOption = None,
    read_as: InputOptions,
) -> None:
    """Write a trace at another rate, with the same joint lengths.

    Example: phasesplit trace resample azure-coding out.csv --rate 70 --duration 600
    """
    from phasesplit.console.workload_options import check_numbers
    from phasesplit.domain.arrivals import parse_arrivals
    from phasesplit.domain.workload import resample as resampled
    from phasesplit.domain.workload import window_of
    from phasesplit.io.trace_writers import write_trace

    _check_apart(file, out)
    check_numbers(rate_per_s=rate, duration_s=duration, seed=seed)
    _check_window(start, end)
    model = None if arrivals == "keep" else parse_arrivals(arrivals, "--arrivals")
    trace = _read(file, read_as)
    if start or end is not None:
        trace = window_of(trace, start, math.inf if end is None else end)
    result = resampled(trace, rate, duration_s=duration, seed=seed, arrivals=model)
    write_trace(out, result, format=written)
    typer.echo(f"{out}: {len(result):,} requests over {result.duration_s:,.1f} s", err=True)


def _check_apart(file: str, out: str) -> None:
    """Raise if the output would replace the input."""
    from phasesplit.errors import SpecError

    if out != "-" and Path(out).resolve() == Path(file).resolve():
        raise SpecError.bad("output", out, "a file other than the input")


def _check_window(start_s: float, end_s: float | None) -> None:
    from phasesplit.errors import SpecError

    if not 0 <= start_s < math.inf:
        raise SpecError.bad("--start", start_s, "a finite number of seconds of at least 0")
    if end_s is not None and not start_s < end_s:
        raise SpecError.bad("--end", end_s, f"more than --start, {start_s:g} s")


def _read(file: str, read_as: InputOptions) -> Any:
    from phasesplit.io.traces import read_trace_or_workload

    trace, count = read_trace_or_workload(
        file,
        format=read_as.layout,
        columns=read_as.columns,
        time_unit=read_as.time_unit,
        skip_bad=read_as.skip_bad,
        sort=read_as.sort,
    )
    if count.dropped:
        typer.echo(f"{file}: {count}", err=True)
    return trace


def _plain(value: Any) -> Any:
    """Return a value that JSON can hold: a number that is none becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
