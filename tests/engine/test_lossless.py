"""Greedy output of every policy equals plain decoding, token for token, in float32.

In bfloat16 the last bits of a logit depend on the shape of the batch, so equality can only
be asked of float32.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from engine_harness import complete_all, rising_calibration, steep_costs

from specbench.engines.vllm import VLLMEngine
from specbench.records import EngineRequest, Message, SamplingSpec
from specbench.workloads import load_workload

pytestmark = pytest.mark.engine

POLICIES = (
    "ngram",
    "ngram:16",
    "dspark",
    "dspark:0",
    "dspark:2",
    "dspark:7",
    "hybrid",
    "forespark",
)
GREEDY = SamplingSpec(temperature=0.0)
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def plain(launch):
    return launch(dtype="float32", plain="v2")


@pytest.fixture(scope="module")
def engine(launch, loop):
    engine = launch(dtype="float32")
    loop.run(engine.set_costs(steep_costs()))
    loop.run(engine.set_calibration(rising_calibration()))
    return engine


@pytest.fixture(scope="module")
def prompts(plain):
    items = load_workload("mixed", 6, 0)
    return [
        plain.encode_chat([*item.history, Message("user", item.turns[-1])])[:900] for item in items
    ]


@pytest.fixture(scope="module")
def expected(loop, plain, prompts):
    return loop.run(complete_all(plain, "plain", prompts, GREEDY, NUM_TOKENS))


def test_ar_equals_plain_decoding(loop, engine, prompts, expected):
    loop.run(engine.set_policy("ar"))
    assert loop.run(complete_all(engine, "ar", prompts, GREEDY, NUM_TOKENS)) == expected


@pytest.mark.parametrize(
    ("policy", "stagger_s"),
    [
        *((policy, 0.0) for policy in POLICIES),
        *((policy, 0.05) for policy in ("ngram", "dspark", "hybrid", "forespark")),
    ],
)
def test_policy_equals_plain_decoding(loop, engine, prompts, expected, policy, stagger_s):
    loop.run(engine.set_policy(policy))
    loop.run(engine.take_steps())
    label = f"{policy}-{stagger_s}"
    outputs = loop.run(complete_all(engine, label, prompts, GREEDY, NUM_TOKENS, stagger_s))
    assert outputs == expected
    verified = sum(step.num_verified_tokens for step in loop.run(engine.take_steps()))
    assert (verified == 0) == (policy == "dspark:0")


def test_single_request_equals_plain_decoding(loop, engine, prompts, expected):
    for policy in ("ngram", "dspark", "hybrid", "forespark"):
        loop.run(engine.set_policy(policy))
        assert (
            loop.run(complete_all(engine, f"one-{policy}", prompts[:1], GREEDY, NUM_TOKENS))
            == expected[:1]
        )


def test_plain_decoding_again_after_drafting(loop, engine, prompts, expected):
    for policy in ("dspark:7", "ar", "hybrid", "forespark"):
        loop.run(engine.set_policy(policy))
        outputs = loop.run(complete_all(engine, f"again-{policy}", prompts, GREEDY, NUM_TOKENS))
        assert outputs == expected, policy


def test_steps_account_for_every_token(loop, engine, prompts):
    loop.run(engine.set_policy("dspark"))
    loop.run(engine.take_steps())
    outputs = loop.run(complete_all(engine, "account", prompts, GREEDY, NUM_TOKENS))
    steps = loop.run(engine.take_steps())
    # The engine may emit past a request's limit within its last step; the client never sees it.
    assert sum(s.num_emitted_tokens for s in steps) >= sum(len(tokens) for tokens in outputs)
    assert sum(s.num_prompt_tokens for s in steps) == sum(len(p) for p in prompts)
    for step in steps:
        assert step.num_accepted_tokens <= step.num_verified_tokens
        assert step.num_emitted_tokens == step.num_accepted_tokens + step.num_decoding
        assert sum(step.verified_per_request) == step.num_verified_tokens


async def serve_and_abort(
    engine: VLLMEngine, label: str, prompts: list[list[int]], max_tokens: int
) -> list[tuple[int, ...]]:
    """Requests that arrive 0.1 s apart, every third of them aborted in the middle."""

    async def one(index: int) -> tuple[int, ...]:
        await asyncio.sleep(index * 0.1)
        request = EngineRequest(f"{label}-{index}", tuple(prompts[index]), GREEDY, max_tokens)
        tokens: list[int] = []
        stream = engine.generate(request)
        async for chunk in stream:
            tokens.extend(chunk.token_ids)
            if index % 3 == 0 and len(tokens) > index % 20:
                await stream.aclose()
                break
        return tuple(tokens)

    return list(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


def real_prompts(num: int) -> list[str]:
    folder = Path(os.environ.get("SPECBENCH_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set SPECBENCH_DATA")
    lines = (folder / "spec_bench_questions.jsonl").read_text().splitlines()
    step = len(lines) // num
    return [json.loads(line)["turns"][0] for line in lines[::step][:num]]


@pytest.fixture(scope="module")
def real(loop, plain):
    """52 real prompts and what plain decoding makes of them."""
    prompts = [plain.encode_chat([Message("user", text)])[:1200] for text in real_prompts(52)]
    return prompts, loop.run(complete_all(plain, "real", prompts, GREEDY, 32), 1200)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["forespark", "hybrid", "dspark", "ngram", "ar", "dspark:0", "dspark:2", "dspark:7"]
)
def test_real_prompts_equal_plain_decoding(loop, engine, real, policy):
    prompts, expected = real
    loop.run(engine.set_policy(policy))
    outputs = loop.run(complete_all(engine, f"real-{policy}", prompts, GREEDY, 32), 1200)
    assert outputs == expected


@pytest.fixture(scope="module")
def cramped(launch, loop):
    """Prefills in chunks of 64, 12 KV blocks for 8 requests, budgets one step stale."""
    engine = launch(
        dtype="float32",
        max_model_len=512,
        engine_args={
            "max_num_batched_tokens": 256,
            "num_gpu_blocks_override": 12,
            "enable_prefix_caching": False,
            "long_prefill_token_threshold": 64,
        },
        plugin_settings={"budget_staleness": 1},
    )
    loop.run(engine.set_costs(steep_costs()))
    loop.run(engine.set_calibration(rising_calibration()))
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["ar", *POLICIES])
def test_chunked_prefill_preemption_and_stale_budgets(loop, plain, cramped, prompts, policy):
    short = [prompt[:200] for prompt in prompts]
    expected = loop.run(complete_all(plain, f"cramped-plain-{policy}", short, GREEDY, 100))
    loop.run(cramped.set_policy(policy))
    outputs = loop.run(complete_all(cramped, f"cramped-{policy}", short, GREEDY, 100))
    assert outputs == expected


@pytest.fixture(scope="module")
def short_real(loop, plain):
    """The first tokens of 52 real prompts, and what plain decoding makes of them."""
    prompts = [plain.encode_chat([Message("user", text)])[:250] for text in real_prompts(52)]
    return prompts, loop.run(complete_all(plain, "short-real", prompts, GREEDY, 64), 1200)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["forespark", "forespark:3", "hybrid", "dspark"])
def test_arrivals_aborts_and_preemption_on_real_prompts(loop, plain, cramped, short_real, policy):
    prompts, expected = short_real
    loop.run(cramped.set_policy(policy))
    loop.run(cramped.take_steps())
    outputs = loop.run(serve_and_abort(cramped, f"aborts-{policy}", prompts, 64), 1200)
    for index, (tokens, whole) in enumerate(zip(outputs, expected, strict=True)):
        assert tokens == whole[: len(tokens)], f"prompt {index}"
    cut_short = [len(tokens) < len(whole) for tokens, whole in zip(outputs, expected, strict=True)]
    # Only what was aborted; the last tokens of some may have come with their first chunks.
    assert cut_short == [cut and index % 3 == 0 for index, cut in enumerate(cut_short)]
    assert sum(cut_short) > 10
    steps = loop.run(cramped.take_steps())
    assert sum(step.num_verified_tokens for step in steps) > 100
    # Preempted requests read their prompts again.
    assert sum(step.num_prompt_tokens for step in steps) > sum(len(prompt) for prompt in prompts)
