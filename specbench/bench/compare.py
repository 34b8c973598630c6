"""Interleaved comparison: in every round each policy serves the same prompts once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from specbench.bench.driver import Clock, run_round
from specbench.bench.events import OnEvent, ignore_event
from specbench.bench.plan import plan_rounds, seed_offsets, warmup_sampling
from specbench.bench.prompts import check_fit, encode_first_turns
from specbench.engines.base import Engine
from specbench.errors import EngineFailure, Interrupted, SpecbenchError
from specbench.records import Conversation, RoundRecord, RunSpec


async def compare(
    engine: Engine,
    spec: RunSpec,
    conversations: Sequence[Conversation],
    *,
    on_event: OnEvent = ignore_event,
    stop: asyncio.Event | None = None,
    clock: Clock = time.perf_counter,
) -> AsyncIterator[RoundRecord]:
    """Yield every policy's share of every round as it is finished, warm-ups included.

    Args:
        conversations: the prompts of the whole run; dealt out over ``spec.rounds``.
        stop: setting it ends the run after the round in progress was cut short.

    Raises:
        InputError: a prompt does not fit the engine's context; nothing was sent.
        UsageError: fewer prompts than rounds.
        Interrupted: ``stop`` was set; raised after the cut round was yielded.
        EngineFailure: the engine died; raised after the cut round was yielded.
        SpecbenchError: every request of a round failed; raised after it was yielded.
    """
    stop = stop or asyncio.Event()
    plan = plan_rounds(
        spec.policies,
        conversations,
        num_rounds=spec.rounds,
        warmup_prompts=spec.warmup_prompts,
        seed=spec.seed,
    )
    check_fit(engine, conversations, spec.sampling)
    first_prompts = encode_first_turns(engine, conversations)
    offsets = seed_offsets(conversations)
    for planned in plan:
        record = await run_round(
            engine,
            planned.policy,
            planned.conversations,
            max_concurrency=spec.max_concurrency,
            sampling=warmup_sampling(spec.sampling) if planned.warmup else spec.sampling,
            round_index=planned.round_index,
            warmup=planned.warmup,
            on_event=on_event,
            stop=stop,
            first_prompts=first_prompts,
            offsets=offsets,
            clock=clock,
        )
        yield record
        _raise_if_over(record, stop)


def _raise_if_over(record: RoundRecord, stop: asyncio.Event) -> None:
    # A terminal sends Ctrl-C to the engine's processes too: one that dies after the user
    # asked to stop has not failed.
    if stop.is_set():
        raise Interrupted("stopped by the user")
    if record.failure is not None:
        raise EngineFailure(record.failure)
    errors = [request.error for request in record.requests]
    if errors and all(errors):
        raise SpecbenchError(f"every request under policy {record.policy!r} failed: {errors[0]}")
