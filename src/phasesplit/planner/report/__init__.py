"""A plan as something to look at: one sheet of figures (PNG, PDF, SVG), or a report in one HTML file."""

from phasesplit.planner.report.plan_page import write_plan_html
from phasesplit.planner.report.plan_sheet import write_plan_figure

__all__ = ["write_plan_figure", "write_plan_html"]
