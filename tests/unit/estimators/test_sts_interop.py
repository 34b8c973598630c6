"""Files as the other engines write them, and what they must be able to read back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.estimators.sts_interop import (
    StsFormat,
    StsTable,
    read_temperatures,
    temperatures_from_payload,
    temperatures_to_payload,
    write_temperatures,
)

# Golden files: the fields of each engine's own calibration class, defaults left out.
SGLANG = {
    "temperatures": [1.5, 1.25, 2.0],
    "dataset": "sharegpt",
    "num_samples": 4096,
    "ece_before": [0.08, 0.07, 0.05],
    "ece_after": [0.01, 0.01, 0.02],
}
TENSORRT = {"sts_temperatures": SGLANG["temperatures"], **SGLANG}
TABLE = StsTable((1.5, 1.25, 2.0), (0.08, 0.07, 0.05), (0.01, 0.01, 0.02), "sharegpt", 4096)
every_format = pytest.mark.parametrize("target", list(StsFormat))

units = st.floats(0, 1)
tables = st.integers(1, 8).flatmap(
    lambda n: st.builds(
        StsTable,
        temperatures=st.tuples(*[st.floats(0.01, 100)] * n),
        ece_before=st.just(()) | st.tuples(*[units] * n),
        ece_after=st.just(()) | st.tuples(*[units] * n),
        dataset=st.text(max_size=10),
        num_samples=st.integers(0, 10**9),
    )
)


@pytest.mark.parametrize(
    "payload",
    [
        SGLANG,
        TENSORRT,
        {key: value for key, value in TENSORRT.items() if key != "temperatures"},
        {**TENSORRT, "max_draft_len": 3},
    ],
)
def test_golden_files_are_read(tmp_path: Path, payload: dict) -> None:
    path = tmp_path / "sts.json"
    path.write_text(json.dumps(payload))
    assert read_temperatures(path) == TABLE


def test_golden_files_are_written(tmp_path: Path) -> None:
    for target, expected in ((StsFormat.SGLANG, SGLANG), (StsFormat.TENSORRT_LLM, TENSORRT)):
        path = tmp_path / f"{target}.json"
        write_temperatures(path, TABLE, target)
        assert json.loads(path.read_text()) == expected


def test_bare_temperatures_are_enough() -> None:
    assert temperatures_from_payload({"temperatures": [2]}, "f") == StsTable((2.0,))


@every_format
@given(table=tables)
def test_round_trip_is_exact(target: StsFormat, table: StsTable) -> None:
    payload = json.loads(json.dumps(temperatures_to_payload(table, target)))
    assert temperatures_from_payload(payload, "f") == table


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"hello": 1}, r"f: not a temperature file \(keys: hello; expected"),
        ({}, "keys: none"),
        ({"temperatures": []}, "f: the list of temperatures is empty"),
        ({"temperatures": 1.0}, "f, temperatures must be a list of numbers"),
        ({"temperatures": [1.0, 0.0]}, r"f, temperatures\[1\]: 0.0 is not above 0"),
        ({"temperatures": [-1.0]}, r"temperatures\[0\]: -1.0 is not above 0"),
        ({"temperatures": [float("nan")]}, r"temperatures\[0\]: nan is not a finite number"),
        ({"temperatures": [True]}, r"temperatures\[0\]: expected a number, got True"),
        ({"temperatures": ["1"]}, r"temperatures\[0\]: expected a number, got '1'"),
        ({"temperatures": [1.0], "sts_temperatures": [2.0]}, "differ; keep the right one"),
        ({"temperatures": [1.0], "ece_after": [0.1, 0.1]}, "1 temperatures but 2 in ece_after"),
        ({"temperatures": [1.0], "ece_before": [2.0]}, r"ece_before\[0\]: 2.0 is not within"),
        ({"temperatures": [1.0], "max_draft_len": 7}, "max_draft_len 7, but 1 temperatures"),
        ({"temperatures": [1.0], "num_samples": -1}, "num_samples -1 is negative"),
        ({"temperatures": [1.0], "num_samples": 0.5}, "num_samples: expected a whole number"),
    ],
)
def test_bad_files_are_refused_in_one_line(payload: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as problem:
        temperatures_from_payload(payload, "f")
    assert "\n" not in str(problem.value)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    with pytest.raises(InputError, match=r"cannot read .*sts\.json: No such file"):
        read_temperatures(path)
    path.write_text('{"temperatures": [1.0')
    with pytest.raises(InputError, match=r"sts\.json, line 1: not valid JSON"):
        read_temperatures(path)
    path.write_text("[]")
    with pytest.raises(InputError, match="expected a JSON object, got list"):
        read_temperatures(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        read_temperatures(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"sts\.json"):
        read_temperatures(path)
    with pytest.raises(InputError, match="cannot read"):
        read_temperatures(tmp_path)


def test_a_bad_table_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "sts.json"
    with pytest.raises(InputError, match="empty"):
        write_temperatures(path, StsTable(()), StsFormat.SGLANG)
    assert not path.exists()
