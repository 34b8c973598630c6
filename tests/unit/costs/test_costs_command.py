from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from specbench import costs
from specbench.cli.costs import app
from specbench.costs import CostTable
from specbench.errors import EnvironmentProblem, InputError, SpecbenchError, UsageError
from specbench.profiling import CONTEXT_TOKENS

SIMPLE = {"sample_batch_tokens": [1, 8, 64], "sample_steps_per_sec": [100.0, 80.0, 25.0]}


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_show_prints_every_size_with_its_slope(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    costs.write_table(table, path)
    output = invoke("show", str(path))
    assert "dtype: bfloat16" in output
    assert "context 256 tokens" in output
    rows = [line.split() for line in output.splitlines()]
    assert ["verify", "8", "16.000", "1.0000"] in rows
    assert ["draft", "28", "10.000", f"{6 / 21:.4f}"] in rows
    assert "\x1b" not in output  # plain when piped


def test_show_without_a_path_shows_the_cache(table: CostTable, cache: Path) -> None:
    assert f"no cost tables in {cache}" in invoke("show")
    path = costs.save_table(table)
    assert str(path) in invoke("show").replace("\n", "")


def test_show_names_damaged_tables_and_still_shows_the_others(
    table: CostTable, cache: Path
) -> None:
    good = costs.save_table(table)
    good.with_name("0-damaged.json").write_text("{")
    result = CliRunner().invoke(app, ["show"])
    assert isinstance(result.exception, InputError)
    assert "1 damaged table" in str(result.exception)
    assert "0-damaged.json" in result.output
    assert "context 1024 tokens" in result.output
    with pytest.raises(InputError, match="0-damaged"):
        invoke("show", str(good.with_name("0-damaged.json")))


def test_path_prints_the_folder(cache: Path) -> None:
    assert invoke("path").strip() == str(cache / "cost-tables")


def test_import_and_export(table: CostTable, tmp_path: Path) -> None:
    foreign, ours, donor = (tmp_path / name for name in ("f.json", "o.json", "d.json"))
    foreign.write_text(json.dumps(SIMPLE))
    donor.write_text(json.dumps({"tokens": [0, 7], "ms": [0.1, 2.0]}))
    options = ("--draft-from", str(donor), "--context", "512")
    assert "written:" in invoke("import", str(foreign), "--output", str(ours), *options)
    assert costs.read_table(ours).contexts[0].context_tokens == 512
    invoke("import", str(foreign), *options)
    assert [costs.read_table(path) for path in costs.cached_tables()] == [costs.read_table(ours)]

    exported = tmp_path / "e.json"
    invoke("export", str(ours), "--format", "sglang-simple", "--output", str(exported))
    payload = json.loads(exported.read_text())
    assert payload["sample_steps_per_sec"] == pytest.approx(SIMPLE["sample_steps_per_sec"])


def test_imports_do_not_replace_each_other_in_the_cache(tmp_path: Path) -> None:
    donor = tmp_path / "d.json"
    donor.write_text(json.dumps({"tokens": [0, 7], "ms": [0.1, 2.0]}))
    for number, last_rate in enumerate((25.0, 20.0)):
        foreign = tmp_path / f"f{number}.json"
        foreign.write_text(json.dumps({**SIMPLE, "sample_steps_per_sec": [100.0, 80.0, last_rate]}))
        invoke("import", str(foreign), "--draft-from", str(donor))
    assert len(costs.cached_tables()) == 2


def test_an_import_can_take_the_place_of_a_profiled_table(table: CostTable, tmp_path: Path) -> None:
    profiled = costs.save_table(table)
    foreign, donor = tmp_path / "f.json", tmp_path / "d.json"
    foreign.write_text(json.dumps(SIMPLE))
    donor.write_text(json.dumps({"tokens": [0, 7], "ms": [0.1, 2.0]}))
    invoke("import", str(foreign), "--draft-from", str(donor), "--fingerprint-from", str(profiled))
    found = costs.find_table(table.fingerprint)
    assert found is not None
    assert found.contexts[0].verify.tokens == (1, 8, 64)
    assert found.provenance["source"] == "f.json"


def test_outputs_replace_cost_tables_and_nothing_else(table: CostTable, tmp_path: Path) -> None:
    ours, diary = tmp_path / "o.json", tmp_path / "diary.txt"
    costs.write_table(table, ours)
    diary.write_text("dear diary")
    options = ("--format", "sglang-simple", "--context", "256", "--output")
    with pytest.raises(UsageError, match="the file that is read"):
        invoke("export", str(ours), *options, str(ours))
    with pytest.raises(UsageError, match="not a cost table; it is left alone"):
        invoke("export", str(ours), *options, str(diary))
    with pytest.raises(UsageError, match="is a directory"):
        invoke("import", str(ours), "--output", str(tmp_path))
    assert diary.read_text() == "dear diary"
    assert costs.read_table(ours) == table
    for _ in range(2):  # the second time replaces a table
        invoke("export", str(ours), *options, str(tmp_path / "e.json"))


def test_import_without_a_draft_curve_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps(SIMPLE))
    with pytest.raises(UsageError, match="--draft-from"):
        invoke("import", str(tmp_path / "f.json"))


