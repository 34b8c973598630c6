"""The steps of the recipe on a tiny target: data without leaks, training, evaluation, export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from recipe_workdir import MASK, SHAPE, add_features, learnable, make_workdir
from tiny_target import VOCAB, make_target

from specbench.engines.model_cache import ModelRef, check_provenance
from specbench.errors import InputError, UsageError
from specbench.training import export, recipe
from specbench.training.drafter_checkpoint import load_drafter
from specbench.training.export import ExportRequest, export_drafter
from specbench.training.feature_store import FeatureStore
from specbench.training.optimizer import OptimizerSpec
from specbench.training.recipe import (
    DEFAULT_BLOCK_LENGTHS,
    evaluate_checkpoint,
    extract,
    first_tokens,
    parse_probabilities,
    train_run,
    without_leaks,
)
from specbench.training.retrain import write_evaluation
from specbench.training.run_record import count_data, read_record
from specbench.training.starting_drafter import make_drafter, token_counts
from specbench.training.trainer import TrainSpec
from specbench.training.training_state import read_state

SPEC = TrainSpec(
    epochs=1.0,
    tokens_per_batch=64,
    block_length_probabilities=(0.1, 0.2, 0.3, 0.4),
    optimizer=OptimizerSpec(learning_rate=0.01),
)


def ignore(done: float, total: float) -> None:
    """No progress wanted."""


def rows(*entries: tuple[str, str, list[int], list[int]]) -> pl.DataFrame:
    """(source, split, prompt, response) as a responses frame, ids by number."""
    return pl.DataFrame(
        [
            {
                "prompt_id": str(index),
                "source": source,
                "split": split,
                "temperature": 0.0,
                "prompt_token_ids": prompt,
                "response_token_ids": response,
            }
            for index, (source, split, prompt, response) in enumerate(entries)
        ]
    )


def random_tokens(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(1000, size=length).tolist()


def train(workdir: Path, run: str = "r", spec: TrainSpec = SPEC, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "shape": SHAPE,
        "start_from": None,
        "model": None,
        "device": "cpu",
        "on_progress": ignore,
    }
    return train_run(workdir, run, spec, **{**options, **changes})


def test_leaks_are_left_out_of_training_only() -> None:
    header, ask = random_tokens(0, 10), random_tokens(1)
    near = [*ask[:-1], 7]
    frame = rows(
        ("chat", "test", header + ask, random_tokens(10)),
        ("chat", "train", header + near, random_tokens(11)),  # nearly a test prompt
        ("chat", "train", header + random_tokens(2), random_tokens(12)),
        ("chat", "train", header + random_tokens(3), random_tokens(12)),  # a repeated answer
        ("code", "train", header + random_tokens(4), random_tokens(13)),
        ("chat", "test", header + random_tokens(5), random_tokens(10)),  # tests may repeat
    )
    kept, num_dropped = without_leaks(frame)
    assert kept["prompt_id"].to_list() == ["0", "2", "4", "5"]
    assert num_dropped == 2


def test_an_outside_set_is_kept_out_of_every_source() -> None:
    header, ask = random_tokens(0, 10), random_tokens(1)
    frame = rows(
        ("code", "train", header + ask, random_tokens(11)),
        ("chat", "train", header + random_tokens(2), random_tokens(12)),
        ("mt-bench", "test", header + ask, random_tokens(13)),
    )
    assert without_leaks(frame)[0]["prompt_id"].to_list() == ["1", "2"]


def test_sources_with_a_template_in_common_are_not_near_by_it() -> None:
    header = random_tokens(0, 60)
    frame = rows(
        ("chat", "test", [*header, 1, 2, 3, 4, 5], random_tokens(1)),
        ("chat", "train", [*header, 6, 7, 8, 9, 10], random_tokens(2)),
    )
    assert without_leaks(frame)[1] == 0


@pytest.mark.parametrize(("limit", "kept"), [(None, 3), (120, 3), (119, 2), (40, 1), (39, 0)])
def test_first_tokens_counts_whole_responses(limit: int | None, kept: int) -> None:
    frame = rows(*[("chat", "train", [1], random_tokens(seed)) for seed in range(3)])
    assert len(first_tokens(frame, limit)) == kept


def test_block_length_chances() -> None:
    assert parse_probabilities(None) == DEFAULT_BLOCK_LENGTHS
    assert parse_probabilities("0.25, 0.75") == (0.25, 0.75)
    for block_size in range(1, 12):
        chances = parse_probabilities(None, block_size)
        assert len(chances) == block_size
        assert sum(chances) == pytest.approx(1.0)
        assert max(chances) == chances[-1]


@pytest.mark.parametrize("text", ["", "a,b", "0.5,0.6", "-0.5,1.5", "nan,1", "1;0"])
def test_bad_block_length_chances_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--block-lengths"):
        parse_probabilities(text)


def test_token_counts_are_of_responses_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_workdir(tmp_path, monkeypatch)
    store = FeatureStore(tmp_path / "features", "train")
    expected = np.zeros(VOCAB, dtype=np.int64)
    for response in learnable(16, 0, "train"):
        expected += np.bincount(response.response_token_ids, minlength=VOCAB)
    assert token_counts(store, VOCAB).tolist() == expected.tolist()


def test_a_new_drafter_proposes_what_responses_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_workdir(tmp_path, monkeypatch)
    store = FeatureStore(tmp_path / "features", "train")
    drafter = make_drafter(target, store, replace(SHAPE, draft_vocab_size=12), seed=0)
    assert drafter.draft_token_ids.tolist() == list(range(20, 32))
    # More than the vocabulary has is the whole vocabulary.
    whole = make_drafter(target, store, replace(SHAPE, draft_vocab_size=None), seed=0)
    assert whole.draft_token_ids.tolist() == list(range(VOCAB))
    assert drafter.config.target_layer_ids == store.target_layer_ids


@pytest.mark.parametrize("mask", [None, 21])
def test_a_mask_token_must_be_named_and_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int | None
) -> None:
    target = make_workdir(tmp_path, monkeypatch)
    store = FeatureStore(tmp_path / "features", "train")
    with pytest.raises(UsageError, match="--mask-token-id"):
        make_drafter(target, store, replace(SHAPE, mask_token_id=mask), seed=0)


def test_starting_from_a_checkpoint_keeps_what_it_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_workdir(tmp_path, monkeypatch)
    first = load_drafter(train(tmp_path), target.embedding)
    # A rate next to nothing shows what the second run started with.
    still = replace(SPEC, optimizer=OptimizerSpec(learning_rate=1e-12))
    shape = replace(SHAPE, draft_vocab_size=20)
    folder = train(tmp_path, "smaller", still, start_from=tmp_path / "runs/r/drafter", shape=shape)
    second = load_drafter(folder, target.embedding)
    assert second.config.draft_vocab_size == 20
    ids = second.draft_token_ids
    assert set(range(20, 32)) <= set(ids.tolist())
    rows_before = first.lm_head.weight[first.target_to_draft[ids]]
    torch.testing.assert_close(second.lm_head.weight, rows_before, rtol=0, atol=1e-6)
    torch.testing.assert_close(second.fc.weight, first.fc.weight, rtol=0, atol=1e-6)
    record = read_record(folder.parent)
    assert record is not None
    assert record.started_from is not None
    assert record.started_from["name"] == "drafter"


def test_a_checkpoint_that_reads_other_layers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_workdir(tmp_path / "two", monkeypatch)
    add_features(tmp_path / "one", target, learnable(4, 0, "train"), layer_ids=(1,))
    folder = train(tmp_path / "two")
    with pytest.raises(UsageError, match="extract those with --layer"):
        train(tmp_path / "one", start_from=folder)


def test_a_run_keeps_its_vocabulary_when_the_features_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_workdir(tmp_path, monkeypatch)

    def interrupt(done: float, total: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, on_progress=interrupt)
    state = read_state(tmp_path / "runs/r")
    assert state is not None
    more = [
        replace(response, prompt_id=f"more-{index}", response_token_ids=[60 + index] * 19 + [1])
        for index, response in enumerate(learnable(20, 9, "train"))
    ]
    add_features(tmp_path, target, more)
    finished = load_drafter(train(tmp_path), target.embedding)
    assert state.draft_token_ids is not None
    assert finished.draft_token_ids.tolist() == state.draft_token_ids.tolist()


@pytest.mark.parametrize("run", ["", ".", "..", "a/b", "/a"])
def test_a_run_name_is_one_folder(tmp_path: Path, run: str) -> None:
    with pytest.raises(UsageError, match="--run"):
        train(tmp_path, run)


def test_extraction_leaves_near_duplicates_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target()
    monkeypatch.setattr(recipe, "load_target", lambda model, device: target)
    reference = ModelRef("tiny", target.fingerprint, is_default=False)
    monkeypatch.setattr(recipe, "resolve_model", lambda model: reference)
    responses = learnable(4, 0, "train")
    recipe_writer(tmp_path, target.fingerprint, [*responses, replace(responses[0], prompt_id="x")])
    lines = list(
        extract(
            tmp_path,
            model="tiny",
            device="cpu",
            layer_ids=[0, 1],
            splits=["train"],
            max_tokens=None,
            on_progress=ignore,
        )
    )
    assert count_data(tmp_path / "features")["train"]["all"]["num_responses"] == 4
    assert "1 near-duplicates left out" in lines[0]


def recipe_writer(folder: Path, fingerprint: str, responses: list[Any]) -> None:
    from specbench.training.responses import ResponseWriter

    writer = ResponseWriter(folder / "responses", stream="0", model="tiny", fingerprint=fingerprint)
    writer.write(responses)


def evaluate(workdir: Path, folder: Path, **changes: Any) -> list[Any]:
    options: dict[str, Any] = {
        "split": "test",
        "temperatures": [0.0, 1.0],
        "block_length": None,
        "model": None,
        "device": "cpu",
        "on_progress": ignore,
    }
    return evaluate_checkpoint(workdir, str(folder), **{**options, **changes})


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A work folder with a finished and evaluated run."""
    target = make_workdir(tmp_path, monkeypatch)
    reference = ModelRef("/somewhere/tiny", target.fingerprint, is_default=False)
    for module in (recipe, export):
        monkeypatch.setattr(module, "resolve_model", lambda model: reference)
    folder = train(tmp_path)
    write_evaluation(tmp_path / "runs/r/evaluation.json", evaluate(tmp_path, folder), folder)
    return tmp_path


