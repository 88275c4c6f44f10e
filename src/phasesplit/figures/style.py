"""How all figures look: colours with a meaning, type, and axes without ornament."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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

The strong ones are told apart with every kind of colour blindness; light ones differ pairwise, so that a drawing in
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
