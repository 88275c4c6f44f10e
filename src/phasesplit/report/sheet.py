"""All panels of a result on one sheet, as a PNG, PDF or SVG file."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phasesplit.errors import SpecError
from phasesplit.io.compression import write_bytes
from phasesplit.report import readable
from phasesplit.report.page import colour, drawing, new_figure
from phasesplit.report.panels import COLUMNS, LATENCY_PANELS, SLO_PANEL, TIMELINE_PANELS, USAGE_PANELS, Panel
from phasesplit.simulator.result import Result

# No time of drawing and no version: the same result gives the same bytes.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Date": None, "Creator": None},
}
_DPI = 160
_LONGEST_NAME = 110
_LONGEST_LINE = 180


def write_figure(result: Result, path: str | Path) -> None:
    """Write all panels of a result as one picture; the same result gives the same bytes.

    Args:
        result: What a simulation found.
        path: Where to; its ending says how: .png, .pdf or .svg.

    Raises:
        SpecError: The ending is another one, or the file cannot be written.
    """
    panels = (*LATENCY_PANELS, SLO_PANEL, *TIMELINE_PANELS, *USAGE_PANELS)
    write_sheet(path, [_onto(panel, result) for panel in panels], lambda figure: _head(figure, result))


def write_sheet(path: str | Path, panels: Sequence[Callable[[Any], None]], head: Callable[[Any], None]) -> None:
    """Write panels, `COLUMNS` in a row, as one picture; the same panels give the same bytes.

    Args:
        path: Where to; its ending says how: .png, .pdf or .svg.
        panels: Each draws itself onto axes; a whole number of rows, or less than one.
        head: Writes above and below the panels of a figure.

    Raises:
        SpecError: The ending is another one, or the file cannot be written.
    """
    kind = Path(path).suffix.lower().removeprefix(".")
    if kind not in _METADATA:
        raise SpecError.bad(f"figure {path}, ending", Path(path).suffix, "one of .png, .pdf, .svg")
    columns = min(COLUMNS, len(panels))
    rows = len(panels) // columns
    with drawing(svg__hashsalt="phasesplit"):
        figure = new_figure(12.6, 8.4, facecolor=colour("paper"))
        figure.get_layout_engine().set(w_pad=0.09, h_pad=0.09, hspace=0.03, wspace=0.03, rect=(0, 0.025, 1, 0.893))
        for draw, axes in zip(panels, figure.subplots(rows, columns, squeeze=False).flat, strict=True):
            draw(axes)
        head(figure)
        picture = io.BytesIO()
        figure.savefig(picture, format=kind, dpi=_DPI, metadata=_METADATA[kind])
    write_bytes(path, picture.getvalue())


def _onto(panel: Panel, result: Result) -> Callable[[Any], None]:
    return lambda axes: panel.draw(axes, result)


def _head(figure: Any, result: Result) -> None:
    """Write above the panels what was simulated and whether it kept up, and below them what to beware of."""
    name = f"{result.cluster.model.name} on {result.cluster.name}"
    figure.text(0.009, 0.985, readable.shortened(name, _LONGEST_NAME), fontsize=13, fontweight="bold", va="top")
    served = f"{result.statuses['completed']:,} completed, {readable.number(result.throughput_per_s)}/s"
    about = readable.shortened(f"{readable.load(result)}; {served}", _LONGEST_LINE)
    figure.text(0.009, 0.953, about, fontsize=8.5, va="top", color=colour("faint"))
    if result.overload is not None:
        alarm = readable.shortened(str(result.overload).capitalize(), _LONGEST_LINE)
        figure.text(0.009, 0.934, alarm, fontsize=8, va="top", color=colour("alarm"), fontweight="bold")
    if result.warnings:
        beware = readable.shortened(f"Beware: {'; '.join(result.warnings)}", _LONGEST_LINE + 30)
        figure.text(0.009, 0.01, beware, fontsize=7.5, color=colour("faint"))
