from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import drafter_reference as reference
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from specbench.errors import EnvironmentProblem, InputError
from specbench.training.drafter_checkpoint import load_drafter, save_drafter
from specbench.training.drafter_config import DrafterConfig, default_target_layer_ids
from specbench.training.drafter_initial import (
    choose_draft_vocab,
    new_drafter,
    resize_draft_vocab,
)

COMMITTED = Path(__file__).resolve().parents[3] / "calibrations" / "smollm2-135m-dspark"
TARGET: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "max_position_embeddings": 8192,
}


def from_target(**changes: Any) -> DrafterConfig:
    return DrafterConfig.from_target(
        {**TARGET, **changes},
        num_layers=2,
        block_size=7,
        markov_rank=64,
        draft_vocab_size=12288,
        mask_token_id=16,
    )


def write_config(folder: Path, **changes: Any) -> Path:
    raw = {**reference.tiny_config().to_mapping(), **changes}
    path = folder / "config.json"
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    return path


def test_committed_config_round_trips() -> None:
    path = COMMITTED / "config.json"
    assert DrafterConfig.from_json(path).to_mapping() == json.loads(path.read_text())


def test_committed_tensors_round_trip(tmp_path: Path) -> None:
    config = DrafterConfig.from_json(COMMITTED / "config.json")
    drafter = load_drafter(COMMITTED, torch.zeros(config.vocab_size, config.hidden_size))
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    save_drafter(tmp_path, drafter)
    before = load_file(COMMITTED / "model.safetensors")
    after = load_file(tmp_path / "model.safetensors")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("draft_vocab_size", [20, 50])
def test_saved_drafter_drafts_the_same(tmp_path: Path, draft_vocab_size: int) -> None:
    drafter = reference.tiny_drafter(reference.tiny_config(draft_vocab_size=draft_vocab_size))
    drafter = drafter.bfloat16().float()
    save_drafter(tmp_path, drafter)
    loaded = load_drafter(tmp_path, drafter.embed_tokens)
    assert loaded.config == drafter.config
    assert torch.equal(loaded.draft_token_ids, drafter.draft_token_ids)
    batch = reference.tiny_batch(drafter.config, [20], [4, 9], [5, 3])
    assert torch.equal(loaded(batch).hidden, drafter(batch).hidden)
    # vLLM has no parameter for the map of a full vocabulary and fails on it.
    has_map = "d2t" in load_file(tmp_path / "model.safetensors")
    assert has_map == (draft_vocab_size < 50)


def test_config_from_the_default_target() -> None:
    assert from_target() == DrafterConfig.from_json(COMMITTED / "config.json")


def test_config_from_a_qwen_target() -> None:
    """Head size of its own, base of the rotary embedding at the top level, scaling dropped."""
    config = from_target(
        model_type="qwen3",
        head_dim=128,
        rope_parameters=None,
        rope_theta=1e6,
        rope_scaling={"rope_type": "yarn", "factor": 4.0},
    )
    assert (config.head_dim, config.rope_theta) == (128, 1e6)
    assert config.to_mapping()["rope_parameters"]["rope_type"] == "default"
    assert from_target(num_key_value_heads=None).num_key_value_heads == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "llama, qwen2, qwen3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rope_parameters": {}}, "rope_theta is missing"),
        ({"num_hidden_layers": 5}, "too shallow"),
        ({"vocab_size": 1000}, "larger than the vocabulary"),
        ({"num_key_value_heads": 4}, "evenly"),
    ],
)
def test_unfit_targets_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_target(**changes)


@given(st.integers(7, 200))
def test_default_layer_ids_spread_over_the_target(num_layers: int) -> None:
    ids = default_target_layer_ids(num_layers)
    assert (ids[0], ids[-1], len(ids)) == (1, num_layers - 2, 5)
    gaps = [b - a for a, b in itertools.pairwise(ids)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "Qwen3DSparkModel"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"enable_confidence_head": None}, "enable_confidence_head is missing"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"markov_rank": "many"}, "wrong type"),
        ({"markov_rank": 0}, "markov_rank"),
        ({"head_dim": 7}, "even"),
        ({"dflash_config": {"target_layer_ids": [2, 1], "mask_token_id": 3}}, "ascend"),
        ({"dflash_config": {"target_layer_ids": [0, 5], "mask_token_id": 3}}, "ascend"),
        ({"dflash_config": None, "mask_token_id": 50}, "mask_token_id"),
        ({"dflash_config": None, "mask_token_id": None}, "needed"),
    ],
)
def test_unfit_configs_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        DrafterConfig.from_json(write_config(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_unreadable_configs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        DrafterConfig.from_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="JSON object"):
        DrafterConfig.from_json(tmp_path / "config.json")


def change_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    merged = {**load_file(path), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm__weight": None}, "missing: norm.weight"),
        ({"extra": torch.zeros(1)}, "not known: extra"),
        ({"norm__weight": torch.zeros(3)}, "norm.weight has shape"),
        ({"d2t": None}, "d2t is missing"),
        ({"d2t": torch.zeros(19, dtype=torch.int64)}, "20 integers"),
        ({"d2t": torch.full((20,), 31)}, "ascending tokens"),
        ({"d2t": -torch.arange(20)}, "ascending tokens"),
    ],
)
def test_unfit_weights_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    drafter = reference.tiny_drafter()
    save_drafter(tmp_path, drafter)
    change_tensors(tmp_path, **tensors)
    with pytest.raises(InputError, match=message):
        load_drafter(tmp_path, drafter.embed_tokens)


