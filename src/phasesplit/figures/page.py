"""The blocks of a report page without scripts that loads nothing; the HTML is in `templates`, every text escaped."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup as Markup

from phasesplit.figures.style import THEME


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
    light, dark = ([(name, pair[index]) for name, pair in THEME.items()] for index in (0, 1))
    return str(_block("page", title, lead, list(blocks), foot, light, dark))


def section(heading: str, *blocks: Markup) -> Markup:
    """Return blocks under a heading."""
    return _block("section", heading, blocks)


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph of that kind, one of the style sheet's classes."""
    return _block("paragraph", text, kind)


def banner(heading: str, lines: Sequence[str], *, alarm: bool) -> Markup:
    """Return a box that is not overlooked."""
    return _block("banner", heading, lines, alarm)


def tiles(entries: Iterable[tuple[str, Cell]]) -> Markup:
    """Return a row of named figures, large."""
    return _block("tiles", entries)


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], kind: str = "") -> Markup:
    """Return a table of that kind; the first column names its rows, others are numbers unless the kind is "words"."""
    return _block("table", columns, list(rows), kind)


def drawings(entries: Iterable[Drawing]) -> Markup:
    """Return figures side by side, as many as there is room for."""
    return _block("drawings", list(entries))


def beside(*blocks: Markup) -> Markup:
    """Return blocks next to one another where there is room."""
    return _block("beside", blocks)


def details(summary: str, *blocks: Markup) -> Markup:
    """Return blocks that are shown on demand."""
    return _block("details", summary, blocks)


def terms(entries: Iterable[tuple[str, str]]) -> Markup:
    """Return words and what they mean."""
    return _block("terms", entries)


def _block(name: str, *values: Any) -> Markup:
    """Return what a macro of the template makes of values; a text that is no `Markup` is escaped."""
    return Markup(getattr(_template(), name)(*values))  # noqa: S704 - made by a template with autoescape


@cache
def _template() -> Any:
    environment = Environment(
        loader=PackageLoader("phasesplit.figures"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["exact"] = lambda number: repr(float(number))
    return environment.get_template("page.html").module
