"""The benchmark program of the n-gram lookup: a tiny run, its figures, and its refusals."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.errors import EngineFailure, EnvironmentProblem, UsageError
from specbench.kernels.benchmarks import ngram_lookup as benchmark
from specbench.stats import paired_ratio

PROGRAM = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks" / "ngram_lookup.py"


def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed: there is nothing to compare with")


def run_program(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--device", "cpu", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_a_small_run_times_every_side_in_every_round(tmp_path: Path) -> None:
    needs_vllm()
    output = tmp_path / "result.json"
    sizes = ("--contexts", "40,64", "--requests", "1,3", "--rounds", "3")
    result = run_program(*sizes, "--output", str(output))
    assert result.returncode == 0, result.stderr
    document = json.loads(output.read_text())
    assert document["settings"]["rounds"] == 3
    cases = document["cases"]
    assert [(c["text"], c["context_tokens"], c["num_requests"]) for c in cases] == [
        (text, n, size) for text in ("prose", "loop") for n in (40, 64) for size in (1, 3)
    ]
    for case in cases:
        ours, theirs = case["samples_ms"]["specbench"], case["samples_ms"]["vllm-numba"]
        assert len(ours) == len(theirs) == 3
        assert case["median_ms"]["specbench"] == sorted(ours)[1]
        expected = paired_ratio(ours, theirs)
        assert expected is not None
        ratio = case["ratio_ours_to"]["vllm-numba"]
        assert ratio["value"] == pytest.approx(expected.value)
        assert f"{ratio['value']:.2f} [" in result.stdout


def test_a_mistake_is_one_line_without_a_traceback() -> None:
    result = run_program("--contexts", "many")
    assert result.returncode == UsageError.exit_code
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "whole numbers" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--contexts", "1"], "too small"),
        (["--requests", "0,4"], "too small"),
        (["--min-n", "5", "--max-n", "4"], "--max-n 4"),
        (["--device", "tpu"], "cpu, cuda or auto"),
    ],
)
def test_refuses_options_that_make_no_sense(options: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        benchmark.app(options, standalone_mode=False)


def test_refuses_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark.torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentProblem, match="no CUDA device"):
        benchmark.choose_device("cuda")
    assert benchmark.choose_device("auto") == "cpu"


def test_texts_are_the_same_for_the_same_seed_and_hold_a_match() -> None:
    settings = benchmark.Settings(2, 8, 16, 1, 0, "cpu")
    for text in benchmark.TEXTS:
        case = benchmark.Case(text, 200, 3)
        texts = benchmark.make_texts(case, 7)
        assert texts.shape == (3, 200)
        assert texts.equal(benchmark.make_texts(case, 7))
        assert benchmark.our_side(texts, settings)().match_lengths.tolist() == [8, 8, 8]
    assert not texts.equal(benchmark.make_texts(benchmark.Case("prose", 200, 3), 7))


def test_sides_that_find_different_matches_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = benchmark.Settings(2, 8, 16, 1, 0, "cpu")
    monkeypatch.setattr(benchmark, "vllm_numba_side", lambda texts, settings: lambda: [[5], []])
    texts = benchmark.make_texts(benchmark.Case("loop", 50, 2), 0)
    with pytest.raises(EngineFailure, match="not compared"):
        benchmark.make_sides(texts, settings)
