"""Calibration artefacts: a folder of two files, bound to the models they were fitted on.

``calibration.json`` holds what the engine reads: fingerprints, the n-gram table, the
drafter's temperatures and its usual acceptance. ``provenance.json`` holds how it came about
and how well it does, and the SHA-256 of the first, so that the two cannot be mixed up.

History of the file format (``VERSION``):

1  first version. ``acceptance`` came later; files without it are read as having none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.cache import write_text_atomically
from specbench.errors import InputError, UsageError
from specbench.estimators.acceptance_prior import AcceptancePrior, validate_prior
from specbench.estimators.json_fields import (
    mapping,
    number,
    numbers,
    read_json_object,
    text,
    whole,
)
from specbench.estimators.ngram_table import NgramTable, Stratification, validate_table
from specbench.estimators.sts_interop import (
    StsFormat,
    StsTable,
    temperatures_from_payload,
    temperatures_to_payload,
    validate_temperatures,
)

FORMAT = "specbench-calibration"
VERSION = 1
CALIBRATION_FILE = "calibration.json"
PROVENANCE_FILE = "provenance.json"

_ROWS_KEY = '"survival": '
# Nine significant digits bring every float32 back exactly (IEEE 754: ceil(1 + 24 log10 2)).
_FLOAT32_DIGITS = 9


@dataclass(frozen=True)
class Provenance:
    """How a calibration came about.

    Attributes:
        text_source: which text the target wrote it on.
        date: day of the fit, ISO 8601.
        temperatures: sampling temperatures of the text.
        num_prompts, num_response_tokens, num_chains: size of the data.
        seed: of the generation and the splits.
        versions: package name to version.
        reliability: scores before and after on held-out prompts, as JSON.
        remarks: anything else worth keeping, as JSON.
    """

    text_source: str
    date: str
    temperatures: tuple[float, ...]
    num_prompts: int
    num_response_tokens: int
    num_chains: int
    seed: int
    versions: dict[str, str]
    reliability: dict[str, Any] = field(default_factory=dict)
    remarks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Calibration:
    """What was fitted, for which models.

    Attributes:
        model_fingerprint, tokenizer_fingerprint: of the target whose acceptance it is.
        drafter_fingerprint: of the model drafter that ``temperatures`` and ``acceptance``
            belong to; None exactly if there are none. The n-gram table is good with any
            drafter.
        ngram: survival of n-gram chains, or None.
        temperatures: of the drafter's confidence head, or None.
        acceptance: what is expected of the drafter before it drafts, or None.
        provenance: where it comes from.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    drafter_fingerprint: str | None
    ngram: NgramTable | None
    temperatures: StsTable | None
    provenance: Provenance
    acceptance: AcceptancePrior | None = None


@dataclass(frozen=True)
class EngineFacts:
    """The engine that wants to use a calibration.

    Attributes:
        model_fingerprint, tokenizer_fingerprint: of the served target.
        drafter_fingerprint: of the model drafter; None without one.
        min_n, max_n: suffix lengths the lookup tries.
        num_ngram_tokens: longest n-gram chain.
        num_draft_tokens: the model drafter's block; 0 without one.
    """

    model_fingerprint: str
    tokenizer_fingerprint: str
    drafter_fingerprint: str | None
    min_n: int
    max_n: int
    num_ngram_tokens: int
    num_draft_tokens: int


