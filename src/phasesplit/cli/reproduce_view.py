"""The published study and ours as text: a table for each part, and below every row where its differences come from."""

import textwrap
from collections.abc import Sequence

from phasesplit.planning.ladder import REPORTED, Rung
from phasesplit.planning.paper import CONTRADICTIONS, TAGS
from phasesplit.planning.reasons import signed
from phasesplit.planning.reproduction import Findings
from phasesplit.planning.study_parts import Part, ladders, parts

HEADINGS = ("published", "ours as published", "ours, default", "and bursty")
_WIDTH = 118
_NONE = "-"
_FIXED = "\N{NO-BREAK SPACE}"


def study_text(found: Findings) -> str:
    """Return the whole study as text."""
    bench = found.bench
    seeds = f"{len(bench.seeds)} seed{'' if len(bench.seeds) == 1 else 's'}"
    lines = [
        "The provisioning study of the Splitwise paper",
        *_wrapped(
            f"{bench.duration_s:g} s of requests, {seeds}, all of which must keep the nine slowdowns; BLOOM-176B unless"
            " a part says so. Default: right times, KV and transfers, unsplit machines with chunked prompts, joint"
            " lengths, Poisson arrivals. Bursty: the same with arrivals as bursty as the trace's."
        ),
        *(f"  {tag}: {meaning}" for tag, meaning in TAGS.items()),
    ]
    for part in parts(found):
        lines += ["", f"{part.title} ({part.unit})", *_part_lines(part)]
    lines += ["", "From published to right, one correction after the other (requests/s held)", *_ladder_lines(found)]
    lines += ["", "Where the paper contradicts itself"]
    for one in CONTRADICTIONS:
        lines += _wrapped(f"{one.what}: {one.one}; {one.other}. Here: {one.here}.", first="  ", rest="    ")
    return "\n".join(lines)


def _part_lines(part: Part) -> list[str]:
    rows = [
        (row.what, str(row.published), *(row.ours[rung].text if rung in row.ours else _NONE for rung in REPORTED))
        for row in part.rows
    ]
    table = _table(("", *HEADINGS), rows)
    lines = table[:1]
    for text, row in zip(table[1:], part.rows, strict=True):
        lines += [text, *_wrapped("; ".join(row.why), first="      why: ", rest="           ")]
    return lines


def _ladder_lines(found: Findings) -> list[str]:
    climbed = ladders(found)
    rows = []
    for rung in Rung:
        cells = []
        for ladder in climbed.values():
            before = ladder.get(Rung(max(rung - 1, 0)), 0.0)
            change = f" ({signed(ladder[rung] / before - 1)})" if before and ladder[rung] != before else ""
            cells.append(f"{ladder[rung]:.1f}{change}")
        rows.append((rung.label, *cells))
    return _table(("", *climbed), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: the first column to the left, others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            [f"  {row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Return lines of the text; a figure and its per cent sign stay together."""
    lines = textwrap.wrap(
        text.replace(" %", _FIXED + "%"), _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )
    return [line.replace(_FIXED, " ") for line in lines]
