"""What every fitted estimator must satisfy: scikit-learn's manners, and determinism."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError

from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.temperature_scaling import SequentialTemperatureScaling

NUM_ROWS = 400


def chain_data(seed: int) -> tuple[NgramChains]:
    rng = np.random.default_rng(seed)
    length = rng.integers(1, 4, NUM_ROWS)
    return (
        NgramChains(
            match_length=rng.integers(2, 6, NUM_ROWS),
            num_accepted=rng.integers(0, length + 1),
            chain_length=length,
            num_occurrences=rng.integers(1, 3, NUM_ROWS),
            num_agreeing=np.ones(NUM_ROWS, int),
        ),
    )


def block_data(seed: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    drafted = rng.integers(1, 4, NUM_ROWS)
    logits = rng.normal(2.0, 2.0, (NUM_ROWS, 3))
    held = rng.random((NUM_ROWS, 3)) < 1.0 / (1.0 + np.exp(-logits / (1.0 + seed)))
    return logits, np.minimum(held.cumprod(axis=1).sum(axis=1), drafted), drafted


Case = tuple[BaseEstimator, Callable[[int], tuple[Any, ...]], str]
CASES: list[Case] = [
    (NgramAcceptance(max_n=6, num_positions=3, shrinkage=3.0), chain_data, "predict"),
    (SequentialTemperatureScaling(objective="nll", min_samples=10), block_data, "transform"),
]
every_estimator = pytest.mark.parametrize(
    ("estimator", "data", "method"), CASES, ids=[type(case[0]).__name__ for case in CASES]
)


def learned(estimator: BaseEstimator) -> dict[str, Any]:
    """Attributes that are no constructor parameters."""
    return {k: v for k, v in vars(estimator).items() if k not in estimator.get_params()}


def outcome(estimator: BaseEstimator, data: tuple[Any, ...], method: str) -> np.ndarray:
    return np.asarray(getattr(estimator, method)(data[0]))


@every_estimator
def test_the_constructor_only_stores(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    assert learned(estimator) == {}
    assert clone(estimator).get_params() == estimator.get_params()
    nonsense = {name: object() for name in estimator.get_params()}
    stored = type(estimator)(**nonsense).get_params()
    assert all(stored[name] is value for name, value in nonsense.items())


@every_estimator
def test_fitting_returns_itself_and_learned_attributes_end_in_an_underscore(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    fresh = clone(estimator)
    assert fresh.fit(*data(0)) is fresh
    assert fresh.get_params() == estimator.get_params()
    assert learned(fresh)
    assert [name for name in learned(fresh) if not name.endswith("_")] == []


@every_estimator
def test_unfitted_estimators_say_so(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    with pytest.raises(NotFittedError, match="call fit first"):
        outcome(clone(estimator), data(0), method)
    with pytest.raises(NotFittedError, match="call fit first"):
        clone(estimator).table()


@every_estimator
def test_fitting_again_forgets_what_was_learned_before(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    fresh = clone(estimator).fit(*data(0))
    reused = clone(estimator).fit(*data(1)).fit(*data(0))
    np.testing.assert_array_equal(outcome(fresh, data(2), method), outcome(reused, data(2), method))
    assert not np.array_equal(
        outcome(fresh, data(2), method),
        outcome(clone(estimator).fit(*data(1)), data(2), method),
    )


@every_estimator
def test_predictions_are_probabilities_and_survive_pickling(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    fitted = clone(estimator).fit(*data(0))
    predicted = outcome(fitted, data(1), method)
    assert predicted.shape == (NUM_ROWS, 3)
    assert ((predicted >= 0) & (predicted <= 1)).all()
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(predicted, outcome(copy, data(1), method))


@every_estimator
def test_weights_of_one_change_nothing_and_inputs_stay_as_they_were(
    estimator: BaseEstimator, data: Callable[[int], tuple[Any, ...]], method: str
) -> None:
    given, untouched = data(0), data(0)
    weighted = clone(estimator).fit(*given, sample_weight=np.ones(NUM_ROWS))
    plain = clone(estimator).fit(*given)
    np.testing.assert_array_equal(
        outcome(weighted, data(1), method), outcome(plain, data(1), method)
    )
    assert pickle.dumps(given) == pickle.dumps(untouched)
