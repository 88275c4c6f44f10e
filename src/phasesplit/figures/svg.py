"""A panel as SVG text that takes its colours and its type from the page it is put into."""

import io
import re
from collections.abc import Callable
from typing import Any

from phasesplit.figures.style import THEME, drawing, new_figure

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
