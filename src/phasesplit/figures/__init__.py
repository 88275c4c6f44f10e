"""A result as something to look at: a figure (PNG, PDF, SVG), or a report in one HTML file."""

from phasesplit.figures.report import write_html
from phasesplit.figures.sheet import write_figure

__all__ = ["write_figure", "write_html"]
