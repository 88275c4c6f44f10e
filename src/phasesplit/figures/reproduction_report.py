"""The published study and ours as one HTML file: tables side by side, why they differ, and the ladder drawn."""

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from phasesplit._version import __version__
from phasesplit.figures import readable
from phasesplit.figures.page import (
    Cell,
    Drawing,
    Markup,
    Value,
    details,
    drawings,
    page,
    paragraph,
    section,
    table,
    terms,
)
from phasesplit.figures.style import colour, title
from phasesplit.figures.svg import inline_svg
from phasesplit.files.compression import write_bytes
from phasesplit.planning.ladder import REPORTED, Rung
from phasesplit.planning.paper import CONTRADICTIONS, TAGS
from phasesplit.planning.reproduction import Findings
from phasesplit.planning.study_parts import Part, ladders, parts
from phasesplit.planning.study_rows import Row

_COLUMNS = ("", "published", "ours, as published", "ours, default", "default, bursty arrivals")
_COLOURS = {"Splitwise": "decode", "Baseline": "unsplit"}


def write_reproduction_html(found: Findings, path: str | Path) -> None:
    """Write the study as one HTML file that needs no network; the same study gives the same bytes.

    Args:
        found: The outcome.
        path: Where to.

    Raises:
        SpecError: The file cannot be written.
    """
    write_bytes(path, reproduction_report(found).encode())


def reproduction_report(found: Findings) -> str:
    """Return the study as an HTML page."""
    bench = found.bench
    lead = (
        f"{readable.counted(found.questions, 'simulation')}: {bench.duration_s:g} s of requests each,"
        f" {readable.counted(len(bench.seeds), 'seed')}, all of which must keep the nine slowdowns"
    )
    blocks = [
        section("From published to right", _drawn_ladders(found), details("As a table", _ladder_table(ladders(found)))),
        *(_part(part) for part in parts(found)),
        section("Where the paper contradicts itself", _contradictions()),
        section("What the letters mean", terms(TAGS.items())),
    ]
    return page("The provisioning study of the Splitwise paper", lead, blocks, f"phasesplit {__version__}")


def _part(part: Part) -> Markup:
    reasons = terms((row.what, "; ".join(row.why)) for row in part.rows)
    return section(
        part.title,
        paragraph(f"In {part.unit}.", "note"),
        table(_COLUMNS, [_cells(row) for row in part.rows]),
        details("Why they differ, each part of it measured", reasons),
    )


def _cells(row: Row) -> list[Cell]:
    published = Value(row.published.number, str(row.published))
    ours = [
        Value(row.ours[rung].number, row.ours[rung].text) if rung in row.ours else readable.NONE for rung in REPORTED
    ]
    return [row.what, published, *ours]


def _ladder_table(climbed: Mapping[str, Mapping[Rung, float]]) -> Markup:
    rows: list[list[Cell]] = [
        [rung.label, *(Value(ladder[rung], f"{ladder[rung]:.1f}") for ladder in climbed.values())] for rung in Rung
    ]
    return table(("requests/s held", *climbed), rows)


def _drawn_ladders(found: Findings) -> Markup:
    climbed = ladders(found)
    entries = []
    for workload in dict.fromkeys(name.rpartition(", ")[2] for name in climbed):
        own = {name: ladder for name, ladder in climbed.items() if name.endswith(f", {workload}")}
        caption = f"{workload.capitalize()}: what 40 DGX-H100 hold, each correction on top of those above it."
        svg = inline_svg(f"ladder-{workload}", escape(caption), _ladder_panel(workload, own))
        entries.append(Drawing(Markup(svg), caption))
    return drawings(entries)


def _ladder_panel(workload: str, own: Mapping[str, Mapping[Rung, float]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        key = []
        for name, ladder in own.items():
            paint = next(paint for start, paint in _COLOURS.items() if name.startswith(start))
            axes.plot([ladder[rung] for rung in Rung], range(len(Rung)), marker="o", markersize=3, color=colour(paint))
            key.append((name.rpartition(", ")[0], paint))
        axes.set_yticks(range(len(Rung)), [rung.label for rung in Rung])
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_xlabel("requests/s held")
        axes.grid(axis="x")
        title(axes, workload.capitalize(), key, columns=1)

    return draw


def _contradictions() -> Markup:
    rows = [(one.what, one.one, one.other, one.here) for one in CONTRADICTIONS]
    return Markup("".join(details(what, terms((("one place", one), ("another", other), ("here", here))))
                          for what, one, other, here in rows))  # fmt: skip