def test_an_export_says_where_the_drafter_comes_from(trained: Path) -> None:
    output = trained / "tiny-dspark"
    assert export_drafter(ExportRequest(trained, "r", output, licence="MIT")) == output
    check_provenance(output)
    found = json.loads((output / "provenance.json").read_text())
    assert found["name"] == "tiny-dspark"
    assert found["licence"] == "MIT"
    assert found["target"]["model"] == "tiny"
    assert found["architecture"]["mask_token_id"] == MASK
    training = found["training"]
    assert training["data"]["train"]["chat"]["num_responses"] == 8
    assert training["data"]["test"]["all"]["num_response_tokens"] == 8 * 20
    assert training["loop_tokens_left_out"] == {"0": 3}
    state = read_state(trained / "runs/r")
    assert state is not None
    assert training["num_steps"] == state.place.num_steps > 0
    assert training["at_the_end"]["total"] > 0
    assert [result["temperature"] for result in found["results"]] == [0.0, 1.0]
    everything = found["results"][0]["sources"]["all"]
    assert set(found["results"][0]["sources"]) == {"all", "chat", "code-edit"}
    assert 1.0 <= everything["acceptance_length"] <= 5.0
    assert len(everything["acceptance_by_position"]) == 4
    assert len(everything["confidence_ece_after_scaling"]) == 4
    assert "/somewhere" not in json.dumps(found)
    assert str(trained) not in json.dumps(found)


