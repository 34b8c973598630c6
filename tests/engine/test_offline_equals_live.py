"""What the offline replay says of a drafter is what the engine then does with it."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from engine_harness import complete_all

from specbench.engines.model_cache import shipped_drafter
from specbench.records import Message, SamplingSpec
from specbench.training.drafter_checkpoint import load_drafter
from specbench.training.feature_store import FeatureStore
from specbench.training.features import extract_features
from specbench.training.greedy_drafting import GreedyDSpark
from specbench.training.replay import replay
from specbench.training.target_model import load_target
from specbench.workloads import load_workload

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_PROMPTS = 32
NUM_TOKENS = 160
# Near ties between tokens fall differently where batches have other shapes.
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def served(launch, loop) -> tuple[float, list[list[int]], list[list[int]], int]:
    """Acceptance length with whole blocks verified, prompts, outputs and block length."""
    engine = launch(max_num_seqs=8)
    prompts = [
        engine.encode_chat([*item.history, Message("user", item.turns[-1])])
        for item in load_workload("mixed", NUM_PROMPTS, 0)
    ]
    block = engine.describe()["draft_block_tokens"]
    loop.run(engine.set_policy(f"dspark:{block}"))
    loop.run(engine.take_steps())
    outputs = loop.run(
        complete_all(engine, "live", prompts, SamplingSpec(ignore_eos=True), NUM_TOKENS)
    )
    steps = loop.run(engine.take_steps())
    accepted = sum(step.num_accepted_tokens for step in steps)
    verified = sum(step.num_requests_verified for step in steps)
    return 1 + accepted / verified, prompts, [list(tokens) for tokens in outputs], block


def test_acceptance_is_the_same(served, tmp_path: Path) -> None:
    live, prompts, outputs, block = served
    responses = pl.DataFrame(
        {
            "prompt_id": [str(index) for index in range(len(prompts))],
            "source": ["mixed"] * len(prompts),
            "split": ["test"] * len(prompts),
            "temperature": [0.0] * len(prompts),
            "prompt_token_ids": prompts,
            "response_token_ids": outputs,
        }
    )
    target = load_target(None)
    drafter = load_drafter(shipped_drafter(), target.embedding)
    layers = drafter.config.target_layer_ids
    extract_features(responses, target, tmp_path, layer_ids=layers, split="test")
    steps = replay(
        GreedyDSpark(drafter.eval()),
        FeatureStore(tmp_path, "test"),
        block_length=block,
        temperature=0.0,
        tokens_per_batch=4096,
    )
    whole = steps.take(steps.num_labels == block)
    offline = 1 + float(whole.num_accepted.mean())
    assert offline == pytest.approx(live, rel=TOLERANCE)
