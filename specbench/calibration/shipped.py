"""Which calibration an engine uses: the one given, else the cached one, else the shipped one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from specbench.cache import cache_dir
from specbench.errors import UsageError
from specbench.estimators.calibration_store import (
    CALIBRATION_FILE,
    Calibration,
    EngineFacts,
    check_matches,
    load_calibration,
)

SHIPPED_CALIBRATION = "smollm2-135m-ngram"
# Names a folder; 64 bits keep a user's models apart, and the whole digest is checked inside.
_NAME_DIGITS = 16

Origin = Literal["given", "cache", "shipped"]


@dataclass(frozen=True)
class FoundCalibration:
    """A calibration that fits the engine.

    Attributes:
        calibration: ``temperatures`` and ``acceptance`` are left out where they are
            another drafter's.
        folder: where it was read.
        origin: given by the user, from the cache, or shipped with the package.
        has_other_drafter: it had some, of another drafter than the engine's; they
            were left out, and the caller should say so.
    """

    calibration: Calibration
    folder: Path
    origin: Origin
    has_other_drafter: bool


def cached_folder(model_fingerprint: str) -> Path:
    """Where ``specbench calibrate`` puts a model's calibration unless told otherwise."""
    return cache_dir() / "calibrations" / model_fingerprint[:_NAME_DIGITS]


def shipped_folder() -> Path:
    """The calibration of the embedded default model."""
    return Path(str(files("specbench"))) / "calibrations" / SHIPPED_CALIBRATION


def find_calibration(
    given: Path | None,
    *,
    model_fingerprint: str,
    tokenizer_fingerprint: str,
    drafter_fingerprint: str | None,
    is_default_model: bool,
) -> FoundCalibration | None:
    """The calibration to use with these models; None if there is none.

    A calibration whose drafter alone differs still has its n-gram table. One that was given
    must fit; one in the cache or the package that does not is passed over. Suffix lengths
    and chain lengths are not compared: an engine takes them from the table, or checks its
    own with ``check_matches``.

    Args:
        given: folder the user named.
        model_fingerprint, tokenizer_fingerprint: of the served target.
        drafter_fingerprint: of the model drafter; None without one.
        is_default_model: the embedded default is served.

    Raises:
        InputError: the folder given, or the one in the cache, is damaged.
        UsageError: the one given was fitted for other models; names what differs.
    """
    candidates: list[tuple[Origin, Path]] = []
    if given is not None:
        candidates.append(("given", given))
    else:
        candidates.append(("cache", cached_folder(model_fingerprint)))
        if is_default_model:
            candidates.append(("shipped", shipped_folder()))
    for origin, folder in candidates:
        if origin != "given" and not (folder / CALIBRATION_FILE).exists():
            continue
        try:
            return _fitting(
                folder, origin, model_fingerprint, tokenizer_fingerprint, drafter_fingerprint
            )
        except UsageError:
            if origin == "given":
                raise
    return None


def missing_calibration(policy: str) -> UsageError:
    """What to raise where ``policy`` needs a calibration and none was found."""
    return UsageError(
        f"policy '{policy}' needs a calibration for this model; run 'specbench calibrate'"
    )


def _fitting(
    folder: Path, origin: Origin, model: str, tokenizer: str, drafter: str | None
) -> FoundCalibration:
    """Load and check one candidate; raises UsageError if it belongs to other models."""
    calibration = load_calibration(folder)
    is_other = calibration.temperatures is not None and calibration.drafter_fingerprint != drafter
    if is_other and calibration.ngram is not None:
        calibration = replace(
            calibration, temperatures=None, drafter_fingerprint=None, acceptance=None
        )
    table = calibration.ngram
    facts = EngineFacts(
        model_fingerprint=model,
        tokenizer_fingerprint=tokenizer,
        drafter_fingerprint=drafter,
        min_n=table.min_n if table else 0,
        max_n=table.max_n if table else 0,
        num_ngram_tokens=0,
        num_draft_tokens=0,
    )
    check_matches(calibration, facts, str(folder))
    return FoundCalibration(calibration, folder, origin, has_other_drafter=is_other)