def test_weights_beyond_the_limit_are_not_exported(trained: Path) -> None:
    with pytest.raises(UsageError, match="--max-mb"):
        export_drafter(ExportRequest(trained, "r", trained / "out", max_mb=0.001))
    assert not (trained / "out").exists()


def test_an_evaluation_of_another_drafter_is_refused(trained: Path) -> None:
    other = train(trained, "other", replace(SPEC, seed=3))
    path = trained / "runs/other/evaluation.json"
    path.write_bytes((trained / "runs/r/evaluation.json").read_bytes())
    assert other.is_dir()
    with pytest.raises(UsageError, match="another drafter"):
        export_drafter(ExportRequest(trained, "other", trained / "out"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"drafter_fingerprint": "x"}]'])
def test_a_file_that_is_no_evaluation_is_refused(trained: Path, text: str) -> None:
    path = trained / "other.json"
    path.write_text(text)
    with pytest.raises((InputError, UsageError), match=r"other\.json"):
        export_drafter(ExportRequest(trained, "r", trained / "out", evaluation=path))


def test_an_unknown_run_and_a_missing_evaluation_say_what_to_do(trained: Path) -> None:
    with pytest.raises(InputError, match="drafter train"):
        export_drafter(ExportRequest(trained, "none", trained / "out"))
    (trained / "runs/r/evaluation.json").unlink()
    with pytest.raises(InputError, match="drafter evaluate --output"):
        export_drafter(ExportRequest(trained, "r", trained / "out"))


def test_a_block_longer_than_the_drafters_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match="drafter's block is 4"):
        evaluate(trained, trained / "runs/r/drafter", block_length=5)


def test_without_temperatures_all_there_are_count(trained: Path) -> None:
    reports = evaluate(trained, trained / "runs/r/drafter", temperatures=[])
    assert [report.temperature for report in reports] == [0.0, 1.0]
