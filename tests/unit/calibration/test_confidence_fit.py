"""Temperatures from replayed blocks whose true acceptance is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from specbench.calibration.confidence import fit_blocks, why_not
from specbench.engines.model_cache import DrafterRef
from specbench.errors import InputError
from specbench.training.replay import ReplaySteps

TRUE_TEMPERATURES = np.array([0.5, 0.4])


def blocks(num_blocks: int, num_sequences: int) -> tuple[ReplaySteps, pl.DataFrame]:
    """Blocks of two tokens, accepted with sigmoid(logit / true temperature)."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0.5, 1.5, (num_blocks, 2))
    held = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / TRUE_TEMPERATURES))
    num_labels = rng.integers(1, 3, num_blocks)
    steps = ReplaySteps(
        sequence_ids=rng.integers(0, num_sequences, num_blocks),
        num_accepted=np.minimum(held.cumprod(axis=1).sum(axis=1), num_labels),
        num_labels=num_labels,
        confidence_logits=logits.astype(np.float32),
        overlaps=None,
    )
    sequences = pl.DataFrame(
        {
            "prompt_id": [f"p{i}" for i in range(num_sequences)],
            "source": [("chat-self", "code-edit")[i % 2] for i in range(num_sequences)],
        }
    )
    return steps, sequences


def test_true_temperatures_are_found() -> None:
    fit = fit_blocks(*blocks(40_000, 50), seed=0)
    np.testing.assert_allclose(fit.table.temperatures, TRUE_TEMPERATURES, rtol=0.15)
    assert fit.hit_bound == ()
    assert fit.num_prompts == 50
    # Every block is as likely as the next: the record of a request says nothing. Confidences
    # do, on both positions.
    with_record, alone = fit.acceptance_losses
    assert with_record == pytest.approx(alone, abs=0.005)
    assert len(fit.acceptance.conditional) == 2
    assert 0.2 < fit.acceptance.resolution < 0.8
    report = fit.report
    assert list(report.sources) == ["all", "chat", "code-edit"]
    assert report.sources["all"].num_prompts == 25
    for position in report.sources["all"].survival:
        assert position.before.ece is not None
        assert position.after.ece is not None
        assert position.after.ece < 0.03 < position.before.ece


def test_turns_of_one_conversation_are_not_split() -> None:
    steps, sequences = blocks(500, 2)
    same = sequences.with_columns(prompt_id=pl.Series(["p", "p+"]))
    with pytest.raises(InputError, match=r"1 prompt\(s\)"):
        fit_blocks(steps, same, seed=0)


def test_reasons_against_temperatures(tmp_path: Path) -> None:
    assert why_not(None) == "no model drafter"
    hub = DrafterRef("owner/name", "f", is_default=False)
    assert "hub id" in str(why_not(hub))
    drafter = DrafterRef(str(tmp_path), "f", is_default=False)
    with pytest.raises(InputError, match="not a readable drafter"):
        why_not(drafter)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    assert "no confidence head" in str(why_not(drafter))
    config.write_text(json.dumps({"enable_confidence_head": True}), encoding="utf-8")
    assert why_not(drafter) is None
    config.write_text("[]", encoding="utf-8")
    with pytest.raises(InputError):
        why_not(drafter)
