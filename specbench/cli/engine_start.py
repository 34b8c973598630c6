"""Start the engine of a benchmark with everything its policies need."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbench.bench.events import OnEvent
    from specbench.costs import CostTable
    from specbench.engines.base import Engine
    from specbench.engines.config import EngineConfig
    from specbench.engines.vllm import VLLMEngine


@dataclass(frozen=True)
class CostSource:
    """Where step costs come from: the user's table, or (None) this engine's own."""

    table: CostTable | None = None
    path: Path | None = None


@dataclass(frozen=True)
class CalibrationSource:
    """Where the n-gram calibration comes from.

    Attributes:
        wanted_by: the first policy that needs it.
        path: folder the user named; None looks in the cache and among the shipped ones.
    """

    wanted_by: str
    path: Path | None = None


@dataclass(frozen=True)
class EngineNeeds:
    """What the policies of a benchmark need beside the engine; None where none does."""

    costs: CostSource | None = None
    calibration: CalibrationSource | None = None


async def start_engine(config: EngineConfig, needs: EngineNeeds, on_event: OnEvent) -> Engine:
    """Start vLLM and install what the policies need.

    Imported late because vLLM takes seconds to import.
    """
    from specbench.engines.vllm import start_engine as start_vllm

    engine = await start_vllm(config)
    try:
        # First what can be refused at once: profiling takes a minute.
        if needs.calibration is not None:
            await _install_calibration(engine, needs.calibration, on_event)
        if needs.costs is not None:
            await _install_costs(engine, needs.costs, on_event)
    except BaseException:
        await engine.close()
        raise
    return engine


async def _install_calibration(
    engine: VLLMEngine, source: CalibrationSource, on_event: OnEvent
) -> None:
    from specbench.bench.events import Notice
    from specbench.calibration.install import install_calibration

    found = await install_calibration(engine, source.path, wanted_by=source.wanted_by)
    if found.has_other_drafter:
        on_event(
            Notice(
                f"the calibration in {found.folder} has temperatures of another drafter; "
                "this drafter's confidences stay as they are ('specbench calibrate' fits them)"
            )
        )


async def _install_costs(engine: VLLMEngine, source: CostSource, on_event: OnEvent) -> None:
    from specbench.bench.events import EngineProfiled
    from specbench.profiling import ensure_costs, install_costs

    if source.table is not None:
        await install_costs(engine, source.table, str(source.path))
    else:
        await ensure_costs(engine, progress=lambda *a: on_event(EngineProfiled(*a)))
