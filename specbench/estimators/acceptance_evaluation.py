"""Held-out calibration of acceptance: cross-validation by prompt, scores per position.

Chains of one prompt resemble each other, above all where the target repeats itself, so a
split by chains would grade the fit on what it has seen. Every split here is by group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone
from sklearn.model_selection import GroupKFold

from specbench.errors import InputError
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_table import available_features
from specbench.estimators.reliability import (
    DEFAULT_NUM_BINS,
    Binning,
    ReliabilityCurve,
    auc,
    brier_score,
    calibration_noise,
    checked_weights,
    expected_calibration_error,
    reliability_curve,
)

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

ALL = "all"
# What a user without a calibration would write down; monotone, and wrong in scale.
BASELINE = "conditional acceptance = match length / max_n"


@dataclass(frozen=True)
class Scores:
    """Calibration of one set of predictions; None where no sample (or one class) allows it.

    Attributes:
        ece: expected calibration error, equal-mass bins unless chosen otherwise.
        ece_noise: what ``ece`` would be on average if the predictions were exactly right.
        brier: mean squared error.
        auc: area under the ROC curve.
        curve: the reliability curve behind ``ece``.
    """

    ece: float | None
    ece_noise: float | None
    brier: float | None
    auc: float | None
    curve: ReliabilityCurve


@dataclass(frozen=True)
class PositionReport:
    """One position, before and after calibration.

    Attributes:
        position: 1 for the first drafted token.
        weight: total weight of the samples graded.
        observed_rate: share accepted; None without samples. The constant prediction of
            this rate has a Brier score of rate * (1 - rate).
        before, after: scores of the baseline and of the calibrated predictions.
    """

    position: int
    weight: float
    observed_rate: float | None
    before: Scores
    after: Scores


@dataclass(frozen=True)
class AcceptanceReport:
    """Scores on held-out groups.

    Attributes:
        num_chains, num_groups: graded chains and the prompts they come from.
        num_splits: folds of the cross-validation; 1 for a fixed set of held-out groups.
        baseline: what ``before`` stands for.
        conditional: acceptance of position j among chains alive before it.
        survival: acceptance of all of 1..j among chains with at least j tokens.
    """

    num_chains: int
    num_groups: int
    num_splits: int
    baseline: str
    conditional: tuple[PositionReport, ...]
    survival: tuple[PositionReport, ...]


def evaluate(
    estimator: NgramAcceptance,
    chains: NgramChains,
    *,
    sample_weight: ArrayLike | None = None,
    labels: Sequence[str] | None = None,
    num_splits: int = 5,
    seed: int = 0,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> dict[str, AcceptanceReport]:
    """Cross-validate by ``chains.group`` and score the out-of-fold predictions.

    Args:
        estimator: its parameters are used, it is not fitted itself.
        chains: must have ``group``.
        sample_weight: [num_chains].
        labels: [num_chains], for example the workload; each gets a report of its own.
        num_splits: folds; at most the number of groups.
        seed: of the assignment of groups to folds.
        num_bins, binning: of the calibration errors.

    Returns:
        A report under "all" and one under each label.

    Raises:
        InputError: no groups, fewer than two, or labels of another length.
    """
    weight = checked_weights(sample_weight, len(chains))
    conditional, num_splits = cross_validate(
        estimator, chains, sample_weight=weight, num_splits=num_splits, seed=seed
    )
    return _reports(estimator, conditional, chains, weight, labels, num_splits, num_bins, binning)


def evaluate_held_out(
    fitted: NgramAcceptance,
    chains: NgramChains,
    *,
    sample_weight: ArrayLike | None = None,
    labels: Sequence[str] | None = None,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> dict[str, AcceptanceReport]:
    """Score a fitted estimator on chains of prompts that it was not fitted on.

    Arguments, result and errors as for :func:`evaluate`; ``num_splits`` of the reports is 1.
    """
    if chains.group is None:
        raise InputError("n-gram chains: no group; nobody can tell what was held out")
    weight = checked_weights(sample_weight, len(chains))
    conditional = fitted.predict_conditional(chains)
    return _reports(fitted, conditional, chains, weight, labels, 1, num_bins, binning)


def _reports(
    estimator: NgramAcceptance,
    conditional: FloatArray,
    chains: NgramChains,
    weight: FloatArray,
    labels: Sequence[str] | None,
    num_splits: int,
    num_bins: int,
    binning: Binning,
) -> dict[str, AcceptanceReport]:
    """A report on all chains and one under each label."""
    if labels is not None and len(labels) != len(chains):
        raise InputError(f"{len(chains)} chains but {len(labels)} labels")
    subsets = {ALL: np.ones(len(chains), dtype=np.bool_)}
    for label in sorted(set(labels or ())):
        subsets[label] = np.asarray(labels) == label
    return {
        label: _report(
            estimator,
            conditional[mask],
            chains.take(mask),
            weight[mask],
            num_splits,
            num_bins,
            binning,
        )
        for label, mask in subsets.items()
    }


def cross_validate(
    estimator: NgramAcceptance,
    chains: NgramChains,
    *,
    sample_weight: ArrayLike | None = None,
    num_splits: int = 5,
    seed: int = 0,
) -> tuple[FloatArray, int]:
    """Out-of-fold conditional acceptance [num_chains, num_positions], and the folds used."""
    weight = checked_weights(sample_weight, len(chains))
    conditional = np.zeros((len(chains), estimator.num_positions))
    if chains.group is None:
        raise InputError("n-gram chains: no group; without prompts nothing can be held out")
    folds = group_folds(chains.group, num_splits, seed)
    for train, test in folds:
        fitted = clone(estimator).fit(chains.take(train), weight[train])
        conditional[test] = fitted.predict_conditional(chains.take(test))
    return conditional, len(folds)


def group_folds(
    groups: NDArray[np.generic], num_splits: int, seed: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """(train, test) indices of each fold; no group is on both sides.

    Raises:
        InputError: fewer than two groups, or ``num_splits`` below 2.
    """
    num_groups = np.unique(groups).size
    if num_groups < 2:
        raise InputError(f"{num_groups} prompt(s); holding some out takes at least 2")
    if num_splits < 2:
        raise InputError(f"num_splits must be at least 2, got {num_splits}")
    splitter = GroupKFold(min(num_splits, num_groups), shuffle=True, random_state=seed)
    return list(splitter.split(groups, groups=groups))


def select_features(
    estimator: NgramAcceptance,
    chains: NgramChains,
    *,
    sample_weight: ArrayLike | None = None,
    num_splits: int = 5,
    seed: int = 0,
) -> tuple[str, ...]:
    """Strata features worth having, by forward selection on held-out Brier score.

    The score is the conditional one summed over positions and chains: proper, and bounded
    where a logarithm is not. A feature stays only if it lowers it; on a draw the smaller set
    wins.
    """
    weight = checked_weights(sample_weight, len(chains))

    def score(features: tuple[str, ...]) -> float:
        candidate = clone(estimator).set_params(features=features)
        predicted, _ = cross_validate(
            candidate, chains, sample_weight=weight, num_splits=num_splits, seed=seed
        )
        return _conditional_loss(predicted, chains, weight)

    known = available_features(chains)
    chosen: tuple[str, ...] = ()
    best = score(chosen)
    while len(chosen) < len(known):
        options = [
            tuple(name for name in known if name in chosen or name == added)
            for added in known
            if added not in chosen
        ]
        scores = [score(option) for option in options]
        if min(scores) >= best:
            break
        best = min(scores)
        chosen = options[scores.index(best)]
    return chosen


def position_reports(
    before: FloatArray,
    after: FloatArray,
    is_accepted: BoolArray,
    is_graded: BoolArray,
    *,
    sample_weight: ArrayLike | None = None,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> tuple[PositionReport, ...]:
    """Score two sets of predictions column by column; all arguments [n, num_positions]."""
    weight = checked_weights(sample_weight, len(before))
    reports = []
    for j in range(before.shape[1]):
        rows = is_graded[:, j]
        outcome, row_weight = is_accepted[rows, j], weight[rows]
        total = float(row_weight.sum())
        reports.append(
            PositionReport(
                position=j + 1,
                weight=total,
                observed_rate=float((row_weight * outcome).sum() / total) if total else None,
                before=_scores(before[rows, j], outcome, row_weight, num_bins, binning),
                after=_scores(after[rows, j], outcome, row_weight, num_bins, binning),
            )
        )
    return tuple(reports)


def _report(
    estimator: NgramAcceptance,
    conditional: FloatArray,
    chains: NgramChains,
    weight: FloatArray,
    num_splits: int,
    num_bins: int,
    binning: Binning,
) -> AcceptanceReport:
    share = np.minimum(chains.match_length / estimator.max_n, 1.0)
    naive = np.repeat(share[:, None], conditional.shape[1], axis=1)
    is_accepted, is_alive, is_proposed = _outcomes(chains, conditional.shape[1])
    assert chains.group is not None  # cross_validate has refused chains without groups

    def score(before: FloatArray, after: FloatArray, rows: BoolArray) -> tuple[PositionReport, ...]:
        return position_reports(
            before,
            after,
            is_accepted,
            rows,
            sample_weight=weight,
            num_bins=num_bins,
            binning=binning,
        )

    return AcceptanceReport(
        num_chains=int((chains.chain_length > 0).sum()),
        num_groups=int(np.unique(chains.group).size),
        num_splits=num_splits,
        baseline=BASELINE,
        conditional=score(naive, conditional, is_alive),
        survival=score(naive.cumprod(axis=1), conditional.cumprod(axis=1), is_proposed),
    )


def _outcomes(chains: NgramChains, num_positions: int) -> tuple[BoolArray, BoolArray, BoolArray]:
    """(accepted up to and with j, alive before j and proposed, proposed), [n, num_positions]."""
    positions = np.arange(num_positions)
    is_accepted = chains.num_accepted[:, None] > positions
    is_proposed = chains.chain_length[:, None] > positions
    return is_accepted, is_proposed & (chains.num_accepted[:, None] >= positions), is_proposed


def _conditional_loss(predicted: FloatArray, chains: NgramChains, weight: FloatArray) -> float:
    is_accepted, is_alive, _ = _outcomes(chains, predicted.shape[1])
    squared = (predicted - is_accepted) ** 2
    return float((weight[:, None] * squared * is_alive).sum())


def _scores(
    predicted: FloatArray,
    outcome: BoolArray,
    weight: FloatArray,
    num_bins: int,
    binning: Binning,
) -> Scores:
    # A product of probabilities may leave [0, 1] by rounding only.
    predicted = np.clip(predicted, 0.0, 1.0)

    return Scores(
        ece=expected_calibration_error(
            predicted, outcome, sample_weight=weight, num_bins=num_bins, binning=binning
        ),
        ece_noise=calibration_noise(
            predicted, sample_weight=weight, num_bins=num_bins, binning=binning
        ),
        brier=brier_score(predicted, outcome, sample_weight=weight),
        auc=auc(predicted, outcome, sample_weight=weight),
        curve=reliability_curve(
            predicted, outcome, sample_weight=weight, num_bins=num_bins, binning=binning
        ),
    )
