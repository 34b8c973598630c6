"""What the engine tests share: a loop to run engines on, requests, a made-up cost table."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from specbench.costs import ContextCosts, CostCurve, CostTable
from specbench.costs.store import to_json
from specbench.engines.vllm import VLLMEngine
from specbench.estimators.ngram_table import Stratification
from specbench.records import EngineRequest, SamplingSpec

T = TypeVar("T")


class EngineLoop:
    """Runs coroutines on one loop: an engine belongs to the loop it was started on."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = 600) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)


def steep_costs() -> dict[str, Any]:
    """A cost table under which the adaptive budget is neither nothing nor everything."""
    curve = CostCurve(tokens=(1, 8, 16, 64, 2048), ms=(10.0, 13.0, 20.0, 70.0, 2000.0))
    draft = CostCurve(tokens=(0, 7, 56), ms=(0.0, 2.0, 8.0))
    context = ContextCosts(context_tokens=128, draft=draft, verify=curve)
    table = CostTable(contexts=(context,), fingerprint={}, provenance={}, padding="none")
    payload: dict[str, Any] = json.loads(to_json(table))
    return payload


def rising_calibration() -> dict[str, Any]:
    """A calibration under which long matches beat the model drafter's block and short ones do not.

    Nine strata: three levels of agreement by three of recent acceptance, made-up numbers.
    """
    match_lengths = np.arange(17)[:, None]
    conditional = np.clip(0.25 + 0.05 * match_lengths, 0.0, 0.97)
    survival = conditional ** np.arange(1, 17)[None, :]
    survival[:2] = 0.0
    levels = np.linspace(0.7, 1.0, 9)[:, None, None]
    strata = Stratification(("agreement", "recent_acceptance"), (0.5,))
    return {
        "min_n": 2,
        "max_n": 16,
        "features": list(strata.features),
        "recent_edges": list(strata.recent_edges),
        "survival": (levels * survival[None]).tolist(),
        "temperatures": [1.2] * 7,
        # A prior that a few steps overrule, high enough for long drafts at first.
        "acceptance": {
            "conditional": [0.85] * 7,
            "weight": 2.0,
            "decay": 0.9,
            "resolution": 0.3,
        },
    }


async def complete(
    engine: VLLMEngine, request_id: str, prompt: list[int], sampling: SamplingSpec, max_tokens: int
) -> tuple[int, ...]:
    tokens: list[int] = []
    async for chunk in engine.generate(
        EngineRequest(request_id, tuple(prompt), sampling, max_tokens)
    ):
        tokens.extend(chunk.token_ids)
    return tuple(tokens)


async def complete_all(
    engine: VLLMEngine,
    label: str,
    prompts: list[list[int]],
    sampling: SamplingSpec,
    max_tokens: int,
    stagger_s: float = 0.0,
) -> list[tuple[int, ...]]:
    """Serve all prompts together; request i uses the sampling's seed + i, as in the bench.

    ``stagger_s`` delays each start, so that prefills mix in.
    """

    async def one(index: int) -> tuple[int, ...]:
        await asyncio.sleep(index * stagger_s)
        own = replace(sampling, seed=sampling.seed + index)
        return await complete(engine, f"{label}-{index}", prompts[index], own, max_tokens)

    return list(await asyncio.gather(*(one(i) for i in range(len(prompts)))))
