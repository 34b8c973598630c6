from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression

from specbench.errors import InputError
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains
from specbench.estimators.ngram_table import validate_table

MIN_N, MAX_N, NUM_POSITIONS = 2, 8, 5


def make_estimator(**options: object) -> NgramAcceptance:
    return NgramAcceptance(
        **{"min_n": MIN_N, "max_n": MAX_N, "num_positions": NUM_POSITIONS, **options}
    )


@st.composite
def few_chains(draw: st.DrawFn) -> NgramChains:
    """Small, lopsided samples: the ones that break a fit."""
    num_chains = draw(st.integers(1, 25))

    def column(low: int, high: int) -> np.ndarray:
        values = st.lists(st.integers(low, high), min_size=num_chains, max_size=num_chains)
        return np.array(draw(values))

    # Chains may be longer than the table has positions.
    chain_length = column(1, NUM_POSITIONS + 2)
    occurrences = column(1, 3)
    recent = column(0, 3) / 2.0
    return NgramChains(
        match_length=column(MIN_N, MAX_N),
        num_accepted=np.minimum(column(0, NUM_POSITIONS + 2), chain_length),
        chain_length=chain_length,
        num_occurrences=occurrences,
        num_agreeing=np.minimum(column(1, 3), occurrences),
        recent_acceptance=np.where(recent > 1.0, np.nan, recent),
        in_prompt=column(0, 1) > 0,
        temperature=column(0, 1) / 2.0,
    )


@given(chains=few_chains(), shrinkage=st.sampled_from([1e-3, 1.0, 20.0]))
def test_the_table_keeps_its_promises_on_any_sample(chains: NgramChains, shrinkage: float) -> None:
    fitted = make_estimator(shrinkage=shrinkage).fit(chains)
    table = fitted.table()
    validate_table(table, "fit")  # in [0, 1], monotone in match length and in position
    assert table.survival.shape == (3 * 3 * 2 * 2, MAX_N + 1, NUM_POSITIONS)
    assert table.survival.dtype == np.float32
    assert (np.diff(fitted.conditional_[:, MIN_N:], axis=1) >= 0).all()
    assert (np.diff(fitted.pooled_[MIN_N:], axis=0) >= 0).all()


@given(chains=few_chains(), copies=st.data())
def test_weights_are_duplicated_rows(chains: NgramChains, copies: st.DataObject) -> None:
    counts = np.array(
        copies.draw(
            st.lists(st.integers(0, 3), min_size=len(chains), max_size=len(chains)).filter(any)
        )
    )
    weighted = make_estimator().fit(chains, counts)
    repeated = make_estimator().fit(chains.take(np.repeat(np.arange(len(chains)), counts)))
    np.testing.assert_allclose(weighted.conditional_, repeated.conditional_, atol=1e-9)
    np.testing.assert_allclose(weighted.stratum_weight_, repeated.stratum_weight_)


