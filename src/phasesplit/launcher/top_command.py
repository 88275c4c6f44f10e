"""`phasesplit top`: the state of a live cluster in the terminal, from the metrics of its gateway.

1. `GatewayReading` reads one answer of /metrics.
2. `machine_rows` and `summary` turn one or two readings into rows and lines.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer

from phasesplit.console.options import option
from phasesplit.errors import SpecError
from phasesplit.protocol.prometheus_text import read_samples

if TYPE_CHECKING:
    from rich.console import Group


_CALL_S = 5.0
_PIPE_COLUMNS = 140


def top(
    url: Annotated[
        str,
        typer.Argument(help="GatewayAddress; by default http://127.0.0.1:8080.", metavar="[URL]", show_default=False),
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


def _read(url: str) -> "GatewayReading":
    import http.client

    from phasesplit.launcher.announcing import GatewayAddress, unreached

    gateway = GatewayAddress.from_text(url, "URL")
    kind = http.client.HTTPSConnection if gateway.scheme == "https" else http.client.HTTPConnection
    connection = kind(gateway.host, gateway.port, timeout=_CALL_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as problem:
        raise SpecError(f"{url}: {unreached(problem)}") from None
    finally:
        connection.close()
    return GatewayReading.from_text(text, time.monotonic(), url)


def _page(url: str, now: "GatewayReading", before: "GatewayReading | None") -> "Group":
    from rich.console import Group
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(MACHINE_COLUMNS):
        table.add_column(column, justify="left" if number < 4 else "right", no_wrap=True)
    for row in machine_rows(now):
        table.add_row(*row)
    return Group(f"[bold]phasesplit[/] {url}", *summary(now, before), "", table)


_STATES = ("queued", "prefilling", "transferring", "waiting", "decoding")


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """One reading of a gateway's metrics.

    Attributes:
        at_s: When, on a clock that never goes back.
        samples: By name: labels and value.
    """

    at_s: float
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]]

    @classmethod
    def from_text(cls, text: str, at_s: float, where: str = "gateway") -> "GatewayReading":
        """Read Prometheus' text form.

        Args:
            text: What was answered.
            at_s: When.
            where: How the person knows who answered.

        Raises:
            SpecError: It is not that of a gateway.
        """
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for one in read_samples(text):
            samples.setdefault(one.name, []).append((one.labels, one.value))
        if "phasesplit_requests_total" not in samples and "phasesplit_pool_machines" not in samples:
            raise SpecError(f"{where}: what answers there is not a phasesplit gateway")
        return cls(at_s, {name: tuple(rows) for name, rows in samples.items()})

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        return sum(
            value
            for found, value in self.samples.get(f"phasesplit_{name}", ())
            if all(found.get(label) == wanted for label, wanted in labels.items())
        )

    def labels(self, name: str, label: str) -> list[str]:
        """Return the values of a label, each once, in order."""
        return list(dict.fromkeys(found[label] for found, _ in self.samples.get(f"phasesplit_{name}", ())))

    def one(self, name: str, wanted: str, **labels: str) -> str:
        """Return a label of the sample that is not zero and has the others, `-` where there is none."""
        for found, value in self.samples.get(f"phasesplit_{name}", ()):
            if value and all(found.get(label) == text for label, text in labels.items()):
                return found[wanted]
        return "-"


MACHINE_COLUMNS = (
    "machine",
    "pool",
    "home",
    "state",
    "queue",
    "running",
    "KV used",
    "of",
    "layerwise",
    "whole",
    "sent",
)


def machine_rows(now: GatewayReading) -> list[tuple[str, ...]]:
    """Return a row for each machine in the order of their names, see `MACHINE_COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for name in sorted(
        now.labels("machine_pool", "machine"), key=lambda name: (name.rstrip("0123456789"), len(name), name)
    ):
        used, capacity = (now.value(f"machine_kv_{what}_blocks", machine=name) for what in ("used", "capacity"))
        rows.append((
            name,
            now.one("machine_pool", "pool", machine=name),
            now.one("machine_pool", "home", machine=name),
            now.one("machine_state", "state", machine=name),
            f"{now.value('machine_waiting_prompts', machine=name):.0f}",
            f"{now.value('machine_running_requests', machine=name):.0f}",
            f"{100 * used / capacity if capacity else 0:.0f} %",
            f"{capacity:,.0f} blocks",
            f"{now.value('transfers_total', machine=name, mode='layerwise'):.0f}",
            f"{now.value('transfers_total', machine=name, mode='serialized'):.0f}",
            _size(now.value("transfer_sent_bytes_total", machine=name)),
        ))  # fmt: skip
    return rows


def summary(now: GatewayReading, before: GatewayReading | None) -> list[str]:
    """Return lines about the whole cluster: recent where there is an earlier reading, since the start where not.

    Args:
        now: The reading.
        before: An earlier one.
    """
    span_s = now.at_s - before.at_s if before is not None else 0.0
    done = _grown(now, before, "requests_total")
    tokens = _grown(now, before, "output_tokens_total")
    rates = f"{done / span_s:.1f} requests/s, {tokens / span_s:.0f} tokens/s" if span_s > 0 else f"{done:.0f} requests"
    live = ", ".join(f"{now.value('live_requests', state=state):.0f} {state}" for state in _STATES)
    moves = ", ".join(
        f"{now.value('pool_moves_total', move=move):.0f} {move.replace('_', ' ')}" for move in _moves(now)
    )
    return [
        f"{rates}; TTFT {_percentiles(now, before, 'ttft')}; ITL {_percentiles(now, before, 'itl')}",
        f"now: {live}",
        f"retries {now.value('retries_total'):.0f}; moves: {moves or 'none'}"
        + ("; DEGRADED, see /ready" if now.value("degraded") else "")
        + ("; THE DECISION LOG HAS ENDED, it cannot be written" if now.value("decision_log_ended") else ""),
    ]


def _moves(now: GatewayReading) -> Iterable[str]:
    return now.labels("pool_moves_total", "move")


def _grown(now: GatewayReading, before: GatewayReading | None, name: str) -> float:
    return now.value(name) - (before.value(name) if before is not None else 0.0)


def _percentiles(now: GatewayReading, before: GatewayReading | None, name: str) -> str:
    """Return p50 and p99 of a histogram's recent values, as the upper bounds of their buckets."""
    name = f"{name}_seconds_bucket"
    bounds = [(float(bound), _grown_bucket(now, before, name, bound)) for bound in now.labels(name, "le")]
    if not bounds or bounds[-1][1] <= 0:
        return "-"
    total = bounds[-1][1]

    def at(share: float) -> str:
        for (lower, _), (upper, count) in pairwise([(0.0, 0.0), *bounds]):
            if count >= share * total:
                return f"<{1e3 * upper:.4g}" if upper != float("inf") else f">{1e3 * lower:.4g}"
        return "-"

    return f"p50 {at(0.5)} ms p99 {at(0.99)} ms"


def _grown_bucket(now: GatewayReading, before: GatewayReading | None, name: str, bound: str) -> float:
    return now.value(name, le=bound) - (before.value(name, le=bound) if before is not None else 0.0)


def _size(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"
