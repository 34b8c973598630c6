"""One whole run: start the engine, measure, close the engine, keep whatever was measured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specbench.bench.compare import compare
from specbench.bench.events import EngineStarting, OnEvent, ignore_event
from specbench.bench.waiting import run_unless_stopped
from specbench.engines.base import Engine
from specbench.errors import Interrupted, SpecbenchError
from specbench.records import Conversation, RoundRecord, RunSpec

StartEngine = Callable[[], Awaitable[Engine]]


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    Attributes:
        rounds: in the order they were served, warm-ups and a cut last one included.
        engine_description: the engine's own account of itself.
        stopped_by: what ended the run early; None if it was completed.
    """

    rounds: tuple[RoundRecord, ...]
    engine_description: dict[str, Any]
    stopped_by: SpecbenchError | None

    @property
    def measured_anything(self) -> bool:
        """Whether a request outside the warm-ups was answered."""
        return any(
            request.chunk_tokens
            for record in self.rounds
            if not record.warmup
            for request in record.requests
        )


async def run_session(
    start_engine: StartEngine,
    spec: RunSpec,
    conversations: Sequence[Conversation],
    *,
    on_event: OnEvent = ignore_event,
    stop: asyncio.Event | None = None,
) -> Outcome:
    """Measure on an engine of one's own.

    Expected failures after the start (engine died, user stopped) end up in the outcome,
    so that the caller can still write what was measured.

    Raises:
        EngineFailure: the engine did not start.
        InputError: a prompt does not fit; nothing was measured.
        Interrupted: the user stopped before the engine was up.
    """
    stop = stop or asyncio.Event()
    on_event(EngineStarting())
    started, engine = await run_unless_stopped(stop, _started(start_engine))
    if not started or engine is None:
        raise Interrupted("stopped before anything was measured")
    rounds: list[RoundRecord] = []
    stopped_by: SpecbenchError | None = None
    try:
        description = engine.describe()
        async for record in compare(engine, spec, conversations, on_event=on_event, stop=stop):
            rounds.append(record)
    except SpecbenchError as error:
        if not rounds:
            raise
        stopped_by = error
    finally:
        await engine.close()
    return Outcome(tuple(rounds), description, stopped_by)


async def _started(start_engine: StartEngine) -> Engine:
    return await start_engine()
