"""`phasesplit replay`: a trace against a running endpoint, measured as its clients see it."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit.console.options import ReplayOptions, option
from phasesplit.console.workload_options import Demand
from phasesplit.errors import InfeasibleError, SpecError

if TYPE_CHECKING:
    from phasesplit.domain.request import Trace
    from phasesplit.replay.client import ReplayResult

_SHARES = (0.5, 0.9, 0.99)
_KEY_VARIABLE = "PHASESPLIT_API_KEY"


def replay(
    *,
    workload: Annotated[str, typer.Argument(help="Trace file, - for standard input, or a shipped workload.")],
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible endpoint.")],
    model: Annotated[
        str | None, option("--model", text="Model there; by default the only one.", metavar="NAME")
    ] = None,
    load: ReplayOptions,
    ids: Annotated[
        str,
        option("--token-ids", text="Token ids that prompts are drawn from; by default 1000:20000.", metavar="FROM:TO"),
    ] = "1000:20000",
    timeout: Annotated[
        float, option("--timeout", text="Seconds after which a request has failed; by default 600.", metavar="S")
    ] = 600.0,
    requests: Annotated[
        Path | None, option("--requests", text="Write a row for each request: .csv, .csv.gz, .parquet.", metavar="FILE")
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print the result as JSON, and nothing else.")] = False,
) -> int:
    """Send a trace to an endpoint, each request at its instant, and measure TTFT, ITL and E2E.

    Prompts are random tokens of the trace's lengths; answers have the trace's lengths. Latencies count from the instant
    at which a request was due. A key for the endpoint is taken from PHASESPLIT_API_KEY.

    Example: phasesplit replay azure-conversation http://127.0.0.1:8080 --rate 2 --duration 60 --clip 512:64
    """
    from phasesplit.io.results import REQUEST_ENDINGS, check_output

    demand = Demand(source=workload, load=load, seed=load.seed, place="WORKLOAD")
    if requests is not None:
        check_output(requests, REQUEST_ENDINGS, "--requests")
    if not 0 < timeout < float("inf"):
        raise SpecError.bad("--timeout", timeout, "a time > 0 in seconds")
    drawn = token_ids(ids)
    limits = None if load.clip is None else span("--clip", load.clip)
    trace, dropped = demand.trace()
    measured = asyncio.run(_measured(clipped(trace, limits), url, model, drawn, load.seed, timeout, quiet=as_json))
    if requests is not None:
        from phasesplit.io.results import write_columns, written_whole

        with written_whole(requests) as part:
            write_columns(measured.columns(), part)
    if as_json:
        import orjson

        typer.echo(orjson.dumps(summary(measured), option=orjson.OPT_INDENT_2).decode())
    else:
        if dropped:
            typer.echo(dropped, err=True)
        _print(measured)
    if not measured.completed:
        raise InfeasibleError("no request was answered")
    return 0


async def _measured(
    trace: "Trace", url: str, model: str | None, ids: range, seed: int, timeout_s: float, *, quiet: bool
) -> "ReplayResult":
    from phasesplit.replay.client import Prompts, SeenRequest, find_endpoint
    from phasesplit.replay.client import replay as send

    api_key = os.environ.get(_KEY_VARIABLE)
    endpoint = await find_endpoint(url, model=model, api_key=api_key)
    longest = int((trace.prompt_tokens + trace.output_tokens).max()) if len(trace) else 0
    if endpoint.context_tokens is not None and longest > endpoint.context_tokens:
        raise SpecError(
            f"{trace.name}: has a request of {longest:,} tokens, and {endpoint.model} there takes "
            f"{endpoint.context_tokens:,} at most; shorten with --clip"
        )
    ended = failed = 0
    shows = not quiet and sys.stderr.isatty()

    def count(seen: SeenRequest) -> None:
        nonlocal ended, failed
        ended += 1
        failed += bool(seen.error)
        if shows:
            last = "\n" if ended == len(trace) else ""
            sys.stderr.write(f"\r{ended:,} of {len(trace):,} requests ended, {failed:,} failed{last}")

    return await send(
        trace,
        endpoint.url,
        model=endpoint.model,
        prompts=Prompts(ids=ids, seed=seed),
        api_key=api_key,
        timeout_s=timeout_s,
        on_end=count,
    )


def span(flag: str, text: str) -> range:
    """Return two whole numbers FIRST:LAST as a range.

    Args:
        flag: The option they were given with.
        text: What stands there.

    Raises:
        SpecError: It is not two whole numbers.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and len(text) < 24):
        raise SpecError.bad(flag, text, "two whole numbers, such as 512:64")
    return range(int(first), int(last))


