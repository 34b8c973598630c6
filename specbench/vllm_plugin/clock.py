"""Marks in time on the device the engine runs on.

On a CPU a mark is a reading of the wall clock. On a GPU it is a recorded event, so that
taking a mark never waits for the device; durations are resolved later.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceClock:
    """Takes marks and turns pairs of marks into milliseconds."""

    def __init__(self, device: torch.device) -> None:
        self._uses_events = device.type == "cuda"

    def mark(self) -> Any:
        """A mark at this point of the device's work."""
        if not self._uses_events:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks; waits for the device on a GPU."""
        if not self._uses_events:
            return float(end - start) * 1e3
        end.synchronize()
        return float(start.elapsed_time(end))
