"""``specbench calibrate``: fit how likely drafted tokens are accepted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specbench.cache import write_text_atomically
from specbench.cli.drafter_progress import LINE_INTERVAL_S, REFRESH_PER_SECOND, interruptible

TEXT = "Text"
FIT = "Fit"
OUTPUT = "Output"


class StsFormatOption(StrEnum):
    """``StsFormat``, without importing what computes."""

    SGLANG = "sglang"
    TENSORRT_LLM = "tensorrt-llm"


def calibrate(
    model: Annotated[
        str | None, typer.Option(help="Target model: folder or hub id. Default: the embedded one.")
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="DSpark drafter whose confidence head gets temperatures, or none. Default: the "
            "embedded one, for the embedded model only."
        ),
    ] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="Use the answers in this folder (of `drafter generate`) instead of generating.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    num_tokens: Annotated[
        int, typer.Option(min=1, help="Response tokens to generate.", rich_help_panel=TEXT)
    ] = 60_000,
    workdir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for text and features, used again by later runs. Default: in the cache.",
            rich_help_panel=TEXT,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of prompts and splits.", rich_help_panel=TEXT)
    ] = 0,
    min_n: Annotated[
        int, typer.Option(min=1, help="Shortest suffix looked up.", rich_help_panel=FIT)
    ] = 2,
    max_n: Annotated[
        int, typer.Option(min=1, help="Longest suffix looked up.", rich_help_panel=FIT)
    ] = 16,
    num_positions: Annotated[
        int, typer.Option(min=1, help="Longest n-gram chain, in tokens.", rich_help_panel=FIT)
    ] = 16,
    features: Annotated[
        str | None,
        typer.Option(
            help="Strata: agreement,recent_acceptance,in_prompt,sampling or some of them, or "
            "none. Default: those that lower the held-out Brier score.",
            rich_help_panel=FIT,
        ),
    ] = None,
    no_confidence: Annotated[
        bool,
        typer.Option("--no-confidence", help="Fit the n-gram table only.", rich_help_panel=FIT),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the calibration. Default: in the cache, where policies find it.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    sts_output: Annotated[
        Path | None,
        typer.Option(help="Also write the temperatures to this file.", rich_help_panel=OUTPUT),
    ] = None,
    sts_format: Annotated[
        StsFormatOption,
        typer.Option(help="The engine that file is for.", rich_help_panel=OUTPUT),
    ] = StsFormatOption.SGLANG,
    json_output: Annotated[
        Path | None,
        typer.Option("--json", help="Write all figures as JSON here.", rich_help_panel=OUTPUT),
    ] = None,
) -> None:
    """Measure how much of what n-gram copies and the drafter propose is accepted, and fit it.

    Minutes for the embedded model. Stop at any time and run again to go on.
    """
    from specbench.calibration.calibrate import CalibrationSpec
    from specbench.calibration.calibrate import calibrate as run
    from specbench.calibration.ngram_fit import LookupSpec, parse_features
    from specbench.cli.calibration_tables import print_calibration
    from specbench.estimators.sts_interop import StsFormat

    spec = CalibrationSpec(
        model=model,
        drafter=drafter,
        output=output,
        workdir=workdir,
        responses=responses,
        num_tokens=num_tokens,
        seed=seed,
        lookup=LookupSpec(min_n, max_n, num_positions),
        features=parse_features(features),
        with_confidence=not no_confidence,
        sts_output=sts_output,
        sts_format=StsFormat(sts_format.value),
    )
    with _observer() as observer, interruptible():
        result = run(spec, observer)
    print_calibration(result)
    if json_output is not None:
        content = json.dumps(result.to_json(), indent=1, allow_nan=False)
        write_text_atomically(json_output, content + "\n")


class _Observer(Protocol):
    def note(self, line: str) -> None: ...
    def progress(self, what: str, done: float, total: float) -> None: ...


@contextmanager
def _observer() -> Iterator[_Observer]:
    """A bar for what is being done on standard error; outside a terminal, lines."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True
    ) as bar:
        yield _Bars(bar)


class _Bars:
    """One bar for each thing that is counted."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def note(self, line: str) -> None:
        """Print above the bars."""
        self._bar.console.print(line, highlight=False, markup=False)

    def progress(self, what: str, done: float, total: float) -> None:
        """Move the bar of ``what``."""
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what)
        description = f"{done:,.0f}/{total:,.0f} {what}"
        self._bar.update(self._tasks[what], completed=done, total=total, description=description)


class _Lines:
    """For logs: a line at the start of each thing, one a minute, one at its end."""

    def __init__(self) -> None:
        self._next_s: dict[str, float] = {}

    def note(self, line: str) -> None:
        """Print the line."""
        print(line, file=sys.stderr, flush=True)

    def progress(self, what: str, done: float, total: float) -> None:
        """Print a line if one is due."""
        now_s = time.monotonic()
        if now_s >= self._next_s.get(what, 0.0) or done >= total:
            self._next_s[what] = now_s + LINE_INTERVAL_S
            self.note(f"{done:,.0f}/{total:,.0f} {what}")
