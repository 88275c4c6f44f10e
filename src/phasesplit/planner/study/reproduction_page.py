"""The published study and ours as one HTML file: tables with both, why they differ, and the ablation drawn."""

from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from phasesplit._version import __version__
from phasesplit.io.compression import write_bytes
from phasesplit.planner.study.ablation import CONTRADICTIONS, REPORTED, TAGS, AblationStep
from phasesplit.planner.study.parts import StudyPart, ablations, parts
from phasesplit.planner.study.reproduction import Findings
from phasesplit.planner.study.rows import StudyRow
from phasesplit.report import readable
from phasesplit.report.page import (
    Cell,
    Drawing,
    Markup,
    Value,
    colour,
    details,
    drawings,
    inline_svg,
    page,
    paragraph,
    section,
    table,
    terms,
    title,
)

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
        section(
            "From published to right", _drawn_ablations(found), details("As a table", _ablation_table(ablations(found)))
        ),
        *(_part(part) for part in parts(found)),
        section("Where the paper contradicts itself", _contradictions()),
        section("What the letters mean", terms(TAGS.items())),
    ]
    return page("The provisioning study of the Splitwise paper", lead, blocks, f"phasesplit {__version__}")


def _part(part: StudyPart) -> Markup:
    reasons = terms((row.what, "; ".join(row.why)) for row in part.rows)
    return section(
        part.title,
        paragraph(f"In {part.unit}.", "note"),
        table(_COLUMNS, [_cells(row) for row in part.rows]),
        details("Why they differ, each part of it measured", reasons),
    )


def _cells(row: StudyRow) -> list[Cell]:
    published = Value(row.published.number, str(row.published))
    ours = [
        Value(row.ours[ablation_step].number, row.ours[ablation_step].text)
        if ablation_step in row.ours
        else readable.NONE
        for ablation_step in REPORTED
    ]
    return [row.what, published, *ours]


def _ablation_table(series: Mapping[str, Mapping[AblationStep, float]]) -> Markup:
    rows: list[list[Cell]] = [
        [
            ablation_step.label,
            *(
                Value(ablated_steps[ablation_step], f"{ablated_steps[ablation_step]:.1f}")
                for ablated_steps in series.values()
            ),
        ]
        for ablation_step in AblationStep
    ]
    return table(("requests/s held", *series), rows)


def _drawn_ablations(found: Findings) -> Markup:
    series = ablations(found)
    entries = []
    for workload in dict.fromkeys(name.rpartition(", ")[2] for name in series):
        own = {name: ablated_steps for name, ablated_steps in series.items() if name.endswith(f", {workload}")}
        caption = f"{workload.capitalize()}: what 40 DGX-H100 hold, each correction on top of those above it."
        svg = inline_svg(f"ablation-{workload}", escape(caption), _ablation_panel(workload, own))
        entries.append(Drawing(Markup(svg), caption))
    return drawings(entries)


def _ablation_panel(workload: str, own: Mapping[str, Mapping[AblationStep, float]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        key = []
        for name, ablated_steps in own.items():
            paint = next(paint for start, paint in _COLOURS.items() if name.startswith(start))
            axes.plot(
                [ablated_steps[ablation_step] for ablation_step in AblationStep],
                range(len(AblationStep)),
                marker="o",
                markersize=3,
                color=colour(paint),
            )
            key.append((name.rpartition(", ")[0], paint))
        axes.set_yticks(range(len(AblationStep)), [ablation_step.label for ablation_step in AblationStep])
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
