"""Measure step costs on the engine that will run: real steps of real requests.

A group of requests is started once per context length and batch size; while it runs, what is
drafted and what is verified are switched every few steps. The duration of a step is taken from its
start to the start of the next one, so that scheduling and sampling are part of the cost.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import random
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from specbench.costs import (
    CostSample,
    CostTable,
    check_fingerprint,
    find_table,
    fit_cost_table,
    save_table,
)
from specbench.costs.store import to_json
from specbench.engines.vllm import VLLMEngine
from specbench.errors import EngineFailure, InputError, UsageError
from specbench.records import EngineRequest, SamplingSpec, StepRecord

# Two context lengths: a short chat turn, and about half of the embedded default's limit.
CONTEXT_TOKENS = (128, 1024)
# What is measured in every batch: (drafted, verified) tokens of each request; None is the
# drafter's whole block. Skipping comes last: it leaves contexts unstored.
LENGTHS: tuple[tuple[int | None, int], ...] = ((None, 0), (1, 1), (3, 3), (None, 7), (0, 0))
# Rounds over these lengths, and steps of each in a round. Rounds, because a machine that is
# busy for some seconds would otherwise make one length look dear beside the others of the
# same batch, and decisions compare just those. The first step of all is dropped by the fit.
ROUNDS = 3
STEPS_PER_ROUND = 3
# Of the plan above. In the fingerprint, so that tables of earlier plans are measured again.
PLAN_VERSION = 3
# Prompt tokens that one batch may need, and above which only every other power of two is
# measured: they bound the time spent on prefill to about half a minute on two cores.
MAX_PREFILL_TOKENS = 20_000
LONG_CONTEXT_TOKENS = 512
POLL_S = 0.02
# Room for the tokens emitted while a batch is measured.
OUTPUT_MARGIN_TOKENS = 512
# A shape that has not produced its steps by then is given up: the engine hangs.
SHAPE_TIMEOUT_S = 120.0

Progress = Callable[[str, int, int], None]


def cost_fingerprint(facts: dict[str, Any]) -> dict[str, str]:
    """What a cost table depends on, from ``Engine.describe()``."""
    keys = (
        "model_fingerprint",
        "drafter_fingerprint",
        "dtype",
        "threads",
        "processor",
        "gpu",
        "vllm_version",
        "block_size",
        "num_speculative_tokens",
        "draft_block_tokens",
        "max_num_seqs",
        "tensor_parallel_size",
        "draft_sample_method",
        "max_num_batched_tokens",
        "async_scheduling",
    )
    fingerprint = {key: str(facts.get(key)) for key in keys}
    fingerprint["profile_plan"] = str(PLAN_VERSION)
    # Any other engine argument may move the costs; which ones do is vLLM's knowledge.
    fingerprint["engine_args"] = json.dumps(facts.get("engine_args") or {}, sort_keys=True)
    return fingerprint


async def ensure_costs(engine: VLLMEngine, *, progress: Progress | None = None) -> CostTable:
    """The engine's cost table from the cache, measured now if there is none; installs it."""
    table = find_table(cost_fingerprint(engine.describe()))
    if table is None:
        table = await profile_costs(engine, progress=progress)
        save_table(table)
    await engine.set_costs(json.loads(to_json(table)))
    return table


async def install_costs(engine: VLLMEngine, table: CostTable, source: str) -> None:
    """Use a given table; one that says what it was measured on must fit this engine.

    Raises:
        InputError: its fingerprint differs; the message lists what does.
    """
    if table.fingerprint:
        check_fingerprint(table, cost_fingerprint(engine.describe()), source)
    await engine.set_costs(json.loads(to_json(table)))


async def profile_costs(
    engine: VLLMEngine,
    *,
    contexts: Sequence[int] = CONTEXT_TOKENS,
    progress: Progress | None = None,
) -> CostTable:
    """Measure the draft and verify curves of a running engine with a model drafter.

    Raises:
        InputError: the measured curves are unusable (flat, non-finite).
        EngineFailure: the engine died or stopped making steps.
    """
    facts = engine.describe()
    if facts["data_parallel_size"] != 1:
        raise UsageError(
            "step costs cannot be measured with several engine copies: run 'specbench costs "
            "profile' with one and give the table with --costs"
        )
    plan = [
        (context, num_requests)
        for context in contexts
        if context + OUTPUT_MARGIN_TOKENS <= facts["max_model_len"]
        for num_requests in batch_sizes(facts["max_num_seqs"], context)
    ]
    if not plan:
        raise InputError(
            f"profiling needs a context of {min(contexts) + OUTPUT_MARGIN_TOKENS} tokens, "
            f"the engine has {facts['max_model_len']}; raise --max-model-len"
        )
    samples: list[CostSample] = []
    for index, (context, num_requests) in enumerate(plan):
        if progress is not None:
            progress(f"{num_requests} requests at {context} tokens", index, len(plan))
        steps = await _measure_batch(engine, context, num_requests, facts)
        samples.extend(_sample(step, context) for step in steps)
    if progress is not None:
        progress("done", len(plan), len(plan))
    provenance = {
        "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "engine": facts,
        "steps_per_shape": ROUNDS * STEPS_PER_ROUND,
    }
    return fit_cost_table(
        samples, cost_fingerprint(facts), provenance, context_lengths=sorted({c for c, _ in plan})
    )


