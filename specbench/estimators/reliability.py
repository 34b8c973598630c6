"""How far predicted probabilities are from what happened: ECE, Brier, AUC, reliability curves.

Pure functions on arrays. Every one takes sample weights, and a weight of 2 means exactly
what two equal rows mean. No samples give None rather than a number that looks measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specbench.errors import InputError

FloatArray = NDArray[np.float64]
Binning = Literal["equal-mass", "equal-width"]

# 15 bins as in Guo et al. 2017, "On calibration of modern neural networks", so that figures
# can be held against published ones.
DEFAULT_NUM_BINS = 15


@dataclass(frozen=True)
class ReliabilityCurve:
    """Mean prediction against observed rate, one entry for every bin that is not empty.

    Attributes:
        predicted: mean predicted probability, increasing from bin to bin.
        observed: share of outcomes that were true.
        weight: total sample weight (the number of samples if there are no weights).
    """

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    weight: tuple[float, ...]


@dataclass(frozen=True)
class _Binned:
    """Sums over non-empty bins, each [num_filled_bins]."""

    weight: FloatArray
    predicted: FloatArray
    observed: FloatArray
    variance: FloatArray


def expected_calibration_error(
    probabilities: ArrayLike,
    outcomes: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> float | None:
    """Weighted mean over bins of |mean prediction - observed rate| (Naeini et al. 2015).

    Bins hold equal shares of the samples by default: predicted survivals pile up near 0 and
    1, where bins of equal width would be nearly empty in the middle and let a handful of
    samples, or one crowded bin, decide. Equal predictions always share a bin, so the result
    does not depend on the order of rows, and there may be fewer bins than asked for.

    The estimate is biased upwards: even a perfectly calibrated predictor scores above 0 on a
    finite sample. :func:`calibration_noise` says by how much; report it beside this.

    Args:
        probabilities: [n] in [0, 1].
        outcomes: [n] bool, or 0 and 1.
        sample_weight: [n], finite and not negative.
        num_bins: at least 1.
        binning: "equal-mass" or "equal-width".

    Returns:
        The error in [0, 1]; None if there is no sample of positive weight.

    Raises:
        InputError: lengths differ, or a value is NaN or out of range.
    """
    binned = _bin(probabilities, outcomes, sample_weight, num_bins, binning)
    if binned is None:
        return None
    return float(np.abs(binned.predicted - binned.observed).sum() / binned.weight.sum())


def calibration_noise(
    probabilities: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> float | None:
    """ECE that these predictions would score on average if they were exactly right.

    Outcomes drawn from the predictions themselves make the gap of a bin approximately
    normal with variance sum w p (1 - p), whose mean absolute value is sqrt(2 / pi)
    standard deviations. Samples count as independent; chains of one prompt are not, so the
    true floor is higher. Arguments, None and errors as in
    :func:`expected_calibration_error`.
    """
    values = np.asarray(probabilities, dtype=np.float64)
    binned = _bin(values, np.zeros(values.shape, bool), sample_weight, num_bins, binning)
    if binned is None:
        return None
    return float(np.sqrt(2.0 / np.pi) * np.sqrt(binned.variance).sum() / binned.weight.sum())


def reliability_curve(
    probabilities: ArrayLike,
    outcomes: ArrayLike,
    *,
    sample_weight: ArrayLike | None = None,
    num_bins: int = DEFAULT_NUM_BINS,
    binning: Binning = "equal-mass",
) -> ReliabilityCurve:
    """The bins behind :func:`expected_calibration_error`; empty if there are no samples."""
    binned = _bin(probabilities, outcomes, sample_weight, num_bins, binning)
    if binned is None:
        return ReliabilityCurve((), (), ())
    return ReliabilityCurve(
        predicted=tuple((binned.predicted / binned.weight).tolist()),
        observed=tuple((binned.observed / binned.weight).tolist()),
        weight=tuple(binned.weight.tolist()),
    )


def brier_score(
    probabilities: ArrayLike, outcomes: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float | None:
    """Weighted mean of (prediction - outcome)^2; None without samples.

    The constant prediction of the observed rate r scores r (1 - r).

    Raises:
        InputError: lengths differ, or a value is NaN or out of range.
    """
    from sklearn.metrics import brier_score_loss  # takes over a second to import

    predicted, observed, weight = _checked(probabilities, outcomes, sample_weight)
    if weight.sum() == 0:
        return None
    # The explicit label serves samples of one class, where it cannot be inferred.
    return float(brier_score_loss(observed, predicted, sample_weight=weight, pos_label=True))


def auc(
    probabilities: ArrayLike, outcomes: ArrayLike, *, sample_weight: ArrayLike | None = None
) -> float | None:
    """Probability that a true outcome was predicted higher than a false one; ties count half.

    Returns:
        Area under the ROC curve; None where all outcomes are equal or there are none.

    Raises:
        InputError: lengths differ, or a value is NaN or out of range.
    """
    from sklearn.metrics import roc_auc_score

    predicted, observed, weight = _checked(probabilities, outcomes, sample_weight)
    true_weight = weight[observed].sum()
    if true_weight == 0 or true_weight == weight.sum():
        return None
    return float(roc_auc_score(observed, predicted, sample_weight=weight))


def _bin(
    probabilities: ArrayLike,
    outcomes: ArrayLike,
    sample_weight: ArrayLike | None,
    num_bins: int,
    binning: Binning,
) -> _Binned | None:
    if num_bins < 1:
        raise InputError(f"num_bins must be at least 1, got {num_bins}")
    predicted, observed, weight = _checked(probabilities, outcomes, sample_weight)
    used = weight > 0
    predicted, observed, weight = predicted[used], observed[used], weight[used]
    if predicted.size == 0:
        return None
    index = _bin_index(predicted, weight, num_bins, binning)

    def total(values: FloatArray) -> FloatArray:
        return np.bincount(index, values, minlength=num_bins).astype(np.float64)

    sums = total(weight)
    filled = sums > 0
    return _Binned(
        weight=sums[filled],
        predicted=total(weight * predicted)[filled],
        observed=total(weight * observed)[filled],
        # One row of weight w stands for w rows, each with its own chance.
        variance=total(weight * predicted * (1.0 - predicted))[filled],
    )


def _bin_index(
    predicted: FloatArray, weight: FloatArray, num_bins: int, binning: Binning
) -> NDArray[np.int64]:
    """[n] bin of every sample."""
    if binning == "equal-width":
        return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
    if binning != "equal-mass":
        raise InputError(f"binning must be 'equal-mass' or 'equal-width', got {binning!r}")
    values, inverse = np.unique(predicted, return_inverse=True)
    mass = np.bincount(inverse, weight, minlength=values.size)
    # A group of ties belongs to the bin in which the middle of its mass lies.
    middle = (np.cumsum(mass) - mass / 2.0) / mass.sum()
    of_value = np.minimum((middle * num_bins).astype(np.int64), num_bins - 1)
    return np.asarray(of_value[inverse], dtype=np.int64)


def _checked(
    probabilities: ArrayLike, outcomes: ArrayLike, sample_weight: ArrayLike | None
) -> tuple[FloatArray, NDArray[np.bool_], FloatArray]:
    predicted = _vector(probabilities, "probabilities")
    _refuse(predicted, ~((predicted >= 0) & (predicted <= 1)), "probabilities", "0 to 1")
    observed = _vector(outcomes, "outcomes")
    _refuse(observed, ~np.isin(observed, (0.0, 1.0)), "outcomes", "0 or 1")
    weight = checked_weights(sample_weight, predicted.size)
    if observed.size != predicted.size:
        raise InputError(f"{predicted.size} probabilities but {observed.size} outcomes")
    return predicted, observed.astype(np.bool_), weight


def checked_weights(sample_weight: ArrayLike | None, num_samples: int) -> FloatArray:
    """[num_samples] weights, ones if None; raises InputError unless finite and >= 0."""
    if sample_weight is None:
        return np.ones(num_samples)
    weight = _vector(sample_weight, "sample_weight")
    if weight.size != num_samples:
        raise InputError(f"{num_samples} samples but {weight.size} weights")
    _refuse(weight, ~(np.isfinite(weight) & (weight >= 0)), "sample_weight", "finite, 0 or more")
    return weight


def _vector(values: ArrayLike, name: str) -> FloatArray:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise InputError(f"{name} must be a list of numbers") from problem
    if array.ndim != 1:
        raise InputError(f"{name} must have one dimension, got shape {array.shape}")
    return array


def _refuse(values: FloatArray, is_bad: NDArray[Any], name: str, allowed: str) -> None:
    if is_bad.any():
        index = int(is_bad.argmax())
        raise InputError(f"{name}[{index}] is {values[index]}; allowed: {allowed}")