def token_ids(text: str) -> range:
    """Return the token ids that --token-ids has prompts drawn from.

    Raises:
        SpecError: It is not two whole numbers, the first below the second.
    """
    try:
        ids = span("--token-ids", text)
    except SpecError:
        ids = range(0)
    if not ids:
        raise SpecError.bad("--token-ids", text, "two whole numbers FROM:TO, such as 1000:20000")
    return ids


def clipped(trace: "Trace", limits: range | None) -> "Trace":
    """Return the trace with prompts and outputs no longer than the limits, start and stop of the range.

    Raises:
        SpecError: A limit is 0.
    """
    if limits is None:
        return trace
    if min(limits.start, limits.stop) < 1:
        raise SpecError.bad("--clip", f"{limits.start}:{limits.stop}", "two whole numbers of at least 1")
    import numpy as np

    from phasesplit.domain.request import Trace

    return Trace.from_columns(
        f"{trace.name}, clipped to {limits.start}:{limits.stop}",
        trace.arrival_s,
        np.minimum(trace.prompt_tokens, limits.start).astype(np.int32),
        np.minimum(trace.output_tokens, limits.stop).astype(np.int32),
        oracle=trace.oracle,
    )


def summary(measured: "ReplayResult") -> dict[str, Any]:
    """Return the result as JSON has it: counts, and percentiles in seconds."""
    import numpy as np

    from phasesplit.domain.latency import Exact
    from phasesplit.replay.client import LATE_S

    columns = measured.columns()
    answered = columns["error"] == ""
    values = {name: columns[f"{name}_s"][answered] for name in ("ttft", "itl_max", "e2e")} | {"itl": measured.gaps_s}
    found = {f"{name}_s": Exact(value.astype(np.float64)) for name, value in values.items()}
    output_tokens = int(columns["output_tokens"][answered].sum())
    late = measured.late
    return {
        "requests": len(measured.seen),
        "answered": int(answered.sum()),
        "failed": int((~answered).sum()),
        "first_error": next((str(error) for error in columns["error"] if error), None),
        "wall_s": measured.wall_s,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / measured.wall_s if measured.wall_s else 0.0,
        "requests_per_s": int(answered.sum()) / measured.wall_s if measured.wall_s else 0.0,
        "sent_late": int((late > LATE_S).sum()),
        "latest_s": float(late.max()) if late.size else 0.0,
        **{
            name: {f"p{share * 100:g}": value.quantile(share) for share in _SHARES} | {"mean": value.mean}
            for name, value in found.items()
        },
    }


def _ms(value_s: float) -> str:
    return f"{1e3 * value_s:,.1f} ms" if value_s == value_s else "-"  # of nothing there is no percentile


def _print(measured: "ReplayResult") -> None:
    from rich.console import Console
    from rich.table import Table

    from phasesplit.replay.client import LATE_S

    found = summary(measured)
    table = Table("latency", *(f"p{share * 100:g}" for share in _SHARES), "mean", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("ttft", "itl", "itl_max", "e2e"):
        row = found[f"{name}_s"]
        table.add_row(name.upper().replace("_MAX", ", longest"), *map(_ms, row.values()))
    console = Console()
    console.print(table)
    console.print(
        f"{found['answered']:,} of {found['requests']:,} requests answered in {found['wall_s']:.1f} s: "
        f"{found['requests_per_s']:.2f} requests/s, {found['output_tokens_per_s']:,.0f} output tokens/s"
    )
    if found["failed"]:
        console.print(f"{found['failed']:,} failed, the first with: {found['first_error']}", markup=False)
    if found["sent_late"]:
        console.print(
            f"Beware: {found['sent_late']:,} requests were sent more than {1e3 * LATE_S:.0f} ms late (latest "
            f"{1e3 * found['latest_s']:,.0f} ms): this machine is too slow for this load. Latencies count from the "
            "instants at which they were due."
        )
