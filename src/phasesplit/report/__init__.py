"""A simulation's result as something to look at: a figure (PNG, PDF, SVG), or a report in one HTML file."""

from phasesplit.report.sheet import write_figure
from phasesplit.report.simulation_page import write_html

__all__ = ["write_figure", "write_html"]
