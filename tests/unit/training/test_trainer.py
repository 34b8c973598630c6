"""Training runs on a tiny target: they learn, stop, go on and refuse what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_workdir import SHAPE, make_workdir
from torch import Tensor

from specbench.errors import InputError, UsageError
from specbench.training.feature_store import FeatureStore
from specbench.training.optimizer import OptimizerSpec
from specbench.training.starting_drafter import NewDrafter, make_drafter
from specbench.training.target_model import TargetModel
from specbench.training.trainer import Trainer, TrainSpec
from specbench.training.training_state import (
    LOG_FILE,
    STATE_FILE,
    only_trainer,
    read_log,
    read_state,
)

SPEC = TrainSpec(
    epochs=2.0,
    tokens_per_batch=64,
    block_length_probabilities=(0.1, 0.2, 0.3, 0.4),
    optimizer=OptimizerSpec(learning_rate=0.01),
)
Data = tuple[FeatureStore, TargetModel]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch:
        target = make_workdir(folder, patch)
    return FeatureStore(folder / "features", "train"), target


def trainer(data: Data, folder: Path, spec: TrainSpec = SPEC, shape: NewDrafter = SHAPE) -> Trainer:
    store, target = data
    drafter = make_drafter(target, store, shape, seed=0)
    return Trainer(drafter, store, target.lm_head_weight, spec, folder)


def weights(folder: Path) -> dict[str, Tensor]:
    state = read_state(folder)
    assert state is not None
    return state.drafter


class StopAfter:
    """Progress listener that presses Ctrl-C after so many steps."""

    def __init__(self, num_steps: int | None) -> None:
        self.num_steps = num_steps
        self.seen: list[float] = []

    def __call__(self, done: float, total: float) -> None:
        self.seen.append(done / total)
        if len(self.seen) == self.num_steps:
            raise KeyboardInterrupt


def test_it_learns(data: Data, tmp_path: Path) -> None:
    spec = replace(SPEC, epochs=40.0)
    trainer(data, tmp_path, spec).run(StopAfter(None))
    log = read_log(tmp_path)
    assert log[-1]["total"] < 0.8 * log[0]["total"]
    # The random target often prefers tokens outside the draft vocabulary: 1 is out of reach.
    assert log[-1]["greedy_accuracy"] > 1.8 * log[0]["greedy_accuracy"]


@pytest.mark.parametrize("num_steps", [1, 4, 9])
def test_stop_and_resume_equals_an_uninterrupted_run(
    data: Data, tmp_path: Path, num_steps: int
) -> None:
    whole = trainer(data, tmp_path / "whole")
    whole.run(StopAfter(None))
    assert whole.place.num_steps > 9
    with pytest.raises(KeyboardInterrupt):
        trainer(data, tmp_path / "parts").run(StopAfter(num_steps))
    again = trainer(data, tmp_path / "parts")
    assert again.place.num_steps == num_steps
    again.run(StopAfter(None))
    assert again.place.num_steps == whole.place.num_steps
    assert again.place.num_rows == whole.place.num_rows
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_progress_rises_to_one_and_a_finished_run_stays(data: Data, tmp_path: Path) -> None:
    listener = StopAfter(None)
    run = trainer(data, tmp_path)
    run.run(listener)
    assert listener.seen == sorted(listener.seen)
    assert listener.seen[-1] == 1.0
    again = StopAfter(None)
    trainer(data, tmp_path).run(again)
    assert again.seen == []
    assert run.place.num_steps == len(listener.seen)


def test_part_of_an_epoch_is_enough_to_ask_for(data: Data, tmp_path: Path) -> None:
    half = trainer(data, tmp_path, replace(SPEC, epochs=0.5))
    half.run(StopAfter(None))
    store, _ = data
    assert half.place.num_steps == -(-store.num_batches(SPEC.plan, 0) // 2)


def test_training_by_time_ends(data: Data, tmp_path: Path) -> None:
    spec = replace(SPEC, epochs=None, minutes=1e-3)
    run = trainer(data, tmp_path, spec)
    run.run(StopAfter(None))
    assert run.progress == 1.0
    assert run.place.num_steps >= 1
    assert run.place.trained_s >= 0.06


def test_every_step_is_logged_as_json_even_the_last_few(data: Data, tmp_path: Path) -> None:
    run = trainer(data, tmp_path)
    run.run(StopAfter(None))
    lines = [json.loads(line) for line in (tmp_path / LOG_FILE).read_text().splitlines()]
    assert lines[-1]["step"] == run.place.num_steps
    assert lines[-1]["progress"] == 1.0
    names = {"total", "cross_entropy", "total_variation", "kl", "confidence", "greedy_accuracy"}
    assert all(names <= line.keys() for line in lines)


def test_lines_about_lost_steps_are_dropped(data: Data, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trainer(data, tmp_path).run(StopAfter(3))
    with (tmp_path / LOG_FILE).open("a") as file:
        file.write(json.dumps({"step": 20, "total": 1.0}) + "\n" + '{"step": 4, "tot')
    trainer(data, tmp_path)
    assert [line["step"] for line in read_log(tmp_path)] == [3]


def test_other_settings_are_refused(data: Data, tmp_path: Path) -> None:
    trainer(data, tmp_path).run(StopAfter(None))
    with pytest.raises(UsageError, match="another --run"):
        trainer(data, tmp_path, replace(SPEC, seed=1))


@pytest.mark.parametrize(
    "changes", [{"num_layers": 2}, {"draft_vocab_size": 20}, {"markov_rank": 2}]
)
def test_a_drafter_of_another_shape_is_refused(
    data: Data, tmp_path: Path, changes: dict[str, Any]
) -> None:
    trainer(data, tmp_path).run(StopAfter(None))
    with pytest.raises(InputError, match="another shape"):
        trainer(data, tmp_path, shape=replace(SHAPE, **changes))


@pytest.mark.parametrize("damage", [b"", b"nothing", None])
def test_a_damaged_state_is_refused(data: Data, tmp_path: Path, damage: bytes | None) -> None:
    trainer(data, tmp_path).run(StopAfter(None))
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:-2000] if damage is None else damage)
    with pytest.raises(InputError, match=r"state\.pt cannot be read"):
        trainer(data, tmp_path)


def test_blocks_longer_than_the_drafters_are_refused(data: Data, tmp_path: Path) -> None:
    spec = replace(SPEC, block_length_probabilities=(0.2,) * 5)
    with pytest.raises(UsageError, match="drafter's block is 4"):
        trainer(data, tmp_path, spec)


def test_divergence_keeps_the_last_finite_weights(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(data, tmp_path)
    original = run._loss

    def spoilt(batch: Any, progress: float) -> Any:
        loss, num_rows = original(batch, progress)
        factor = float("inf") if run.place.num_steps == 2 else 1.0
        return replace(loss, total=loss.total * factor), num_rows

    monkeypatch.setattr(run, "_loss", spoilt)
    with pytest.raises(InputError, match="diverged"):
        run.run(StopAfter(None))
    assert run.place.num_steps == 2
    assert all(bool(tensor.isfinite().all()) for tensor in weights(tmp_path).values())


def test_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    with (
        only_trainer(tmp_path),
        pytest.raises(UsageError, match="another process"),
        only_trainer(tmp_path),
    ):
        raise AssertionError("two processes were let in")


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": None},
        {"minutes": 1.0},
        {"epochs": 0.0},
        {"epochs": float("nan")},
        {"position_decay": 0.0},
        {"kl_share": -0.1},
        {"anchor_probability": 0.0},
        {"tokens_per_batch": 0},
        {"block_length_probabilities": (0.5, 0.6)},
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        replace(SPEC, **changes)


def test_the_kl_term_fades_over_its_share() -> None:
    weights = [SPEC.loss_at(progress).kl for progress in (0.0, 0.125, 0.25, 1.0)]
    assert weights == pytest.approx([1.0 + SPEC.loss.kl, 0.5 + SPEC.loss.kl] + [SPEC.loss.kl] * 2)
    assert replace(SPEC, kl_share=0.0).loss_at(0.0).kl == SPEC.loss.kl
