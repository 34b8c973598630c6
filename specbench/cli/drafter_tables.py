"""Tables of a drafter's evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from specbench.training.evaluate import EvaluationReport, SourceReport


def print_evaluation(reports: list[EvaluationReport]) -> None:
    """Acceptance of every source, then acceptance and confidence by position."""
    console = Console()
    for report in reports:
        title = f"{report.split}, temperature {report.temperature:g}, block {report.block_length}"
        console.print(_acceptance(report, title))
        console.print(_positions(report.sources["all"], f"all sources, {title}"))


def _acceptance(report: EvaluationReport, title: str) -> Table:
    table = Table(title=f"Acceptance length (bonus included): {title}")
    for name in ("source", "prompts", "steps", "acceptance length", "95% interval"):
        table.add_column(name, justify="left" if name == "source" else "right")
    for name, source in report.sources.items():
        interval = source.acceptance_length_ci95
        table.add_row(
            name,
            f"{source.num_prompts:,}",
            f"{source.num_steps:,}",
            _number(source.acceptance_length),
            "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
        )
    return table


def _positions(source: SourceReport, title: str) -> Table:
    table = Table(title=f"By position: {title}")
    columns = ("position", "accepted", "if reached", "AUC", "ECE", "ECE scaled")
    for name in columns:
        table.add_column(name, justify="right")
    for position in source.positions:
        half, scaled = position.test_half, position.test_half_scaled
        table.add_row(
            str(position.position),
            _number(position.acceptance),
            _number(position.conditional_acceptance),
            _number(None if half is None else half.auc),
            _number(None if half is None else half.ece, 3),
            _number(None if scaled is None else scaled.ece, 3),
        )
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