def save_calibration(calibration: Calibration, folder: Path) -> None:
    """Validate and write both files, each atomically; ``folder`` is made if missing.

    A save that is interrupted between the two leaves files that do not belong together,
    which :func:`load_calibration` notices.

    Raises:
        InputError: the calibration is not valid.
        EnvironmentProblem: the folder cannot be written or the disk is full.
    """
    validate_calibration(calibration, str(folder))
    content = _calibration_json(calibration)
    provenance = {
        "format": FORMAT,
        "version": VERSION,
        "calibration_sha256": _sha256(content),
        **asdict(calibration.provenance),
    }
    try:
        remarks = json.dumps(provenance, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as problem:
        raise InputError(f"{folder}: the provenance does not fit into JSON: {problem}") from problem
    write_text_atomically(folder / PROVENANCE_FILE, remarks)
    write_text_atomically(folder / CALIBRATION_FILE, content)


def load_calibration(folder: Path) -> Calibration:
    """Read and validate a calibration folder.

    Raises:
        InputError: a file is missing, damaged, foreign or of another version, or the two
            files do not belong together; the message names the file and the field.
    """
    path, provenance_path = folder / CALIBRATION_FILE, folder / PROVENANCE_FILE
    payload = _read(path)
    provenance = _read(provenance_path)
    found = _sha256(path.read_text(encoding="utf-8"))
    if provenance.get("calibration_sha256") != found:
        raise InputError(
            f"{provenance_path} describes another {CALIBRATION_FILE} (SHA-256 {found[:12]}... "
            f"is not recorded there); copy both files together or calibrate again"
        )
    source = str(path)
    drafter = payload.get("drafter_fingerprint")
    ngram, temperatures = payload.get("ngram"), payload.get("temperatures")
    acceptance = payload.get("acceptance")
    calibration = Calibration(
        model_fingerprint=text(payload.get("model_fingerprint"), f"{source}, model_fingerprint"),
        tokenizer_fingerprint=text(
            payload.get("tokenizer_fingerprint"), f"{source}, tokenizer_fingerprint"
        ),
        drafter_fingerprint=None
        if drafter is None
        else text(drafter, f"{source}, drafter_fingerprint"),
        ngram=None if ngram is None else _ngram_table(ngram, f"{source}, ngram"),
        temperatures=None
        if temperatures is None
        else temperatures_from_payload(
            mapping(temperatures, f"{source}, temperatures"), f"{source}, temperatures"
        ),
        provenance=_provenance(provenance, str(provenance_path)),
        acceptance=None if acceptance is None else _prior(acceptance, f"{source}, acceptance"),
    )
    validate_calibration(calibration, source)
    return calibration


def validate_calibration(calibration: Calibration, source: str) -> None:
    """Raise InputError, naming ``source``, for a calibration that cannot be used."""
    if calibration.ngram is None and calibration.temperatures is None:
        raise InputError(f"{source}: neither an n-gram table nor temperatures; nothing to use")
    if (calibration.drafter_fingerprint is None) != (calibration.temperatures is None):
        raise InputError(
            f"{source}: temperatures belong to a drafter; give both or neither of temperatures "
            f"and drafter_fingerprint"
        )
    if calibration.acceptance is not None:
        if calibration.temperatures is None:
            raise InputError(
                f"{source}: acceptance belongs to a drafter with temperatures; calibrate again"
            )
        validate_prior(calibration.acceptance, f"{source}, acceptance")
    if calibration.ngram is not None:
        validate_table(calibration.ngram, f"{source}, ngram")
    if calibration.temperatures is not None:
        validate_temperatures(calibration.temperatures, f"{source}, temperatures")


def check_matches(calibration: Calibration, engine: EngineFacts, source: str) -> None:
    """Refuse a calibration that was fitted for something else than this engine.

    Longer tables than the engine needs are fine, shorter ones are not.

    Raises:
        UsageError: names every field that differs, with both values.
    """
    differing = [
        f"{name}: calibration {ours!r}, engine {theirs!r}"
        for name, ours, theirs in _compared(calibration, engine)
        if ours != theirs
    ]
    for name, num_fitted, num_wanted in _compared_lengths(calibration, engine):
        if num_fitted < num_wanted:
            differing.append(f"{name}: calibration {num_fitted}, engine {num_wanted}")
    if differing:
        raise UsageError(
            f"{source}: fitted for another engine ({'; '.join(differing)}); run 'specbench "
            f"calibrate' with this one's options"
        )


def _compared(
    calibration: Calibration, engine: EngineFacts
) -> list[tuple[str, str | int | None, str | int | None]]:
    pairs: list[tuple[str, str | int | None, str | int | None]] = [
        ("model", calibration.model_fingerprint, engine.model_fingerprint),
        ("tokenizer", calibration.tokenizer_fingerprint, engine.tokenizer_fingerprint),
    ]
    if calibration.temperatures is not None:
        pairs.append(("drafter", calibration.drafter_fingerprint, engine.drafter_fingerprint))
    if calibration.ngram is not None:
        pairs.append(("min_n", calibration.ngram.min_n, engine.min_n))
        pairs.append(("max_n", calibration.ngram.max_n, engine.max_n))
    return pairs


def _compared_lengths(calibration: Calibration, engine: EngineFacts) -> list[tuple[str, int, int]]:
    pairs = []
    if calibration.ngram is not None:
        pairs.append(("n-gram tokens", calibration.ngram.num_positions, engine.num_ngram_tokens))
    if calibration.temperatures is not None:
        num_fitted = len(calibration.temperatures.temperatures)
        pairs.append(("draft tokens", num_fitted, engine.num_draft_tokens))
    return pairs


def _read(path: Path) -> dict[str, Any]:
    payload = read_json_object(path)
    if payload.get("format") != FORMAT:
        raise InputError(
            f"{path}: not a specbench calibration; give a folder that 'specbench calibrate' wrote"
        )
    version = payload.get("version")
    if version != VERSION:
        is_newer = isinstance(version, int) and version > VERSION
        remedy = "update specbench" if is_newer else "calibrate again"
        raise InputError(
            f"{path}: calibration version {version!r:.40}, this specbench reads version "
            f"{VERSION}; {remedy}"
        )
    return payload


def _calibration_json(calibration: Calibration) -> str:
    payload: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model_fingerprint": calibration.model_fingerprint,
        "tokenizer_fingerprint": calibration.tokenizer_fingerprint,
        "drafter_fingerprint": calibration.drafter_fingerprint,
        "temperatures": None
        if calibration.temperatures is None
        else temperatures_to_payload(calibration.temperatures, StsFormat.SGLANG),
    }
    if calibration.acceptance is not None:
        payload["acceptance"] = asdict(calibration.acceptance)
    payload["ngram"] = None
    table = calibration.ngram
    if table is None:
        return json.dumps(payload, indent=2, allow_nan=False) + "\n"
    payload["ngram"] = {
        "min_n": table.min_n,
        "max_n": table.max_n,
        "features": list(table.stratification.features),
        "recent_edges": list(table.stratification.recent_edges),
        "survival": None,
    }
    content = json.dumps(payload, indent=2, allow_nan=False)
    head, key, tail = content.rpartition(f"{_ROWS_KEY}null")
    assert key  # the table's entry is the last of the file
    return f"{head}{_ROWS_KEY}{_rows_json(table.survival)}{tail}\n"


