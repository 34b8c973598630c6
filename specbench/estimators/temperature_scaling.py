"""Sequential temperature scaling of a drafter's confidence head (DSpark paper, 3.2.1).

The head's c_j estimates the acceptance of position j given that the ones before held; what
the budget needs is the survival c_1 ... c_j, in which errors compound. So temperatures are
fitted from left to right: T_j makes the *product* up to j match the observed survival, with
T_1 .. T_(j-1) fixed. Division by a positive temperature keeps the order of candidates within
a position.
"""

from __future__ import annotations

from typing import Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError

from specbench.errors import InputError
from specbench.estimators.acceptance_evaluation import group_folds
from specbench.estimators.reliability import (
    DEFAULT_NUM_BINS,
    Binning,
    checked_weights,
    expected_calibration_error,
)
from specbench.estimators.sts_interop import StsTable

FloatArray = NDArray[np.float64]
Objective = Literal["ece", "nll"]

# A head whose logits are off by more than a factor of 10 is broken, not miscalibrated.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.1, 10.0
# Search points over that range in log space, neighbours 8% apart ...
_NUM_COARSE = 61
# ... then between the neighbours of the best one, 0.4% apart.
_NUM_FINE = 41
# Losses are means of numbers around 1; differences below this are summation order.
_LOSS_TOLERANCE = 1e-12
# Below about ten samples a bin, the search fits the noise of the error it minimises.
MIN_SAMPLES = 10 * DEFAULT_NUM_BINS
# Keeps logarithms and logits finite; float32 sigmoid itself saturates at 6e-8 from 1.
PROBABILITY_EPS = 1e-7


