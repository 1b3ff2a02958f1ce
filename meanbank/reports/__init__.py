"""Reports from result files alone: tables, figures and self-contained pages."""

from meanbank.reports.benchmark_figures import draw_benchmark
from meanbank.reports.benchmarks import (
    benchmark_tables,
    csv,
    first_faster,
    growth_exponent,
    load_records,
)
from meanbank.reports.console import print_table
from meanbank.reports.markdown import markdown
from meanbank.reports.mask_figure import MaskPanel, draw_mask, write_mask
from meanbank.reports.memory_figure import MemoryPanel, draw_token_fates, write_token_fates
from meanbank.reports.study import (
    study_tables,
    write_results_page,
    write_study_report,
)
from meanbank.reports.tables import Row, Table

__all__ = [
    "MaskPanel",
    "MemoryPanel",
    "Row",
    "Table",
    "benchmark_tables",
    "csv",
    "draw_benchmark",
    "draw_mask",
    "draw_token_fates",
    "first_faster",
    "growth_exponent",
    "load_records",
    "markdown",
    "print_table",
    "study_tables",
    "write_mask",
    "write_results_page",
    "write_study_report",
    "write_token_fates",
]
