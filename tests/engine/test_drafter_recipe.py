"""The whole recipe with the embedded target: re-trained, stopped, resumed and exported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.engines.model_cache import check_provenance
from specbench.training.drafter_config import DrafterConfig

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    # Two engine starts, 30,000 tokens, two minutes of training: a quarter of an hour at most.
    pytest.mark.timeout(1800),
]

OPTIONS = ("--num-tokens", "30000", "--minutes", "2")


def retrain(workdir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbench.cli.app", "drafter", "retrain"]
    return subprocess.run(
        [*command, "--workdir", str(workdir), *OPTIONS],
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_command_trains_a_drafter_that_beats_chance(tmp_path: Path) -> None:
    first = retrain(tmp_path)
    assert first.returncode == 0, first.stderr[-2000:]
    output = tmp_path / "export" / "retrain"
    check_provenance(output)
    config = DrafterConfig.from_json(output / "config.json")
    assert config.draft_vocab_size == 12_288
    found = json.loads((output / "provenance.json").read_text())
    train = found["training"]["data"]["train"]["all"]
    assert train["num_response_tokens"] > 15_000
    assert found["training"]["progress"] == 1.0
    by_temperature = {result["temperature"]: result["sources"] for result in found["results"]}
    assert set(by_temperature) == {0.0, 1.0}
    assert {"workload-chat", "workload-code-edit"} <= set(by_temperature[0.0])
    # A drafter that learnt nothing accepts next to nothing: 1.0 is the bonus token alone.
    assert by_temperature[0.0]["all"]["acceptance_length"] > 1.05
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "responses").glob("*.parquet")}
    state = (tmp_path / "runs" / "retrain" / "log.jsonl").read_text()

    again = retrain(tmp_path)
    assert again.returncode == 0, again.stderr[-2000:]
    # Nothing is generated or trained twice.
    assert files == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "responses").glob("*.parquet")
    }
    assert (tmp_path / "runs" / "retrain" / "log.jsonl").read_text() == state
    assert json.loads((output / "provenance.json").read_text())["files"] == found["files"]
