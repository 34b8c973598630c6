from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.report import build_document
from specbench.errors import InputError, SpecbenchError, UsageError
from specbench.records import RunSpec, SamplingSpec
from specbench.results import store
from specbench.results.document import RESULT_VERSION, PolicyResult, ResultDocument

SPEC = RunSpec(("ar", "ngram"), "chat", 4, 8, 2, SamplingSpec(), 0, "m", None)


@pytest.fixture
def document() -> ResultDocument:
    return build_document(SPEC, [], {"command": ["specbench"]})


def test_round_trip(tmp_path: Path, document: ResultDocument) -> None:
    path = tmp_path / "result.json"
    store.write_result(path, document)
    assert store.load_result(path) == document
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_nothing_measured_is_null_everywhere(document: ResultDocument) -> None:
    ngram = document["policies"]["ngram"]
    for name in ("output_throughput", "ttft_ms", "acceptance_length", "draft_share", "cycle_share"):
        assert ngram[name] is None  # type: ignore[literal-required]
    assert ngram["ratio_to_baseline"] == {"value": None, "ci95": None}
    assert document["policies"]["ar"]["ratio_to_baseline"] == {"value": 1.0, "ci95": None}


def test_secret_engine_arguments_stay_out() -> None:
    spec = replace(SPEC, engine_args={"hf_token": "geheim", "seed": 1})
    text = json.dumps(build_document(spec, [], {}))
    assert "geheim" not in text
    assert '"seed": 1' in text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cut short"),
        ('{"format": "specbench-result", "vers', "cut short|broken at line 1"),
        ("{\n]", "broken at line 2"),
        ("[]", "is not a specbench result file"),
        ('{"format": "other", "version": 1}', "is not a specbench result file"),
        ('{"format": "specbench-result"}', "no valid format version"),
        ('{"format": "specbench-result", "version": true}', "no valid format version"),
        ('{"format": "specbench-result", "version": 99}', "format version 99.*update specbench"),
        ('{"format": "specbench-result", "version": 1}', "damaged: it lacks baseline, complete"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        store.load_result(path)
    assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path, document: ResultDocument) -> None:
    whole = json.dumps(document)
    path = tmp_path / "x.json"
    for length in range(0, len(whole) - 1, 37):
        path.write_text(whole[:length])
        with pytest.raises(InputError):
            store.load_result(path)


def test_missing_file_binary_file_and_damaged_policy(
    tmp_path: Path, document: ResultDocument
) -> None:
    with pytest.raises(InputError, match=r"cannot read .*: No such file"):
        store.load_result(tmp_path / "absent.json")
    binary = tmp_path / "b.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not text"):
        store.load_result(binary)
    damaged: Any = json.loads(json.dumps(document))
    del damaged["policies"]["ngram"]["tpot_ms"]
    binary.write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"policies\.ngram, is damaged: it lacks tpot_ms"):
        store.load_result(binary)
    damaged["policies"]["ngram"] = 3
    binary.write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=r"policies\.ngram is not an object"):
        store.load_result(binary)


def test_usable_output_paths_pass_and_leave_nothing(
    tmp_path: Path, document: ResultDocument
) -> None:
    new = tmp_path / "new.json"
    store.check_output_path(new)
    assert list(tmp_path.iterdir()) == []
    store.write_result(new, document)
    store.check_output_path(new)
    assert store.load_result(new) == document
    empty = tmp_path / "empty.json"
    empty.touch()
    store.check_output_path(empty)


def test_unusable_output_paths_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    for path, message in (
        (tmp_path, "is a directory"),
        (tmp_path / "no" / "x.json", "there is no directory"),
        (foreign, "not a specbench result; it is left alone"),
        (foreign / "x.json", "there is no directory"),
        (Path("/proc/x.json"), "cannot write in /proc"),
        (Path("/dev/null"), "not a regular file"),
    ):
        with pytest.raises(UsageError, match=message):
            store.check_output_path(path)
    assert foreign.read_text() == "mine"


def test_records_directory_is_made_or_refused(tmp_path: Path) -> None:
    store.check_records_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError, match="cannot be used as a directory"):
        store.check_records_directory(file)
    with pytest.raises(UsageError):
        store.check_records_directory(Path("/proc/records"))


def test_failed_write_leaves_the_old_file(
    tmp_path: Path, document: ResultDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    store.write_result(path, document)
    before = path.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(SpecbenchError, match="No space left on device"):
        store.write_result(path, {**document, "complete": False})
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_documented_fields_are_the_fields() -> None:
    documentation = (Path(__file__).parents[3] / "docs" / "results-format.md").read_text()
    keys = PolicyResult.__required_keys__ | ResultDocument.__required_keys__
    assert [key for key in sorted(keys) if f"`{key}`" not in documentation] == []
    assert f"version {RESULT_VERSION}" in documentation
