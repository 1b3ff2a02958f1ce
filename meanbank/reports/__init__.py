"""Reports from result files alone: tables, figures and one self-contained page."""

from meanbank.reports.console import print_tables
from meanbank.reports.expectations import demo_tables, expectations_table
from meanbank.reports.figures import Figure, draw_figures
from meanbank.reports.loading import load_demo
from meanbank.reports.page import write_report
from meanbank.reports.results import DemoResults, LanguageArm, RecallArm, RecallRun, Sample
from meanbank.reports.tables import Row, Table

__all__ = [
    "DemoResults",
    "Figure",
    "LanguageArm",
    "RecallArm",
    "RecallRun",
    "Row",
    "Sample",
    "Table",
    "demo_tables",
    "draw_figures",
    "expectations_table",
    "load_demo",
    "print_tables",
    "write_report",
]
