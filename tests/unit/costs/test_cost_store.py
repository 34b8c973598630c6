from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import pytest

from specbench import costs
from specbench.costs import CostTable
from specbench.costs.store import MAX_FILE_BYTES, to_json
from specbench.errors import EnvironmentProblem, InputError


def edited(table: CostTable, path: Path, **changes: object) -> Path:
    payload = {**json.loads(to_json(table)), **changes}
    path.write_text(json.dumps(payload))
    return path


def test_round_trip_is_exact(table: CostTable, tmp_path: Path) -> None:
    odd = dataclasses.replace(
        table,
        padding=(8, 32),
        contexts=(
            dataclasses.replace(
                table.contexts[0], verify=costs.CostCurve((1, 3), (0.1 + 0.2, 1 / 3))
            ),
            table.contexts[1],
        ),
    )
    costs.write_table(odd, tmp_path / "t.json")
    assert costs.read_table(tmp_path / "t.json") == odd


def test_remarks_that_json_cannot_hold_become_null(table: CostTable, tmp_path: Path) -> None:
    noted = dataclasses.replace(table, provenance={"_meta": [float("nan"), float("inf"), 1.5]})
    costs.write_table(noted, tmp_path / "t.json")
    assert costs.read_table(tmp_path / "t.json").provenance == {"_meta": [None, None, 1.5]}


def test_save_and_find_by_fingerprint(table: CostTable, cache: Path) -> None:
    assert costs.find_table(table.fingerprint) is None
    path = costs.save_table(table)
    assert path.parent == cache / "cost-tables"
    assert costs.find_table(dict(reversed(table.fingerprint.items()))) == table
    assert costs.find_table({**table.fingerprint, "dtype": "float32"}) is None
    assert costs.cached_tables() == [path]


def test_saving_again_replaces_and_leaves_no_temporary_file(table: CostTable) -> None:
    costs.save_table(table)
    newer = dataclasses.replace(table, provenance={"repeats": 9})
    path = costs.save_table(newer)
    assert costs.find_table(table.fingerprint) == newer
    assert os.listdir(path.parent) == [path.name]


def test_another_engines_table_is_refused_with_every_difference(table: CostTable) -> None:
    costs.save_table(table)
    expected = {"model": "m", "dtype": "float32", "block_size": "16", "threads": "2"}
    costs.table_path(table.fingerprint).rename(costs.table_path(expected))
    with pytest.raises(InputError) as caught:
        costs.find_table(expected)
    message = str(caught.value)
    assert "dtype: this engine 'float32', table 'bfloat16'" in message
    assert "block_size: this engine '16', table not stated" in message
    assert "model" not in message.split("(", 1)[1].split(")")[0]
    assert "specbench costs profile" in message


def test_explain_mismatch_of_equal_fingerprints_is_empty() -> None:
    assert costs.explain_mismatch({"a": "1"}, {"a": "1"}) == ""


def test_imported_tables_are_compared_on_shared_keys_only(table: CostTable) -> None:
    imported = dataclasses.replace(table, fingerprint={"imported_from": "sglang", "dtype": "f"})
    costs.check_fingerprint(imported, {"dtype": "f", "model": "m"}, "t")
    with pytest.raises(InputError, match="dtype: this engine 'g', table 'f'"):
        costs.check_fingerprint(imported, {"dtype": "g", "model": "m"}, "t")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2, this specbench reads version 1"),
        ({"version": None}, "version None"),
        ({"format": "other"}, "not a specbench cost table"),
        ({"contexts": None}, "expected"),
        ({"contexts": [3]}, "expected"),
        ({"contexts": []}, "no context length"),
        ({"contexts": [{"context_tokens": 1}]}, "context 0, draft: expected"),
        ({"contexts": [{"context_tokens": "1"}]}, "context_tokens: expected a number, got '1'"),
        ({"contexts": [{"context_tokens": True}]}, "expected a number, got True"),
        ({"contexts": [{"context_tokens": 1.5}]}, "whole number"),
        ({"fingerprint": None}, "fingerprint"),
        ({"fingerprint": {"threads": 2}}, "fingerprint"),
        ({"padding": "all"}, "padding must be a list"),
        ({"padding": [1, "2"]}, r"padding\[1\]: expected a number"),
    ],
)
def test_edited_files_are_refused(
    table: CostTable, tmp_path: Path, changes: dict, message: str
) -> None:
    path = edited(table, tmp_path / "t.json", **changes)
    with pytest.raises(InputError, match=message) as caught:
        costs.read_table(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "line 1: not valid JSON"),
        (b"[1, 2]", "expected a JSON object, got list"),
        (b"\xff\xfe\x00", "not a text file"),
        (b'{"a": ' * 100_000, "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "beyond any cost table"),
    ],
)
def test_foreign_content_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        costs.read_table(path)


def test_a_truncated_file_is_refused(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(to_json(table)[:-40])
    with pytest.raises(InputError, match="truncated"):
        costs.read_table(path)


def test_non_finite_and_huge_numbers_are_refused(table: CostTable, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(to_json(table).replace("40.0", "NaN"))
    with pytest.raises(InputError, match=r"verify curve, index 2 .*cost nan"):
        costs.read_table(path)
    path.write_text(to_json(table).replace("40.0", "1" + "0" * 400))
    with pytest.raises(InputError, match="number too large"):
        costs.read_table(path)


def test_an_oversized_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with path.open("wb") as handle:
        handle.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match="never over 8 MB"):
        costs.read_table(path)


def test_missing_files_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        costs.read_table(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot read"):
        costs.read_table(tmp_path)


def test_an_invalid_table_is_not_written(table: CostTable, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        costs.write_table(dataclasses.replace(table, contexts=()), tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_full_disk_keeps_the_old_table(table: CostTable, monkeypatch: pytest.MonkeyPatch) -> None:
    path = costs.save_table(table)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match=r"No space left.*SPECBENCH_CACHE") as caught:
        costs.save_table(dataclasses.replace(table, provenance={}))
    assert str(path) in str(caught.value)
    assert costs.find_table(table.fingerprint) == table
    assert os.listdir(path.parent) == [path.name]


def test_an_unusable_cache_directory_is_named(table: CostTable, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem, match="SPECBENCH_CACHE"):
        costs.save_table(table)