def _rows_json(survival: NDArray[np.float32]) -> str:
    """One line a match length: differences between two calibrations stay readable."""
    strata = [
        ",\n".join(
            json.dumps([float(f"{value:.{_FLOAT32_DIGITS}g}") for value in row]) for row in stratum
        )
        for stratum in survival
    ]
    return "[\n" + ",\n".join(f"[\n{rows}\n]" for rows in strata) + "\n]"


def _ngram_table(value: Any, where: str) -> NgramTable:
    payload = mapping(value, where)
    features = payload.get("features")
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise InputError(f"{where}, features must be a list of names")
    try:
        stratification = Stratification(
            tuple(features), numbers(payload.get("recent_edges"), f"{where}, recent_edges")
        )
    except InputError as problem:
        raise InputError(f"{where}: {problem}") from problem
    return NgramTable(
        survival=_survival(payload.get("survival"), f"{where}, survival"),
        min_n=whole(payload.get("min_n"), f"{where}, min_n"),
        max_n=whole(payload.get("max_n"), f"{where}, max_n"),
        stratification=stratification,
    )


def _prior(value: Any, where: str) -> AcceptancePrior:
    payload = mapping(value, where)
    return AcceptancePrior(
        conditional=numbers(payload.get("conditional"), f"{where}, conditional"),
        weight=number(payload.get("weight"), f"{where}, weight"),
        decay=number(payload.get("decay"), f"{where}, decay"),
        resolution=number(payload.get("resolution"), f"{where}, resolution"),
    )


def _survival(value: Any, where: str) -> NDArray[np.float32]:
    try:
        array = np.array(value, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as problem:
        raise InputError(
            f"{where}: expected numbers as [strata][match lengths][positions], all rows of one "
            f"length"
        ) from problem
    return array


def _provenance(payload: dict[str, Any], source: str) -> Provenance:
    missing = [item.name for item in fields(Provenance) if item.name not in payload]
    if missing:
        raise InputError(f"{source}: {', '.join(missing)} missing; calibrate again")
    versions = mapping(payload["versions"], f"{source}, versions")
    return Provenance(
        text_source=text(payload["text_source"], f"{source}, text_source"),
        date=text(payload["date"], f"{source}, date"),
        temperatures=numbers(payload["temperatures"], f"{source}, temperatures"),
        num_prompts=whole(payload["num_prompts"], f"{source}, num_prompts"),
        num_response_tokens=whole(payload["num_response_tokens"], f"{source}, num_response_tokens"),
        num_chains=whole(payload["num_chains"], f"{source}, num_chains"),
        seed=whole(payload["seed"], f"{source}, seed"),
        versions={name: text(v, f"{source}, versions, {name}") for name, v in versions.items()},
        reliability=mapping(payload["reliability"], f"{source}, reliability"),
        remarks=mapping(payload["remarks"], f"{source}, remarks"),
    )


def _sha256(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
