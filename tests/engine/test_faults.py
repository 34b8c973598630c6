"""A dying engine is reported in one line that names the log; what was measured is kept."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from engine_harness import complete

from specbench.errors import EngineFailure, InputError, UsageError
from specbench.records import EngineRequest, SamplingSpec

pytestmark = pytest.mark.engine
GREEDY = SamplingSpec()


@pytest.fixture(scope="module")
def engine(launch):
    return launch(max_model_len=256, drafter="none")


def test_policy_without_its_drafter_is_refused(loop, engine):
    with pytest.raises(UsageError, match="needs a model drafter"):
        loop.run(engine.set_policy("dspark"))
    loop.run(engine.set_policy("ngram"))
    assert loop.run(complete(engine, "after", [400, 401, 400, 401, 400], GREEDY, 6))


def test_policy_cannot_switch_under_a_running_request(loop, engine):
    async def switch_while_running():
        stream = engine.generate(
            EngineRequest("running", (400, 500, 600), SamplingSpec(ignore_eos=True), 200)
        )
        await anext(stream)
        try:
            await engine.set_policy("ar")
        finally:
            await stream.aclose()

    with pytest.raises(UsageError, match="while requests are running"):
        loop.run(switch_while_running())


def test_too_long_prompt_is_refused(loop, engine):
    with pytest.raises(InputError, match="too-long"):
        loop.run(complete(engine, "too-long", [400] * 300, GREEDY, 8))


def test_aborted_request_frees_the_engine(loop, engine):
    async def abort_one():
        stream = engine.generate(
            EngineRequest("abort", (400, 500), SamplingSpec(ignore_eos=True), 200)
        )
        await anext(stream)
        await stream.aclose()
        await engine.set_policy("ar")

    loop.run(abort_one())
    assert loop.run(complete(engine, "after-abort", [400, 500], GREEDY, 4))


def test_waiting_between_requests_is_not_step_time(loop, engine):
    async def two_with_a_pause():
        await engine.set_policy("ar")
        await engine.take_steps()
        await complete(engine, "first", [400, 500], GREEDY, 8)
        await asyncio.sleep(2.0)
        await complete(engine, "second", [400, 500], GREEDY, 8)
        return await engine.take_steps()

    steps = loop.run(two_with_a_pause())
    durations = [step.step_ms for step in steps if step.step_ms is not None]
    # 16 tokens: two steps end in a pause, the others follow each other at once.
    assert len(steps) - len(durations) == 2
    assert sum(durations) < 2000


def test_killed_worker_is_an_engine_failure(loop, engine):
    """Last in the module: the engine is gone afterwards."""

    async def kill_while_running():
        stream = engine.generate(
            EngineRequest("victim", (400, 500), SamplingSpec(ignore_eos=True), 200)
        )
        await anext(stream)
        os.kill(engine.worker_pid, signal.SIGKILL)
        await asyncio.wait_for(_drain(stream), 60)

    with pytest.raises(EngineFailure, match=r"engine died.*engine\.log"):
        loop.run(kill_while_running())


async def _drain(stream):
    async for _ in stream:
        pass


def test_a_dead_engine_answers_no_call(loop, engine):
    """After the kill above: every call fails in time instead of waiting for ever."""
    for call in (engine.set_policy("ar"), engine.take_steps()):
        with pytest.raises(EngineFailure, match="engine died"):
            loop.run(asyncio.wait_for(call, 30))
