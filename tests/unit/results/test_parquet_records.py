from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import polars as pl
import pytest

from specbench.errors import SpecbenchError
from specbench.records import RequestRecord, RoundRecord, StepRecord
from specbench.results import parquet

REQUEST = RequestRecord(
    "ar/r0/a/0", "a", 0, "ar", 0, False, 7, 0.5, 1.0, 2.0, (1.5, 2.0), (1, 2), (4, 5, 6), "stop"
)
STEP = StepRecord(
    2,
    2,
    0,
    3,
    1,
    3,
    4,
    1,
    None,
    6.0,
    2.0,
    0.5,
    99.5,
    (1,),
    (3,),
    (2, 2),
    ((0.5, 0.25), (0.5, 0.25)),
    ((0.75, 0.5), (0.25, 0.0)),
)
ROUNDS = [
    RoundRecord("ar", 0, True, 0.0, 1.0, (), ()),
    RoundRecord("ar", 0, False, 1.0, 2.0, (REQUEST, REQUEST), (STEP,)),
]


def as_lists(value: object) -> object:
    return [as_lists(item) for item in value] if isinstance(value, tuple) else value


def test_every_field_survives(tmp_path: Path) -> None:
    parquet.write_records(tmp_path, ROUNDS)
    requests = pl.read_parquet(tmp_path / parquet.REQUESTS_FILE)
    steps = pl.read_parquet(tmp_path / parquet.STEPS_FILE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["requests.parquet", "steps.parquet"]
    assert requests.height == 2
    row = requests.row(0, named=True)
    for item in fields(RequestRecord):
        value = getattr(REQUEST, item.name)
        assert row[item.name] == (list(value) if isinstance(value, tuple) else value)
    step = steps.row(0, named=True)
    assert (step["policy"], step["round_index"], step["step_index"]) == ("ar", 0, 0)
    for item in fields(StepRecord):
        assert step[item.name] == as_lists(getattr(STEP, item.name))


def test_schema_holds_for_no_rows(tmp_path: Path) -> None:
    parquet.write_records(tmp_path, [])
    empty = pl.read_parquet(tmp_path / parquet.STEPS_FILE)
    assert empty.height == 0
    assert set(empty.columns) == set(parquet.STEP_SCHEMA)
    assert set(parquet.REQUEST_SCHEMA) == {item.name for item in fields(RequestRecord)}


def test_vanished_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpecbenchError, match="cannot write the records"):
        parquet.write_records(tmp_path / "gone", ROUNDS)
