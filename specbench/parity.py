"""What the plugin costs: the same decoding on vLLM's V1 runner, its V2 runner, and a policy engine.

Three engines are loaded and take turns on the same prompts, so that each ratio compares
neighbours in time. A step's duration is the gap between consecutive tokens of a request,
with one token a step everywhere.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specbench.engines.config import EngineConfig
from specbench.engines.vllm import VLLMEngine, start_engine
from specbench.records import EngineRequest, SamplingSpec
from specbench.stats import RatioEstimate, paired_ratio

PROMPT_TOKENS = 96
# What is compared with what: (label, side measured, yardstick).
COMPARISONS = (
    ("V2 runner / V1 runner", "v2", "v1"),
    ("policy ar / V2 runner without speculation", "ar", "v2"),
)


@dataclass(frozen=True)
class ParityCell:
    """One ratio of step times.

    Attributes:
        num_requests: requests decoding together.
        ratio: step time of the first side over the second, over all pairs.
        equal_tokens: greedy outputs agreed token for token; None above temperature 0.
        step_ms: median step time of each side over all rounds.
    """

    comparison: str
    num_requests: int
    temperature: float
    ratio: RatioEstimate
    equal_tokens: bool | None
    step_ms: tuple[float, float]


@dataclass(frozen=True)
class TwinShare:
    """Time in the kernels' CPU twins, of the step time of a policy that verifies 7 tokens.

    Attributes:
        share: fraction of the summed step time.
        top: the dearest kernels, (name, milliseconds a step).
    """

    num_requests: int
    temperature: float
    share: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class ParityReport:
    """Everything one run of the command measured."""

    cells: tuple[ParityCell, ...]
    twins: tuple[TwinShare, ...]


@dataclass(frozen=True)
class _Turn:
    step_ms: float
    tokens: tuple[tuple[int, ...], ...]


async def measure_parity(
    config: EngineConfig,
    *,
    batch_sizes: Sequence[int],
    temperatures: Sequence[float],
    rounds: int,
    output_tokens: int,
    on_progress: Callable[[str], None],
) -> ParityReport:
    """Interleave the three engines for every batch size and temperature.

    Raises:
        EngineFailure: an engine did not start or died.
    """
    engines: dict[str, VLLMEngine] = {}
    try:
        for side, plain in (("v1", "v1"), ("v2", "v2"), ("ar", None)):
            on_progress(f"starting engine {side}")
            engines[side] = await start_engine(replace(config, plain=plain))  # type: ignore[arg-type]
        await engines["ar"].set_policy("ar")
        cells = []
        for temperature, size in itertools.product(temperatures, batch_sizes):
            on_progress(f"{size} requests, temperature {temperature:g}")
            turns = await _interleave(engines, size, temperature, rounds, output_tokens)
            cells += [_cell(c, size, temperature, turns) for c in COMPARISONS]
        on_progress("kernel twins")
        twins = [
            await _twin_share(engines["ar"], max(batch_sizes), temperature, output_tokens)
            for temperature in temperatures
        ]
        return ParityReport(tuple(cells), tuple(twins))
    finally:
        closing = (engine.close() for engine in engines.values())
        await asyncio.gather(*closing, return_exceptions=True)


async def _interleave(
    engines: dict[str, VLLMEngine], size: int, temperature: float, rounds: int, output_tokens: int
) -> dict[str, list[_Turn]]:
    """``rounds`` turns a side after one warm-up turn each; the order rotates."""
    sides = list(engines)
    turns: dict[str, list[_Turn]] = {side: [] for side in sides}
    for index in range(rounds + 1):
        for offset in range(len(sides)):
            side = sides[(index + offset) % len(sides)]
            turn = await _turn(engines[side], size, temperature, output_tokens, index)
            if index > 0:
                turns[side].append(turn)
    return turns


async def _twin_share(
    engine: VLLMEngine, size: int, temperature: float, output_tokens: int
) -> TwinShare:
    """Warm-up turn, then one with the twins timed; dspark where there is a model drafter."""
    policy = "ngram" if engine.describe()["drafter"] is None else "dspark:7"
    await engine.set_policy(policy)
    await _turn(engine, size, temperature, output_tokens, 0)
    await engine.take_steps()
    await engine.time_twins(True)
    await _turn(engine, size, temperature, output_tokens, 1)
    totals = await engine.time_twins(False)
    steps = [step for step in await engine.take_steps() if step.step_ms is not None]
    step_ms = sum(step.step_ms or 0.0 for step in steps)
    dearest = sorted(totals.items(), key=lambda item: -item[1])[:5]
    top = tuple((name.rpartition(".")[2], ms / len(steps)) for name, ms in dearest)
    return TwinShare(size, temperature, sum(totals.values()) / step_ms, top)


async def _turn(
    engine: VLLMEngine, size: int, temperature: float, output_tokens: int, index: int
) -> _Turn:
    rng = random.Random(index)
    prompts = [[rng.randrange(300, 8000) for _ in range(PROMPT_TOKENS)] for _ in range(size)]

    async def one(position: int) -> tuple[list[float], tuple[int, ...]]:
        sampling = SamplingSpec(temperature=temperature, ignore_eos=True, seed=position)
        request = EngineRequest(
            f"parity-{size}-{temperature}-{index}-{position}",
            tuple(prompts[position]),
            sampling,
            output_tokens,
        )
        times: list[float] = []
        tokens: list[int] = []
        async for chunk in engine.generate(request):
            times.append(chunk.time_s)
            tokens.extend(chunk.token_ids)
        return times, tuple(tokens)

    results = await asyncio.gather(*(one(i) for i in range(size)))
    # Steps in which all requests decode: from the last first token to the first last one.
    start = max(times[0] for times, _ in results)
    end = min(times[-1] for times, _ in results)
    gaps = [
        later - earlier
        for times, _ in results
        for earlier, later in itertools.pairwise(times)
        if earlier >= start and later <= end
    ]
    return _Turn(statistics.median(gaps) * 1e3, tuple(tokens for _, tokens in results))


def _cell(
    comparison: tuple[str, str, str], size: int, temperature: float, turns: dict[str, list[_Turn]]
) -> ParityCell:
    label, side, yardstick = comparison
    ours, theirs = turns[side], turns[yardstick]
    ratio = paired_ratio([t.step_ms for t in ours], [t.step_ms for t in theirs])
    assert ratio is not None
    equal = all(a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True))
    medians = tuple(statistics.median(t.step_ms for t in ts) for ts in (ours, theirs))
    return ParityCell(
        label,
        size,
        temperature,
        ratio,
        equal if temperature == 0 else None,
        (medians[0], medians[1]),
    )


def report_to_json(report: ParityReport) -> dict[str, Any]:
    """Plain data for ``--output``."""
    return {
        "cells": [_cell_to_json(cell) for cell in report.cells],
        "twins": [asdict(share) for share in report.twins],
    }


def _cell_to_json(cell: ParityCell) -> dict[str, Any]:
    return {
        "comparison": cell.comparison,
        "num_requests": cell.num_requests,
        "temperature": cell.temperature,
        "ratio": {"value": cell.ratio.value, "ci95": cell.ratio.ci95},
        "equal_tokens": cell.equal_tokens,
        "median_step_ms": list(cell.step_ms),
    }
