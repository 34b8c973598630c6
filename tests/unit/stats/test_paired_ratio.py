"""Ratios: exact values, invariants, and what the interval promises on simulated rounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.stats import RatioEstimate, paired_ratio

rates = st.floats(min_value=0.1, max_value=1e4)


def test_constant_ratio_is_found_exactly_without_spread() -> None:
    estimate = paired_ratio([20.0, 40.0, 10.0], [10.0, 20.0, 5.0])
    assert estimate is not None
    assert estimate.value == pytest.approx(2.0)
    assert estimate.ci95 == pytest.approx((2.0, 2.0))


def test_two_rounds_by_hand() -> None:
    estimate = paired_ratio([math.e, 1.0], [1.0, 1.0])
    assert estimate is not None
    # Log ratios 1 and 0: mean 0.5, standard error 0.5, t(0.975, 1) = 12.7062.
    assert estimate.value == pytest.approx(math.exp(0.5))
    assert estimate.ci95 == pytest.approx(
        (math.exp(0.5 - 12.7062 / 2), math.exp(0.5 + 12.7062 / 2)), rel=1e-4
    )


def test_one_round_has_no_interval_and_none_no_ratio() -> None:
    assert paired_ratio([3.0], [2.0]) == RatioEstimate(pytest.approx(1.5), None)
    assert paired_ratio([], []) is None


@pytest.mark.parametrize(
    ("treatment", "baseline"), [([1.0], []), ([0.0], [1.0]), ([1.0], [math.nan]), ([math.inf], [1])]
)
def test_values_without_a_ratio_are_refused(treatment: list[float], baseline: list[float]) -> None:
    with pytest.raises(ValueError, match=r"rounds|positive"):
        paired_ratio(treatment, baseline)


@given(st.lists(st.tuples(rates, rates), min_size=2, max_size=8))
def test_swapping_the_sides_inverts_value_and_interval(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    forward, backward = paired_ratio(ours, theirs), paired_ratio(theirs, ours)
    assert forward is not None
    assert backward is not None
    assert forward.value == pytest.approx(1 / backward.value)
    assert forward.ci95 is not None
    assert backward.ci95 is not None
    # Intervals of wild pairs reach beyond floating point; logs stay comparable.
    if forward.ci95[0] > 0 and math.isfinite(forward.ci95[1]):
        assert math.log(forward.ci95[0]) == pytest.approx(-math.log(backward.ci95[1]), abs=1e-6)


@given(st.lists(st.tuples(rates, rates), min_size=2, max_size=8), st.floats(0.1, 10))
def test_noise_shared_by_a_rounds_sides_cancels(
    pairs: list[tuple[float, float]], slowdown: float
) -> None:
    ours, theirs = zip(*pairs, strict=True)
    estimate = paired_ratio(ours, theirs)
    slowed = paired_ratio((ours[0] * slowdown, *ours[1:]), (theirs[0] * slowdown, *theirs[1:]))
    assert estimate is not None
    assert slowed is not None
    assert slowed.value == pytest.approx(estimate.value)


def simulated_intervals(
    true_ratio: float, num_rounds: int, num_replays: int, rng: np.random.Generator
) -> list[tuple[float, float]]:
    """Noise as on a busy machine: drift shared by a round, jitter of each run, odd spikes."""
    intervals = []
    for _ in range(num_replays):
        shared = np.exp(rng.normal(0, 0.2, num_rounds))
        jitter = np.exp(rng.normal(0, 0.03, (2, num_rounds)))
        spikes = np.where(rng.random((2, num_rounds)) < 0.1, 0.9, 1.0)
        base, ours = 100 * shared * jitter * spikes
        estimate = paired_ratio((true_ratio * ours).tolist(), base.tolist())
        assert estimate is not None
        assert estimate.ci95 is not None
        intervals.append(estimate.ci95)
    return intervals


@pytest.mark.parametrize("num_rounds", [3, 5, 7])
def test_interval_covers_the_true_ratio(num_rounds: int) -> None:
    rng = np.random.default_rng(20)
    intervals = simulated_intervals(1.3, num_rounds, 2000, rng)
    coverage = np.mean([low <= 1.3 <= high for low, high in intervals])
    assert coverage >= 0.93


def test_same_policy_twice_rarely_looks_different() -> None:
    intervals = simulated_intervals(1.0, 5, 2000, np.random.default_rng(21))
    false_alarms = np.mean([not low <= 1.0 <= high for low, high in intervals])
    assert false_alarms <= 0.08


def test_a_real_difference_is_seen() -> None:
    intervals = simulated_intervals(1.3, 5, 400, np.random.default_rng(22))
    assert np.mean([low > 1.0 for low, _ in intervals]) >= 0.95
