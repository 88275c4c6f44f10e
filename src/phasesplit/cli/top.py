"""`phasesplit top`: a live cluster in the terminal, as its gateway's metrics show it."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.cli.options import option
from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from rich.console import Group

    from phasesplit.serving.glance import Metrics

_CALL_S = 5.0
_PIPE_COLUMNS = 140


def top(
    url: Annotated[
        str, typer.Argument(help="Gateway; by default http://127.0.0.1:8080.", metavar="[URL]", show_default=False)
    ] = "http://127.0.0.1:8080",
    once: Annotated[bool, option("--once", text="Print one table and stop.")] = False,
    every: Annotated[float, option("--every", text="Seconds between two looks; by default 1.", metavar="S")] = 1.0,
) -> None:
    """Show pools, queues, KV, transfers, moves and latencies of a cluster that serves; Ctrl-C stops.

    Example: phasesplit top http://127.0.0.1:8080
    """
    from rich.console import Console
    from rich.live import Live

    if not 0.1 <= every <= 3600:
        raise SpecError.bad("--every", every, "0.1 to 3600 seconds")
    before, now = None, _read(url)
    console = Console()
    # Without a terminal there is nothing to draw over: one table, as with --once.
    if once or not console.is_terminal:
        # A file or a pipe has no width of its own, and nothing in a table is to be cut there.
        Console(width=None if console.is_terminal else _PIPE_COLUMNS).print(_page(url, now, None))
        return
    with Live(_page(url, now, None), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(every)
            before, now = now, _read(url)
            live.update(_page(url, now, before), refresh=True)


def _read(url: str) -> "Metrics":
    import http.client

    from phasesplit.serving.addresses import unreached
    from phasesplit.serving.announcing import Gateway
    from phasesplit.serving.glance import Metrics

    gateway = Gateway.from_text(url, "URL")
    kind = http.client.HTTPSConnection if gateway.scheme == "https" else http.client.HTTPConnection
    connection = kind(gateway.host, gateway.port, timeout=_CALL_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as problem:
        raise SpecError(f"{url}: {unreached(problem)}") from None
    finally:
        connection.close()
    return Metrics.from_text(text, time.monotonic(), url)


def _page(url: str, now: "Metrics", before: "Metrics | None") -> "Group":
    from rich.console import Group
    from rich.table import Table

    from phasesplit.serving.glance import MACHINE_COLUMNS, machine_rows, summary

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(MACHINE_COLUMNS):
        table.add_column(column, justify="left" if number < 4 else "right", no_wrap=True)
    for row in machine_rows(now):
        table.add_row(*row)
    return Group(f"[bold]phasesplit[/] {url}", *summary(now, before), "", table)
