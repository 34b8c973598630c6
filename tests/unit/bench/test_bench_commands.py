"""``specbench run`` and ``compare`` from the command line down, on the fake engine."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console

from specbench.cli import benchmark, tables
from specbench.cli.app import main
from specbench.engines.config import EngineConfig
from specbench.engines.fake import FakeBehaviour, FakeEngine
from specbench.errors import EngineFailure
from specbench.records import EngineRequest
from specbench.results.store import load_result

FAST = FakeBehaviour(chunk_tokens=(1, 4), num_verified_tokens=4, draft_share=0.2)
SMALL = ["--rounds", "2", "--max-concurrency", "2", "--max-tokens", "8", "--warmup-prompts", "1"]

Specbench = Callable[..., int]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"turns": [f"question number {i}"]}) for i in range(6)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def configs() -> list[EngineConfig]:
    return []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, configs: list[EngineConfig]) -> FakeEngine:
    fake = FakeEngine({"ngram": FAST, "dspark": FAST})

    async def start(config: EngineConfig, needs: Any, on_event: Any) -> FakeEngine:
        configs.append(config)
        return fake

    monkeypatch.setattr(benchmark, "start_engine", start)
    return fake


@pytest.fixture
def specbench(monkeypatch: pytest.MonkeyPatch) -> Specbench:
    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["specbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0)

    return call


def test_compare_prints_tables_and_writes_a_complete_result(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "c.json"
    code = specbench("compare", "ar", "ngram", "--workload", workload, "--output", output, *SMALL)
    printed = capsys.readouterr()
    assert code == 0
    result = load_result(output)
    assert result["complete"]
    assert list(result["policies"]) == ["ar", "ngram"]
    ar, ngram = result["policies"]["ar"], result["policies"]["ngram"]
    assert ar["ratio_to_baseline"] == {"value": 1.0, "ci95": None}
    assert ngram["ratio_to_baseline"]["value"] is not None
    assert ngram["ratio_to_baseline"]["ci95"] is not None
    assert ar["output_tokens"] == ngram["output_tokens"] == 48
    assert ngram["acceptance_length"] == pytest.approx(1 + (3 + 2) / 2)
    assert result["spec"]["model"] == "fake"
    assert result["environment"]["command"][1:3] == ["compare", "ar"]
    for text in ("policy", "ratio [95%]", "TTFT ms", "ngram", "cycles", "6 prompts in 2 rounds"):
        assert text in " ".join(printed.out.split()) or text in printed.out
    assert max(map(len, printed.out.splitlines())) <= 80
    assert printed.out.isascii()
    assert "\x1b" not in printed.out
    assert "round 2/2, ngram: 3 requests" in printed.err
    assert engine.closed


def test_run_measures_one_policy(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        specbench("run", "--policy", "ngram", "--workload", workload, "--no-progress", *SMALL) == 0
    )
    printed = capsys.readouterr()
    assert set(engine.policies_set) == {"ngram"}
    assert "ngram" in printed.out
    assert printed.err == ""


def test_json_goes_to_stdout_alone(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = specbench("compare", "dspark", "dspark", "--workload", workload, "--json", *SMALL)
    assert code == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document["policies"]) == ["dspark", "dspark#2"]
    assert document["policies"]["dspark#2"]["policy"] == "dspark"


def test_options_reach_engine_and_requests(
    specbench: Specbench,
    engine: FakeEngine,
    configs: list[EngineConfig],
    workload: Path,
    tmp_path: Path,
) -> None:
    code = specbench(
        "run", "--policy", "ar", "--workload", workload, *SMALL,
        "--temperature", "0.7", "--top-p", "0.9", "--top-k", "20", "--min-p", "0.1",
        "--seed", "5", "--ignore-eos", "--dtype", "float32", "--max-model-len", "512",
        "--tensor-parallel-size", "2", "--distributed-executor-backend", "mp",
        "--engine-arg", "block_size=16", "--log-file", tmp_path / "e.log",
        "--num-speculative-tokens", "5", "--model", "other/model",
        "--draft-sample-method", "probabilistic",
    )  # fmt: skip
    assert code == 0
    (config,) = configs
    assert config.model == "other/model"
    assert config.dtype == "float32"
    assert config.max_model_len == 512
    assert config.max_num_seqs == 16
    assert config.tensor_parallel_size == 2
    assert config.distributed_executor_backend == "mp"
    assert config.engine_args == {"block_size": 16}
    assert config.log_file == tmp_path / "e.log"
    assert config.num_speculative_tokens == 5
    assert config.draft_sample_method == "probabilistic"
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.7,
        0.9,
        20,
        0.1,
    )
    assert sampling.ignore_eos
    assert sorted({r.sampling.seed for r in engine.requests}) == [5, 6, 7, 8, 9, 10]
    assert {r.max_tokens for r in engine.requests} == {8}


def test_records_are_written(
    specbench: Specbench, engine: FakeEngine, workload: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    assert specbench("run", "-p", "ar", "--workload", workload, "--records", folder, *SMALL) == 0
    requests = pl.read_parquet(folder / "requests.parquet")
    assert requests.filter(~pl.col("warmup")).height == 6
    assert pl.read_parquet(folder / "steps.parquet").height == 7 * 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("compare", "ar", "dsprak"), 2, "unknown policy 'dsprak'.*did you mean 'dspark'"),
        (("compare", "ar"), 2, "at least two policies"),
        (("run", "-p", "ar:3"), 2, "takes no argument"),
        (("run", "-p", "ar", "--workload", "chatt"), 2, "chatt"),
        (("run", "-p", "ar", "--output", "/proc/r.json"), 2, "cannot write in /proc"),
        (("run", "-p", "ar", "--output", "/"), 2, "is a directory"),
        (("run", "-p", "ar", "--records", "/proc/r"), 2, "cannot be used as a directory"),
        (("run", "-p", "ar", "--engine-arg", "x"), 2, "expected key=value"),
        (("run", "-p", "ar", "--costs", "/nowhere.json"), 2, "/nowhere.json"),
        (("run", "-p", "ar", "--temperature", "inf"), 2, "finite"),
        (("run", "-p", "ar", "--top-p", "0"), 2, "leaves no token"),
        (("run", "-p", "dspark", "--model", "other/model"), 2, "--drafter"),
        (("run", "-p", "dspark", "--drafter", "none"), 2, "--drafter"),
        (("run", "-p", "ar", "--rounds", "9", "--num-prompts", "4"), 2, "4 prompts cannot"),
    ],
)
def test_bad_requests_are_refused_before_the_engine_starts(
    specbench: Specbench,
    configs: list[EngineConfig],
    engine: FakeEngine,
    arguments: tuple[str, ...],
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert specbench(*arguments) == code
    printed = capsys.readouterr()
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert re.search(message, lines[0])
    assert printed.out == ""
    assert configs == []


def press_ctrl_c_at(engine: FakeEngine, request_part: str) -> None:
    def on_request(request: EngineRequest) -> None:
        if request_part in request.request_id:
            os.kill(os.getpid(), signal.SIGINT)

    engine.on_request = on_request


def test_ctrl_c_keeps_what_was_measured(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.behaviours = {"ar": FakeBehaviour(chunk_s=0.02)}
    press_ctrl_c_at(engine, "ngram/r1/")
    output = tmp_path / "c.json"
    code = specbench(
        "compare", "ar", "ngram", "--workload", workload, "--output", output, *SMALL,
        "--max-concurrency", "1",
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 130
    result = load_result(output)
    assert not result["complete"]
    assert result["policies"]["ngram"]["ratio_to_baseline"]["value"] is not None
    assert [r["complete"] for r in result["policies"]["ngram"]["rounds"]] == [True, False]
    assert "PARTIAL RESULT" in printed.out
    assert "marked as partial" in printed.err
    assert engine.closed
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_during_the_warmup_writes_nothing(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    press_ctrl_c_at(engine, "ar/warmup/")
    output = tmp_path / "c.json"
    code = specbench("compare", "ar", "ngram", "--workload", workload, "--output", output, *SMALL)
    assert code == 130
    assert not output.exists()
    assert "before anything was measured" in capsys.readouterr().err
    assert engine.closed


def test_engine_death_in_the_middle_keeps_what_was_measured(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.die_after_requests = 10
    output = tmp_path / "c.json"
    code = specbench("compare", "ar", "ngram", "--workload", workload, "--output", output, *SMALL)
    printed = capsys.readouterr()
    assert code == 4
    assert "fake.log" in printed.err
    result = load_result(output)
    assert not result["complete"]
    assert "the engine died" in str(result["stopped_by"])
    assert "PARTIAL RESULT" in printed.out


def test_engine_that_does_not_start(
    specbench: Specbench,
    workload: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def start(config: EngineConfig, needs: Any, on_event: Any) -> FakeEngine:
        raise EngineFailure(f"vLLM did not start (log: {config.log_file})")

    monkeypatch.setattr(benchmark, "start_engine", start)
    output = tmp_path / "c.json"
    code = specbench("run", "-p", "ar", "--workload", workload, "--output", output, *SMALL)
    assert code == 4
    assert str(tmp_path / "cache" / "logs") in capsys.readouterr().err
    assert not output.exists()


def test_prompt_that_does_not_fit(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.max_model_len = 10
    assert specbench("run", "-p", "ar", "--workload", workload, "--no-progress", *SMALL) == 2
    assert "does not fit the engine's context of 10 tokens" in capsys.readouterr().err
    assert engine.requests == []
    assert engine.closed


def test_terminal_tables_fit_80_columns(
    specbench: Specbench,
    engine: FakeEngine,
    workload: Path,
    tmp_path: Path,
) -> None:
    output = tmp_path / "c.json"
    specbench("compare", "dspark:3", "dspark:3", "--workload", workload, "--output", output, *SMALL)
    document = load_result(output)
    wide: Any = document["policies"]["dspark:3#2"]
    wide.update(output_throughput=12345.6, unverified_tokens=10_000_000, verified_tokens=9_000_000)
    wide["ratio_to_baseline"] = {"value": 10.0, "ci95": [9.5, 10.5]}
    wide["e2el_ms"] = {"mean": 1.0, "median": 12345.6, "p90": 1.0, "p99": 123456.7}
    wide["tpot_ms"] = {"mean": 1.0, "median": 123.4, "p90": 1.0, "p99": 1234.5}
    console = Console(width=80, force_terminal=True, color_system=None, record=True)
    tables.print_result(document, console)
    text = console.export_text()
    assert "10.0 [9.5, 10.5]" in text
    assert "12346/123457" in text
    assert "9000000" in text
    assert "10000000" in text
    assert "…" not in text
