"""Greedy drafting in bulk against one block at a time, as the engine drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny_target import LAYER_IDS, VOCAB, make_responses, make_target

from specbench.training import greedy_drafting
from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_model import DraftBatch, DSparkDrafter
from specbench.training.feature_store import FeatureStore, TrainingBatch
from specbench.training.features import extract_features
from specbench.training.greedy_drafting import GreedyDSpark
from specbench.training.replay import GreedyDrafter, replay

BLOCK = 4


@pytest.fixture(scope="module")
def drafter() -> DSparkDrafter:
    torch.manual_seed(5)
    config = DrafterConfig(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_hidden_layers=2,
        vocab_size=VOCAB,
        draft_vocab_size=40,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=64,
        block_size=BLOCK,
        mask_token_id=0,
        target_layer_ids=LAYER_IDS,
        num_target_layers=3,
        markov_rank=8,
    )
    ids = torch.randperm(VOCAB)[:40].sort().values
    drafter = DSparkDrafter(config, make_target().embedding, ids)
    # A large transition bias, so that the token before decides what comes next.
    torch.nn.init.normal_(drafter.markov_head.markov_w1.weight, std=3.0)
    return drafter


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> TrainingBatch:
    return next(
        iter(
            store_in(tmp_path_factory.mktemp("features")).evaluation_batches(
                tokens_per_batch=100, block_length=BLOCK
            )
        )
    )


def store_in(folder: Path) -> FeatureStore:
    extract_features(make_responses(), make_target(), folder, layer_ids=LAYER_IDS, split="train")
    return FeatureStore(folder, "train")


@torch.no_grad()
def draft_alone(
    drafter: DSparkDrafter, batch: TrainingBatch, anchor: int
) -> tuple[list[int], list[float]]:
    """One block, token by token, from the definition of the heads."""
    output = drafter(
        DraftBatch(
            batch.token_ids,
            batch.aux_hidden,
            batch.sequence_starts,
            torch.tensor([anchor]),
            torch.tensor([BLOCK]),
        )
    )
    previous = int(batch.token_ids[anchor])
    tokens, confidences = [], []
    for hidden in output.hidden:
        markov = drafter.markov_head.markov_w1.weight[previous]
        logits = drafter.lm_head.weight @ hidden + drafter.markov_head.markov_w2.weight @ markov
        head = drafter.confidence_head.proj
        confidences.append(float(head.weight[0] @ torch.cat([hidden, markov]) + head.bias[0]))
        previous = int(drafter.draft_token_ids[int(logits.argmax())])
        tokens.append(previous)
    return tokens, confidences


@pytest.mark.parametrize("logits_per_chunk", [1 << 24, 120])
def test_bulk_equals_one_block_at_a_time(
    drafter: DSparkDrafter,
    batch: TrainingBatch,
    monkeypatch: pytest.MonkeyPatch,
    logits_per_chunk: int,
) -> None:
    monkeypatch.setattr(greedy_drafting, "LOGITS_PER_CHUNK", logits_per_chunk)
    greedy: GreedyDrafter = GreedyDSpark(drafter, dtype=torch.float32)
    drafts = greedy(batch, batch.anchors, BLOCK)
    assert drafts.overlaps is None
    assert drafts.confidence_logits is not None
    assert len(batch.anchors) > 20
    for row, anchor in enumerate(batch.anchors.tolist()):
        tokens, confidences = draft_alone(drafter, batch, anchor)
        assert drafts.tokens[row].tolist() == tokens
        assert drafts.confidence_logits[row].tolist() == pytest.approx(confidences, abs=1e-3)


def test_the_drafters_own_token_is_its_next_input(
    drafter: DSparkDrafter, batch: TrainingBatch
) -> None:
    """Other true tokens after an anchor change nothing that is drafted from it."""
    greedy = GreedyDSpark(drafter, dtype=torch.float32)
    anchors = batch.response_starts[:1]
    end = int(batch.sequence_starts[1])
    token_ids = batch.token_ids.clone()
    token_ids[int(anchors[0]) + 1 : end] = (token_ids[int(anchors[0]) + 1 : end] + 1) % VOCAB
    other = dataclasses.replace(batch, token_ids=token_ids)
    drafts, changed = (greedy(each, anchors, BLOCK) for each in (batch, other))
    assert drafts.tokens.tolist() == changed.tokens.tolist()


def test_overlap_is_the_shared_mass_of_both_distributions(
    drafter: DSparkDrafter, batch: TrainingBatch
) -> None:
    target = make_target()
    greedy = GreedyDSpark(drafter, target_lm_head=target.lm_head_weight, dtype=torch.float32)
    drafts = greedy(batch, batch.anchors, 1)
    assert drafts.overlaps is not None
    output = drafter(
        DraftBatch(
            batch.token_ids,
            batch.aux_hidden,
            batch.sequence_starts,
            batch.anchors,
            torch.ones_like(batch.anchors),
        )
    )
    q = torch.zeros(len(batch.anchors), VOCAB)
    logits = drafter.draft_logits(output.hidden, batch.token_ids[batch.anchors].long())
    q[:, drafter.draft_token_ids] = logits.softmax(-1).detach()
    p = target.logits(batch.final_hidden[batch.anchors].float()).softmax(-1)
    torch.testing.assert_close(
        drafts.overlaps[:, 0], torch.minimum(p, q).sum(-1), rtol=1e-3, atol=1e-5
    )


def test_runs_through_a_replay_in_bfloat16(drafter: DSparkDrafter, tmp_path: Path) -> None:
    steps = replay(
        GreedyDSpark(drafter),
        store_in(tmp_path),
        block_length=2,
        temperature=0.0,
        tokens_per_batch=64,
    )
    assert steps.confidence_logits is not None
    assert steps.confidence_logits.shape == (len(steps), 2)
    assert set(steps.sequence_ids.tolist()) == {0, 2, 4, 6, 8, 10}
