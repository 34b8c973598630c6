"""Acceptance of a drafter's next block from what a request accepted lately.

Known before anything is drafted. Each position has a conditional acceptance (accepted, given
that the ones before were) with a Beta prior, and decayed counts of what this request accepted
and rejected there; the prediction is the posterior mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError

from specbench.errors import InputError
from specbench.estimators.acceptance_prior import AcceptancePrior

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Tried by the fit. Weights are in observations, from a prior that one step overrules to one
# that a request never does; decays remember from half of the last step to nearly all.
WEIGHTS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 1.0)
# Laplace's rule of succession: a position never seen gets one half, none gets 0 or 1.
_SMOOTHING = 1.0


class RecentAcceptance(BaseEstimator):  # type: ignore[misc]  # no types shipped
    """Beta posterior of the conditional acceptance by position, per request.

    Attributes:
        conditional_: [num_positions] prior means, the share accepted in the data.
        weight_, decay_: those of the grid that predict each step best from the ones before.
    """

    def fit(self, num_accepted: ArrayLike, num_graded: ArrayLike, groups: ArrayLike) -> Self:
        """Fit from graded blocks.

        Args:
            num_accepted: [n] leading tokens accepted.
            num_graded: [n] tokens of the block that were graded.
            groups: [n] the request a block belongs to; its blocks in order of time.

        Raises:
            InputError: shapes differ, values contradict each other, nothing to fit on.
        """
        blocks = _Blocks.checked(num_accepted, num_graded, groups)
        accepted, reached = blocks.accepted.sum(axis=0), blocks.reached.sum(axis=0)
        self.conditional_ = (accepted + _SMOOTHING) / (reached + 2 * _SMOOTHING)
        losses = np.asarray(
            [
                [self._loss(blocks, counts, weight) for weight in WEIGHTS]
                for counts in (blocks.counts(decay) for decay in DECAYS)
            ]
        )
        best_decay, best_weight = np.unravel_index(losses.argmin(), losses.shape)
        self.decay_, self.weight_ = DECAYS[best_decay], WEIGHTS[best_weight]
        return self

    def predict(
        self, num_accepted: ArrayLike, num_graded: ArrayLike, groups: ArrayLike
    ) -> FloatArray:
        """[n, num_positions] survival of each block, from the blocks of its group before it."""
        if not hasattr(self, "conditional_"):
            raise NotFittedError("RecentAcceptance is not fitted; call fit first")
        blocks = _Blocks.checked(num_accepted, num_graded, groups, self.conditional_.size)
        posterior = self._posterior(blocks.counts(self.decay_), self.weight_)
        return np.asarray(posterior.cumprod(axis=1))

    def log_losses(
        self, num_accepted: ArrayLike, num_graded: ArrayLike, groups: ArrayLike
    ) -> tuple[float, float]:
        """Nats a decided token: with the record of each request, and with the prior alone."""
        if not hasattr(self, "conditional_"):
            raise NotFittedError("RecentAcceptance is not fitted; call fit first")
        blocks = _Blocks.checked(num_accepted, num_graded, groups, self.conditional_.size)
        counts = blocks.counts(self.decay_)
        return (
            self._loss(blocks, counts, self.weight_),
            self._loss(blocks, np.zeros_like(counts), self.weight_),
        )

    def prior(self, resolution: float) -> AcceptancePrior:
        """What an engine needs."""
        if not hasattr(self, "conditional_"):
            raise NotFittedError("RecentAcceptance is not fitted; call fit first")
        return AcceptancePrior(
            tuple(self.conditional_.tolist()), self.weight_, self.decay_, resolution
        )

    def _posterior(self, counts: FloatArray, weight: float) -> FloatArray:
        accepted, reached = counts
        return np.asarray((weight * self.conditional_ + accepted) / (weight + reached))

    def _loss(self, blocks: _Blocks, counts: FloatArray, weight: float) -> float:
        chance = self._posterior(counts, weight)
        chance = np.where(blocks.accepted > 0, chance, 1.0 - chance)
        return float(-np.log(chance[blocks.reached > 0]).mean())


@dataclass(frozen=True)
class _Blocks:
    """Graded blocks as numbers by position.

    Attributes:
        accepted: [n, num_positions] 1 where accepted.
        reached: [n, num_positions] 1 where it was decided: accepted, or the first rejected.
        groups: [n].
    """

    accepted: FloatArray
    reached: FloatArray
    groups: NDArray[Any]

    @classmethod
    def checked(
        cls,
        num_accepted: ArrayLike,
        num_graded: ArrayLike,
        groups: ArrayLike,
        num_positions: int | None = None,
    ) -> _Blocks:
        accepted, graded = np.asarray(num_accepted), np.asarray(num_graded)
        group = np.asarray(groups)
        if not accepted.shape == graded.shape == group.shape or accepted.ndim != 1:
            raise InputError(
                f"blocks of different numbers: {accepted.shape} accepted, {graded.shape} graded, "
                f"{group.shape} groups"
            )
        size = num_positions or int(graded.max(initial=0))
        if size < 1:
            raise InputError("no drafted block to fit acceptance on; collect more text")
        is_bad = (accepted < 0) | (accepted > graded) | (graded > size)
        if is_bad.any():
            row = int(is_bad.argmax())
            raise InputError(
                f"block {row}: {accepted[row]} accepted of {graded[row]} graded, with "
                f"{size} positions"
            )
        positions = np.arange(size)
        decided = np.minimum(accepted + 1, graded)
        return cls(
            (positions < accepted[:, None]).astype(np.float64),
            (positions < decided[:, None]).astype(np.float64),
            group,
        )

    def counts(self, decay: float) -> FloatArray:
        """[2, n, num_positions] decayed numbers accepted and reached before each block."""
        now = np.stack([self.accepted, self.reached])
        before = np.zeros_like(now)
        # Blocks of one group follow each other, perhaps with others between: order by group,
        # and within it by rank, so that the blocks of one rank are summed up at once.
        order = np.argsort(self.groups, kind="stable")
        _, first, sizes = np.unique(self.groups[order], return_index=True, return_counts=True)
        for rank in range(1, int(sizes.max(initial=0))):
            rows = order[first[sizes > rank] + rank]
            previous = order[first[sizes > rank] + rank - 1]
            before[:, rows] = decay * (before[:, previous] + now[:, previous])
        return before


def resolution(
    predicted: FloatArray, shown: FloatArray, is_accepted: NDArray[Any], is_graded: NDArray[Any]
) -> float:
    """Share of the variance of acceptance, given the prediction, that confidences explain.

    The Brier skill score of the survivals known after drafting over those predicted before:
    1 - Brier(shown) / Brier(predicted); 0 where confidences predict no better.

    Args:
        predicted, shown: [n, num_positions] survivals.
        is_accepted, is_graded: [n, num_positions] bool.
    """
    outcome = is_accepted[is_graded].astype(np.float64)
    before = float(np.square(predicted[is_graded] - outcome).sum())
    after = float(np.square(shown[is_graded] - outcome).sum())
    return max(0.0, 1.0 - after / before) if before > 0 else 0.0
