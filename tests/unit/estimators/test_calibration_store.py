from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbench.errors import InputError, UsageError
from specbench.estimators.acceptance_prior import AcceptancePrior
from specbench.estimators.calibration_store import (
    CALIBRATION_FILE,
    PROVENANCE_FILE,
    Calibration,
    EngineFacts,
    Provenance,
    check_matches,
    load_calibration,
    save_calibration,
)
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_table import NgramTable, Stratification
from specbench.estimators.sts_interop import StsTable

PROVENANCE = Provenance(
    text_source="answers of the target",
    date="2026-11-30",
    temperatures=(0.0, 1.0),
    num_prompts=100,
    num_response_tokens=12_345,
    num_chains=4_321,
    seed=7,
    versions={"specbench": "0.1.0"},
    reliability={"chat": {"ece": 0.01}},
)
SURVIVAL = np.array([[[0, 0], [0, 0], [0.5, 0.25], [0.75, 0.7]]], dtype=np.float32)
CALIBRATION = Calibration(
    model_fingerprint="model-a",
    tokenizer_fingerprint="tokenizer-a",
    drafter_fingerprint="drafter-a",
    ngram=NgramTable(SURVIVAL, min_n=2, max_n=3, stratification=Stratification()),
    temperatures=StsTable((1.5, 2.0), (0.1, 0.1), (0.01, 0.02), "chat", 99),
    provenance=PROVENANCE,
    acceptance=AcceptancePrior((0.6, 0.5), weight=4.0, decay=0.98, resolution=0.25),
)
WITHOUT_DRAFTER = {"temperatures": None, "drafter_fingerprint": None, "acceptance": None}
ENGINE = EngineFacts("model-a", "tokenizer-a", "drafter-a", 2, 3, 2, 2)