def batch_sizes(max_num_seqs: int, context_tokens: int) -> list[int]:
    """Powers of two (of four, at long contexts) up to the engine's limit and the prefill bound."""
    base = 4 if context_tokens > LONG_CONTEXT_TOKENS else 2
    sizes = [base**k for k in range(11) if base**k < max_num_seqs] + [max_num_seqs]
    affordable = [n for n in sizes if n * context_tokens <= MAX_PREFILL_TOKENS]
    return affordable or [1]


def _sample(step: StepRecord, context_tokens: int) -> CostSample:
    assert step.step_ms is not None
    return CostSample(
        context_tokens=context_tokens,
        num_tokens=step.num_requests + step.num_verified_tokens,
        num_drafted_tokens=step.num_drafted_tokens,
        verify_ms=step.step_ms - step.draft_ms,
        draft_ms=step.draft_ms,
    )


async def _measure_batch(
    engine: VLLMEngine, context: int, num_requests: int, facts: dict[str, Any]
) -> list[StepRecord]:
    """Steps of one batch at all of ``LENGTHS``."""
    await engine.set_policy("dspark:0")
    started = [asyncio.Event() for _ in range(num_requests)]
    tasks = [
        asyncio.create_task(_run_until_cancelled(engine, _request(i, context), started[i]))
        for i in range(num_requests)
    ]
    steps: list[StepRecord] = []
    try:
        await _wait_all(started, tasks)
        for drafted, verified in LENGTHS * ROUNDS:
            if max(drafted or 0, verified) > facts["draft_block_tokens"]:
                continue
            drafted = await _set_lengths(engine, drafted, verified, facts["draft_block_tokens"])
            steps += await _collect(
                engine, num_requests, num_requests * verified, num_requests * drafted
            )
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return steps


async def _set_lengths(
    engine: VLLMEngine, drafted: int | None, verified: int, block_tokens: int
) -> int:
    """Fix what every request drafts and verifies; returns the tokens that are drafted.

    Not every drafter can draft less than a block: it is then skipped, or drafts one.
    """
    if drafted is not None:
        with contextlib.suppress(UsageError):
            await engine.set_policy(f"forespark:{drafted}", while_running=True)
            return drafted
    await engine.set_policy(f"dspark:{verified}" if drafted != 0 else "ar", while_running=True)
    return block_tokens if drafted != 0 else 0


def _request(index: int, context_tokens: int) -> EngineRequest:
    """Random prompt tokens, so that no prefix is shared; outputs are not looked at."""
    rng = random.Random(index)
    # Ids below 256 + 32 are special or single bytes in common vocabularies.
    tokens = tuple(rng.randrange(300, 8000) for _ in range(context_tokens))
    sampling = SamplingSpec(ignore_eos=True)
    return EngineRequest(f"profile-{uuid.uuid4()}", tokens, sampling, 900)


async def _run_until_cancelled(
    engine: VLLMEngine, request: EngineRequest, started: asyncio.Event
) -> None:
    stream = engine.generate(request)
    with contextlib.suppress(asyncio.CancelledError):
        async for _ in stream:
            started.set()


async def _wait_all(started: list[asyncio.Event], tasks: list[asyncio.Task[None]]) -> None:
    """Wait for every request's first token; surfaces the first request that failed."""
    pending = [asyncio.ensure_future(event.wait()) for event in started]
    try:
        while not all(event.is_set() for event in started):
            futures: list[asyncio.Future[Any]] = [*pending, *tasks]
            unfinished = [future for future in futures if not future.done()]
            await asyncio.wait(unfinished, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
                    raise EngineFailure("a profiling request ended before it was measured")
    finally:
        for future in pending:
            future.cancel()


async def _collect(
    engine: VLLMEngine, num_requests: int, num_verified: int, num_drafted: int
) -> list[StepRecord]:
    """The next STEPS_PER_ROUND steps of exactly this shape."""
    await engine.take_steps()
    found: list[StepRecord] = []
    deadline = asyncio.get_running_loop().time() + SHAPE_TIMEOUT_S
    while len(found) < STEPS_PER_ROUND:
        if asyncio.get_running_loop().time() > deadline:
            raise EngineFailure(
                f"no steps of {num_requests} requests with {num_verified} verified tokens within "
                f"{SHAPE_TIMEOUT_S:.0f} s while profiling; restart the engine"
            )
        await asyncio.sleep(POLL_S)
        found += [
            step
            for step in await engine.take_steps(include_open=False)
            if step.step_ms is not None
            and step.num_prompt_tokens == 0
            and step.num_requests == num_requests
            and step.num_verified_tokens == num_verified
            and step.num_drafted_tokens == num_drafted
        ]
    return found[:STEPS_PER_ROUND]
