"""Live progress on standard error: a bar in a terminal, a line a round elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from specbench.bench.events import (
    EngineProfiled,
    EngineStarting,
    Event,
    Notice,
    OnEvent,
    RequestDone,
    RoundDone,
    RoundStarted,
    ignore_event,
)
from specbench.metrics.throughput import output_throughput
from specbench.records import RunSpec

# Drawing shares the machine with the engine: twice a second is enough to watch.
REFRESH_PER_SECOND = 2


@contextmanager
def open_progress(*, enabled: bool, spec: RunSpec) -> Iterator[OnEvent]:
    """Show a run's events while the context is open; yields the listener to feed."""
    if not enabled:
        yield ignore_event
        return
    console = Console(file=terminal_of_its_own())
    if not console.is_terminal:
        yield LineProgress(console, spec)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
        transient=True,
    ) as progress:
        yield BarProgress(progress, spec)


def terminal_of_its_own() -> TextIO:
    """Standard error; in a terminal a second descriptor of it.

    While the engine starts, descriptor 2 points at its log: a bar drawn there would freeze
    on the screen and end up in the file.
    """
    if not sys.stderr.isatty():
        return sys.stderr
    return os.fdopen(os.dup(sys.stderr.fileno()), "w")


class LineProgress:
    """One line when a policy's share of a round is over."""

    def __init__(self, console: Console, spec: RunSpec) -> None:
        self._console = console
        self._spec = spec

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, EngineStarting):
            self._print("starting the engine")
        elif isinstance(event, EngineProfiled):
            if event.done == 0:
                self._print("measuring step costs (once for this engine)")
        elif isinstance(event, Notice):
            self._print(f"note: {event.text}")
        elif isinstance(event, RoundDone):
            record = event.record
            rate = output_throughput(record)
            speed = "" if record.warmup or rate is None else f", {rate:.1f} tokens/s"
            state = "" if record.complete else ", cut short"
            self._print(
                f"{place_of(self._spec, record.policy, record.round_index, record.warmup)}: "
                f"{len(record.requests)} requests in {record.duration_s:.1f} s{speed}{state}"
            )

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class BarProgress:
    """One bar for the requests of the round in progress, with its rate so far."""

    def __init__(self, progress: Progress, spec: RunSpec) -> None:
        self._progress = progress
        self._spec = spec
        self._task: TaskID = progress.add_task("", total=None, rate="")
        self._first_sent_s = 0.0
        self._num_tokens = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        if isinstance(event, EngineStarting):
            self._progress.update(self._task, description="starting the engine")
        elif isinstance(event, EngineProfiled):
            self._progress.update(
                self._task,
                description=f"measuring step costs: {event.shape}",
                completed=event.done,
                total=event.total,
            )
        elif isinstance(event, Notice):
            self._progress.console.print(f"note: {event.text}", markup=False, highlight=False)
        elif isinstance(event, RoundStarted):
            place = place_of(self._spec, event.policy, event.round_index, event.warmup)
            self._num_tokens, self._first_sent_s = 0, float("inf")
            self._progress.reset(self._task, total=event.num_requests, description=place, rate="")
        elif isinstance(event, RequestDone):
            self._request_done(event)

    def _request_done(self, event: RequestDone) -> None:
        request = event.request
        self._num_tokens += request.num_output_tokens
        self._first_sent_s = min(self._first_sent_s, request.sent_s)
        elapsed_s = request.finished_s - self._first_sent_s
        rate = f"{self._num_tokens / elapsed_s:.1f} tokens/s" if elapsed_s > 0 else ""
        self._progress.update(self._task, advance=1, rate=rate)


def place_of(spec: RunSpec, policy: str, round_index: int, warmup: bool) -> str:
    """Where in the run a round is, in words."""
    where = "warm-up" if warmup else f"round {round_index + 1}/{spec.rounds}"
    return f"{where}, {policy}"
