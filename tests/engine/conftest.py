"""One event loop in a thread for all real engines, and engines shared by a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EngineLoop

from specbench.engines.config import EngineConfig
from specbench.engines.vllm import VLLMEngine, start_engine


@pytest.fixture(scope="session")
def loop() -> Iterator[EngineLoop]:
    runner = EngineLoop()
    yield runner
    runner.stop()


@pytest.fixture(scope="module")
def launch(
    loop: EngineLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., VLLMEngine]]:
    """Start engines with the embedded default model; all are closed with the module."""
    engines: list[VLLMEngine] = []

    def start(**overrides: Any) -> VLLMEngine:
        log: Path = tmp_path_factory.mktemp("engine") / "engine.log"
        settings: dict[str, Any] = {"model": None, "drafter": None, "max_num_seqs": 8}
        config = EngineConfig(**{**settings, "log_file": log, **overrides})
        engines.append(loop.run(start_engine(config)))
        return engines[-1]

    yield start
    for engine in engines:
        loop.run(engine.close())
