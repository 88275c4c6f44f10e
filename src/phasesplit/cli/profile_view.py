"""A profile as people read it, and how far one is."""

from collections.abc import Sequence
from itertools import zip_longest
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from phasesplit.files.profile_schema import ProfileSpec
    from phasesplit.measuring.profiling import State

_ENDINGS = {
    "reached": "stopped because the error asked for was reached",
    "form": "stopped because more points and runs would not help: what is left is the form of the phase times",
    "budget": "stopped because the time was up",
    "interrupted": "interrupted",
}
_MUCH_INTERRUPTED = 0.05
_MOST_ROWS = 10


class ProfileProgress:
    """Shows the time gone of the budget, what is timed, and the error so far; to be closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._shown = shown

    def __call__(self, state: "State") -> None:
        """Show a state."""
        if not self._shown:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.completed:3.0f} of {task.total:.0f} s"),
                BarColumn(30),
                TextColumn("{task.description}"),
                console=Console(stderr=True, highlight=False),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=state.budget_s)
        error = "" if state.error != state.error else f", held-out error {state.error:.1%}"
        self._bar.update(
            self._task, completed=state.elapsed_s, description=f"{state.timed} iterations{error}; now {state.shape}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_profile(profile: "ProfileSpec") -> None:
    """Print what a profile says, in short tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    machine = profile.machine
    title = f"{profile.model.name} on {machine.name}"
    if machine.processor:
        title += f" ({machine.processor}, {machine.cores} cores, {machine.threads} thread)"
    console.print(title, markup=False)
    if profile.times is not None:
        prompt, token = (
            _chosen(profile.times.prompt_knots_tokens, profile.times.prompt_knots_s),
            _chosen(profile.times.token_knots_requests, profile.times.token_knots_s),
        )
        table = Table("prompt tokens", "ms", "requests", "ms, no context", title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for left, right in zip_longest(prompt, token, fillvalue=("", "")):
            table.add_row(*left, *right)
        console.print(table)
        console.print(
            f"and {1e9 * profile.times.prompt_pair_s:,.1f} ns a pair of prompt tokens, "
            f"{1e6 * profile.times.token_context_s:,.2f} us a token of context"
        )
    errors = Table("held-out error", "iterations", "mean", "worst", "where", title_justify="left")
    for phase, found in profile.errors.items():
        if found.mean is not None and found.worst is not None:
            errors.add_row(phase, str(found.count), f"{found.mean:.1%}", f"{found.worst:.1%}", found.worst_at)
    if errors.row_count:
        console.print(errors)
    for line in _lines(profile):
        console.print(line, markup=False, soft_wrap=True)


def _chosen(places: Sequence[float], seconds: Sequence[float]) -> list[tuple[str, str]]:
    """Return some of the knots, spread evenly, first and last among them."""
    count = min(len(places), _MOST_ROWS)
    chosen = [round(row * (len(places) - 1) / (count - 1)) for row in range(count)]
    return [(f"{places[index]:,.0f}", f"{1e3 * seconds[index]:,.1f}") for index in chosen]


def _lines(profile: "ProfileSpec") -> list[str]:
    runs = sum(one.runs for one in profile.iterations)
    rejected = sum(one.rejected for one in profile.iterations)
    lines = [
        f"{len(profile.iterations)} iterations, {runs:,} runs, {rejected} spikes left out, {profile.elapsed_s:.0f} s; "
        f"{_ENDINGS.get(profile.ending, profile.ending)}"
    ]
    if profile.interrupted_share is not None and profile.interrupted_share > _MUCH_INTERRUPTED:
        lines.append(
            f"Beware: during {profile.interrupted_share:.0%} of the runs another process had the core; the time of the "
            "thread counts for those, and caches and memory were shared. On a quiet core the error is smaller."
        )
    if profile.kv is not None:
        tokens = profile.kv.blocks * profile.kv.block_tokens
        lines.append(f"KV: {tokens:,} tokens ({profile.kv.blocks:,} blocks of {profile.kv.block_tokens})")
    if profile.link is not None:
        lines.append(
            f"link: {profile.link.bytes_per_s / 1e9:.2f} GB/s, latency {1e6 * profile.link.latency_s:,.0f} us "
            f"({profile.link.source})"
        )
    if profile.start_up_s is not None:
        lines.append(f"start-up: {profile.start_up_s:.2f} s from starting a process to its first token")
    if profile.power is not None:
        power = profile.power
        lines.append(
            f"power: idle {power.idle_w:,.0f} W, prompt {power.prompt_w:,.0f} W, token {power.token_w:,.0f} W "
            f"({power.source})"
        )
    lines += [f"{what}: unknown, {why}" for what, why in profile.unknown.items()]
    return lines + [f"note: {note}" for note in profile.notes]