class FakeEngine:
    closed = False

    async def close(self) -> None:
        self.closed = True


@dataclass
class FakeProfiler:
    """Stands in for the engine and the profiler; keeps what it was asked for."""

    table: CostTable
    failure: Exception | None = None
    engine: FakeEngine = field(default_factory=FakeEngine)
    config: Any = None
    contexts: tuple[int, ...] | None = None

    async def start_engine(self, config: Any) -> FakeEngine:
        self.config = config
        return self.engine

    async def profile_costs(
        self, engine: FakeEngine, *, contexts: tuple[int, ...], progress: Any
    ) -> CostTable:
        assert engine is self.engine
        progress("1 requests at 256 tokens", 0, 1)
        self.contexts = contexts
        if self.failure is not None:
            raise self.failure
        return self.table


@pytest.fixture
def profiler(table: CostTable, monkeypatch: pytest.MonkeyPatch) -> FakeProfiler:
    fake = FakeProfiler(table)
    monkeypatch.setattr("specbench.engines.vllm.start_engine", fake.start_engine)
    monkeypatch.setattr("specbench.profiling.profile_costs", fake.profile_costs)
    return fake


def test_profile_hands_over_its_options_and_keeps_the_table(
    table: CostTable, profiler: FakeProfiler
) -> None:
    contexts = ("--context", "1024", "--context", "256", "--context", "256")
    engine = ("--model", "m", "--drafter", "d", "--max-concurrency", "8", "--dtype", "float32")
    output = invoke("profile", *engine, *contexts, "--engine-arg", "block_size=16")
    assert profiler.contexts == (256, 1024)
    config = profiler.config
    assert (config.model, config.drafter, config.max_num_seqs) == ("m", "d", 16)
    assert (config.dtype, config.engine_args) == ("float32", {"block_size": 16})
    assert costs.find_table(table.fingerprint) == table
    assert "context 256 tokens" in output
    assert profiler.engine.closed


def test_profile_uses_the_profilers_own_contexts_by_default(profiler: FakeProfiler) -> None:
    invoke("profile")
    assert profiler.contexts == CONTEXT_TOKENS


def test_profile_writes_where_it_is_told(
    table: CostTable, profiler: FakeProfiler, tmp_path: Path
) -> None:
    invoke("profile", "--output", str(tmp_path / "t.json"))
    assert costs.read_table(tmp_path / "t.json") == table
    assert costs.cached_tables() == []


def test_a_failed_profile_stops_the_engine_and_keeps_nothing(profiler: FakeProfiler) -> None:
    profiler.failure = InputError("profile, verify curve: flat")
    with pytest.raises(InputError, match="flat"):
        invoke("profile")
    assert profiler.engine.closed
    assert costs.cached_tables() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine-arg", "block_size"), "key=value"),
        (("--drafter", "none"), "needs a drafter"),
        (("--model", "m"), "needs a drafter"),
        (("--output", "/nonexistent/t.json"), "nonexistent"),
    ],
)
def test_what_cannot_work_is_refused_before_the_engine_starts(
    profiler: FakeProfiler, arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecbenchError, match=message):
        invoke("profile", *arguments)
    assert profiler.config is None


def test_an_unusable_cache_is_found_before_the_engine_starts(
    profiler: FakeProfiler, cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem, match="SPECBENCH_CACHE"):
        invoke("profile")
    assert profiler.config is None


def test_the_command_imports_no_engine() -> None:
    script = (
        "import sys, specbench.cli.costs; "
        "print([name for name in ('torch', 'vllm', 'sklearn') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
