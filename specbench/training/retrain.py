"""The whole recipe in one call: answers, features, training, evaluation, export."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from specbench.cache import write_text_atomically
from specbench.engines.model_cache import fingerprint_folder
from specbench.training.answering import (
    EngineChoice,
    answer_outside_prompts,
    answer_training_prompts,
)
from specbench.training.child_process import call_in_child
from specbench.training.evaluate import EvaluationReport
from specbench.training.export import EVALUATION_FILE, ExportRequest, export_drafter
from specbench.training.recipe import (
    OnProgress,
    evaluate_checkpoint,
    extract,
    run_folder,
    train_run,
)
from specbench.training.starting_drafter import NewDrafter
from specbench.training.trainer import TrainSpec

# Opens a progress display for one step, by the unit it counts.
OpenProgress = Callable[[str], AbstractContextManager[OnProgress]]
Report = Callable[[str], None]


@dataclass(frozen=True)
class OutsideSets:
    """Prompts to test on besides the held-out ones.

    Attributes:
        prompts: files or workload names.
        temperatures: of the answers.
        num_prompts: of each set; None takes all.
        max_tokens: of each answer.
    """

    prompts: Sequence[str]
    temperatures: Sequence[float]
    num_prompts: int | None
    max_tokens: int


@dataclass(frozen=True)
class RetrainPlan:
    """Everything one re-training does.

    Attributes:
        engine: that answers.
        num_tokens: response tokens to train and test on.
        outside: further test prompts.
        layer_ids: target layers to read; None takes the default ones.
        train: the training run.
        shape: of a new drafter.
        start_from: checkpoint to start from instead.
        device: where features, training and evaluation run.
        export: run name, folders and target.
    """

    engine: EngineChoice
    num_tokens: int
    outside: OutsideSets
    layer_ids: Sequence[int] | None
    train: TrainSpec
    shape: NewDrafter
    start_from: Path | None
    device: str
    export: ExportRequest


def retrain(
    plan: RetrainPlan, report: Report, open_progress: OpenProgress
) -> list[EvaluationReport]:
    """Do every step that is not done yet; returns the evaluation.

    Each step takes up what an earlier call left. The outside sets are answered before
    features are extracted, so that training data too close to them is left out.

    Args:
        report: receives a line after each step.
        open_progress: opened once a step.

    Raises:
        SpecbenchError: as the steps.
        KeyboardInterrupt: what is done is kept.
    """
    _answer(plan, report, open_progress)
    with open_progress("tokens") as on_progress:
        for line in extract(
            plan.export.workdir,
            model=plan.export.model,
            device=plan.device,
            layer_ids=plan.layer_ids,
            splits=("train", "test"),
            max_tokens=None,
            on_progress=on_progress,
        ):
            report(f"features: {line}")
    with open_progress("of the training") as on_progress:
        drafter = train_run(
            plan.export.workdir,
            plan.export.run,
            plan.train,
            shape=plan.shape,
            start_from=plan.start_from,
            model=plan.export.model,
            device=plan.device,
            on_progress=on_progress,
        )
    report(f"train: drafter in {drafter}")
    evaluation = _evaluate(plan, drafter, open_progress)
    report(f"export: drafter and its provenance in {export_drafter(plan.export)}")
    return evaluation


def _answer(plan: RetrainPlan, report: Report, open_progress: OpenProgress) -> None:
    workdir, outside = plan.export.workdir, plan.outside
    for prompts in outside.prompts:
        with open_progress("outside conversations") as on_progress:
            arguments = {
                "workdir": workdir,
                "engine": plan.engine,
                "prompts": prompts,
                "temperatures": outside.temperatures,
                "num_prompts": outside.num_prompts,
                "max_tokens": outside.max_tokens,
            }
            summary = call_in_child(answer_outside_prompts, arguments, on_progress)
        report(f"generate: {summary}")
    with open_progress("response tokens") as on_progress:
        arguments = {"workdir": workdir, "engine": plan.engine, "num_tokens": plan.num_tokens}
        summary = call_in_child(answer_training_prompts, arguments, on_progress)
    report(f"generate: {summary}")


def _evaluate(
    plan: RetrainPlan, drafter: Path, open_progress: OpenProgress
) -> list[EvaluationReport]:
    with open_progress("responses") as on_progress:
        reports = evaluate_checkpoint(
            plan.export.workdir,
            str(drafter),
            split="test",
            temperatures=plan.outside.temperatures if plan.outside.prompts else (),
            block_length=None,
            model=plan.export.model,
            device=plan.device,
            on_progress=on_progress,
        )
    folder = run_folder(plan.export.workdir, plan.export.run)
    write_evaluation(folder / EVALUATION_FILE, reports, drafter)
    return reports


def write_evaluation(path: Path, reports: Sequence[EvaluationReport], drafter: Path) -> None:
    """Write reports as JSON, each with the fingerprint of the drafter it is about.

    Raises:
        EnvironmentProblem: the file cannot be written.
    """
    fingerprint = fingerprint_folder(drafter)
    payload = [{**report.to_json(), "drafter_fingerprint": fingerprint} for report in reports]
    write_text_atomically(path, json.dumps(payload, indent=1) + "\n")
