"""Offline evaluation of a drafter: acceptance and confidence on stored responses.

What a step is and why a stored response decides acceptance: :mod:`specbench.training.replay`.
A step near the end of its response is *cut* when the block reaches past the last token:
what the target would have accepted there is unknown. Whether a step is cut depends on where
it starts, not on its drafts, so leaving cut steps out does not favour any outcome.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from specbench.estimators.reliability import auc, brier_score, expected_calibration_error
from specbench.estimators.temperature_scaling import SequentialTemperatureScaling
from specbench.training.feature_store import FeatureStore
from specbench.training.replay import GreedyDrafter, Progress, ReplaySteps, replay

ALL_SOURCES = "all"
# The percentile bounds of 2,000 resamples vary by about a twentieth of the interval's width.
NUM_RESAMPLES = 2_000
# Drafting all blocks of a batch holds a few (anchors x block x hidden) tensors at once.
TOKENS_PER_BATCH = 4_096


@dataclass(frozen=True)
class ConfidenceReport:
    """How well confidences predict acceptance at one position.

    Judged on steps that accepted every earlier position, except for ``survival_ece``, which
    compares the product of confidences up to this position with the share of all steps that
    got so far. A value is None where it has no meaning: no samples, or one class for the AUC.
    """

    num_samples: int
    auc: float | None
    ece: float | None
    brier: float | None
    survival_ece: float | None


@dataclass(frozen=True)
class PositionReport:
    """Acceptance at one position of the block, over whole (not cut) steps.

    Attributes:
        position: from 1.
        num_reached: steps that accepted every earlier position.
        acceptance: unconditional: share of steps that accepted this position.
        conditional_acceptance: share of the steps that reached it; None if none did.
        mean_overlap: mean of sum min(p, q) over the steps that reached it, if known.
        confidence: of all prompts, unscaled; None without a confidence head.
        test_half: of the prompts that the temperatures were not fitted on, unscaled.
        test_half_scaled: the same after sequential temperature scaling.
    """

    position: int
    num_reached: int
    acceptance: float | None
    conditional_acceptance: float | None
    mean_overlap: float | None
    confidence: ConfidenceReport | None
    test_half: ConfidenceReport | None
    test_half_scaled: ConfidenceReport | None


@dataclass(frozen=True)
class SourceReport:
    """One source of prompts, or all together.

    Attributes:
        num_prompts, num_sequences: with at least one step.
        num_steps: whole steps.
        num_cut_steps: steps left out because the response ended inside the block.
        acceptance_length: tokens a whole step, bonus included; None without whole steps.
        acceptance_length_ci95: 95% percentile interval of a bootstrap over prompts; None with
            fewer than two prompts.
        acceptance_length_with_cut_steps: the same over all steps, tokens past the end of a
            response counted as rejected: a lower bound.
        positions: one entry a position.
    """

    num_prompts: int
    num_sequences: int
    num_steps: int
    num_cut_steps: int
    acceptance_length: float | None
    acceptance_length_ci95: tuple[float, float] | None
    acceptance_length_with_cut_steps: float
    positions: tuple[PositionReport, ...]


@dataclass(frozen=True)
class EvaluationReport:
    """What a drafter does on the responses of one temperature.

    Attributes:
        split: part of the features that was used.
        temperature: with which the responses were sampled.
        block_length: draft tokens a step.
        scaling_temperatures: [block_length] fitted on half of the prompts of all sources; None
            without a confidence head or with fewer than two prompts.
        sources: by name; :data:`ALL_SOURCES` has everything.
    """

    split: str
    temperature: float
    block_length: int
    scaling_temperatures: tuple[float, ...] | None
    sources: dict[str, SourceReport]

    def to_json(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers."""
        return asdict(self)