def test_damaged_weights_and_another_target_are_refused(tmp_path: Path) -> None:
    drafter = reference.tiny_drafter()
    save_drafter(tmp_path, drafter)
    with pytest.raises(InputError, match="50 x 24, not 51 x 24"):
        load_drafter(tmp_path, torch.zeros(51, 24))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(InputError, match="cannot be read as drafter weights"):
        load_drafter(tmp_path, drafter.embed_tokens)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot write"):
        save_drafter(tmp_path / "file", reference.tiny_drafter())


def test_saving_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    save_drafter(tmp_path, reference.tiny_drafter(seed=1))
    second = reference.tiny_drafter(seed=2).bfloat16().float()
    save_drafter(tmp_path, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    loaded = load_drafter(tmp_path, second.embed_tokens)
    assert torch.equal(loaded.fc.weight, second.fc.weight)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_chosen_vocabulary_is_the_most_frequent(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts)))
    chosen = choose_draft_vocab(torch.tensor(counts), size).tolist()
    ranked = sorted(range(len(counts)), key=lambda token: (-counts[token], token))
    assert chosen == sorted(ranked[:size])


@pytest.mark.parametrize("size", [0, 4])
def test_impossible_vocabulary_sizes_are_refused(size: int) -> None:
    with pytest.raises(InputError, match="draft vocabulary"):
        choose_draft_vocab(torch.ones(3), size)


def test_resizing_keeps_shared_rows_and_starts_new_ones_from_the_target() -> None:
    drafter = reference.tiny_drafter()
    config = drafter.config
    target_head = torch.randn(config.vocab_size, config.hidden_size)
    old = drafter.draft_token_ids
    new = torch.tensor(sorted({*old[::2].tolist(), 0, 1, 2, 49}))
    resized = resize_draft_vocab(drafter, new, target_head)
    assert resized.config == replace(config, draft_vocab_size=len(new))
    assert torch.equal(resized.draft_token_ids, new)
    batch = reference.tiny_batch(config, [20], [4, 9], [5, 3])
    hidden = drafter(batch).hidden
    assert torch.equal(resized(batch).hidden, hidden)
    previous = torch.randint(0, config.vocab_size, (8,))
    logits = resized.draft_logits(hidden, previous)
    before = drafter.draft_logits(hidden, previous)
    fresh = hidden @ target_head.T
    for index, token in enumerate(new.tolist()):
        row = int(drafter.target_to_draft[token])
        expected = before[:, row] if row >= 0 else fresh[:, token]
        torch.testing.assert_close(logits[:, index], expected)
    full = resize_draft_vocab(drafter, torch.arange(config.vocab_size), target_head)
    assert not full.config.reduced_vocabulary
    assert "d2t" not in full.state_dict()


def test_new_drafter_starts_from_the_target() -> None:
    config = reference.tiny_config(hidden_size=64)
    embedding, head = torch.randn(50, 64), torch.randn(50, 64)
    ids = torch.arange(0, 40, 2)
    drafter = new_drafter(config, embedding, head, ids, seed=7)
    assert torch.equal(drafter.lm_head.weight, head[ids])
    states = torch.randn(3, 64)
    same_everywhere = drafter.fc(states.repeat(1, len(config.target_layer_ids)))
    error = (same_everywhere - states).norm() / states.norm()
    assert 0 < error < 0.5
    batch = reference.tiny_batch(config, [9], [4], [5])
    out = drafter(batch)
    logits = drafter.draft_logits(out.hidden, batch.token_ids[:5])
    torch.testing.assert_close(logits, drafter.lm_head(out.hidden))
    again = new_drafter(config, embedding, head, ids, seed=7)
    other = new_drafter(config, embedding, head, ids, seed=8)
    assert torch.equal(again.fc.weight, drafter.fc.weight)
    assert not torch.equal(other.fc.weight, drafter.fc.weight)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.arange(19), "draft_vocab_size"),
        (torch.arange(20).flip(0), "ascending"),
        (torch.arange(31, 51), "in the vocabulary"),
    ],
)
def test_impossible_vocabularies_are_refused(ids: torch.Tensor, message: str) -> None:
    config = reference.tiny_config()
    embedding = torch.zeros(config.vocab_size, config.hidden_size)
    with pytest.raises(ValueError, match=message):
        new_drafter(config, embedding, embedding, ids, seed=0)
