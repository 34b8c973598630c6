"""``specbench calibrate`` on a small random target: artefact, tables, and every complaint."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbench.calibration import calibrate as job
from specbench.calibration.calibrate import CONFIDENCE_DIAGRAM, NGRAM_DIAGRAM
from specbench.calibration.shipped import find_calibration
from specbench.calibration.tokenizer import tokenizer_fingerprint
from specbench.cli.app import main
from specbench.engines.model_cache import fingerprint_folder
from specbench.estimators.calibration_store import load_calibration
from specbench.estimators.sts_interop import read_temperatures
from specbench.training.answering import EngineChoice
from specbench.training.drafter_checkpoint import save_drafter
from specbench.training.drafter_config import DrafterConfig
from specbench.training.drafter_initial import new_drafter
from specbench.training.responses import Response, ResponseWriter
from specbench.training.target_model import load_target

VOCAB = 96
BLOCK = 3

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=128,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter")
    loaded = load_target(str(target))
    config = DrafterConfig.from_target(
        loaded.config.to_dict(),
        num_layers=1,
        block_size=BLOCK,
        markov_rank=4,
        draft_vocab_size=VOCAB,
        mask_token_id=0,
        target_layer_ids=(0, 1),
    )
    ids = torch.arange(VOCAB)
    save_drafter(folder, new_drafter(config, loaded.embedding, loaded.lm_head_weight, ids, seed=0))
    return folder


@pytest.fixture(scope="module")
def responses(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers over few tokens, so that much repeats."""
    folder = tmp_path_factory.mktemp("responses")
    rng = np.random.default_rng(0)
    writer = ResponseWriter(
        folder, stream="0", model=str(target), fingerprint=fingerprint_folder(target)
    )
    writer.write(
        [
            Response(
                prompt_id=f"p{i}",
                source=("chat-self", "code-edit")[i % 2],
                split="test" if i % 5 == 0 else "train",
                temperature=(0.0, 1.0)[i % 2],
                prompt_token_ids=rng.integers(VOCAB, size=40).tolist(),
                response_token_ids=rng.integers(4, size=50).tolist(),
            )
            for i in range(30)
        ]
    )
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))

    def call(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["specbench", "calibrate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def test_everything_at_once(
    run: Run, target: Path, drafter: Path, responses: Path, tmp_path: Path
) -> None:
    figures, sts = tmp_path / "figures.json", tmp_path / "sts.json"
    options = ("--model", target, "--drafter", drafter, "--responses", responses)
    more = ("--num-positions", 4, "--max-n", 5, "--json", figures)
    code, out, err = run(*options, *more, "--sts-output", sts, "--sts-format", "tensorrt-llm")
    assert code == 0, err
    found = find_calibration(
        None,
        model_fingerprint=fingerprint_folder(target),
        tokenizer_fingerprint=tokenizer_fingerprint(str(target)),
        drafter_fingerprint=fingerprint_folder(drafter),
        is_default_model=False,
    )
    assert found is not None
    calibration = found.calibration
    assert calibration.ngram is not None
    assert calibration.temperatures is not None
    assert (calibration.ngram.max_n, calibration.ngram.num_positions) == (5, 4)
    assert len(calibration.temperatures.temperatures) == BLOCK
    assert read_temperatures(sts).temperatures == calibration.temperatures.temperatures
    assert "sts_temperatures" in json.loads(sts.read_text(encoding="utf-8"))
    for name in (NGRAM_DIAGRAM, CONFIDENCE_DIAGRAM):
        assert (found.folder / name).read_text(encoding="utf-8").startswith("<svg")
    written = json.loads(figures.read_text(encoding="utf-8"))
    assert written["reliability"] == calibration.provenance.reliability
    assert written["num_chains"] == calibration.provenance.num_chains > 100
    assert "test prompts" in out
    assert "Temperatures" in out
    # Without temperatures, what was there about them goes.
    code, out, err = run(*options, *more[:4], "--no-confidence", "--features", "agreement")
    assert code == 0, err
    assert load_calibration(found.folder).temperatures is None
    assert not (found.folder / CONFIDENCE_DIAGRAM).exists()
    assert "no temperatures: not asked for" in out
    assert "features (given): agreement" in out


def test_a_later_run_uses_the_features_again(
    run: Run, target: Path, drafter: Path, responses: Path, tmp_path: Path
) -> None:
    options = ("--model", target, "--drafter", drafter, "--responses", responses)
    work = ("--workdir", tmp_path / "work", "--output", tmp_path / "out", "--features", "none")
    assert run(*options, *work)[0] == 0
    (folder,) = (tmp_path / "work").glob("features-*")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    first = load_calibration(tmp_path / "out")
    assert run(*options, *work)[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    assert load_calibration(tmp_path / "out").temperatures == first.temperatures


def test_text_is_generated_into_the_work_folder(
    run: Run, target: Path, responses: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str | None, int, int]] = []

    def answer(
        workdir: Path, engine: EngineChoice, *, num_tokens: int, on_progress: Callable[..., None]
    ) -> None:
        asked.append((engine.model, engine.seed, num_tokens))
        on_progress(0, num_tokens)
        shutil.copytree(responses, workdir / "responses")

    monkeypatch.setattr(job, "answer_training_prompts", answer)
    options = ("--num-tokens", 1500, "--seed", 3, "--workdir", tmp_path / "work")
    code, _, err = run("--model", target, *options, "--output", tmp_path / "out")
    assert code == 0, err
    assert asked == [(str(target), 3, 1500)]
    assert "0/1,500 response tokens" in err
    assert load_calibration(tmp_path / "out").provenance.seed == 3


def test_a_stop_says_what_to_do(
    run: Run, target: Path, responses: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "answer_training_prompts", stop)
    code, _, err = run("--model", target, "--num-tokens", 10)
    assert code == 130
    assert "run the same command to go on" in err


def damage(folder: Path, responses: Path) -> Path:
    folder.mkdir()
    (folder / "target.json").write_bytes((responses / "target.json").read_bytes())
    (folder / "responses-0-00000.parquet").write_text("no parquet", encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--min-n", "4", "--max-n", "3"), "min-n"),
        (("--min-n", "0"), "min-n"),
        (("--num-positions", "0"), "num-positions"),
        (("--features", "length"), "--features"),
        (("--responses", "RESPONSES/nowhere"), "no such folder"),
        (("--responses", "EMPTY"), "target.json is missing"),
        (("--responses", "DAMAGED"), "cannot be read"),
        (("--responses", "RESPONSES", "--sts-output", "x.json"), "no model drafter"),
        (("--responses", "RESPONSES", "--sts-format", "vllm"), "sts-format"),
        (("--responses", "RESPONSES", "--drafter", "./nowhere"), "no such folder"),
        (("--model", "./nowhere"), "no such folder"),
        (("--num-tokens", "0"), "num-tokens"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_complaints_are_one_line_with_exit_code_2(
    run: Run,
    target: Path,
    responses: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    reason: str,
) -> None:
    (tmp_path / "empty").mkdir()
    places = {
        "RESPONSES": str(responses),
        "EMPTY": str(tmp_path / "empty"),
        "DAMAGED": str(damage(tmp_path / "damaged", responses)),
    }
    for name, place in places.items():
        options = tuple(option.replace(name, place) for option in options)
    model = () if "--model" in options else ("--model", target)
    code, _, err = run(*model, *options)
    assert code == 2
    assert reason in err
    assert "Traceback" not in err


def test_answers_of_another_model_are_refused(
    run: Run, target: Path, tmp_path: Path, responses: Path
) -> None:
    folder = damage(tmp_path / "other", responses)
    facts = json.loads((folder / "target.json").read_text(encoding="utf-8"))
    changed = json.dumps(facts | {"fingerprint": "0" * 64, "model": "owner/other"})
    (folder / "target.json").write_text(changed, encoding="utf-8")
    code, _, err = run("--model", target, "--responses", folder)
    assert code == 2
    assert "written by owner/other" in err


def test_a_folder_that_cannot_be_written_is_found_first(
    run: Run, target: Path, responses: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    code, _, err = run(
        "--model", target, "--responses", responses, "--output", tmp_path / "file" / "out"
    )
    assert code == 3
    assert "cannot write" in err
