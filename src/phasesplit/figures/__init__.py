"""A result or a plan as something to look at: a figure (PNG, PDF, SVG), or a report in one HTML file."""

from phasesplit.figures.plan_report import write_plan_html
from phasesplit.figures.plan_sheet import write_plan_figure
from phasesplit.figures.report import write_html
from phasesplit.figures.sheet import write_figure

__all__ = ["write_figure", "write_html", "write_plan_figure", "write_plan_html"]
