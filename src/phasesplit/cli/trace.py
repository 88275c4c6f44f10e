"""`phasesplit trace`: look at a trace, change its format, or its rate."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Look at a trace, convert it, or give it another rate.")

Input = Annotated[str, typer.Argument(help="Trace file, - for standard input, or the name of a shipped workload.")]
Output = Annotated[str, typer.Argument(help="File to write (.csv, .parquet, .jsonl; .gz and .zst compress), or -.")]
LayoutOption = Annotated[
    str | None,
    typer.Option("--input-format", help="Layout of the input instead of telling it from the columns, as azure."),
]
WrittenOption = Annotated[
    str | None, typer.Option("--format", help="csv, parquet, splitwise-sim or mooncake; by default from the name.")
]
ColumnsOption = Annotated[
    str | None, typer.Option("--columns", help="Names of your columns: arrival=ts,prompt=in,output=out.")
]
UnitOption = Annotated[
    str | None, typer.Option("--time-unit", help="Unit of numeric arrivals with --columns: s, ms, us or ns.")
]
SkipOption = Annotated[bool, typer.Option("--skip-bad", help="Drop and count wrong rows instead of stopping.")]
SortOption = Annotated[bool, typer.Option("--sort", help="Sort rows by arrival instead of stopping.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Seed of everything drawn at random.")]


@app.command()
def inspect(
    file: Input,
    png: Annotated[Path | None, typer.Option("--png", help="Also draw the trace into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    layout: LayoutOption = None,
    columns: ColumnsOption = None,
    time_unit: UnitOption = None,
    skip_bad: SkipOption = False,
    sort: SortOption = False,
) -> None:
    """Show rate, burstiness and lengths of a trace.

    Example: phasesplit trace inspect azure-coding --png coding.png
    """
    from phasesplit.domain.trace_shape import describe_trace

    trace = _read(file, format=layout, columns=columns, time_unit=time_unit, skip_bad=skip_bad, sort=sort)
    shape = describe_trace(trace)
    if png is not None:
        from phasesplit.cli.trace_figure import trace_png
        from phasesplit.files.compression import write_bytes

        write_bytes(png, trace_png(trace))
    if as_json:
        typer.echo(json.dumps(_plain(dataclasses.asdict(shape)), indent=2))
        return
    from phasesplit.cli.trace_view import print_trace

    print_trace(trace, shape)


@app.command()
def convert(
    file: Input,
    out: Output,
    written: WrittenOption = None,
    layout: LayoutOption = None,
    columns: ColumnsOption = None,
    time_unit: UnitOption = None,
    skip_bad: SkipOption = False,
    sort: SortOption = False,
) -> None:
    """Write a trace in another format.

    Example: phasesplit trace convert BurstGPT_1.csv burst.csv.gz --skip-bad
    """
    from phasesplit.files.trace_writers import write_trace

    _check_apart(file, out)
    trace = _read(file, format=layout, columns=columns, time_unit=time_unit, skip_bad=skip_bad, sort=sort)
    write_trace(out, trace, format=written)
    typer.echo(f"{out}: {len(trace):,} requests", err=True)


@app.command()
def resample(
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
    layout: LayoutOption = None,
    columns: ColumnsOption = None,
    time_unit: UnitOption = None,
    skip_bad: SkipOption = False,
    sort: SortOption = False,
) -> None:
    """Write a trace at another rate, with the same joint lengths.

    Example: phasesplit trace resample azure-coding out.csv --rate 70 --duration 600
    """
    from phasesplit.cli.demand import check_numbers
    from phasesplit.domain.arrival_text import parse_arrivals
    from phasesplit.domain.resampling import resample as resampled
    from phasesplit.domain.resampling import window_of
    from phasesplit.files.trace_writers import write_trace

    _check_apart(file, out)
    check_numbers(rate_per_s=rate, duration_s=duration, seed=seed)
    _check_window(start, end)
    model = None if arrivals == "keep" else parse_arrivals(arrivals, "--arrivals")
    trace = _read(file, format=layout, columns=columns, time_unit=time_unit, skip_bad=skip_bad, sort=sort)
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


def _read(file: str, **options: Any) -> Any:
    from phasesplit.files.traces import read_trace_or_workload

    trace, count = read_trace_or_workload(file, **options)
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
