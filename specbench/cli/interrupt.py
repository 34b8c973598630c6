"""Ctrl-C: the first ends the run and keeps what was measured, the second ends everything."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptGuard:
    """Context manager that turns the first SIGINT into a stop event.

    A Python-level handler is used rather than the event loop's: it also runs while a call
    blocks the loop, which starting an engine does.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._presses = 0
        self._previous: Any = None

    def attach(self, stop: asyncio.Event) -> None:
        """Set ``stop`` on the first SIGINT; call from within the running loop."""
        self._loop, self._stop = asyncio.get_running_loop(), stop

    def __enter__(self) -> InterruptGuard:
        # Signals can only be caught in the main thread; elsewhere the caller handles them.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._presses += 1
        if self._presses > 1:
            _kill_everything()
        if self._loop is None or self._stop is None:
            raise KeyboardInterrupt
        print("stopping; press Ctrl-C again to kill", file=sys.stderr)
        self._loop.call_soon_threadsafe(self._stop.set)


def _kill_everything() -> None:
    """End this process and the engine processes under it at once."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        child.kill()
    os._exit(128 + signal.SIGINT)
