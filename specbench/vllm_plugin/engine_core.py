"""A call into vLLM's engine loop: whether it should ask the worker for drafts at all."""

from __future__ import annotations

from typing import Any

EXPECT_DRAFTS = "specbench_expect_drafts"


def expect_drafts(engine_core: Any, expected: bool) -> None:
    """With synchronous scheduling the loop fetches drafts from the worker after each step.

    Under a policy that never drafts this is a round trip for nothing (about 1% of a step
    of the embedded model), so it is switched off. No request may be running. Asynchronous
    scheduling uses the flag for structured outputs instead and is left alone.
    """
    if not engine_core.async_scheduling:
        engine_core.check_for_draft_tokens = expected


def add_engine_calls() -> None:
    """Make :func:`expect_drafts` reachable through ``call_utility_async``."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, EXPECT_DRAFTS, expect_drafts)
