from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, roc_auc_score

from specbench.errors import InputError
from specbench.estimators.reliability import (
    auc,
    brier_score,
    calibration_noise,
    expected_calibration_error,
    reliability_curve,
)

samples = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60)
both_binnings = pytest.mark.parametrize("binning", ["equal-mass", "equal-width"])


def test_a_hand_computed_error() -> None:
    # Two bins of equal width: |0.2 - 0.5| * 2/4 and |0.9 - 1| * 2/4.
    error = expected_calibration_error(
        [0.1, 0.3, 0.9, 0.9], [0, 1, 1, 1], num_bins=2, binning="equal-width"
    )
    assert error == pytest.approx(0.2)


def test_equal_mass_bins_hold_equal_shares() -> None:
    predicted = np.concatenate([np.linspace(0.0, 0.01, 90), np.linspace(0.5, 1.0, 10)])
    curve = reliability_curve(predicted, np.zeros(100), num_bins=10)
    assert curve.weight == (10.0,) * 10
    wide = reliability_curve(predicted, np.zeros(100), num_bins=10, binning="equal-width")
    assert max(wide.weight) == 90.0


@both_binnings
@given(rows=samples, copies=st.data())
def test_weights_are_duplicated_rows(binning: str, rows: list, copies: st.DataObject) -> None:
    counts = copies.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    predicted, outcomes = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    repeated, repeated_outcomes = np.repeat(predicted, counts), np.repeat(outcomes, counts)
    for function in (expected_calibration_error, auc, brier_score):
        options = {"binning": binning} if function is expected_calibration_error else {}
        weighted = function(predicted, outcomes, sample_weight=counts, **options)
        plain = function(repeated, repeated_outcomes, **options)
        assert (weighted is None) == (plain is None)
        assert plain is None or weighted == pytest.approx(plain, abs=1e-9)
    noise = calibration_noise(predicted, sample_weight=counts, binning=binning)
    plain_noise = calibration_noise(repeated, binning=binning)
    assert noise is plain_noise or noise == pytest.approx(plain_noise, abs=1e-9)


@both_binnings
@given(rows=samples, seed=st.integers(0, 9))
def test_order_of_rows_does_not_matter(binning: str, rows: list, seed: int) -> None:
    predicted, outcomes = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    order = np.random.default_rng(seed).permutation(len(rows))
    error = expected_calibration_error(predicted, outcomes, binning=binning)
    shuffled = expected_calibration_error(predicted[order], outcomes[order], binning=binning)
    assert error == pytest.approx(shuffled, abs=1e-9)
    assert 0.0 <= error <= 1.0


@both_binnings
def test_perfectly_calibrated_predictions_score_their_noise(binning: str) -> None:
    rng = np.random.default_rng(0)
    predicted = rng.random(20_000)
    errors = [
        expected_calibration_error(predicted, rng.random(20_000) < predicted, binning=binning)
        for _ in range(40)
    ]
    noise = calibration_noise(predicted, binning=binning)
    assert noise is not None
    assert noise < 0.012
    assert np.mean(errors) == pytest.approx(noise, rel=0.15)


def test_known_miscalibration_is_measured() -> None:
    rng = np.random.default_rng(1)
    truth = 0.5 * rng.random(50_000)
    outcomes = rng.random(50_000) < truth
    assert expected_calibration_error(truth + 0.2, outcomes) == pytest.approx(0.2, abs=0.01)


def test_constant_predictions_form_one_bin() -> None:
    curve = reliability_curve([0.25] * 8, [1, 1, 0, 0, 0, 0, 0, 0])
    assert curve == type(curve)((0.25,), (0.25,), (8.0,))
    assert expected_calibration_error([0.25] * 4, [1, 1, 0, 0]) == pytest.approx(0.25)


def test_brier_and_auc_are_the_known_ones() -> None:
    rng = np.random.default_rng(2)
    predicted, outcomes, weight = rng.random(99), rng.random(99) < 0.4, rng.random(99)
    assert brier_score(predicted, outcomes, sample_weight=weight) == pytest.approx(
        brier_score_loss(outcomes, predicted, sample_weight=weight)
    )
    assert auc(predicted, outcomes) == pytest.approx(roc_auc_score(outcomes, predicted))
    assert auc([0.1, 0.9, 0.5, 0.5], [0, 1, 0, 1]) == pytest.approx(0.875)


@pytest.mark.parametrize("weights", [[], [0.0, 0.0]])
def test_nothing_to_score_gives_none(weights: list) -> None:
    predicted, outcomes = [0.5] * len(weights), [1] * len(weights)
    for function in (expected_calibration_error, brier_score, auc):
        assert function(predicted, outcomes, sample_weight=weights) is None
    assert calibration_noise(predicted, sample_weight=weights) is None
    assert reliability_curve(predicted, outcomes, sample_weight=weights).weight == ()


def test_one_class_has_no_auc_but_a_brier_score() -> None:
    for outcome in (0, 1):
        assert auc([0.1, 0.9], [outcome, outcome]) is None
        assert brier_score([0.0, 1.0], [outcome, outcome]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("predicted", "outcomes", "weights", "message"),
    [
        ([0.5, float("nan")], [0, 1], None, r"probabilities\[1\] is nan; allowed: 0 to 1"),
        ([0.5, 1.5], [0, 1], None, r"probabilities\[1\] is 1.5"),
        ([0.5], [0.5], None, r"outcomes\[0\] is 0.5; allowed: 0 or 1"),
        ([0.5], [float("nan")], None, r"outcomes\[0\] is nan"),
        ([0.5, 0.5], [1], None, "2 probabilities but 1 outcomes"),
        ([0.5], [1], [1.0, 1.0], "1 samples but 2 weights"),
        ([0.5], [1], [-1.0], r"sample_weight\[0\] is -1.0"),
        ([[0.5]], [1], None, "one dimension"),
        (["x"], [1], None, "must be a list of numbers"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    predicted: list, outcomes: list, weights: list | None, message: str
) -> None:
    for function in (expected_calibration_error, brier_score, auc):
        with pytest.raises(InputError, match=message):
            function(predicted, outcomes, sample_weight=weights)


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="num_bins must be at least 1"):
        expected_calibration_error([0.5], [1], num_bins=0)
    with pytest.raises(InputError, match="binning must be"):
        expected_calibration_error([0.5], [1], binning="quantile")
