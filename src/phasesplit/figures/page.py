"""The skeleton of a report: one HTML page without scripts that loads nothing. Every text is escaped here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isnan

from phasesplit.figures.stylesheet import stylesheet


class Markup(str):
    """Text that is HTML already; only functions of this module and drawings make it."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A number as people read it, and as programs do (the element `data`).

    Attributes:
        number: The number; one that is not known (NaN) is left out.
        text: How it reads.
        broken: Whether it breaks a limit.
    """

    number: float
    text: str
    broken: bool = False


Cell = str | Value


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure of the page.

    Attributes:
        svg: The drawing.
        caption: One sentence that says what to see.
    """

    svg: Markup
    caption: str


def page(title: str, lead: str, blocks: Iterable[Markup], foot: str) -> str:
    """Return a whole page.

    Args:
        title: Heading, and title of the window.
        lead: The line below it.
        blocks: What follows, in order.
        foot: The last line.
    """
    body = "\n".join(blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{stylesheet()}</style>\n</head>\n<body>\n"
        f'<header>\n<h1>{escape(title)}</h1>\n<p class="lead">{escape(lead)}</p>\n</header>\n'
        f"<main>\n{body}\n</main>\n<footer>{escape(foot)}</footer>\n</body>\n</html>\n"
    )


def section(heading: str, *blocks: Markup) -> Markup:
    """Return blocks under a heading."""
    return Markup(f"<section>\n<h2>{escape(heading)}</h2>\n" + "\n".join(blocks) + "\n</section>")


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph of that kind, one of the style sheet's classes."""
    return Markup(f"<p{_class(kind)}>{escape(text)}</p>")


def banner(heading: str, lines: Sequence[str], *, alarm: bool) -> Markup:
    """Return a box that is not overlooked."""
    points = "".join(f"<li>{escape(line)}</li>" for line in lines)
    inside = f"<ul>{points}</ul>" if len(lines) > 1 else escape("".join(lines))
    return Markup(
        f'<div class="banner{" alarm" if alarm else ""}" role="alert"><strong>{escape(heading)}</strong>{inside}</div>'
    )


def tiles(entries: Iterable[tuple[str, Cell]]) -> Markup:
    """Return a row of named figures, large."""
    inside = "".join(f"<div><dt>{escape(name)}</dt><dd>{_cell(value)}</dd></div>" for name, value in entries)
    return Markup(f'<dl class="tiles">{inside}</dl>')


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], kind: str = "") -> Markup:
    """Return a table of that kind; the first column names its rows, others are numbers unless the kind is "words"."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "\n".join("<tr>" + "".join(_table_cell(cell) for cell in row) + "</tr>" for row in rows)
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return Markup(f'<div class="scroll"><table{_class(kind)}>\n{inside}\n</table></div>')


def drawings(entries: Iterable[Drawing]) -> Markup:
    """Return figures side by side, as many as there is room for."""
    each = [f"<figure>{entry.svg}<figcaption>{escape(entry.caption)}</figcaption></figure>" for entry in entries]
    inside = "\n".join(each)
    return Markup(f'<div class="figures{" three" if len(each) == 3 else ""}">\n{inside}\n</div>')


def beside(*blocks: Markup) -> Markup:
    """Return blocks next to one another where there is room."""
    inside = "\n".join(f"<div>{block}</div>" for block in blocks)
    return Markup(f'<div class="figures">\n{inside}\n</div>')


def details(summary: str, *blocks: Markup) -> Markup:
    """Return blocks that are shown on demand."""
    return Markup(f"<details><summary>{escape(summary)}</summary>\n" + "\n".join(blocks) + "\n</details>")


def terms(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return words and what they mean."""
    inside = "".join(f"<dt>{escape(term)}</dt><dd>{escape(meaning)}</dd>" for term, meaning in entries)
    return Markup(f'<dl class="terms">{inside}</dl>')


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        return escape(cell)
    if isnan(cell.number):
        return escape(cell.text)
    return f'<data value="{float(cell.number)!r}">{escape(cell.text)}</data>'


def _table_cell(cell: Cell) -> str:
    return f"<td{_class('broken') if isinstance(cell, Value) and cell.broken else ''}>{_cell(cell)}</td>"
