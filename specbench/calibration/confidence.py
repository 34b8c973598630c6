"""Fit what belongs to a DSpark drafter on replayed responses: temperatures, usual acceptance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from specbench.calibration.collect import conversations
from specbench.calibration.reliability_report import (
    ReliabilityReport,
    SourceReliability,
    source_labels,
)
from specbench.engines.model_cache import DrafterRef
from specbench.errors import InputError
from specbench.estimators.acceptance_evaluation import ALL, position_reports
from specbench.estimators.acceptance_prior import AcceptancePrior
from specbench.estimators.recent_acceptance import (
    RecentAcceptance,
    resolution,
)
from specbench.estimators.sts_interop import StsTable
from specbench.estimators.temperature_scaling import SequentialTemperatureScaling
from specbench.training.drafter_checkpoint import load_drafter
from specbench.training.evaluate import TOKENS_PER_BATCH
from specbench.training.feature_store import FeatureStore
from specbench.training.features import extract_features
from specbench.training.greedy_drafting import GreedyDSpark
from specbench.training.recipe import first_tokens
from specbench.training.replay import ReplaySteps, replay
from specbench.training.target_model import load_target

WHAT = "drafter's blocks"
BEFORE = "the confidence head as trained"
# With the embedded drafter 14,000 blocks, ninety times what a position's temperature needs
# (MIN_SAMPLES), from 300 MB of features; a few minutes on one core.
DEFAULT_NUM_TOKENS = 20_000
_SPLIT = "train"
_DIGEST_DIGITS = 12

OnProgress = Callable[[str, float, float], None]


@dataclass(frozen=True)
class ConfidenceFit:
    """What was fitted and how well it does.

    Attributes:
        table: temperatures, fitted on all prompts.
        report: of temperatures fitted on half of the prompts, graded on the other half.
        acceptance: what to expect of a block before it is drafted, fitted on all prompts.
        acceptance_losses: of that estimate, fitted on half of the prompts and graded on the
            other half: nats a token with a request's own record, and with the prior alone.
        hit_bound: positions whose search ended at its limit; the head is wrong there.
        num_prompts, num_blocks: what was fitted on.
    """

    table: StsTable
    report: ReliabilityReport
    acceptance: AcceptancePrior
    acceptance_losses: tuple[float, float]
    hit_bound: tuple[int, ...]
    num_prompts: int
    num_blocks: int


def why_not(drafter: DrafterRef | None) -> str | None:
    """Why there are no temperatures to fit for this drafter; None if there are.

    Raises:
        InputError: the checkpoint's configuration cannot be read.
    """
    if drafter is None:
        return "no model drafter"
    path = Path(drafter.path_or_id) / "config.json"
    if not path.parent.is_dir():
        return f"drafter {drafter.path_or_id} is a hub id; give a local folder"
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        has_head = bool(config.get("enable_confidence_head"))
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{path}: not a readable drafter configuration") from None
    return None if has_head else f"drafter {drafter.path_or_id} has no confidence head"


def fit_confidence(
    responses: pl.DataFrame,
    drafter: DrafterRef,
    *,
    model: str | None,
    workdir: Path,
    num_tokens: int,
    seed: int,
    on_progress: OnProgress,
) -> ConfidenceFit:
    """Extract features, replay the drafter greedily, fit and grade.

    Features stay in ``workdir`` and are used again by a later call on the same responses.

    Args:
        responses: written by the target, at any temperatures; the first ones are used.
        drafter: a local DSpark checkpoint with a confidence head.
        model: the target, as for ``load_target``.
        workdir: for features.
        num_tokens: response tokens to use.
        seed: of the split of prompts into halves.
        on_progress: called with (what is counted, done, to do).

    Raises:
        InputError: checkpoint or target cannot be loaded, or fewer than two prompts.
        EnvironmentProblem: no room for the features.
        Interrupted: Ctrl-C during extraction; whole shards are kept.
    """
    chosen = _first_responses(responses, num_tokens)
    target = load_target(model)
    loaded = load_drafter(Path(drafter.path_or_id), target.embedding)
    layer_ids = loaded.config.target_layer_ids
    folder = workdir / f"features-{_digest(chosen, layer_ids)}"
    extract_features(
        chosen,
        target,
        folder,
        layer_ids=layer_ids,
        split=_SPLIT,
        progress=lambda done, total: on_progress("tokens of features", done, total),
    )
    store = FeatureStore(
        folder, _SPLIT, target_fingerprint=target.fingerprint, target_layer_ids=layer_ids
    )
    blocks = _replay_all(GreedyDSpark(loaded.eval()), store, loaded.config.block_size, on_progress)
    return fit_blocks(blocks, store.sequences, seed=seed)


def fit_blocks(steps: ReplaySteps, sequences: pl.DataFrame, *, seed: int) -> ConfidenceFit:
    """Fit on half of the prompts, grade on the other half, then fit on all.

    Args:
        steps: with confidence logits [n, block].
        sequences: [num_sequences] rows with prompt_id and source that ``steps`` points into.
        seed: of the halves.

    Raises:
        InputError: fewer than two prompts, or no block with a token to grade.
    """
    assert steps.confidence_logits is not None  # the drafter has a confidence head
    group = conversations(sequences)[steps.sequence_ids]
    prompts = np.unique(group)
    if len(prompts) < 2:
        raise InputError(f"{len(prompts)} prompt(s) to fit temperatures on; generate more")
    shuffled = np.random.default_rng(seed).permutation(prompts)
    is_fit = np.isin(group, shuffled[: len(shuffled) // 2])
    half, held_out = _fit(steps.take(is_fit)), steps.take(~is_fit)
    half_acceptance = _fit_acceptance(steps.take(is_fit))
    labels = source_labels(sequences["source"].to_numpy()[steps.sequence_ids])
    whole = _fit(steps)
    return ConfidenceFit(
        table=whole.table(dataset="target's own answers to built-in prompts"),
        report=_grade(half, held_out, group[~is_fit], np.asarray(labels)[~is_fit]),
        acceptance=_fit_acceptance(steps).prior(_resolution(half, half_acceptance, held_out)),
        acceptance_losses=half_acceptance.log_losses(
            held_out.num_accepted, held_out.num_labels, held_out.sequence_ids
        ),
        hit_bound=tuple((np.flatnonzero(whole.hit_bound_) + 1).tolist()),
        num_prompts=len(prompts),
        num_blocks=len(steps),
    )


def _fit(steps: ReplaySteps) -> SequentialTemperatureScaling:
    assert steps.confidence_logits is not None
    return SequentialTemperatureScaling().fit(
        steps.confidence_logits, steps.num_accepted, steps.num_labels
    )


def _fit_acceptance(steps: ReplaySteps) -> RecentAcceptance:
    return RecentAcceptance().fit(steps.num_accepted, steps.num_labels, steps.sequence_ids)


def _resolution(
    temperatures: SequentialTemperatureScaling, acceptance: RecentAcceptance, steps: ReplaySteps
) -> float:
    """How much more confidences know than what is known before drafting."""
    assert steps.confidence_logits is not None
    positions = np.arange(steps.confidence_logits.shape[1])
    return resolution(
        acceptance.predict(steps.num_accepted, steps.num_labels, steps.sequence_ids),
        temperatures.survival(steps.confidence_logits),
        steps.num_accepted[:, None] > positions,
        steps.num_labels[:, None] > positions,
    )


def _grade(
    fitted: SequentialTemperatureScaling,
    steps: ReplaySteps,
    group: NDArray[Any],
    labels: NDArray[Any],
) -> ReliabilityReport:
    assert steps.confidence_logits is not None
    logits = steps.confidence_logits.astype(np.float64)
    positions = np.arange(logits.shape[1])
    # Temperatures of 1 leave the head as it is.
    raw = (1.0 / (1.0 + np.exp(-logits))).cumprod(axis=1)
    calibrated = fitted.survival(logits)
    is_accepted = steps.num_accepted[:, None] > positions
    is_graded = steps.num_labels[:, None] > positions
    subsets = {ALL: np.ones(len(steps), dtype=np.bool_)}
    subsets |= {label: labels == label for label in sorted(set(labels.tolist()))}
    sources = {
        name: SourceReliability(
            num_samples=int(mask.sum()),
            num_prompts=len(np.unique(group[mask])),
            survival=position_reports(
                raw[mask], calibrated[mask], is_accepted[mask], is_graded[mask]
            ),
        )
        for name, mask in subsets.items()
    }
    return ReliabilityReport(WHAT, "the other half of the prompts", BEFORE, sources)


def _first_responses(responses: pl.DataFrame, num_tokens: int) -> pl.DataFrame:
    """The first responses that hold so many tokens, one at least, all called one split."""
    train = responses.filter(pl.col("split") == _SPLIT)
    source = train if len(train) else responses
    chosen = first_tokens(source, num_tokens)
    return (chosen if len(chosen) else source.head(1)).with_columns(split=pl.lit(_SPLIT))


def _digest(responses: pl.DataFrame, layer_ids: tuple[int, ...]) -> str:
    """Names the features of these responses: other ones need a folder of their own."""
    columns = ("prompt_id", "temperature", "prompt_token_ids", "response_token_ids")
    content = json.dumps([list(layer_ids), responses.select(columns).rows()])
    return hashlib.sha256(content.encode()).hexdigest()[:_DIGEST_DIGITS]


def _replay_all(
    drafter: GreedyDSpark, store: FeatureStore, block_length: int, on_progress: OnProgress
) -> ReplaySteps:
    """Replay the responses of every temperature; drafts are greedy throughout."""
    parts: list[ReplaySteps] = []
    num_done = 0
    for temperature in store.sequences["temperature"].unique().sort().to_list():
        before = num_done

        def report(done: int, total: int, before: int = before) -> None:
            on_progress("responses replayed", before + done, store.num_sequences)

        parts.append(
            replay(
                drafter,
                store,
                block_length=block_length,
                temperature=temperature,
                tokens_per_batch=TOKENS_PER_BATCH,
                progress=report,
            )
        )
        num_done += int((store.sequences["temperature"] == temperature).sum())
    logits = [part.confidence_logits for part in parts if part.confidence_logits is not None]
    return ReplaySteps(
        sequence_ids=np.concatenate([part.sequence_ids for part in parts]),
        num_accepted=np.concatenate([part.num_accepted for part in parts]),
        num_labels=np.concatenate([part.num_labels for part in parts]),
        confidence_logits=np.concatenate(logits),
        overlaps=None,
    )
