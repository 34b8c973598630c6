"""Offline evaluation: the walk against brute force, and the numbers summed up from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logit
from tiny_target import LAYER_IDS, VOCAB, make_responses, make_target
from torch import Tensor

from specbench.errors import UsageError
from specbench.training.evaluate import bootstrap_ratio, evaluate_drafter, report_steps
from specbench.training.feature_store import FeatureStore, TrainingBatch
from specbench.training.features import extract_features
from specbench.training.replay import DraftedBlocks, ReplaySteps, replay, replay_batch

NUM_PROMPTS = 40
LENGTH = 4


class ScriptedDrafter:
    """Right exactly where ``is_right[sequence, position of the anchor, j - 1]`` says so."""

    def __init__(self, is_right: npt.NDArray[np.bool_]) -> None:
        self.is_right = torch.from_numpy(is_right)

    def __call__(self, batch: TrainingBatch, anchors: Tensor, length: int) -> DraftedBlocks:
        rows = torch.searchsorted(batch.sequence_starts, anchors, right=True) - 1
        places = anchors - batch.sequence_starts[rows]
        right = self.is_right[batch.sequence_ids[rows], places, :length]
        wanted = anchors[:, None] + torch.arange(1, length + 1)
        truth = batch.token_ids[wanted.clamp(max=len(batch.token_ids) - 1)].long()
        tokens = torch.where(right, truth, (truth + 1) % VOCAB)
        # Larger where right, and different for every anchor.
        confidence = right.float() + 0.001 * places[:, None]
        return DraftedBlocks(tokens, confidence, overlaps=right.float())


def brute_force(
    response_start: int, num_tokens: int, is_right: npt.NDArray[np.bool_], length: int
) -> list[tuple[int, int]]:
    """(accepted, labelled) of each step of one sequence, decoded token by token."""
    steps = []
    position = response_start  # the prefill emitted this one
    while position + 1 < num_tokens:
        accepted = 0
        while (
            accepted < length
            and position + accepted + 1 < num_tokens
            and is_right[position, accepted]
        ):
            accepted += 1
        steps.append((accepted, min(length, num_tokens - 1 - position)))
        position += accepted + 1
    return steps


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    folder = tmp_path_factory.mktemp("features")
    responses = make_responses(NUM_PROMPTS, split="test")
    extract_features(responses, make_target(), folder, layer_ids=LAYER_IDS, split="test")
    return FeatureStore(folder, "test")


@pytest.mark.parametrize("share_right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_walk_equals_decoding_step_by_step(
    store: FeatureStore, share_right: float, temperature: float
) -> None:
    is_right = np.random.default_rng(0).random((2 * NUM_PROMPTS, 64, LENGTH)) < share_right
    steps = replay(
        ScriptedDrafter(is_right),
        store,
        block_length=LENGTH,
        temperature=temperature,
        tokens_per_batch=60,
    )
    found: dict[int, list[tuple[int, int]]] = {}
    for sequence, accepted, labels in zip(
        steps.sequence_ids.tolist(),
        steps.num_accepted.tolist(),
        steps.num_labels.tolist(),
        strict=True,
    ):
        found.setdefault(sequence, []).append((accepted, labels))
    expected = {
        index: brute_force(
            row["num_tokens"] - row["num_response_tokens"],
            row["num_tokens"],
            is_right[index],
            LENGTH,
        )
        for index, row in enumerate(store.sequences.iter_rows(named=True))
        if row["temperature"] == temperature
    }
    assert found == expected


def hand_made_store(folder: Path) -> FeatureStore:
    """Two tokens of prompt, twelve of response: anchors 2..12."""
    rows = make_responses(1, split="test").filter(pl.col("temperature") == 0.0)
    rows = rows.with_columns(
        pl.Series("prompt_token_ids", [[1, 2]], dtype=pl.List(pl.Int32)),
        pl.Series("response_token_ids", [list(range(3, 15))], dtype=pl.List(pl.Int32)),
    )
    extract_features(rows, make_target(), folder, layer_ids=LAYER_IDS, split="test")
    return FeatureStore(folder, "test")


def test_hand_made_example(tmp_path: Path) -> None:
    """Steps at 2 (accepts 3), 6 (1), 8 (0), 9 (2); at 12 only one token is left (cut, 1)."""
    is_right = np.zeros((1, 64, 3), dtype=np.bool_)
    is_right[0, 2] = True
    is_right[0, 6, 0] = is_right[0, 6, 2] = True  # what follows a mistake does not count
    is_right[0, 9, :2] = True
    is_right[0, 12] = True
    is_right[0, 3:6] = True  # never visited
    report = evaluate_drafter(
        ScriptedDrafter(is_right), hand_made_store(tmp_path), block_length=3, temperature=0.0
    )
    everything = report.sources["all"]
    assert (everything.num_prompts, everything.num_sequences) == (1, 1)
    assert (everything.num_steps, everything.num_cut_steps) == (4, 1)
    assert everything.acceptance_length == 1 + (3 + 1 + 0 + 2) / 4
    assert everything.acceptance_length_with_cut_steps == 1 + (3 + 1 + 0 + 2 + 1) / 5
    assert [p.num_reached for p in everything.positions] == [4, 3, 2]
    assert [p.acceptance for p in everything.positions] == [3 / 4, 2 / 4, 1 / 4]
    assert [p.conditional_acceptance for p in everything.positions] == [3 / 4, 2 / 3, 1 / 2]
    assert [p.mean_overlap for p in everything.positions] == [3 / 4, 2 / 3, 1 / 2]
    assert [p.confidence.auc for p in everything.positions if p.confidence] == [1.0, 1.0, 1.0]
    assert everything.acceptance_length_ci95 is None
    assert report.scaling_temperatures is None
    assert report.sources["chat"] == everything


def test_response_shorter_than_the_block_has_only_cut_steps(tmp_path: Path) -> None:
    drafter = ScriptedDrafter(np.ones((1, 64, 20), dtype=np.bool_))
    report = evaluate_drafter(drafter, hand_made_store(tmp_path), block_length=20)
    everything = report.sources["all"]
    assert (everything.num_steps, everything.num_cut_steps) == (0, 1)
    assert everything.acceptance_length is None
    assert everything.acceptance_length_with_cut_steps == 12
    assert everything.positions[0].conditional_acceptance is None


def bare_batch(tokens: list[int]) -> TrainingBatch:
    """One sequence with a prompt of one token and no features."""
    count = len(tokens)
    anchors = torch.arange(1, count - 1)
    return TrainingBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        aux_hidden=torch.empty(count, 0),
        final_hidden=torch.empty(count, 0),
        logsumexp=torch.empty(count),
        argmax=torch.empty(count, dtype=torch.int32),
        sequence_starts=torch.tensor([0, count]),
        response_starts=torch.tensor([1]),
        anchors=anchors,
        block_lengths=torch.ones_like(anchors),
        sequence_ids=torch.tensor([0]),
        sequence_sources=torch.tensor([0]),
        temperatures=torch.tensor([1.0]),
    )


def test_sampled_responses_accept_a_fixed_draft_as_rejection_sampling_does() -> None:
    """Tokens drawn with p = 0.7, 0.2, 0.1, draft always 0: a chain of length k has 0.7**k."""
    rng = np.random.default_rng(1)
    batch = bare_batch(rng.choice(3, size=30_000, p=[0.7, 0.2, 0.1]).tolist())
    steps = replay_batch(
        lambda batch, anchors, length: DraftedBlocks(torch.zeros(len(anchors), length)), batch, 3
    )
    for position in (1, 2, 3):
        expected = 0.7**position
        spread = (expected * (1 - expected) / len(steps)) ** 0.5
        assert abs((steps.num_accepted >= position).mean() - expected) < 4 * spread


@given(st.lists(st.integers(0, 1), min_size=3, max_size=30), st.integers(1, 5))
def test_steps_cover_the_response(tokens: list[int], length: int) -> None:
    """Accepted and bonus tokens of all steps add up to what the prefill did not emit."""
    batch = bare_batch(tokens)
    steps = replay_batch(
        lambda batch, anchors, length: DraftedBlocks(torch.ones(len(anchors), length)),
        batch,
        length,
    )
    emitted = int((steps.num_accepted + 1).sum())
    # If the last draft runs to the end of the response, its bonus token lies beyond.
    assert emitted in (len(tokens) - 2, len(tokens) - 1)
    assert (steps.num_accepted <= steps.num_labels).all()


def test_unknown_temperature_and_block_length_are_refused(store: FeatureStore) -> None:
    drafter = ScriptedDrafter(np.ones((1, 64, 1), dtype=np.bool_))
    with pytest.raises(UsageError, match=r"at temperature 0\.5; there are some at 0, 1"):
        evaluate_drafter(drafter, store, block_length=1, temperature=0.5)
    with pytest.raises(UsageError, match="block length is 0"):
        evaluate_drafter(drafter, store, block_length=0)


def synthetic_steps(store: FeatureStore, stated_over_true: float, num_steps: int) -> ReplaySteps:
    """Acceptance drawn from known probabilities; confidence logits a multiple of the true ones."""
    rng = np.random.default_rng(2)
    chances = rng.uniform(0.1, 0.9, size=(num_steps, 2))
    accepted = (rng.random(chances.shape) < chances).cumprod(axis=1).sum(axis=1)
    return ReplaySteps(
        sequence_ids=rng.integers(store.num_sequences, size=num_steps),
        num_accepted=accepted,
        num_labels=np.full(num_steps, 2),
        confidence_logits=(stated_over_true * logit(chances)).astype(np.float32),
        overlaps=None,
    )


def test_scaling_is_fitted_on_one_half_and_judged_on_the_other(store: FeatureStore) -> None:
    steps = synthetic_steps(store, stated_over_true=2.5, num_steps=6000)
    report = report_steps(steps, store, block_length=2, temperature=0.0, seed=0)
    assert report.scaling_temperatures is not None
    assert np.allclose(report.scaling_temperatures, 2.5, rtol=0.15)
    for position in report.sources["all"].positions:
        plain, before, after = position.confidence, position.test_half, position.test_half_scaled
        assert plain is not None
        assert before is not None
        assert after is not None
        assert 0.3 < before.num_samples / plain.num_samples < 0.7
        assert before.num_samples == after.num_samples
        assert before.ece is not None
        assert after.ece is not None
        assert after.ece < 0.5 * before.ece
        assert before.auc == pytest.approx(after.auc)  # order within a position stays


def test_right_confidences_are_left_alone(store: FeatureStore) -> None:
    steps = synthetic_steps(store, stated_over_true=1.0, num_steps=6000)
    report = report_steps(steps, store, block_length=2, temperature=0.0, seed=0)
    first = report.sources["all"].positions[0].confidence
    assert first is not None
    assert first.ece is not None
    assert first.ece < 0.03
    assert np.allclose(report.scaling_temperatures or (), 1.0, rtol=0.15)


def test_report_is_json_and_sources_add_up(store: FeatureStore) -> None:
    is_right = np.random.default_rng(3).random((2 * NUM_PROMPTS, 64, LENGTH)) < 0.5
    report = evaluate_drafter(ScriptedDrafter(is_right), store, block_length=LENGTH, temperature=1)
    assert json.loads(json.dumps(report.to_json()))["sources"]["chat"]["num_prompts"] == 20
    parts = [report.sources[name] for name in ("chat", "code-edit")]
    everything = report.sources["all"]
    assert everything.num_steps == sum(part.num_steps for part in parts)
    assert everything.num_prompts == NUM_PROMPTS
    assert everything.acceptance_length is not None
    assert everything.acceptance_length == pytest.approx(
        1 + sum(position.acceptance or 0 for position in everything.positions)
    )
    assert everything.acceptance_length_ci95 is not None
    low, high = everything.acceptance_length_ci95
    assert low < everything.acceptance_length < high
    again = evaluate_drafter(ScriptedDrafter(is_right), store, block_length=LENGTH, temperature=1)
    assert again == report


class TestBootstrap:
    def test_agrees_with_the_normal_interval(self) -> None:
        """With equal clusters the ratio is a mean, whose standard error is known."""
        values = np.random.default_rng(4).normal(2.0, 0.5, size=400)
        interval = bootstrap_ratio(values, np.ones(400), seed=0)
        assert interval is not None
        half = 1.96 * values.std() / 20
        assert interval == pytest.approx(
            (values.mean() - half, values.mean() + half), abs=0.1 * half
        )

    def test_repeated_clusters_narrow_it_and_larger_steps_do_not(self) -> None:
        few = np.asarray([1.0, 2.0, 3.0])
        widths = []
        for numerators, denominators in (
            (few, np.ones(3)),
            (10 * few, np.full(3, 10.0)),
            (np.tile(few, 10), np.ones(30)),
        ):
            interval = bootstrap_ratio(numerators, denominators, seed=0)
            assert interval is not None
            widths.append(interval[1] - interval[0])
        assert widths[0] == widths[1] > 2 * widths[2]

    def test_one_cluster_has_no_interval(self) -> None:
        assert bootstrap_ratio(np.ones(1), np.ones(1), seed=0) is None
