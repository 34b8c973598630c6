"""What the training commands show while they work, and how they stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specbench.errors import Interrupted

# Drawing shares the machine with the work.
REFRESH_PER_SECOND = 1
LINE_INTERVAL_S = 60.0

OnProgress = Callable[[float, float], None]


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C ends a step that can be taken up again; say so."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("stopped; what is done is kept, run the same command to go on") from None


@contextmanager
def open_progress(unit: str) -> Iterator[OnProgress]:
    """A bar on standard error in a terminal; elsewhere a line a minute."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LineProgress(unit)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True
    ) as bar:
        task = bar.add_task(unit)

        def update(done: float, total: float) -> None:
            bar.update(
                task, completed=done, total=total, description=f"{done:,.0f}/{total:,.0f} {unit}"
            )

        yield update


class _LineProgress:
    """For logs: a line at the start, one a minute, one at the end."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._next_s = 0.0

    def __call__(self, done: float, total: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s or done >= total:
            self._next_s = now_s + LINE_INTERVAL_S
            print(f"{done:,.0f}/{total:,.0f} {self._unit}", file=sys.stderr, flush=True)
