"""The whole calibration: text, chains, fit, temperatures, artefact.

Text and features stay in the work folder, so a run that was stopped goes on where it was,
and one with other options uses the same text again.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from specbench.cache import cache_dir, ensure_writable
from specbench.calibration.confidence import (
    DEFAULT_NUM_TOKENS as CONFIDENCE_TOKENS,
)
from specbench.calibration.confidence import ConfidenceFit, fit_confidence, why_not
from specbench.calibration.ngram_fit import LookupSpec, NgramFit, fit_ngram
from specbench.calibration.reliability_report import ReliabilityReport
from specbench.calibration.shipped import cached_folder
from specbench.calibration.tokenizer import tokenizer_fingerprint
from specbench.engines.model_cache import (
    DrafterRef,
    ModelRef,
    resolve_drafter,
    resolve_model,
)
from specbench.errors import InputError, UsageError
from specbench.estimators.calibration_store import Calibration, Provenance, save_calibration
from specbench.estimators.reliability_diagram import write_reliability_diagram
from specbench.estimators.sts_interop import StsFormat, write_temperatures
from specbench.training.answering import (
    RESPONSES_FOLDER,
    EngineChoice,
    answer_training_prompts,
)
from specbench.training.recipe import without_leaks
from specbench.training.responses import read_responses, read_target

# Three minutes on two cores for the embedded target, which writes about 300 tokens a second
# and core. They give some 7,000 chains: a standard error of 0.6% at the first position.
DEFAULT_NUM_TOKENS = 60_000
# As many as `specbench drafter generate` keeps in the engine.
BATCH_SIZE = 128
NGRAM_DIAGRAM = "reliability-ngram.svg"
CONFIDENCE_DIAGRAM = "reliability-drafter.svg"
# Two JSON files and two diagrams.
OUTPUT_BYTES = 4 << 20
_PACKAGES = ("specbench", "numpy", "scikit-learn", "torch", "transformers", "vllm")


class Observer(Protocol):
    """Hears how the calibration goes."""

    def note(self, line: str) -> None:
        """Something worth a line."""

    def progress(self, what: str, done: float, total: float) -> None:
        """``done`` of ``total`` of what is counted."""


@dataclass(frozen=True)
class CalibrationSpec:
    """What was asked for.

    Attributes:
        model, drafter: as :func:`resolve_model` and :func:`resolve_drafter` take them.
        output: folder of the artefact; None takes the cache.
        workdir: folder for text and features; None takes the cache.
        responses: use these answers instead of generating some.
        num_tokens: response tokens to generate.
        seed: of prompts, sampling and splits.
        lookup: what is calibrated.
        features: strata; None chooses by held-out score.
        with_confidence: fit the drafter's temperatures, if it has a confidence head.
        sts_output, sts_format: write the temperatures for another engine as well.
    """

    model: str | None = None
    drafter: str | None = None
    output: Path | None = None
    workdir: Path | None = None
    responses: Path | None = None
    num_tokens: int = DEFAULT_NUM_TOKENS
    seed: int = 0
    lookup: LookupSpec = field(default_factory=LookupSpec)
    features: tuple[str, ...] | None = None
    with_confidence: bool = True
    sts_output: Path | None = None
    sts_format: StsFormat = StsFormat.SGLANG


@dataclass(frozen=True)
class CalibrationResult:
    """What came out.

    Attributes:
        folder: where the artefact is.
        calibration: what was saved.
        ngram: the n-gram fit.
        confidence: the temperatures' fit, or None.
        why_no_confidence: the reason, where there are none.
    """

    folder: Path
    calibration: Calibration
    ngram: NgramFit
    confidence: ConfidenceFit | None
    why_no_confidence: str | None

    def reports(self) -> list[ReliabilityReport]:
        """Everything that was graded."""
        return [*self.ngram.reports, *([self.confidence.report] if self.confidence else [])]

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        provenance = self.calibration.provenance
        temperatures = self.calibration.temperatures
        return {
            "folder": str(self.folder),
            "features": list(self.ngram.features),
            "temperatures": None if temperatures is None else list(temperatures.temperatures),
            "why_no_temperatures": self.why_no_confidence,
            "num_prompts": provenance.num_prompts,
            "num_response_tokens": provenance.num_response_tokens,
            "num_chains": provenance.num_chains,
            "reliability": provenance.reliability,
            "remarks": provenance.remarks,
        }


@dataclass(frozen=True)
class _Engine:
    """The models, resolved."""

    target: ModelRef
    tokenizer_fingerprint: str
    drafter: DrafterRef | None
    why_no_confidence: str | None


def calibrate(spec: CalibrationSpec, observer: Observer) -> CalibrationResult:
    """Run every step and save the artefact.

    Raises:
        UsageError, InputError: options or files that do not fit; found before the long steps
            where possible.
        EnvironmentProblem: no room, or a package is missing.
        Interrupted, KeyboardInterrupt: stopped; text and features are kept.
    """
    engine = _resolve(spec)
    workdir = spec.workdir or cache_dir() / "calibration" / engine.target.fingerprint
    output = spec.output or cached_folder(engine.target.fingerprint)
    ensure_writable(output, OUTPUT_BYTES)
    responses = _responses(spec, engine.target, workdir, observer)
    observer.note("fitting n-gram acceptance")
    ngram = fit_ngram(responses, spec.lookup, features=spec.features, seed=spec.seed)
    confidence = None
    if engine.drafter is not None and engine.why_no_confidence is None:
        confidence = fit_confidence(
            responses,
            engine.drafter,
            model=spec.model,
            workdir=workdir,
            num_tokens=CONFIDENCE_TOKENS,
            seed=spec.seed,
            on_progress=observer.progress,
        )
    calibration = _assemble(spec, engine, responses, ngram, confidence)
    result = CalibrationResult(output, calibration, ngram, confidence, engine.why_no_confidence)
    _save(spec, result)
    return result


def _resolve(spec: CalibrationSpec) -> _Engine:
    """Models and what can be fitted for them; all complaints that need no text."""
    target = resolve_model(spec.model)
    drafter = resolve_drafter(spec.drafter, target)
    reason = why_not(drafter) if spec.with_confidence else "not asked for"
    if spec.sts_output is not None and reason is not None:
        raise UsageError(f"--sts-output: there are no temperatures to write ({reason})")
    return _Engine(target, tokenizer_fingerprint(target.path_or_id), drafter, reason)


def _responses(
    spec: CalibrationSpec, target: ModelRef, workdir: Path, observer: Observer
) -> pl.DataFrame:
    """The answers to calibrate on, near-duplicates and leaks between the splits removed."""
    if spec.responses is not None:
        responses = _given_responses(spec.responses, target)
    else:
        _generate(spec, workdir, observer)
        responses = read_responses(workdir / RESPONSES_FOLDER)
    kept, num_dropped = without_leaks(responses)
    if num_dropped:
        observer.note(
            f"{num_dropped:,} of {len(responses):,} responses left out as near-duplicates"
        )
    return kept


def _given_responses(given: Path, target: ModelRef) -> pl.DataFrame:
    """Answers in a folder or its sub-folder ``responses``; refuses another target's."""
    folder = given / RESPONSES_FOLDER if (given / RESPONSES_FOLDER).is_dir() else given
    if not folder.is_dir():
        raise InputError(f"--responses {given}: no such folder")
    found = read_target(folder)
    if found["fingerprint"] != target.fingerprint:
        raise UsageError(
            f"--responses {given}: written by {found['model']}, not by the model calibrated; "
            "name theirs with --model"
        )
    return read_responses(folder)