class SequentialTemperatureScaling(BaseEstimator):  # type: ignore[misc]  # no types shipped
    """One temperature a position, fitted in order against observed survival.

    Args:
        objective: "ece" as in the paper, or "nll" (negative log-likelihood of survival),
            which is smooth in the temperature and steadier on small samples.
        num_bins, binning: of the calibration error.
        min_samples: total weight below which a position takes over the temperature of the
            one before it (1 for the first).

    Attributes:
        temperatures_: [num_positions].
        ece_before_, ece_after_: lists [num_positions] of the survival's calibration error on
            the data fitted to, without and with temperatures; None without samples.
        num_samples_: [num_positions] weight each position was fitted on.
        hit_bound_: [num_positions] bool, the search ended at its limit: distrust the head.
    """

    def __init__(
        self,
        *,
        objective: Objective = "ece",
        num_bins: int = DEFAULT_NUM_BINS,
        binning: Binning = "equal-mass",
        min_samples: float = MIN_SAMPLES,
    ) -> None:
        self.objective = objective
        self.num_bins = num_bins
        self.binning = binning
        self.min_samples = min_samples

    def fit(
        self,
        logits: ArrayLike,
        num_accepted: ArrayLike,
        num_drafted: ArrayLike,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit from graded blocks.

        Args:
            logits: [n, num_positions] of the confidence head, before the sigmoid; ignored
                from ``num_drafted`` on (NaN allowed there).
            num_accepted: [n] leading tokens accepted.
            num_drafted: [n] drafted tokens that were graded.
            sample_weight: [n].

        Raises:
            InputError: shapes differ, values contradict each other, nothing to fit on.
        """
        if self.objective not in ("ece", "nll"):
            raise InputError(f"objective must be 'ece' or 'nll', got {self.objective!r}")
        scores, accepted, drafted = _check_blocks(logits, num_accepted, num_drafted)
        weight = checked_weights(sample_weight, len(scores))
        if not (weight[drafted > 0]).sum() > 0:
            raise InputError("no drafted block to fit temperatures on; collect more text")
        num_positions = scores.shape[1]
        self.temperatures_ = np.ones(num_positions)
        self.num_samples_ = np.zeros(num_positions)
        self.ece_before_: list[float | None] = []
        self.ece_after_: list[float | None] = []
        before, after = np.ones(len(scores)), np.ones(len(scores))
        for j in range(num_positions):
            rows = (drafted > j) & (weight > 0)
            outcome, row_weight = accepted[rows] > j, weight[rows]
            self.num_samples_[j] = row_weight.sum()
            if self.num_samples_[j] >= self.min_samples:
                temperature = self._search(scores[rows, j], after[rows], outcome, row_weight)
            else:
                temperature = float(self.temperatures_[j - 1]) if j else 1.0
            self.temperatures_[j] = temperature
            before[rows] *= _sigmoid(scores[rows, j])
            after[rows] *= _sigmoid(scores[rows, j] / temperature)
            self.ece_before_.append(self._ece(before[rows], outcome, row_weight))
            self.ece_after_.append(self._ece(after[rows], outcome, row_weight))
        self.hit_bound_ = np.isclose(self.temperatures_, MIN_TEMPERATURE) | np.isclose(
            self.temperatures_, MAX_TEMPERATURE
        )
        return self

    def transform(self, logits: ArrayLike) -> FloatArray:
        """[n, num_positions] calibrated conditional acceptance."""
        if not hasattr(self, "temperatures_"):
            raise NotFittedError("SequentialTemperatureScaling is not fitted; call fit first")
        scores = np.asarray(logits, dtype=np.float64)
        if scores.ndim != 2 or scores.shape[1] != self.temperatures_.size:
            raise InputError(
                f"logits have shape {scores.shape}, temperatures are for "
                f"{self.temperatures_.size} positions"
            )
        return _sigmoid(scores / self.temperatures_)

    def survival(self, logits: ArrayLike) -> FloatArray:
        """[n, num_positions] calibrated survival, the product of :meth:`transform`."""
        return np.asarray(self.transform(logits).cumprod(axis=1))

    def table(self, dataset: str = "") -> StsTable:
        """What an engine or a file needs; ``dataset`` names the text fitted on.

        Calibration errors are left out if a position had no sample to measure one on.
        """
        if not hasattr(self, "temperatures_"):
            raise NotFittedError("SequentialTemperatureScaling is not fitted; call fit first")
        before = tuple(value for value in self.ece_before_ if value is not None)
        after = tuple(value for value in self.ece_after_ if value is not None)
        is_complete = len(after) == self.temperatures_.size
        return StsTable(
            temperatures=tuple(self.temperatures_.tolist()),
            ece_before=before if is_complete else (),
            ece_after=after if is_complete else (),
            dataset=dataset,
            num_samples=round(float(self.num_samples_[0])),
        )

    def _search(
        self, logits: FloatArray, before: FloatArray, outcome: NDArray[np.bool_], weight: FloatArray
    ) -> float:
        """Best temperature on a coarse grid, then on a fine one around the best point."""
        low, high = np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE)
        spacing = (high - low) / (_NUM_COARSE - 1)

        def best_of(log_candidates: FloatArray) -> float:
            candidates = np.exp(np.clip(log_candidates, low, high))
            losses = np.asarray(
                [
                    self._loss(before * _sigmoid(logits / candidate), outcome, weight)
                    for candidate in candidates
                ]
            )
            # Among equals the one nearest to 1, that is the smallest intervention.
            equals = candidates[losses <= losses.min() + _LOSS_TOLERANCE]
            return float(equals[np.abs(np.log(equals)).argmin()])

        coarse = np.log(best_of(np.linspace(low, high, _NUM_COARSE)))
        return best_of(np.linspace(coarse - spacing, coarse + spacing, _NUM_FINE))

    def _loss(self, survival: FloatArray, outcome: NDArray[np.bool_], weight: FloatArray) -> float:
        if self.objective == "ece":
            ece = self._ece(survival, outcome, weight)
            assert ece is not None  # rows have positive weight
            return ece
        clipped = np.clip(survival, PROBABILITY_EPS, 1.0 - PROBABILITY_EPS)
        log_likelihood = np.where(outcome, np.log(clipped), np.log1p(-clipped))
        return float(-(weight * log_likelihood).sum() / weight.sum())

    def _ece(
        self, survival: FloatArray, outcome: NDArray[np.bool_], weight: FloatArray
    ) -> float | None:
        return expected_calibration_error(
            survival, outcome, sample_weight=weight, num_bins=self.num_bins, binning=self.binning
        )


def cross_validated_survival(
    estimator: SequentialTemperatureScaling,
    logits: ArrayLike,
    num_accepted: ArrayLike,
    num_drafted: ArrayLike,
    groups: NDArray[np.generic],
    *,
    num_splits: int = 5,
    seed: int = 0,
) -> FloatArray:
    """[n, num_positions] survival of each block by temperatures fitted on other prompts.

    Score it with ``acceptance_evaluation.position_reports``.
    """
    scores, accepted, drafted = _check_blocks(logits, num_accepted, num_drafted)
    if len(groups) != len(scores):
        raise InputError(f"{len(scores)} blocks but {len(groups)} groups")
    survival = np.ones(scores.shape)
    for train, test in group_folds(groups, num_splits, seed):
        fitted = clone(estimator).fit(scores[train], accepted[train], drafted[train])
        survival[test] = fitted.survival(scores[test])
    return survival


def logits_from_probabilities(probabilities: ArrayLike) -> FloatArray:
    """Inverse sigmoid, for confidences recorded after it; 0 and 1 become +-16.1."""
    clipped = np.clip(
        np.asarray(probabilities, dtype=np.float64), PROBABILITY_EPS, 1.0 - PROBABILITY_EPS
    )
    return np.asarray(np.log(clipped) - np.log1p(-clipped))


def _check_blocks(
    logits: ArrayLike, num_accepted: ArrayLike, num_drafted: ArrayLike
) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.int64]]:
    scores = np.asarray(logits, dtype=np.float64)
    accepted = np.asarray(num_accepted, dtype=np.int64)
    drafted = np.asarray(num_drafted, dtype=np.int64)
    if scores.ndim != 2 or scores.shape[1] < 1:
        raise InputError(f"confidence logits must be [n, positions], got shape {scores.shape}")
    if accepted.shape != (len(scores),) or drafted.shape != (len(scores),):
        raise InputError(
            f"{len(scores)} rows of logits, but num_accepted has shape {accepted.shape} and "
            f"num_drafted {drafted.shape}"
        )
    is_bad = (accepted < 0) | (accepted > drafted) | (drafted > scores.shape[1])
    if is_bad.any():
        row = int(is_bad.argmax())
        raise InputError(
            f"block {row}: {accepted[row]} accepted of {drafted[row]} drafted, with logits for "
            f"{scores.shape[1]}"
        )
    is_used = np.arange(scores.shape[1]) < drafted[:, None]
    is_bad = (is_used & np.isnan(scores)).any(axis=1)
    if is_bad.any():
        raise InputError(f"block {int(is_bad.argmax())}: a drafted token's confidence is NaN")
    return np.where(is_used, scores, 0.0), accepted, drafted


def _sigmoid(values: FloatArray) -> FloatArray:
    # exp of the negated magnitude cannot overflow.
    small = np.exp(-np.abs(values))
    return np.asarray(np.where(values >= 0, 1.0, small) / (1.0 + small))
