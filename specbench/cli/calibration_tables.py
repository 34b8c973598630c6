"""Tables of a calibration: reliability by position, and temperatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from specbench.calibration.calibrate import CalibrationResult
    from specbench.calibration.confidence import ConfidenceFit
    from specbench.calibration.reliability_report import ReliabilityReport
    from specbench.estimators.acceptance_evaluation import Scores

_ALL = "all"
_UNDEFINED = "-"


def print_calibration(result: CalibrationResult, console: Console | None = None) -> None:
    """Reliability of everything graded, temperatures, and where the artefact is."""
    console = console or Console()
    for report in result.reports():
        console.print(_overall(report))
        if len(report.sources) > 1:
            console.print(_by_source(report))
    if result.confidence is not None:
        console.print(_temperatures(result.confidence))
        if result.confidence.hit_bound:
            positions = ", ".join(map(str, result.confidence.hit_bound))
            _say(
                console,
                f"warning: the temperature of position {positions} ended at the search's limit; "
                "the confidence head is far off there",
                "yellow",
            )
    else:
        _say(console, f"no temperatures: {result.why_no_confidence}", "dim")
    features = ", ".join(result.ngram.features) or "none"
    origin = "chosen by held-out score" if result.ngram.features_were_chosen else "given"
    _say(console, f"features ({origin}): {features}", "dim")
    _say(
        console,
        f"fitted on {result.ngram.num_chains:,} chains of {result.ngram.num_prompts:,} prompts",
        "dim",
    )
    _say(console, f"calibration in {result.folder}", "bold")


def _overall(report: ReliabilityReport) -> Table:
    source = report.sources[_ALL]
    table = _table(
        title=f"Survival of {report.what}, {report.held_out}: before > after",
        caption=f"{source.num_samples:,} from {source.num_prompts:,} prompts; before: "
        f"{report.before}; noise: ECE of exact predictions on as many independent samples",
    )
    for name in ("position", "samples", "accepted", "ECE", "noise", "Brier", "AUC"):
        table.add_column(name, justify="right")
    for position in source.survival:
        before, after = position.before, position.after
        table.add_row(
            str(position.position),
            f"{position.weight:,.0f}",
            _number(position.observed_rate),
            _pair(before.ece, after.ece),
            _number(after.ece_noise),
            _pair(before.brier, after.brier),
            _pair(before.auc, after.auc, 2),
        )
    return table


def _by_source(report: ReliabilityReport) -> Table:
    names = [name for name in report.sources if name != _ALL]
    table = _table(title=f"ECE by source, {report.what}, {report.held_out}: before > after (noise)")
    table.add_column("position", justify="right")
    for name in names:
        source = report.sources[name]
        table.add_column(f"{name}, {source.num_samples:,}", justify="right")
    for index, position in enumerate(report.sources[_ALL].survival):
        cells = (report.sources[name].survival[index] for name in names)
        table.add_row(str(position.position), *(_errors(cell.before, cell.after) for cell in cells))
    return table


def _temperatures(fit: ConfidenceFit) -> Table:
    table = _table(title="Temperatures of the confidence head, fitted on all prompts")
    table.add_column("position", justify="right")
    table.add_column("temperature", justify="right")
    for index, temperature in enumerate(fit.table.temperatures, start=1):
        table.add_row(str(index), f"{temperature:.3f}")
    return table


def _table(title: str, caption: str | None = None) -> Table:
    """A table of a pipe's 80 columns."""
    return Table(
        title=title,
        caption=caption,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
        title_justify="left",
        caption_justify="left",
    )


def _errors(before: Scores, after: Scores) -> str:
    return f"{_pair(before.ece, after.ece)} ({_number(after.ece_noise)})"


def _pair(before: float | None, after: float | None, digits: int = 3) -> str:
    return f"{_number(before, digits)} > {_number(after, digits)}"


def _number(value: float | None, digits: int = 3) -> str:
    return _UNDEFINED if value is None else f"{value:.{digits}f}"


def _say(console: Console, line: str, style: str) -> None:
    console.print(escape(line), style=style, highlight=False, soft_wrap=True)
