"""A verification as people read it in a terminal, and how far one is."""

import math
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from phasesplit.measuring.cores import cores_text

if TYPE_CHECKING:
    from phasesplit.measuring.comparison import Figure
    from phasesplit.measuring.verify import Verification

_MOST_MISPLACED = 5
_EVERY_S = 5.0
"""Where standard error is no terminal, a line this often."""


class VerifyProgress:
    """Shows what is done and how far it is; to be closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._status: Any = None
        self._said, self._said_s = "", -math.inf

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that so many of all requests are done."""
        if not self._shown:
            return
        if self._status is None:
            from rich.console import Console

            console = Console(stderr=True, highlight=False)
            self._status = console.status("") if console.is_terminal else console
            if console.is_terminal:
                self._status.start()
        text = f"{what} ..." if total <= 1 else f"{what}: {done:,} of {total:,} requests"
        if hasattr(self._status, "update"):
            self._status.update(text)
        elif what != self._said or time.monotonic() - self._said_s > _EVERY_S:
            self._status.print(text)
            self._said, self._said_s = what, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self._status, "stop"):
            self._status.stop()


def print_verification(found: "Verification") -> None:
    """Print predicted beside measured, what explains the difference, and what both rest on."""
    from rich.console import Console

    comparison = found.comparison
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    for line in basis(found):
        say(line)
    console.print(_table("latency", comparison.latencies, has_goals=True))
    console.print(_table("mean time in each stage", comparison.stages))
    console.print(_table("throughput, utilisation, moves", comparison.totals))
    for explanation in comparison.explanations:
        say(str(explanation))
    for line in placements(found):
        say(line)
    missed = comparison.missed
    if missed:
        say(f"Beyond the goal: {', '.join(f'{one.name} ({one.error:+.0%})' for one in missed)}")
    else:
        say("All goals met.")
    for text in found.warnings:
        say(f"Beware: {text}")
    for text, count in found.errors.items():
        say(f"{count} failed: {text}")


def basis(found: "Verification") -> list[str]:
    """Return what prediction and measurement rest on, a line each."""
    trace, kv_blocks = found.trace, set(found.kv_blocks.values())
    pools = " + ".join(f"{count} {role}" for role, count in found.cluster.pools.items())
    each = " or ".join(f"{blocks:,}" for blocks in sorted(kv_blocks))
    lines = [
        f"{found.cluster.name} ({pools}) with {trace.name}: {len(trace):,} requests in {trace.duration_s:.0f} s, "
        f"{trace.rate_per_s:.2f}/s",
        f"times: {found.profile}",
        f"KV memory: {each} blocks of {found.block_tokens} tokens a worker, the same on both sides",
        f"cores: {', '.join(f'{name} on {cores_text(cores)}' for name, cores in found.plan.workers.items())}; on "
        f"{cores_text(found.plan.front)} the gateway ({found.gateway_share:.0%} of a core) and the "
        f"client ({found.client_share:.0%})",
    ]
    share = found.plan.core_share
    if share < 1:
        lines.append(
            f"each worker has {share:.0%} of its core: iterations take {1 / share:.2f} times as long, on both sides"
        )
    overheads = found.overheads
    parts = ", ".join(f"{1e3 * value:.1f} ms in {stage}" for stage, value in overheads.stages_s.items())
    parts += f" a request; {1e3 * overheads.iteration_s:.2f} ms an iteration, {1e3 * overheads.token_s:.2f} ms a token"
    added = "added to the prediction" if found.adds_overheads else "not in the prediction"
    return [*lines, f"front end, measured on the idle cluster: {parts} ({added})"]


def placements(found: "Verification") -> list[str]:
    """Return how many placement decisions differ, and the first of them."""
    comparison = found.comparison
    if not comparison.misplaced:
        return ["Placement: every request went to the predicted machines."]
    count = len(comparison.misplaced)
    lines = [f"Placement: {count:,} of {comparison.requests:,} requests went elsewhere than predicted."]
    lines += [
        f"  request {one.row}: predicted {' -> '.join(one.predicted)}, measured {' -> '.join(one.measured)}"
        for one in comparison.misplaced[:_MOST_MISPLACED]
    ]
    return lines


def shown(figure: "Figure", value: float) -> str:
    """Return a value in the unit that people read."""
    if math.isnan(value):
        return "-"
    if figure.unit == "s":
        return f"{1e3 * value:,.1f} ms"
    if figure.unit == "share":
        return f"{value:.0%}"
    return f"{value:,.2f}/s" if figure.unit == "per_s" else f"{value:,.0f}"


def shown_error(figure: "Figure") -> str:
    """Return the error: of times and rates relative, of shares and counts the difference."""
    if figure.unit == "share":
        return f"{100 * (figure.predicted - figure.measured):+.0f} points"
    if figure.unit == "count":
        return f"{figure.predicted - figure.measured:+.0f}"
    return "-" if math.isnan(figure.error) else f"{figure.error:+.1%}"


def _table(title: str, figures: "Sequence[Figure]", *, has_goals: bool = False) -> Any:
    from rich.table import Table

    table = Table(title, "predicted", "measured", "error", *(["goal"] if has_goals else []))
    for column in table.columns[1:]:
        column.justify = "right"
    for figure in figures:
        cells = [shown(figure, figure.predicted), shown(figure, figure.measured), shown_error(figure)]
        if has_goals and figure.goal is not None:
            cells.append(f"{figure.goal:.0%} {'met' if figure.is_met else 'missed'}")
        table.add_row(figure.name, *cells)
    return table
