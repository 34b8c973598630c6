"""Calibrated acceptance of n-gram chains: isotonic in match length, stratified, shrunk.

An n-gram chain has no confidence of its own. What it has is the length of the suffix that
matched: longer matches hold better. For every position j the conditional acceptance p_j,
among chains that were alive before j and have a j-th token, is fitted as a non-decreasing
function of match length; survival is the product p_1 ... p_j (the Kaplan-Meier product:
a chain that ends before j says nothing about j and is left out there).
"""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from sklearn.isotonic import IsotonicRegression

from specbench.errors import InputError
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_table import NgramTable, Stratification, available_features
from specbench.estimators.reliability import checked_weights

FloatArray = NDArray[np.float64]

# Logits of observed rates must be finite; no sample here tells 1e-6 from 0.
_RATE_EPS = 1e-6
# Moves a rate from one clip limit to the other: 2 * log(1e6) = 27.6.
_MAX_LOGIT_SHIFT = 30.0
# Halvings of that range until neighbouring shifts are equal in float64.
_NUM_BISECTIONS = 60


class NgramAcceptance(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Survival of n-gram chains from match length and a few discrete features.

    Rates of thin cells lean on better-known ones, in two places. A position leans on the
    one before it, a stratum leans on the curve pooled over strata; in both the prior curve
    is first moved, in logits, to the cell group's own overall rate (itself shrunk), so that
    only its *shape* is borrowed and rows without data do not drag a good stratum down.
    ``shrinkage`` is the number of pseudo-chains the prior counts for, at the overall rate
    and at each match length. Last comes the isotonic fit, with observed plus pseudo counts
    as weights.

    Args:
        min_n, max_n: suffix lengths that the lookup tries.
        num_positions: longest chain, in tokens.
        features: strata features (see :class:`Stratification`); None takes every feature
            whose columns the chains have.
        recent_edges: cuts of the running acceptance (see :class:`Stratification`).
        shrinkage: pseudo-chains, above 0. At 20 observed chains the default gives prior and
            data equal say; a rate from 20 chains has a standard error of up to 0.11.

    Attributes:
        stratification_: the strata used.
        pooled_: [max_n + 1, num_positions] conditional acceptance over all strata.
        conditional_: [num_strata, max_n + 1, num_positions] conditional acceptance.
        survival_table_: same shape, float32, its product over positions; rows below
            ``min_n`` are 0.
        stratum_weight_: [num_strata] total weight of the fitted chains.
    """

    def __init__(
        self,
        *,
        min_n: int = 2,
        max_n: int = 16,
        num_positions: int = 16,
        features: tuple[str, ...] | None = None,
        recent_edges: tuple[float, ...] = Stratification().recent_edges,
        shrinkage: float = 20.0,
    ) -> None:
        self.min_n = min_n
        self.max_n = max_n
        self.num_positions = num_positions
        self.features = features
        self.recent_edges = recent_edges
        self.shrinkage = shrinkage

    def fit(self, chains: NgramChains, sample_weight: ArrayLike | None = None) -> Self:
        """Fit from graded chains; a weight of 2 means what two equal chains mean.

        Raises:
            InputError: a parameter is out of range, a match length lies outside
                min_n..max_n, a feature's columns are missing, or no chain has a token.
        """
        self._check_parameters()
        weight = checked_weights(sample_weight, len(chains))
        chains, weight = self._usable(chains, weight)
        features = available_features(chains) if self.features is None else tuple(self.features)
        self.stratification_ = Stratification(features, tuple(self.recent_edges))
        strata = self.stratification_.index(chains)
        num_strata = self.stratification_.num_strata
        at_risk, accepted = _count(
            chains, strata, weight, num_strata, self.max_n, self.num_positions
        )
        rows = slice(self.min_n, self.max_n + 1)
        pooled = _fit_pooled(
            at_risk[:, rows].sum(axis=0), accepted[:, rows].sum(axis=0), self.shrinkage
        )
        by_stratum = _shrink(
            at_risk[:, rows],
            accepted[:, rows],
            np.broadcast_to(pooled, at_risk[:, rows].shape),
            self.shrinkage,
        )
        self.pooled_ = np.zeros((self.max_n + 1, self.num_positions))
        self.pooled_[rows] = pooled
        self.conditional_ = np.zeros(at_risk.shape)
        self.conditional_[:, rows] = by_stratum
        self.survival_table_ = np.cumprod(self.conditional_, axis=2).astype(np.float32)
        self.stratum_weight_ = np.bincount(strata, weight, minlength=num_strata)
        return self

    def predict(self, chains: NgramChains) -> FloatArray:
        """[num_chains, num_positions] survival; 0 beyond the chain's own length."""
        survival = self._rows(self._fitted(), chains).astype(np.float64)
        positions = np.arange(self.num_positions)
        survival[positions >= chains.chain_length[:, None]] = 0.0
        return survival

    def predict_conditional(self, chains: NgramChains) -> FloatArray:
        """[num_chains, num_positions] acceptance of each position if the ones before held."""
        self._fitted()
        return self._rows(self.conditional_, chains)

    def table(self) -> NgramTable:
        """What the engine needs, and nothing of how it was fitted."""
        return NgramTable(self._fitted(), self.min_n, self.max_n, self.stratification_)

    def _rows(self, table: NDArray[np.floating], chains: NgramChains) -> FloatArray:
        strata = self.stratification_.index(chains)
        return np.asarray(table[strata, np.minimum(chains.match_length, self.max_n)])

    def _fitted(self) -> NDArray[np.float32]:
        if not hasattr(self, "survival_table_"):
            raise NotFittedError("NgramAcceptance is not fitted; call fit first")
        return np.asarray(self.survival_table_, dtype=np.float32)

    def _check_parameters(self) -> None:
        if not 1 <= self.min_n <= self.max_n:
            raise InputError(f"need 1 <= min_n <= max_n, got {self.min_n} and {self.max_n}")
        if self.num_positions < 1:
            raise InputError(f"num_positions must be at least 1, got {self.num_positions}")
        if not 0 < self.shrinkage < np.inf:
            raise InputError(f"shrinkage must be above 0 and finite, got {self.shrinkage}")

    def _usable(self, chains: NgramChains, weight: FloatArray) -> tuple[NgramChains, FloatArray]:
        """Chains with at least one token and a positive weight."""
        used = (chains.chain_length > 0) & (weight > 0)
        if not used.any():
            raise InputError("no n-gram chain with a proposed token; collect more text")
        lengths = chains.match_length[used]
        if lengths.min() < self.min_n or lengths.max() > self.max_n:
            raise InputError(
                f"match lengths {lengths.min()} to {lengths.max()} were collected, the fit is "
                f"for {self.min_n} to {self.max_n}; collect with the same min_n and max_n"
            )
        return chains.take(used), weight[used]


def _count(
    chains: NgramChains,
    strata: NDArray[np.int64],
    weight: FloatArray,
    num_strata: int,
    max_n: int,
    num_positions: int,
) -> tuple[FloatArray, FloatArray]:
    """(at_risk, accepted), each [num_strata, max_n + 1, num_positions]: weight of chains.

    These sums are all the fit sees, so it costs the same however many chains there are.
    """
    cell = strata * (max_n + 1) + chains.match_length
    num_cells = num_strata * (max_n + 1)
    at_risk, accepted = np.zeros((2, num_cells, num_positions))
    for j in range(num_positions):
        is_alive = (chains.num_accepted >= j) & (chains.chain_length > j)
        is_accepted = chains.num_accepted > j
        at_risk[:, j] = np.bincount(cell, weight * is_alive, minlength=num_cells)
        accepted[:, j] = np.bincount(cell, weight * is_accepted, minlength=num_cells)
    shape = (num_strata, max_n + 1, num_positions)
    return at_risk.reshape(shape), accepted.reshape(shape)


def _fit_pooled(at_risk: FloatArray, accepted: FloatArray, shrinkage: float) -> FloatArray:
    """[num_lengths, num_positions] conditional acceptance over all strata."""
    curve = np.empty(at_risk.shape)
    curve[:, 0] = _fit_first_position(at_risk[:, 0], accepted[:, 0], shrinkage)
    for j in range(1, at_risk.shape[1]):
        now = (slice(None), slice(j, j + 1))
        before = curve[:, j - 1 : j]
        curve[now] = _shrink(at_risk[now][None], accepted[now][None], before[None], shrinkage)[0]
    return curve


def _fit_first_position(at_risk: FloatArray, accepted: FloatArray, shrinkage: float) -> FloatArray:
    """[num_lengths]; there is no curve to lean on yet, so gaps are interpolated instead."""
    seen = at_risk > 0
    overall = accepted.sum() / at_risk.sum()
    rate = (accepted[seen] + shrinkage * overall) / (at_risk[seen] + shrinkage)
    isotonic = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip")
    isotonic.fit(np.flatnonzero(seen), rate, sample_weight=at_risk[seen] + shrinkage)
    return np.asarray(isotonic.predict(np.arange(at_risk.size)), dtype=np.float64)


def _shrink(
    at_risk: FloatArray, accepted: FloatArray, prior: FloatArray, shrinkage: float
) -> FloatArray:
    """Isotonic rates along axis 1, leaning on ``prior``; all [groups, lengths, positions]."""
    shifted = _shift_to_rate(prior, at_risk, accepted, shrinkage)
    weight = at_risk + shrinkage
    rate = (accepted + shrinkage * shifted) / weight
    result = shifted.copy()
    # Hundreds of short fits: scipy's is the one inside scikit-learn's, a tenth of its time.
    for group, j in np.argwhere(at_risk.sum(axis=1) > 0):
        result[group, :, j] = isotonic_regression(rate[group, :, j], weights=weight[group, :, j]).x
    return result


def _shift_to_rate(
    prior: FloatArray, at_risk: FloatArray, accepted: FloatArray, shrinkage: float
) -> FloatArray:
    """``prior`` moved by one logit per (group, position) to that group's overall rate.

    The rate aimed at is the observed one with ``shrinkage`` pseudo-chains at the prior's
    own; without data the prior is returned as it is. Found by bisection: the mean over
    chains of sigmoid(logit + shift) increases with the shift.
    """
    total = at_risk.sum(axis=1, keepdims=True)
    has_data = total > 0
    share = np.divide(at_risk, total, out=np.zeros_like(at_risk), where=has_data)
    prior_rate = (share * prior).sum(axis=1, keepdims=True)
    target = (accepted.sum(axis=1, keepdims=True) + shrinkage * prior_rate) / (total + shrinkage)
    clipped = np.clip(prior, _RATE_EPS, 1.0 - _RATE_EPS)
    logit = np.log(clipped) - np.log1p(-clipped)
    low = np.full(total.shape, -_MAX_LOGIT_SHIFT)
    high = -low
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2.0
        is_low = (share * _sigmoid(logit + middle)).sum(axis=1, keepdims=True) < target
        low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
    return np.where(has_data, _sigmoid(logit + (low + high) / 2.0), prior)


def _sigmoid(values: FloatArray) -> FloatArray:
    return np.asarray(1.0 / (1.0 + np.exp(-values)))