# The file as version 1 writes it; a change here is a change of format.
GOLDEN = """{
  "format": "specbench-calibration",
  "version": 1,
  "model_fingerprint": "model-a",
  "tokenizer_fingerprint": "tokenizer-a",
  "drafter_fingerprint": null,
  "temperatures": null,
  "ngram": {
    "min_n": 2,
    "max_n": 3,
    "features": [],
    "recent_edges": [
      0.5
    ],
    "survival": [
[
[0.0, 0.0],
[0.0, 0.0],
[0.5, 0.25],
[0.75, 0.699999988]
]
]
  }
}
"""


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Change a calibration and keep its provenance in step, as a stubborn user would."""
    import hashlib

    payload = json.loads((path / CALIBRATION_FILE).read_text())
    change(payload)
    content = json.dumps(payload)
    (path / CALIBRATION_FILE).write_text(content)
    provenance = json.loads((path / PROVENANCE_FILE).read_text())
    provenance["calibration_sha256"] = hashlib.sha256(content.encode()).hexdigest()
    (path / PROVENANCE_FILE).write_text(json.dumps(provenance))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "calibration"
    save_calibration(CALIBRATION, folder)
    return folder


def assert_same(found: Calibration, expected: Calibration) -> None:
    assert (found.ngram is None) == (expected.ngram is None)
    if found.ngram is not None and expected.ngram is not None:
        np.testing.assert_array_equal(found.ngram.survival, expected.ngram.survival)
        assert found.ngram.survival.dtype == np.float32
        assert found.ngram.stratification == expected.ngram.stratification
        assert (found.ngram.min_n, found.ngram.max_n) == (
            expected.ngram.min_n,
            expected.ngram.max_n,
        )
    assert replace(found, ngram=None) == replace(expected, ngram=None)


def test_round_trip(saved: Path) -> None:
    assert_same(load_calibration(saved), CALIBRATION)


@pytest.mark.parametrize(
    "change",
    [{"ngram": None}, WITHOUT_DRAFTER, {"acceptance": None}],
    ids=["drafter only", "n-gram only", "no acceptance, as of earlier versions"],
)
def test_either_part_alone_is_a_calibration(tmp_path: Path, change: dict) -> None:
    calibration = replace(CALIBRATION, **change)
    save_calibration(calibration, tmp_path / "new" / "folder")
    assert_same(load_calibration(tmp_path / "new" / "folder"), calibration)


def test_the_format_is_the_golden_one(tmp_path: Path) -> None:
    save_calibration(replace(CALIBRATION, **WITHOUT_DRAFTER), tmp_path)
    assert (tmp_path / CALIBRATION_FILE).read_text() == GOLDEN


def test_a_fitted_table_survives_to_the_last_bit(
    tmp_path: Path, draw: Callable[..., NgramChains]
) -> None:
    fitted = NgramAcceptance(min_n=2, max_n=8, num_positions=5).fit(draw(3_000, seed=0))
    save_calibration(replace(CALIBRATION, ngram=fitted.table()), tmp_path)
    loaded = load_calibration(tmp_path).ngram
    assert loaded is not None
    np.testing.assert_array_equal(loaded.survival, fitted.survival_table_)
    assert loaded.stratification == fitted.stratification_


def test_saving_again_replaces_both_files(saved: Path) -> None:
    newer = replace(CALIBRATION, model_fingerprint="model-b")
    save_calibration(newer, saved)
    assert_same(load_calibration(saved), newer)
    assert sorted(path.name for path in saved.iterdir()) == [CALIBRATION_FILE, PROVENANCE_FILE]


def test_files_of_two_calibrations_are_told_apart(saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_calibration(replace(CALIBRATION, model_fingerprint="model-b"), other)
    (saved / CALIBRATION_FILE).write_bytes((other / CALIBRATION_FILE).read_bytes())
    with pytest.raises(InputError, match=r"describes another calibration\.json"):
        load_calibration(saved)


def test_damaged_foreign_and_newer_files_are_refused(saved: Path) -> None:
    path = saved / CALIBRATION_FILE
    content = path.read_text()
    path.write_text(content[: len(content) // 2])
    with pytest.raises(InputError, match=r"not valid JSON.*truncated"):
        load_calibration(saved)
    path.write_text('{"format": "other"}')
    with pytest.raises(InputError, match="not a specbench calibration; give a folder"):
        load_calibration(saved)
    path.write_text('{"format": "specbench-calibration", "version": 2}')
    with pytest.raises(InputError, match="version 2, this specbench reads version 1; update"):
        load_calibration(saved)
    path.write_text('{"format": "specbench-calibration", "version": "x"}')
    with pytest.raises(InputError, match=r"version 'x'.*calibrate again"):
        load_calibration(saved)
    path.write_text(content)
    (saved / PROVENANCE_FILE).unlink()
    with pytest.raises(InputError, match=r"cannot read .*provenance.json: No such file"):
        load_calibration(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("model_fingerprint"), "model_fingerprint: expected text, got None"),
        (lambda p: p.update(drafter_fingerprint=3), "drafter_fingerprint: expected text, got 3"),
        (lambda p: p.update(ngram=None, temperatures=None, drafter_fingerprint=None), "neither"),
        (lambda p: p.update(drafter_fingerprint=None), "give both or neither"),
        (lambda p: p["temperatures"].update(temperatures=[0.0, 1.0]), "not above 0"),
        (lambda p: p.update(temperatures=None, drafter_fingerprint=None), "acceptance belongs to"),
        (lambda p: p.update(acceptance=[1.0]), "acceptance: expected an object, got list"),
        (lambda p: p["acceptance"].pop("weight"), "acceptance, weight: expected a number"),
        (lambda p: p["acceptance"].update(conditional=[0.5, 2.0]), r"conditional\[1\]: 2.0 is not"),
        (lambda p: p["acceptance"].update(decay="x"), "acceptance, decay: expected a number"),
        (lambda p: p.update(temperatures=[1.0]), "temperatures: expected an object, got list"),
        (lambda p: p["ngram"].update(features=["colour"]), "ngram: strata features colour"),
        (lambda p: p["ngram"].update(features="agreement"), "features must be a list of names"),
        (lambda p: p["ngram"].update(min_n=0), "1 <= min_n <= max_n"),
        (lambda p: p["ngram"].update(max_n=4), "shape \\[1, 4, 2\\], expected \\[1 strata, 5"),
        (lambda p: p["ngram"].update(min_n=1.5), "min_n: expected a whole number"),
        (lambda p: p["ngram"].update(survival=[[[0], [0, 1]]]), "all rows of one length"),
        (lambda p: p["ngram"].update(survival={}), "survival"),
        (lambda p: p["ngram"].pop("survival"), "survival"),
        (lambda p: p["ngram"]["survival"][0].__setitem__(3, [0.9, 0.95]), "exceeds the position"),
        (lambda p: p["ngram"]["survival"][0].__setitem__(3, [0.4, 0.1]), "below that of a shorter"),
        (lambda p: p["ngram"]["survival"][0].__setitem__(3, [1.4, 0.9]), "not within 0 to 1"),
        (lambda p: p["ngram"]["survival"][0].__setitem__(1, [0.1, 0.1]), "must be 0"),
        (lambda p: p["ngram"]["survival"][0].__setitem__(2, [None, None]), "survival"),
    ],
)
def test_wrong_contents_are_named_in_one_line(
    saved: Path, change: Callable[[dict], object], message: str
) -> None:
    edit(saved, change)
    with pytest.raises(InputError, match=message) as problem:
        load_calibration(saved)
    assert CALIBRATION_FILE in str(problem.value)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", None, "seed: expected a number"),
        ("text_source", "", "text_source: expected text"),
        ("versions", {"torch": 2}, "versions, torch: expected text, got 2"),
        ("reliability", [], "reliability: expected an object"),
    ],
)
def test_wrong_provenance_is_named(saved: Path, key: str, value: object, message: str) -> None:
    path = saved / PROVENANCE_FILE
    payload = json.loads(path.read_text())
    path.write_text(json.dumps({**payload, key: value}))
    with pytest.raises(InputError, match=message):
        load_calibration(saved)
    del payload[key]
    path.write_text(json.dumps(payload))
    with pytest.raises(InputError, match=f"{key} missing; calibrate again"):
        load_calibration(saved)


def test_nothing_is_written_when_it_is_not_valid(tmp_path: Path) -> None:
    bad = replace(CALIBRATION, provenance=replace(PROVENANCE, remarks={"x": float("nan")}))
    with pytest.raises(InputError, match="does not fit into JSON"):
        save_calibration(bad, tmp_path)
    assert CALIBRATION.ngram is not None
    falling = replace(CALIBRATION.ngram, survival=1.0 - SURVIVAL)
    with pytest.raises(InputError, match="must be 0"):
        save_calibration(replace(CALIBRATION, ngram=falling), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_matching_engine_is_accepted() -> None:
    check_matches(CALIBRATION, ENGINE, "c")
    # Shorter chains and blocks than calibrated for are covered by the table's beginning.
    check_matches(CALIBRATION, replace(ENGINE, num_ngram_tokens=1, num_draft_tokens=1), "c")
    ngram_only = replace(CALIBRATION, **WITHOUT_DRAFTER)
    check_matches(ngram_only, replace(ENGINE, drafter_fingerprint="any", num_draft_tokens=9), "c")
    temperatures_only = replace(CALIBRATION, ngram=None)
    check_matches(temperatures_only, replace(ENGINE, min_n=1, max_n=9, num_ngram_tokens=99), "c")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_fingerprint": "b"}, "model: calibration 'model-a', engine 'b'"),
        ({"tokenizer_fingerprint": "b"}, "tokenizer: calibration 'tokenizer-a', engine 'b'"),
        ({"drafter_fingerprint": None}, "drafter: calibration 'drafter-a', engine None"),
        ({"min_n": 3}, "min_n: calibration 2, engine 3"),
        ({"max_n": 5}, "max_n: calibration 3, engine 5"),
        ({"num_ngram_tokens": 16}, "n-gram tokens: calibration 2, engine 16"),
        ({"num_draft_tokens": 7}, "draft tokens: calibration 2, engine 7"),
    ],
)
def test_every_difference_is_named(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=f"c: fitted for another engine \\({message}\\); run"):
        check_matches(CALIBRATION, replace(ENGINE, **change), "c")


def test_all_differences_are_in_one_line() -> None:
    engine = EngineFacts("b", "b", "b", 1, 9, 9, 9)
    with pytest.raises(UsageError) as problem:
        check_matches(CALIBRATION, engine, "c")
    assert str(problem.value).count("calibration ") == 7
    assert "\n" not in str(problem.value)
