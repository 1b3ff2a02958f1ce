"""Reports from result files alone: tables, figures and one self-contained page."""

from meanbank.reports.benchmark_figures import draw_benchmark
from meanbank.reports.benchmarks import (
    benchmark_tables,
    csv,
    first_faster,
    growth_exponent,
    load_records,
)
from meanbank.reports.console import print_table, print_tables
from meanbank.reports.expectations import demo_tables, expectations_table
from meanbank.reports.figures import Figure, draw_figures
from meanbank.reports.loading import load_demo
from meanbank.reports.markdown import markdown
from meanbank.reports.page import write_report
from meanbank.reports.results import DemoResults, LanguageArm, RecallArm, RecallRun, Sample
from meanbank.reports.study import (
    load_study,
    study_tables,
    write_results_page,
    write_study_report,
)
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
    "benchmark_tables",
    "csv",
    "demo_tables",
    "draw_benchmark",
    "draw_figures",
    "expectations_table",
    "first_faster",
    "growth_exponent",
    "load_demo",
    "load_records",
    "load_study",
    "markdown",
    "print_table",
    "print_tables",
    "study_tables",
    "write_report",
    "write_results_page",
    "write_study_report",
]
