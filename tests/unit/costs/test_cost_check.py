from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from specbench import costs
from specbench.cli.costs import app
from specbench.costs import CostTable, MeasuredStep, check_table
from specbench.errors import InputError
from specbench.results.parquet import STEP_SCHEMA, STEPS_FILE


def step(policy: str, tokens: int, drafted: int, emitted: int, step_ms: float) -> MeasuredStep:
    return MeasuredStep(policy, 256.0, tokens, drafted, emitted, step_ms)


def write_steps(folder: Path, rows: list[dict[str, object]]) -> None:
    blank = {name: [] if isinstance(kind, pl.List) else 0 for name, kind in STEP_SCHEMA.items()} | {
        "warmup": False,
        "context_tokens": 256.0,
    }
    pl.DataFrame([blank | row for row in rows], schema=STEP_SCHEMA).write_parquet(
        folder / STEPS_FILE
    )


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def test_steps_cost_what_the_table_says(table: CostTable) -> None:
    # Curves at 256 tokens: verify 8 > 16 ms, 20 > 28 ms; draft 0 > 1 ms, 7 > 4 ms.
    steps = [step("ar", 8, 0, 8, 20.0), step("dspark", 20, 7, 12, 30.0), step("ar", 8, 0, 8, 16.0)]
    plain, dspark = check_table(table, steps)
    assert plain == costs.PolicyCheck("ar", 2, 16, 36.0, 34.0)
    assert dspark == costs.PolicyCheck("dspark", 1, 12, 30.0, 32.0)
    assert plain.measured_tokens_per_s == pytest.approx(16 / 0.036)
    assert dspark.predicted_tokens_per_s == pytest.approx(12 / 0.032)


def test_check_prints_measured_and_predicted_ratios(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    costs.write_table(table, path)
    plain = {"policy": "ar", "num_decoding": 8, "num_emitted_tokens": 8, "step_ms": 17.0}
    drafting = {
        "policy": "dspark",
        "num_decoding": 8,
        "num_verified_tokens": 12,
        "num_drafted_tokens": 7,
        "num_emitted_tokens": 16,
        "step_ms": 31.0,
    }
    unknown = plain | {"step_ms": None}
    warmup = plain | {"warmup": True, "step_ms": 500.0}
    write_steps(tmp_path, [plain, drafting, unknown, warmup])
    rows = [line.split() for line in invoke("check", str(path), str(tmp_path)).splitlines()]
    # Measured 16 / 31 over 8 / 17; predicted 16 / 32 over 8 / 17.
    assert rows[-2:] == [
        ["ar", "1", "17.00", "17.00", "470.6", "470.6", "1.000", "1.000", "1.000"],
        ["dspark", "1", "31.00", "32.00", "516.1", "500.0", "1.097", "1.062", "0.969"],
    ]


def test_records_that_cannot_be_checked_are_named(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    costs.write_table(table, path)
    with pytest.raises(InputError, match="no steps"):
        invoke("check", str(path), str(tmp_path))
    (tmp_path / STEPS_FILE).write_text("no parquet")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        invoke("check", str(path), str(tmp_path))
    pl.DataFrame({"policy": ["ar"]}).write_parquet(tmp_path / STEPS_FILE)
    with pytest.raises(InputError, match="lacks accepted_per_request"):
        invoke("check", str(path), str(tmp_path))
    write_steps(tmp_path, [{"policy": "ar", "step_ms": None}])
    with pytest.raises(InputError, match="no step with a known duration"):
        invoke("check", str(path), str(tmp_path))