def _generate(spec: CalibrationSpec, workdir: Path, observer: Observer) -> None:
    """Let the target answer prompts until there are enough tokens; keeps what there is."""
    observer.note("letting the target answer prompts")
    answer_training_prompts(
        workdir,
        EngineChoice(spec.model, BATCH_SIZE, spec.seed, {}),
        num_tokens=spec.num_tokens,
        on_progress=lambda done, total: observer.progress("response tokens", done, total),
    )
    # The engine's memory is needed for what follows.
    gc.collect()


def _assemble(
    spec: CalibrationSpec,
    engine: _Engine,
    responses: pl.DataFrame,
    ngram: NgramFit,
    confidence: ConfidenceFit | None,
) -> Calibration:
    sources = ", ".join(responses["source"].unique().sort())
    provenance = Provenance(
        text_source=f"the target's own answers to built-in prompts: {sources}",
        date=datetime.now(UTC).date().isoformat(),
        temperatures=tuple(responses["temperature"].unique().sort()),
        num_prompts=ngram.num_prompts,
        num_response_tokens=ngram.num_response_tokens,
        num_chains=ngram.num_chains,
        seed=spec.seed,
        versions=_versions(),
        reliability=_reliability(ngram, confidence),
        remarks=_remarks(ngram, confidence, engine.why_no_confidence),
    )
    assert confidence is None or engine.drafter is not None
    return Calibration(
        model_fingerprint=engine.target.fingerprint,
        tokenizer_fingerprint=engine.tokenizer_fingerprint,
        drafter_fingerprint=engine.drafter.fingerprint if confidence and engine.drafter else None,
        ngram=ngram.table,
        temperatures=None if confidence is None else confidence.table,
        provenance=provenance,
        acceptance=None if confidence is None else confidence.acceptance,
    )


def _reliability(ngram: NgramFit, confidence: ConfidenceFit | None) -> dict[str, Any]:
    found: dict[str, Any] = {"ngram": [report.to_json() for report in ngram.reports]}
    if confidence is not None:
        found["drafter"] = confidence.report.to_json()
    return found


def _remarks(
    ngram: NgramFit, confidence: ConfidenceFit | None, why_no_confidence: str | None
) -> dict[str, Any]:
    remarks: dict[str, Any] = {"features_chosen_by_held_out_score": ngram.features_were_chosen}
    if confidence is None:
        remarks["no_temperatures"] = why_no_confidence
    else:
        remarks["num_prompts_for_temperatures"] = confidence.num_prompts
        remarks["num_blocks_for_temperatures"] = confidence.num_blocks
        with_record, prior_alone = confidence.acceptance_losses
        remarks["acceptance_nats_with_record"] = with_record
        remarks["acceptance_nats_prior_alone"] = prior_alone
        remarks["positions_at_the_search_limit"] = list(confidence.hit_bound)
    return remarks


def _versions() -> dict[str, str]:
    """Versions of what had a part in it; a package that is not installed had none."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _save(spec: CalibrationSpec, result: CalibrationResult) -> None:
    """The artefact, its diagrams, and the temperatures for another engine if asked for."""
    save_calibration(result.calibration, result.folder)
    held_out = result.ngram.reports[0]
    write_reliability_diagram(
        result.folder / NGRAM_DIAGRAM,
        held_out.panels(),
        f"Survival of {held_out.what}, {held_out.held_out}",
    )
    if result.confidence is None:
        # One of an earlier calibration would be about temperatures that are gone.
        (result.folder / CONFIDENCE_DIAGRAM).unlink(missing_ok=True)
        return
    report = result.confidence.report
    write_reliability_diagram(
        result.folder / CONFIDENCE_DIAGRAM,
        report.panels(),
        f"Survival of the {report.what}, {report.held_out}",
    )
    if spec.sts_output is not None:
        write_temperatures(spec.sts_output, result.confidence.table, spec.sts_format)
