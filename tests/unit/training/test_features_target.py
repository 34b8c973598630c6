"""The target as training sees it: hidden states equal transformers' own, whatever the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_target import LAYER_IDS, VOCAB, make_target

from specbench.errors import InputError, UsageError
from specbench.training.target_model import check_type, load_target


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_hidden_states_are_those_of_transformers(model_type: str) -> None:
    target = make_target(model_type=model_type)
    token_ids = torch.randint(VOCAB, (2, 10))
    expected = target._model(token_ids, output_hidden_states=True)
    hidden = target.forward(token_ids, [0, 1])
    torch.testing.assert_close(hidden.aux_hidden, torch.cat(expected.hidden_states[1:3], dim=-1))
    torch.testing.assert_close(hidden.final_hidden, expected.hidden_states[-1])
    torch.testing.assert_close(
        target.logits(hidden.final_hidden.flatten(0, 1)), expected.logits.flatten(0, 1)
    )


def test_last_layer_is_given_before_the_final_norm() -> None:
    target = make_target()
    hidden = target.forward(torch.randint(VOCAB, (1, 5)), [2])
    assert not torch.allclose(hidden.aux_hidden, hidden.final_hidden)
    torch.testing.assert_close(target.final_norm(hidden.aux_hidden), hidden.final_hidden)


def test_padding_on_the_right_changes_nothing() -> None:
    target = make_target()
    sequences = [torch.randint(VOCAB, (length,)) for length in (3, 9, 6)]
    padded = torch.full((3, 9), 7)
    for row, tokens in enumerate(sequences):
        padded[row, : len(tokens)] = tokens
    together = target.forward(padded, LAYER_IDS)
    for row, tokens in enumerate(sequences):
        alone = target.forward(tokens[None], LAYER_IDS)
        # Other shapes round differently; a look at the padding would change values of about 1.
        for name in ("aux_hidden", "final_hidden"):
            expected = getattr(alone, name)[0]
            found = getattr(together, name)[row, : len(tokens)]
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_target_is_frozen_and_leaves_no_hooks() -> None:
    target = make_target()
    hidden = target.forward(torch.randint(VOCAB, (1, 4)), LAYER_IDS)
    assert not hidden.final_hidden.requires_grad
    assert not target.lm_head_weight.requires_grad
    assert all(not layer._forward_hooks for layer in target._decoder.layers)


@pytest.mark.parametrize("layer_ids", [[], [3], [-1], [1, 1]])
def test_impossible_layer_ids_are_refused(layer_ids: list[int]) -> None:
    with pytest.raises(UsageError, match="between 0 and 2"):
        make_target().check_layer_ids(layer_ids)


def test_saved_folder_loads_in_bfloat16(tmp_path: Path) -> None:
    make_target()._model.save_pretrained(tmp_path)
    target = load_target(str(tmp_path))
    assert target.dtype == torch.bfloat16
    assert (target.vocab_size, target.hidden_size, target.num_layers) == (VOCAB, 32, 3)
    assert len(target.fingerprint) == 64


def test_other_types_are_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(InputError, match=r"type 'gpt2'; choose one of type llama, qwen2, qwen3"):
        load_target(str(tmp_path))


def test_damaged_weights_give_one_line(tmp_path: Path) -> None:
    make_target()._model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    with pytest.raises(InputError, match="cannot be loaded for training") as caught:
        load_target(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_config_without_type_is_refused() -> None:
    with pytest.raises(InputError, match="type None"):
        check_type(object())
