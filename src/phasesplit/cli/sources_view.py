"""Where the sources of a plan's phase times differ, as text in the terminal."""

from collections.abc import Sequence
from typing import Any

from phasesplit.files.plan_sources import MachineSources

_SHOWN = {"prompt": (512, 2048, 8192), "token": (1, 16, 64)}


def print_sources(console: Any, sources: Sequence[MachineSources]) -> None:
    """Print the same iterations by each source where two or more cover them, and otherwise why there is only one.

    Args:
        console: A console of rich.
        sources: Sources by machine.
    """
    from rich.text import Text

    compared = [one for one in sources if one.rows]
    if compared:
        console.print(_compared(compared))
    alone = [one for one in sources if not one.rows]
    if alone:
        machines = ", ".join(one.machine for one in alone)
        # That nobody measured a pair goes without saying here.
        absent = [why for one in alone for name, why in one.absent.items() if name != "measured"]
        # Without the place of each error, which is always the source of phase times.
        reasons = dict.fromkeys(why.partition(": ")[2] or why for why in absent)
        console.print(Text("; ".join([f"only the {alone[0].used} has phase times on {machines}", *reasons]), "dim"))


def _compared(sources: Sequence[MachineSources]) -> Any:
    from rich import box
    from rich.table import Table

    names = list(dict.fromkeys(name for one in sources for row in one.rows for name in row.seconds))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in ("phase times, ms", "iteration"):
        table.add_column(column, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("to roofline", justify="right")
    for one in sources:
        shown = [row for row in one.rows if row.size in _SHOWN[row.phase]]
        for row in shown:
            times = [_milliseconds(row.seconds[name]) if name in row.seconds else "" for name in names]
            ratios = ", ".join(f"{ratio:.2f}" for name, ratio in row.ratios.items() if name != "roofline")
            what = f"prompt of {row.size:,}" if row.phase == "prompt" else f"token, batch {row.size}"
            table.add_row(one.machine if row is shown[0] else "", what, *times, ratios)
    return table


def _milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:,.0f}" if time_s >= 0.1 else f"{time_s * 1e3:.3g}"
