"""Averaged runs: the mean of the weights, one origin, and a provenance that says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipe_workdir import SHAPE, make_workdir
from safetensors.torch import load_file, save_file

from specbench.engines.model_cache import ModelRef
from specbench.errors import InputError, UsageError
from specbench.training import export, recipe
from specbench.training.averaging import average_runs, averaged_runs
from specbench.training.export import ExportRequest, export_drafter
from specbench.training.optimizer import OptimizerSpec
from specbench.training.recipe import evaluate_checkpoint, run_folder, train_run
from specbench.training.retrain import write_evaluation
from specbench.training.trainer import TrainSpec


def train(workdir: Path, run: str, seed: int, start_from: Path | None) -> Path:
    spec = TrainSpec(
        epochs=0.5,
        tokens_per_batch=64,
        block_length_probabilities=(0.1, 0.2, 0.3, 0.4),
        optimizer=OptimizerSpec(learning_rate=0.01),
        seed=seed,
    )
    return train_run(
        workdir,
        run,
        spec,
        shape=SHAPE,
        start_from=start_from,
        model="tiny",
        device="cpu",
        on_progress=lambda done, total: None,
    )


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs from the drafter of a third."""
    target = make_workdir(tmp_path, monkeypatch)
    reference = ModelRef("/somewhere/tiny", target.fingerprint, is_default=False)
    for module in (recipe, export):
        monkeypatch.setattr(module, "resolve_model", lambda model: reference)
    first = train(tmp_path, "first", 0, None)
    for seed, run in enumerate("ab"):
        train(tmp_path, run, seed, first)
    return tmp_path


def runs(workdir: Path, *names: str) -> list[Path]:
    return [run_folder(workdir, name) for name in names]


def test_weights_are_the_mean_and_the_vocabulary_stays(workdir: Path) -> None:
    folder = average_runs(runs(workdir, "a", "b"), run_folder(workdir, "ab"))
    found = load_file(folder / "model.safetensors")
    parts = [load_file(run / "drafter/model.safetensors") for run in runs(workdir, "a", "b")]
    assert found.keys() == parts[0].keys()
    moved = 0
    for name, tensor in found.items():
        first, second = (part[name] for part in parts)
        assert tensor.dtype == first.dtype
        if not tensor.is_floating_point():
            assert torch.equal(tensor, first)
            continue
        moved += not torch.equal(first, second)
        mean = ((first.float() + second.float()) / 2).to(first.dtype)
        assert torch.equal(tensor, mean)
    assert moved > 5
    assert averaged_runs(run_folder(workdir, "ab")) == ("a", "b")
    assert averaged_runs(run_folder(workdir, "a")) is None


def test_the_provenance_names_every_run(workdir: Path) -> None:
    folder = average_runs(runs(workdir, "a", "b"), run_folder(workdir, "ab"))
    reports = evaluate_checkpoint(
        workdir,
        str(folder),
        split="test",
        temperatures=[0.0],
        block_length=None,
        model="tiny",
        device="cpu",
        on_progress=lambda done, total: None,
    )
    write_evaluation(workdir / "runs/ab/evaluation.json", reports, folder)
    output = export_drafter(ExportRequest(workdir, "ab", workdir / "out"))
    training = json.loads((output / "provenance.json").read_text())["training"]
    parts = training["mean_of_the_weights_of"]
    assert [part["seed"] for part in parts] == [0, 1]
    assert all(part["initialised_from"]["name"] == "drafter" for part in parts)


def test_runs_without_a_common_start_are_refused(workdir: Path) -> None:
    train(workdir, "new", 5, None)
    for pair in (("a", "new"), ("first", "new")):
        with pytest.raises(UsageError, match="did not start from one checkpoint"):
            average_runs(runs(workdir, *pair), run_folder(workdir, "x"))


@pytest.mark.parametrize(("names", "into"), [(("a",), "x"), (("a", "a"), "x"), (("a", "b"), "a")])
def test_one_run_is_no_average(workdir: Path, names: tuple[str, ...], into: str) -> None:
    with pytest.raises(UsageError, match="at least two different runs"):
        average_runs(runs(workdir, *names), run_folder(workdir, into))


def test_other_vocabularies_are_refused(workdir: Path) -> None:
    path = workdir / "runs/b/drafter/model.safetensors"
    tensors = load_file(path)
    tensors["d2t"] = tensors["d2t"] + 1
    save_file(tensors, path)
    with pytest.raises(UsageError, match="different tokens"):
        average_runs(runs(workdir, "a", "b"), run_folder(workdir, "x"))


def test_an_unfinished_or_damaged_run_is_named(workdir: Path) -> None:
    (workdir / "runs/b/drafter/model.safetensors").write_bytes(b"no")
    with pytest.raises(InputError, match="runs/b/drafter"):
        average_runs(runs(workdir, "a", "b"), run_folder(workdir, "x"))
    (workdir / "runs/b/drafter/config.json").unlink()
    with pytest.raises(InputError, match="no finished drafter"):
        average_runs(runs(workdir, "a", "b"), run_folder(workdir, "x"))