@given(chains=few_chains(), seed=st.integers(0, 9))
def test_order_of_chains_does_not_matter(chains: NgramChains, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(len(chains))
    fitted, shuffled = make_estimator().fit(chains), make_estimator().fit(chains.take(order))
    np.testing.assert_array_equal(fitted.conditional_, shuffled.conditional_)


def test_known_curves_are_recovered(draw: Callable[..., NgramChains]) -> None:
    fitted = make_estimator().fit(draw(120_000, seed=0))
    assert fitted.stratification_.features == ("agreement",)
    lengths = np.arange(MIN_N, MAX_N + 1)
    positions = np.arange(NUM_POSITIONS)
    for stratum in range(3):
        logit = -1.0 + 0.4 * lengths - 1.2 * (stratum == 2) + 0.5 * (stratum == 1)
        truth = 1.0 / (1.0 + np.exp(-(logit[:, None] + 0.3 * positions)))
        # 120,000 / 21 chains in a cell, a fifth of them of full length: the standard error of
        # a survival is at most 0.007 at the first position and 0.015 at the last.
        survival = fitted.survival_table_[stratum, MIN_N:]
        np.testing.assert_allclose(survival, truth.cumprod(axis=1), atol=0.03)
        np.testing.assert_allclose(fitted.conditional_[stratum, MIN_N:, 0], truth[:, 0], atol=0.03)


def test_one_position_and_one_stratum_is_plain_isotonic_regression() -> None:
    rng = np.random.default_rng(4)
    lengths = rng.integers(MIN_N, MAX_N + 1, 3000)
    accepted = (rng.random(3000) < lengths / 10).astype(int)
    chains = NgramChains(lengths, accepted, np.ones(3000, int))
    fitted = make_estimator(num_positions=1, features=(), shrinkage=1e-6).fit(chains)
    expected = IsotonicRegression().fit(lengths, accepted).predict(np.arange(MIN_N, MAX_N + 1))
    np.testing.assert_allclose(fitted.survival_table_[0, MIN_N:, 0], expected, atol=1e-5)


def test_short_chains_say_nothing_about_later_positions() -> None:
    """The product of conditionals is Kaplan-Meier: 0.5 * 1, not 0.25."""
    chains = NgramChains(
        match_length=np.full(400, 3),
        num_accepted=np.repeat([0, 1, 0, 2], 100),
        chain_length=np.repeat([1, 1, 2, 2], 100),
    )
    fitted = make_estimator(shrinkage=1e-3, num_positions=2).fit(chains)
    np.testing.assert_allclose(fitted.survival_table_[0, 3], [0.5, 0.5], atol=1e-3)


def test_a_thin_stratum_leans_on_the_pooled_curve_and_a_thick_one_does_not() -> None:
    def sample(num_split: int) -> NgramChains:
        # Strata: single (90% accepted, 10,000 chains) and disagreeing (none accepted).
        num_chains = 10_000 + num_split
        is_split = np.arange(num_chains) >= 10_000
        return NgramChains(
            match_length=np.full(num_chains, 4),
            num_accepted=np.where(is_split, 0, np.arange(num_chains) % 10 > 0),
            chain_length=np.ones(num_chains, int),
            num_occurrences=np.where(is_split, 3, 1),
            num_agreeing=np.ones(num_chains, int),
        )

    thin = make_estimator().fit(sample(3)).conditional_[2, 4, 0]
    thick = make_estimator().fit(sample(5_000)).conditional_[2, 4, 0]
    assert 0.5 < thin < 0.9
    assert thick < 0.01


def test_a_stratum_without_data_takes_the_pooled_curve(draw: Callable[..., NgramChains]) -> None:
    chains = draw(5_000, seed=1)
    assert chains.num_occurrences is not None
    fitted = make_estimator().fit(chains.take(chains.num_occurrences > 1))
    assert fitted.stratum_weight_[0] == 0
    np.testing.assert_array_equal(fitted.conditional_[0], fitted.pooled_)


def test_empty_rows_do_not_drag_a_good_stratum_down() -> None:
    """A stratum seen at one match length only keeps its own rate there."""
    rng = np.random.default_rng(5)
    is_good = np.arange(20_000) < 2_000
    lengths = np.where(is_good, MIN_N, rng.integers(MIN_N, MAX_N + 1, 20_000))
    accepted = rng.random(20_000) < np.where(is_good, 0.9, 0.3)
    chains = NgramChains(
        lengths, accepted.astype(int), np.ones(20_000, int),
        num_occurrences=np.where(is_good, 4, 1), num_agreeing=np.where(is_good, 4, 1),
    )  # fmt: skip
    fitted = make_estimator(num_positions=1).fit(chains)
    assert fitted.conditional_[1, MIN_N, 0] == pytest.approx(accepted[is_good].mean(), abs=0.01)


def test_positions_nobody_reached_take_over_the_one_before() -> None:
    chains = NgramChains(np.full(50, 3), np.arange(50) % 2, np.ones(50, int))
    fitted = make_estimator().fit(chains)
    for j in range(1, NUM_POSITIONS):
        np.testing.assert_allclose(fitted.conditional_[0, :, j], fitted.conditional_[0, :, 0])


def test_predictions_end_where_the_chain_ends(draw: Callable[..., NgramChains]) -> None:
    chains = draw(2_000, seed=2)
    fitted = make_estimator().fit(chains)
    survival = fitted.predict(chains)
    beyond = np.arange(NUM_POSITIONS) >= chains.chain_length[:, None]
    assert (survival[beyond] == 0).all()
    assert (survival[~beyond] > 0).all()
    conditional = fitted.predict_conditional(chains).cumprod(axis=1)
    np.testing.assert_allclose(survival[~beyond], conditional[~beyond], rtol=1e-6)


def test_unmatched_requests_are_skipped_and_predicted_zero(
    draw: Callable[..., NgramChains],
) -> None:
    chains = draw(1_000, seed=3)
    zeros = np.zeros(5, int)
    none = NgramChains(zeros, zeros, zeros, num_occurrences=zeros, num_agreeing=zeros)
    names = ("match_length", "num_accepted", "chain_length", "num_occurrences", "num_agreeing")
    both = NgramChains(
        *(np.concatenate([getattr(chains, name), getattr(none, name)]) for name in names)
    )
    fitted = make_estimator().fit(both)
    np.testing.assert_array_equal(fitted.conditional_, make_estimator().fit(chains).conditional_)
    assert (fitted.predict(none) == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_n": 0}, "1 <= min_n <= max_n"),
        ({"min_n": 9}, "1 <= min_n <= max_n"),
        ({"num_positions": 0}, "num_positions"),
        ({"shrinkage": 0.0}, "shrinkage"),
        ({"shrinkage": float("nan")}, "shrinkage"),
        ({"max_n": 5}, "match lengths 2 to 8 were collected, the fit is for 2 to 5"),
        ({"features": ("in_prompt",)}, "the chains lack its columns"),
        ({"features": ("colour",)}, "strata features colour"),
        ({"features": ("recent_acceptance", "agreement")}, "in the order agreement"),
    ],
)
def test_bad_parameters_are_refused(
    draw: Callable[..., NgramChains], options: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_estimator(**options).fit(draw(500, seed=0))


def test_nothing_to_fit_on_is_refused() -> None:
    empty = NgramChains(*np.zeros((3, 4), int))
    with pytest.raises(InputError, match="no n-gram chain with a proposed token"):
        make_estimator().fit(empty)
    one = NgramChains(np.array([2]), np.array([1]), np.array([1]))
    with pytest.raises(InputError, match="no n-gram chain with a proposed token"):
        make_estimator().fit(one, [0.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_accepted": np.array([3, 0])}, "row 0: more tokens accepted than proposed"),
        ({"match_length": np.array([2, 0])}, "row 1: a chain without a match"),
        ({"match_length": np.array([2, -1])}, "row 1: match_length is negative"),
        ({"match_length": np.array([2])}, "columns of different lengths"),
        ({"num_agreeing": None}, "or neither"),
        ({"num_agreeing": np.array([9, 1])}, "row 0: num_agreeing > num_occurrences"),
        ({"recent_acceptance": np.array([np.nan, 2.0])}, "row 1: recent_acceptance"),
        ({"temperature": np.array([np.nan, 1.0])}, "row 0: temperature"),
        ({"chain_length": np.array([2.0, 1.0])}, "chain_length has the wrong type float64"),
        ({"chain_length": np.array(["a", "b"])}, "chain_length has the wrong type"),
        ({"chain_length": np.array([[1], [1]])}, "chain_length must have one dimension"),
    ],
)
def test_contradictory_chains_are_refused(change: dict, message: str) -> None:
    good = NgramChains(
        np.array([2, 3]), np.array([1, 0]), np.array([2, 1]),
        num_occurrences=np.array([1, 2]), num_agreeing=np.array([1, 1]),
    )  # fmt: skip
    with pytest.raises(InputError, match=message):
        replace(good, **change)