def evaluate_drafter(
    drafter: GreedyDrafter,
    store: FeatureStore,
    *,
    block_length: int,
    temperature: float = 0.0,
    tokens_per_batch: int = TOKENS_PER_BATCH,
    seed: int = 0,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Measure a drafter on the stored responses of one temperature.

    Args:
        drafter: drafts blocks greedily, as the engine would.
        store: held-out responses with features.
        block_length: draft tokens a step.
        temperature: of the responses to use; drafts are greedy whatever it is.
        tokens_per_batch: tokens drafted in one call.
        seed: of the bootstrap and of the halves for temperature scaling.
        progress: called with (responses done, responses to do).

    Raises:
        UsageError: a block length below 1, or no response of this temperature.
    """
    steps = replay(
        drafter,
        store,
        block_length=block_length,
        temperature=temperature,
        tokens_per_batch=tokens_per_batch,
        progress=progress,
    )
    return report_steps(steps, store, block_length=block_length, temperature=temperature, seed=seed)


def report_steps(
    steps: ReplaySteps, store: FeatureStore, *, block_length: int, temperature: float, seed: int
) -> EvaluationReport:
    """Sum up the steps of a replay; arguments as in :func:`evaluate_drafter`."""
    prompts = _prompt_of_sequence(store)
    scaling = _fit_scaling(steps, prompts, block_length, seed)
    names = store.sequences["source"].to_numpy()[steps.sequence_ids]
    sources = {ALL_SOURCES: _report_source(steps, prompts, scaling, block_length, seed)}
    for name in sorted(set(names.tolist())):
        chosen = steps.take(names == name)
        sources[name] = _report_source(chosen, prompts, scaling, block_length, seed)
    return EvaluationReport(
        split=store.split,
        temperature=temperature,
        block_length=block_length,
        scaling_temperatures=None if scaling is None else scaling.temperatures,
        sources=sources,
    )


def bootstrap_ratio(
    numerators: npt.NDArray[Any],
    denominators: npt.NDArray[Any],
    *,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> tuple[float, float] | None:
    """95% percentile interval of sum(numerators) / sum(denominators) under resampled clusters.

    Steps of one prompt resemble each other, so whole prompts are drawn with replacement: each
    resample weighs the clusters by a multinomial draw.

    Args:
        numerators, denominators: [num_clusters]; denominators positive.
        seed: of the draws.
        num_resamples: how many.

    Returns:
        (low, high), or None with fewer than two clusters.
    """
    num_clusters = len(numerators)
    if num_clusters < 2:
        return None
    rng = np.random.default_rng(seed)
    ratios = np.empty(num_resamples)
    for index in range(num_resamples):
        weights = np.bincount(rng.integers(num_clusters, size=num_clusters), minlength=num_clusters)
        ratios[index] = (weights @ numerators) / (weights @ denominators)
    low, high = np.percentile(ratios, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True)
class _Scaling:
    """Fitted temperatures, and which prompts they were not fitted on."""

    estimator: SequentialTemperatureScaling
    test_prompts: npt.NDArray[np.int64]

    @property
    def temperatures(self) -> tuple[float, ...]:
        return tuple(float(value) for value in self.estimator.temperatures_)


def _prompt_of_sequence(store: FeatureStore) -> npt.NDArray[np.int64]:
    """[num_sequences] number of each sequence's prompt; samples of one prompt share it."""
    _, numbers = np.unique(store.sequences["prompt_id"].to_numpy(), return_inverse=True)
    return numbers.astype(np.int64)


def _fit_scaling(
    steps: ReplaySteps, prompts: npt.NDArray[np.int64], block_length: int, seed: int
) -> _Scaling | None:
    """Temperatures from half of the prompts."""
    whole = steps.take(steps.num_labels == block_length)
    step_prompts = prompts[whole.sequence_ids]
    present = np.unique(step_prompts)
    if whole.confidence_logits is None or len(present) < 2:
        return None
    shuffled = np.random.default_rng(seed).permutation(present)
    fit_prompts, test_prompts = np.array_split(shuffled, 2)
    fit = whole.take(np.isin(step_prompts, fit_prompts))
    assert fit.confidence_logits is not None
    estimator = SequentialTemperatureScaling()
    estimator.fit(fit.confidence_logits, fit.num_accepted, np.full(len(fit), block_length))
    return _Scaling(estimator, test_prompts)


def _report_source(
    steps: ReplaySteps,
    prompts: npt.NDArray[np.int64],
    scaling: _Scaling | None,
    block_length: int,
    seed: int,
) -> SourceReport:
    whole = steps.take(steps.num_labels == block_length)
    step_prompts = prompts[whole.sequence_ids]
    num_steps = np.bincount(step_prompts)
    tokens = np.bincount(step_prompts, weights=whole.num_accepted + 1.0)
    present = num_steps > 0
    return SourceReport(
        num_prompts=len(np.unique(prompts[steps.sequence_ids])),
        num_sequences=len(np.unique(steps.sequence_ids)),
        num_steps=len(whole),
        num_cut_steps=len(steps) - len(whole),
        acceptance_length=float(1 + whole.num_accepted.mean()) if len(whole) else None,
        acceptance_length_ci95=bootstrap_ratio(tokens[present], num_steps[present], seed=seed),
        acceptance_length_with_cut_steps=float(1 + steps.num_accepted.mean()),
        positions=_report_positions(whole, step_prompts, scaling, block_length),
    )


def _report_positions(
    whole: ReplaySteps,
    step_prompts: npt.NDArray[np.int64],
    scaling: _Scaling | None,
    block_length: int,
) -> tuple[PositionReport, ...]:
    logits = whole.confidence_logits
    plain = _report_confidence(None if logits is None else expit(logits), whole.num_accepted)
    before: list[ConfidenceReport] | None = None
    after: list[ConfidenceReport] | None = None
    if scaling is not None and logits is not None:
        held_out = np.isin(step_prompts, scaling.test_prompts)
        accepted = whole.num_accepted[held_out]
        before = _report_confidence(expit(logits[held_out]), accepted)
        after = _report_confidence(scaling.estimator.transform(logits[held_out]), accepted)
    reports = []
    for position in range(1, block_length + 1):
        reached = whole.num_accepted >= position - 1
        num_kept = int((whole.num_accepted >= position).sum())
        overlaps = None if whole.overlaps is None else whole.overlaps[reached, position - 1]
        reports.append(
            PositionReport(
                position=position,
                num_reached=int(reached.sum()),
                acceptance=num_kept / len(whole) if len(whole) else None,
                conditional_acceptance=num_kept / int(reached.sum()) if reached.any() else None,
                mean_overlap=None
                if overlaps is None or not len(overlaps)
                else float(overlaps.mean(dtype=np.float64)),
                confidence=None if plain is None else plain[position - 1],
                test_half=None if before is None else before[position - 1],
                test_half_scaled=None if after is None else after[position - 1],
            )
        )
    return tuple(reports)


def _report_confidence(
    probabilities: npt.NDArray[Any] | None, num_accepted: npt.NDArray[np.int64]
) -> list[ConfidenceReport] | None:
    """One report a position, from conditional probabilities [n, block_length]."""
    if probabilities is None:
        return None
    survival = np.clip(np.cumprod(probabilities, axis=1), 0.0, 1.0)
    reports = []
    for index in range(probabilities.shape[1]):
        reached = num_accepted >= index
        accepted = num_accepted > index
        predicted, observed = probabilities[reached, index], accepted[reached]
        reports.append(
            ConfidenceReport(
                num_samples=int(reached.sum()),
                auc=auc(predicted, observed),
                ece=expected_calibration_error(predicted, observed),
                brier=brier_score(predicted, observed),
                survival_ece=expected_calibration_error(survival[:, index], accepted),
            )
        )
    return reports
