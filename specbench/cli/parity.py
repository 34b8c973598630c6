"""``specbench parity``: what the plugin costs on this machine, as ratios of step times."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from specbench.parity import ParityReport

Number = TypeVar("Number", int, float)
# A few dozen cells of a few hundred characters.
RESULT_BYTES = 64 * 1024


def parity(
    concurrency: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,4,16",
    temperatures: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,1",
    rounds: Annotated[int, typer.Option(min=2, help="Interleaved rounds per cell.")] = 7,
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens per request and turn.")] = 48,
    model: Annotated[str | None, typer.Option(help="Target: path or hub id.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Drafter: path, hub id or 'none'.")] = None,
    dtype: Annotated[str, typer.Option(help="Weights' type, as vLLM names it.")] = "auto",
    output: Annotated[Path | None, typer.Option(help="Write the cells as JSON here.")] = None,
) -> None:
    """Compare step times: V2 runner against V1, and policy ar against no speculation.

    Three engines are loaded at once and take turns on the same prompts.
    """
    import asyncio

    from rich.console import Console

    from specbench.cache import ensure_writable, write_text_atomically
    from specbench.engines.config import EngineConfig, default_log_file
    from specbench.errors import UsageError
    from specbench.parity import measure_parity, report_to_json

    if output is not None:
        if output.is_dir():
            raise UsageError(f"--output {output} is a directory; name a file")
        ensure_writable(output.absolute().parent, RESULT_BYTES)
    sizes = _numbers(concurrency, "--concurrency", int)
    config = EngineConfig(
        model=model,
        drafter=drafter,
        dtype=dtype,
        max_num_seqs=max(sizes),
        log_file=default_log_file(),
    )
    progress = Console(stderr=True)
    report = asyncio.run(
        measure_parity(
            config,
            batch_sizes=sizes,
            temperatures=_numbers(temperatures, "--temperatures", float),
            rounds=rounds,
            output_tokens=output_tokens,
            on_progress=lambda text: progress.print(text, highlight=False),
        )
    )
    _print(report)
    if output is not None:
        write_text_atomically(output, json.dumps(report_to_json(report), indent=2) + "\n")


def _numbers(text: str, option: str, kind: Callable[[str], Number]) -> list[Number]:
    from specbench.errors import UsageError

    try:
        numbers = [kind(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if (
        not all(math.isfinite(n) for n in numbers)
        or not numbers
        or min(numbers) < (1 if kind is int else 0)
    ):
        raise UsageError(f"{option} {text!r}: expected numbers separated by commas")
    return numbers


def _print(report: ParityReport) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Step time ratios (median of interleaved pairs)", box=None)
    for column in ("comparison", "requests", "temp.", "ratio", "95% interval", "ms", "same tokens"):
        table.add_column(column, justify="left" if column == "comparison" else "right")
    for cell in report.cells:
        interval = cell.ratio.ci95
        table.add_row(
            cell.comparison,
            str(cell.num_requests),
            f"{cell.temperature:g}",
            f"{cell.ratio.value:.3f}",
            "-" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}",
            f"{cell.step_ms[0]:.1f} / {cell.step_ms[1]:.1f}",
            "-" if cell.equal_tokens is None else ("yes" if cell.equal_tokens else "NO"),
        )
    console = Console()
    console.print(table)
    if any(cell.equal_tokens is False for cell in report.cells):
        console.print(
            "Tokens differ: in bfloat16 the last bits depend on which requests share a batch, "
            "and arrivals vary; --dtype float32 compares them exactly.",
            highlight=False,
        )
    for share in report.twins:
        top = ", ".join(f"{name} {ms:.2f} ms" for name, ms in share.top)
        console.print(
            f"CPU twins, {share.num_requests} requests, temperature {share.temperature:g}: "
            f"{share.share:.1%} of step time ({top})",
            highlight=False,
        )
