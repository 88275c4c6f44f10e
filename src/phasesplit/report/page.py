"""The parts of a report page: one HTML file without scripts that loads nothing.

The HTML is in `templates`, and every text is escaped. Here are also the colours and type that all figures share, and
figures as SVG text that takes its colours and type from the page.
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup as Markup

THEME = {
    "ink": ("#1f2328", "#e6e9ec"),
    "faint": ("#66707a", "#9aa4ae"),
    "grid": ("#e4e7eb", "#333a42"),
    "paper": ("#ffffff", "#171b20"),
    "on-strong": ("#fffffe", "#101316"),
    "prefill": ("#0072b2", "#56b0ea"),
    "prefill-wait": ("#b5d5ea", "#255877"),
    "transfer": ("#b0568f", "#dd97c3"),
    "decode-wait": ("#f5cdb2", "#7a4520"),
    "decode": ("#d55e00", "#f5955a"),
    "mixed": ("#009e73", "#3cc9a0"),
    "unsplit": ("#5b6672", "#aab4be"),
    "idle": ("#e9ecef", "#2b3138"),
    "alarm": ("#b3261e", "#ff8a80"),
    "keeps-far": ("#7fb8dd", "#2b6a92"),
    "keeps": ("#abcfe8", "#22516f"),
    "keeps-near": ("#d9eaf5", "#1a3a50"),
    "breaks-near": ("#fae5d5", "#4a3020"),
    "breaks": ("#f3c19c", "#6b4425"),
    "breaks-far": ("#e69a6a", "#8a552b"),
}
"""Each colour on light and on dark paper. One meaning each: a phase or pool, waiting for it (its tint), the transfer;
how far something is inside or beyond its limit.

The strong ones differ with every kind of colour blindness; light ones differ pairwise, so that a drawing in
light colours can be turned into one with names. Source: after Okabe and Ito, Color Universal Design (2008).
"""

_LOOK: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 7.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "axes.labelcolor": THEME["faint"][0],
    "axes.edgecolor": THEME["faint"][0],
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "text.color": THEME["ink"][0],
    "xtick.labelcolor": THEME["ink"][0],
    "ytick.labelcolor": THEME["ink"][0],
    "xtick.color": THEME["faint"][0],
    "ytick.color": THEME["faint"][0],
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0,
    "xtick.major.width": 0.7,
    "xtick.minor.visible": False,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "grid.color": THEME["grid"][0],
    "grid.linewidth": 0.7,
    "pdf.fonttype": 42,
}


def colour(name: str) -> str:
    """Return the colour of that meaning, as drawn on paper."""
    return THEME[name][0]


@contextmanager
def drawing(**settings: Any) -> Iterator[None]:
    """Draw within this context in the house style, whatever matplotlib is set to outside it.

    Args:
        settings: Further matplotlib settings, dots in their names written as two underscores.
    """
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        wanted: dict[Any, Any] = _LOOK | {name.replace("__", "."): value for name, value in settings.items()}
        matplotlib.rcParams.update(wanted)
        yield


def new_figure(width_in: float, height_in: float, **settings: Any) -> Any:
    """Return a figure that no global state knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained", **settings)
    FigureCanvasAgg(figure)
    return figure


def title(axes: Any, text: str, key: Sequence[tuple[str, str]] = (), *, columns: int = 4) -> None:
    """Set a panel's title and, between it and the axes, the key to its colours.

    Args:
        axes: The panel.
        text: The title.
        key: What is drawn and the name of its colour; nothing where there is only one.
        columns: Most entries in a row of the key.
    """
    from matplotlib.patches import Patch

    rows = 0
    if len(key) > 1:
        rows = -(-len(key) // columns)
        legend = axes.legend(
            handles=[Patch(color=colour(name), label=label) for label, name in key],
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            ncols=min(columns, len(key)),
            borderaxespad=0.25,
            borderpad=0.0,
            columnspacing=1.0,
            handlelength=0.8,
            handleheight=0.8,
            handletextpad=0.4,
            labelspacing=0.25,
        )
        legend.set_in_layout(False)
    axes.set_title(text, pad=5 + 10.5 * rows)


def note(axes: Any, text: str) -> None:
    """Write into a panel why there is nothing to draw."""
    axes.set_axis_off()
    axes.text(0.0, 0.9, text, transform=axes.transAxes, va="top", color=colour("faint"))


WIDTH_IN, HEIGHT_IN = 4.1, 2.75
"""Size of a panel: its text stays readable on a telephone."""


def inline_svg(name: str, description: str, draw: Callable[[Any], None]) -> str:
    """Return one panel as an SVG element for an HTML page; the same drawing gives the same text.

    Args:
        name: Identifier of the panel on its page; identifiers inside begin with it.
        description: What it shows, for those who do not see it; becomes its label, so it must be escaped.
        draw: Draws onto axes.
    """
    with drawing(svg__fonttype="none", svg__hashsalt=name):
        figure = new_figure(WIDTH_IN, HEIGHT_IN, facecolor="none")
        draw(figure.subplots())
        picture = io.StringIO()
        figure.savefig(picture, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = picture.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    inside = text[text.index(">") + 1 :]
    opening = f'<svg viewBox="0 0 {WIDTH_IN * 72:g} {HEIGHT_IN * 72:g}" role="img" aria-label="{description}">'
    return opening + _themed(_with_own_names(inside, name))


def _with_own_names(text: str, name: str) -> str:
    """Keep only identifiers that something refers to, and make them the page's only ones."""
    wanted = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    names = {first or second for first, second in wanted}

    def renamed(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in names else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    return re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)


def _themed(text: str) -> str:
    """Replace each colour by the page's variable of the same name, and fonts by the page's own."""
    for name, (light, _) in THEME.items():
        text = text.replace(light, f"var(--{name})")
    return re.sub(r"font: ((?:\d+ )?[\d.]+px) [^;\"]+", r"font: \1 var(--figure-font)", text)


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


def side_by_side(*blocks: Markup) -> Markup:
    """Return blocks next to one another where there is room."""
    return _block("side_by_side", blocks)


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
        loader=PackageLoader("phasesplit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters["exact"] = lambda number: repr(float(number))
    return environment.get_template("page.html").module
