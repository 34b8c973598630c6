"""Which calibration is found, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbench.calibration import shipped
from specbench.calibration.shipped import (
    cached_folder,
    find_calibration,
    missing_calibration,
)
from specbench.calibration.tokenizer import tokenizer_fingerprint
from specbench.errors import InputError, UsageError
from specbench.estimators.acceptance_prior import AcceptancePrior
from specbench.estimators.calibration_store import (
    CALIBRATION_FILE,
    Calibration,
    Provenance,
    load_calibration,
    save_calibration,
)
from specbench.estimators.ngram_table import NgramTable, Stratification
from specbench.estimators.sts_interop import StsTable

# Before a fixture puts another folder in its place.
SHIPPED = shipped.shipped_folder()
SURVIVAL = np.array([[[0, 0], [0, 0], [0.5, 0.25], [0.75, 0.7]]], dtype=np.float32)
PROVENANCE = Provenance("answers", "2026-11-30", (0.0,), 10, 100, 50, 0, {})
BOTH = Calibration(
    model_fingerprint="m" * 64,
    tokenizer_fingerprint="tok",
    drafter_fingerprint="drafter-a",
    ngram=NgramTable(SURVIVAL, 2, 3, Stratification()),
    temperatures=StsTable((1.5, 2.0)),
    provenance=PROVENANCE,
    acceptance=AcceptancePrior((0.6, 0.5), weight=4.0, decay=0.98, resolution=0.25),
)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "shipped")


def find(
    given: Path | None = None,
    *,
    tokenizer: str = "tok",
    drafter: str | None = "drafter-a",
    is_default: bool = True,
) -> shipped.FoundCalibration | None:
    return find_calibration(
        given,
        model_fingerprint=BOTH.model_fingerprint,
        tokenizer_fingerprint=tokenizer,
        drafter_fingerprint=drafter,
        is_default_model=is_default,
    )


def test_nothing_is_found_where_there_is_nothing() -> None:
    assert find() is None
    assert "specbench calibrate" in str(missing_calibration("hybrid"))


def test_given_wins_over_cached_and_cached_over_shipped(tmp_path: Path) -> None:
    for name, folder in (("s", tmp_path / "shipped"), ("c", cached_folder("m" * 64))):
        save_calibration(replace(BOTH, provenance=replace(PROVENANCE, text_source=name)), folder)
    save_calibration(BOTH, tmp_path / "given")
    origins = []
    found = find(tmp_path / "given")
    assert found is not None
    origins.append((found.origin, found.calibration.provenance.text_source))
    found = find()
    assert found is not None
    origins.append((found.origin, found.calibration.provenance.text_source))
    (cached_folder("m" * 64) / CALIBRATION_FILE).unlink()
    found = find()
    assert found is not None
    origins.append((found.origin, found.calibration.provenance.text_source))
    assert origins == [("given", "answers"), ("cache", "c"), ("shipped", "s")]


def test_the_shipped_one_is_for_the_default_model_only(tmp_path: Path) -> None:
    save_calibration(BOTH, tmp_path / "shipped")
    assert find(is_default=False) is None
    assert find() is not None


def test_another_drafter_leaves_the_table(tmp_path: Path) -> None:
    save_calibration(BOTH, tmp_path / "given")
    for drafter in ("drafter-b", None):
        found = find(tmp_path / "given", drafter=drafter)
        assert found is not None
        assert found.has_other_drafter
        assert found.calibration.temperatures is None
        assert found.calibration.acceptance is None
        assert found.calibration.drafter_fingerprint is None
        np.testing.assert_array_equal(found.calibration.ngram.survival, SURVIVAL)  # type: ignore[union-attr]
    same = find(tmp_path / "given")
    assert same is not None
    assert not same.has_other_drafter
    assert same.calibration.temperatures == BOTH.temperatures
    assert same.calibration.acceptance == BOTH.acceptance


def test_a_given_one_without_a_table_must_fit_the_drafter(tmp_path: Path) -> None:
    save_calibration(replace(BOTH, ngram=None), tmp_path / "given")
    with pytest.raises(UsageError, match="drafter"):
        find(tmp_path / "given", drafter="drafter-b")


def test_a_given_one_of_another_tokenizer_is_refused_a_cached_one_passed_over(
    tmp_path: Path,
) -> None:
    save_calibration(BOTH, tmp_path / "given")
    save_calibration(BOTH, cached_folder("m" * 64))
    with pytest.raises(UsageError, match="tokenizer: calibration 'tok', engine 'other'"):
        find(tmp_path / "given", tokenizer="other")
    assert find(tokenizer="other") is None


def test_damage_is_reported_wherever_it_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        find(tmp_path / "nowhere")
    save_calibration(BOTH, cached_folder("m" * 64))
    (cached_folder("m" * 64) / CALIBRATION_FILE).write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"calibration\.json"):
        find()


def test_what_is_shipped_is_whole_and_calibrated() -> None:
    calibration = load_calibration(SHIPPED)
    assert calibration.ngram is not None
    assert (calibration.ngram.min_n, calibration.ngram.max_n) == (2, 16)
    assert calibration.ngram.num_positions == 16
    crossed = calibration.provenance.reliability["ngram"][-1]
    after = crossed["sources"]["all"]["survival"]["after"]
    assert len(after["ece"]) == 16
    assert max(after["ece"]) <= 0.03


def test_a_tokenizer_is_named_by_its_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert tokenizer_fingerprint(str(tmp_path / "a")) == tokenizer_fingerprint(str(tmp_path / "b"))
    (tmp_path / "b" / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    assert tokenizer_fingerprint(str(tmp_path / "a")) != tokenizer_fingerprint(str(tmp_path / "b"))
    assert len(tokenizer_fingerprint("owner/name")) == 64
    assert tokenizer_fingerprint("owner/name") != tokenizer_fingerprint("owner/other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no tokenizer"):
        tokenizer_fingerprint(str(tmp_path / "empty"))
