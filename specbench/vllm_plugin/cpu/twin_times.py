"""How much of a step the CPU twins take, measured in the running engine."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class TwinTimer:
    """Wraps every registered twin with a stopwatch; ``stop`` takes them off again."""

    def __init__(self) -> None:
        self._totals_ms: defaultdict[str, float] = defaultdict(float)
        self._originals: list[tuple[Any, Callable[..., Any]]] = []

    def start(self) -> None:
        """Begin from zero."""
        from specbench.vllm_plugin.cpu.install import registered_wrappers

        self.stop()
        for name, wrapper in registered_wrappers().items():
            self._originals.append((wrapper, wrapper._impl))
            wrapper._impl = self._timed(name, wrapper._impl)

    def stop(self) -> dict[str, float]:
        """Total milliseconds by kernel name since ``start``."""
        for wrapper, original in self._originals:
            wrapper._impl = original
        self._originals.clear()
        totals = dict(self._totals_ms)
        self._totals_ms.clear()
        return totals

    def _timed(self, name: str, twin: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = twin(*args, **kwargs)
            self._totals_ms[name] += (time.perf_counter() - start) * 1e3
            return result

        return run
