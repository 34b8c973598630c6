"""Batches from stored features: complete, correct, and the same for the same seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_target import LAYER_IDS, make_responses, make_target

from specbench.errors import InputError, UsageError
from specbench.training.feature_shards import FeatureShard, read_index, shard_path, write_index
from specbench.training.feature_store import BatchPlan, FeatureStore, TrainingBatch
from specbench.training.features import extract_features

NUM_PROMPTS = 8
PLAN = BatchPlan(
    tokens_per_batch=40,
    anchor_probability=0.5,
    block_length_probabilities=(0.2, 0.0, 0.8),
    seed=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features")
    extract_features(
        make_responses(NUM_PROMPTS),
        make_target(),
        path,
        layer_ids=LAYER_IDS,
        split="train",
        tokens_per_shard=60,
    )
    return path


@pytest.fixture(scope="module")
def store(folder: Path) -> FeatureStore:
    return FeatureStore(folder, "train")


def assert_same(left: TrainingBatch, right: TrainingBatch) -> None:
    for field in dataclasses.fields(TrainingBatch):
        assert torch.equal(getattr(left, field.name), getattr(right, field.name)), field.name


def test_totals(store: FeatureStore) -> None:
    responses = make_responses(NUM_PROMPTS)
    prompt, response = responses["prompt_token_ids"], responses["response_token_ids"]
    assert len(store.shards) > 2
    assert store.num_sequences == 2 * NUM_PROMPTS
    assert store.num_response_tokens == response.list.len().sum()
    assert store.num_tokens == prompt.list.len().sum() + response.list.len().sum()
    assert store.num_anchors == store.num_response_tokens - store.num_sequences
    assert store.sources == ["chat", "code-edit"]
    assert store.target_layer_ids == LAYER_IDS


def test_evaluation_has_every_sequence_and_anchor_in_order(store: FeatureStore) -> None:
    batches = list(store.evaluation_batches(tokens_per_batch=50, block_length=4))
    assert torch.cat([b.sequence_ids for b in batches]).tolist() == list(range(16))
    assert sum(len(b.anchors) for b in batches) == store.num_anchors
    assert all((b.block_lengths == 4).all() for b in batches)
    assert all(len(b.token_ids) <= 50 for b in batches)
    assert len(batches) > 2


def test_batch_content_is_that_of_the_responses(store: FeatureStore) -> None:
    responses = make_responses(NUM_PROMPTS).rows(named=True)
    for batch in store.training_batches(PLAN, epoch=0):
        bounds = batch.sequence_starts.tolist()
        for place, sequence in enumerate(batch.sequence_ids.tolist()):
            start, end = bounds[place : place + 2]
            row = responses[sequence]
            prompt, response = row["prompt_token_ids"], row["response_token_ids"]
            assert batch.token_ids[start:end].tolist() == prompt + response
            assert int(batch.response_starts[place]) == start + len(prompt)
            assert float(batch.temperatures[place]) == row["temperature"]
            assert store.sources[int(batch.sequence_sources[place])] == row["source"]
            check_stored_rows(store, batch, sequence, start, end)


def check_stored_rows(
    store: FeatureStore, batch: TrainingBatch, sequence: int, start: int, end: int
) -> None:
    shard_number, position = store.sequences.select("shard", "position").row(sequence)
    shard = store.shards[shard_number]
    first, last = shard.sequence_starts[position : position + 2].tolist()
    for name in ("aux_hidden", "final_hidden", "logsumexp", "argmax"):
        assert torch.equal(getattr(batch, name)[start:end], getattr(shard, name)[first:last])


def test_an_epoch_has_every_sequence_once_in_an_order_of_its_own(store: FeatureStore) -> None:
    orders = [
        torch.cat([b.sequence_ids for b in store.training_batches(PLAN, epoch)]).tolist()
        for epoch in (0, 1)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(16))
    assert orders[0] != orders[1]


@pytest.mark.parametrize("first_step", [0, 1, 4])
def test_training_resumes_at_a_step(folder: Path, store: FeatureStore, first_step: int) -> None:
    """A store opened anew gives the same batches from any step on."""
    whole = list(store.training_batches(PLAN, epoch=2))
    rest = list(FeatureStore(folder, "train").training_batches(PLAN, 2, first_step))
    assert len(whole) == store.num_batches(PLAN, epoch=2)
    assert len(rest) == len(whole) - first_step > 0
    for resumed, expected in zip(rest, whole[first_step:], strict=True):
        assert_same(resumed, expected)


def test_another_seed_gives_other_batches(store: FeatureStore) -> None:
    other = dataclasses.replace(PLAN, seed=4)
    first, second = (next(iter(store.training_batches(plan, 0))) for plan in (PLAN, other))
    assert first.sequence_ids.tolist() != second.sequence_ids.tolist()


@settings(max_examples=30)
@given(
    tokens_per_batch=st.integers(1, 200),
    anchor_probability=st.floats(0.001, 1.0),
    chances=st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(lambda c: sum(c) > 0),
    seed=st.integers(0, 2**32),
    epoch=st.integers(0, 3),
)
def test_every_batch_is_well_formed(
    store: FeatureStore,
    tokens_per_batch: int,
    anchor_probability: float,
    chances: list[int],
    seed: int,
    epoch: int,
) -> None:
    weights = tuple(chance / sum(chances) for chance in chances)
    plan = BatchPlan(tokens_per_batch, anchor_probability, weights, seed)
    for batch in store.training_batches(plan, epoch):
        starts, anchors = batch.sequence_starts, batch.anchors
        assert len(batch.token_ids) <= tokens_per_batch or len(batch.sequence_ids) == 1
        assert len(anchors) >= 1
        assert (anchors.diff() > 0).all()
        sequence = torch.searchsorted(starts, anchors, right=True) - 1
        assert (anchors >= batch.response_starts[sequence]).all()
        assert (anchors <= starts[1:][sequence] - 2).all()
        assert all(weights[length - 1] > 0 for length in batch.block_lengths.tolist())


def test_frequencies_are_those_of_the_plan(store: FeatureStore) -> None:
    batches = [b for epoch in range(40) for b in store.training_batches(PLAN, epoch)]
    num_chosen = sum(len(b.anchors) for b in batches)
    num_long = sum(int((b.block_lengths == 3).sum()) for b in batches)
    # Four standard deviations of the binomials; the seed is fixed.
    num_offered = 40 * store.num_anchors
    assert abs(num_chosen - 0.5 * num_offered) < 4 * (0.25 * num_offered) ** 0.5
    assert abs(num_long - 0.8 * num_chosen) < 4 * (0.16 * num_chosen) ** 0.5


def test_shards_are_mapped_not_copied(folder: Path) -> None:
    path = shard_path(folder, "train", 0)
    shard = FeatureShard(path)
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if path.name in line
    ]
    address = shard.aux_hidden.data_ptr()
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in mapped]
    assert any(low <= address < high for low, high in ranges)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"anchor_probability": 0.0}, "anchor probability is 0.0"),
        ({"anchor_probability": 1.5}, "anchor probability is 1.5"),
        ({"tokens_per_batch": 0}, "tokens per batch is 0"),
        ({"block_length_probabilities": ()}, "sum to 1"),
        ({"block_length_probabilities": (0.5, 0.4)}, "sum to 1"),
        ({"block_length_probabilities": (1.5, -0.5)}, "sum to 1"),
    ],
)
def test_impossible_plans_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(PLAN, **change)


class TestRefusedStores:
    @pytest.fixture
    def copy(self, folder: Path, tmp_path: Path) -> Path:
        for path in folder.glob("train-*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        return tmp_path

    def rewrite(self, path: Path, **changes: str) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() | changes
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors, path, metadata)

    def test_nothing_extracted(self, folder: Path) -> None:
        with pytest.raises(InputError, match="no test features; extract them first"):
            FeatureStore(folder, "test")

    def test_not_what_the_caller_needs(self, folder: Path) -> None:
        FeatureStore(folder, "train", target_fingerprint="tiny-llama-0", target_layer_ids=[0, 1])
        with pytest.raises(UsageError, match="features of another target"):
            FeatureStore(folder, "train", target_fingerprint="other")
        with pytest.raises(UsageError, match=r"layers \[0, 1\], the drafter reads \[1, 0\]"):
            FeatureStore(folder, "train", target_layer_ids=[1, 0])

    def test_shard_of_another_origin(self, copy: Path) -> None:
        self.rewrite(shard_path(copy, "train", 1), target_fingerprint="other")
        with pytest.raises(InputError, match="another target or other layers"):
            FeatureStore(copy, "train")

    def test_newer_format(self, copy: Path) -> None:
        self.rewrite(shard_path(copy, "train", 0), format_version="2")
        with pytest.raises(InputError, match="feature format 2, this release reads 1"):
            FeatureStore(copy, "train")

    def test_foreign_file(self, copy: Path) -> None:
        save_file({"weight": torch.zeros(3)}, shard_path(copy, "train", 0))
        with pytest.raises(InputError, match="metadata is missing or malformed"):
            FeatureStore(copy, "train")

    @pytest.mark.parametrize("content", [b"", b"\xff" * 100])
    def test_damaged_shard(self, copy: Path, content: bytes) -> None:
        shard_path(copy, "train", 0).write_bytes(content)
        with pytest.raises(
            InputError, match=r"train-00000\.safetensors: unusable features"
        ) as caught:
            FeatureStore(copy, "train")
        assert "\n" not in str(caught.value)

    def test_missing_shard(self, copy: Path) -> None:
        shard_path(copy, "train", 1).unlink()
        with pytest.raises(InputError, match=r"train-00001\.safetensors: unusable features"):
            FeatureStore(copy, "train")

    def test_damaged_index(self, copy: Path) -> None:
        (copy / "train-index.parquet").write_bytes(b"PAR1")
        with pytest.raises(InputError, match=r"train-index\.parquet: unusable features") as caught:
            FeatureStore(copy, "train")
        assert "\n" not in str(caught.value)

    def test_index_of_another_extraction(self, copy: Path) -> None:
        index = read_index(copy, "train")
        write_index(copy, "train", index.with_columns(pl.col("num_tokens") + 1))
        with pytest.raises(InputError, match="does not hold what the train index lists"):
            FeatureStore(copy, "train")

    def test_contradicting_sizes(self, copy: Path) -> None:
        path = shard_path(copy, "train", 0)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(tensors | {"argmax": tensors["argmax"][:-1].clone()}, path, metadata)
        with pytest.raises(InputError, match="sizes contradict each other"):
            FeatureStore(copy, "train")
