from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import InputError
from specbench.estimators.acceptance_evaluation import position_reports
from specbench.estimators.calibrated_confidence import apply_temperatures
from specbench.estimators.temperature_scaling import (
    MAX_TEMPERATURE,
    SequentialTemperatureScaling,
    cross_validated_survival,
    logits_from_probabilities,
)

TRUE_TEMPERATURES = np.array([2.0, 1.5, 0.7, 3.0])
objectives = pytest.mark.parametrize("objective", ["ece", "nll"])


def draw_blocks(
    num_blocks: int, seed: int, temperatures: np.ndarray = TRUE_TEMPERATURES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(logits, num_accepted, num_drafted): acceptance is sigmoid(logit / temperature)."""
    rng = np.random.default_rng(seed)
    # Confident heads, so that enough blocks reach the last position.
    logits = rng.normal(2.5, 2.0, (num_blocks, temperatures.size))
    held = rng.random(logits.shape) < 1.0 / (1.0 + np.exp(-logits / temperatures))
    num_drafted = rng.integers(1, temperatures.size + 1, num_blocks)
    num_accepted = np.minimum(held.cumprod(axis=1).sum(axis=1), num_drafted)
    return logits, num_accepted, num_drafted


@objectives
def test_known_temperatures_are_recovered(objective: str) -> None:
    fitted = SequentialTemperatureScaling(objective=objective).fit(*draw_blocks(40_000, seed=0))
    np.testing.assert_allclose(fitted.temperatures_, TRUE_TEMPERATURES, rtol=0.25)
    np.testing.assert_allclose(fitted.temperatures_[:2], TRUE_TEMPERATURES[:2], rtol=0.1)
    assert not fitted.hit_bound_.any()


@objectives
def test_overconfidence_is_removed_on_other_data(objective: str) -> None:
    fitted = SequentialTemperatureScaling(objective=objective).fit(*draw_blocks(20_000, seed=1))
    logits, accepted, drafted = draw_blocks(20_000, seed=2)
    reports = position_reports(
        before=(1.0 / (1.0 + np.exp(-logits))).cumprod(axis=1),
        after=fitted.survival(logits),
        is_accepted=accepted[:, None] > np.arange(4),
        is_graded=drafted[:, None] > np.arange(4),
    )
    for report in (reports[0], reports[1], reports[3]):
        assert report.after.ece < 0.03 < report.before.ece
    for stated, report in zip(fitted.ece_before_, reports, strict=True):
        assert stated == pytest.approx(report.before.ece, abs=0.02)


def test_scaling_never_looks_worse_than_none_where_it_was_fitted() -> None:
    fitted = SequentialTemperatureScaling().fit(*draw_blocks(3_000, seed=3))
    # Position 1 has nothing before it; later ones inherit scaled survivals.
    assert fitted.ece_after_[0] <= fitted.ece_before_[0]
    assert sum(fitted.ece_after_) < sum(fitted.ece_before_)


def test_a_calibrated_head_is_left_nearly_alone() -> None:
    fitted = SequentialTemperatureScaling().fit(*draw_blocks(40_000, 4, np.ones(3)))
    np.testing.assert_allclose(fitted.temperatures_, 1.0, rtol=0.15)


def test_positions_are_fitted_in_order_with_earlier_ones_fixed() -> None:
    logits, accepted, drafted = draw_blocks(5_000, seed=5)
    whole = SequentialTemperatureScaling().fit(logits, accepted, drafted)
    start = SequentialTemperatureScaling().fit(
        logits[:, :2], np.minimum(accepted, 2), np.minimum(drafted, 2)
    )
    np.testing.assert_array_equal(whole.temperatures_[:2], start.temperatures_)
    assert whole.ece_after_[:2] == start.ece_after_


@objectives
def test_weights_are_duplicated_rows(objective: str) -> None:
    logits, accepted, drafted = draw_blocks(800, seed=6)
    counts = np.random.default_rng(7).integers(0, 3, 800)
    options = {"objective": objective, "min_samples": 1}
    weighted = SequentialTemperatureScaling(**options).fit(logits, accepted, drafted, counts)
    rows = np.repeat(np.arange(800), counts)
    repeated = SequentialTemperatureScaling(**options).fit(
        logits[rows], accepted[rows], drafted[rows]
    )
    np.testing.assert_allclose(weighted.temperatures_, repeated.temperatures_, rtol=1e-6)
    np.testing.assert_allclose(weighted.ece_after_, repeated.ece_after_, atol=1e-9)


def test_thin_positions_take_over_the_temperature_before_them() -> None:
    logits, accepted, drafted = draw_blocks(2_000, seed=8)
    fitted = SequentialTemperatureScaling().fit(
        logits, np.minimum(accepted, 2), np.minimum(drafted, 2)
    )
    assert fitted.temperatures_[3] == fitted.temperatures_[2] == fitted.temperatures_[1] != 1.0
    assert fitted.ece_after_[2:] == [None, None]
    assert fitted.num_samples_[2:].tolist() == [0.0, 0.0]
    few = SequentialTemperatureScaling().fit(logits[:20], accepted[:20], drafted[:20])
    assert few.temperatures_.tolist() == [1.0] * 4
    assert fitted.table("chat").ece_after == ()


def test_a_head_without_information_hits_the_bound() -> None:
    rng = np.random.default_rng(9)
    logits = rng.normal(0.0, 4.0, (4_000, 1))
    accepted = (rng.random(4_000) < 0.5).astype(int)
    fitted = SequentialTemperatureScaling(objective="nll").fit(logits, accepted, np.ones(4_000))
    assert fitted.hit_bound_.tolist() == [True]
    assert fitted.temperatures_[0] == pytest.approx(MAX_TEMPERATURE)


def test_undrafted_positions_are_not_read() -> None:
    logits, accepted, drafted = draw_blocks(1_000, seed=10)
    masked = np.where(np.arange(4) < drafted[:, None], logits, np.nan)
    plain = SequentialTemperatureScaling().fit(logits, accepted, drafted)
    without = SequentialTemperatureScaling().fit(masked, accepted, drafted)
    np.testing.assert_array_equal(plain.temperatures_, without.temperatures_)


def test_held_out_survival_comes_from_other_prompts() -> None:
    logits, accepted, drafted = draw_blocks(3_000, seed=11)
    groups = np.arange(3_000) % 10
    survival = cross_validated_survival(
        SequentialTemperatureScaling(), logits, accepted, drafted, groups
    )
    assert survival.shape == logits.shape
    assert (np.diff(survival, axis=1) <= 0).all()
    poisoned = accepted.copy()
    poisoned[groups == 0] = 0
    again = cross_validated_survival(
        SequentialTemperatureScaling(), logits, poisoned, drafted, groups
    )
    np.testing.assert_array_equal(survival[groups == 0], again[groups == 0])
    assert not np.array_equal(survival, again)


@given(
    rows=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5),
    temperatures=st.lists(st.floats(0.1, 10.0), min_size=3, max_size=5),
)
def test_the_engine_scales_as_the_fit_does(rows: list, temperatures: list) -> None:
    probabilities = torch.tensor(rows, dtype=torch.float64)
    scaled = apply_temperatures(probabilities, torch.tensor(temperatures))
    logits = logits_from_probabilities(rows)
    fitted = SequentialTemperatureScaling()
    fitted.temperatures_ = np.array(temperatures[:3], dtype=np.float32).astype(float)
    certain = (probabilities < 1e-7) | (probabilities > 1 - 1e-7)
    np.testing.assert_allclose(
        scaled[~certain].numpy(), fitted.transform(logits)[~certain.numpy()], atol=1e-9
    )
    assert ((scaled >= 0) & (scaled <= 1)).all()


def test_scaling_on_the_device_keeps_certainty_order_and_type() -> None:
    probabilities = torch.tensor([[0.0, 0.2, 1.0]], dtype=torch.bfloat16)
    scaled = apply_temperatures(probabilities, torch.tensor([2.0, 2.0, 2.0, 9.0]))
    assert scaled.dtype == torch.float32
    assert scaled[0, 0] == 0
    assert scaled[0, 2] == 1
    assert scaled[0, 1] == pytest.approx(1 / 3, abs=0.002)  # odds 1/4, square root 1/2


@pytest.mark.parametrize(
    ("logits", "accepted", "drafted", "message"),
    [
        (np.zeros(3), [0] * 3, [1] * 3, r"must be \[n, positions\]"),
        (np.zeros((3, 2)), [0], [1] * 3, "3 rows of logits"),
        (np.zeros((2, 2)), [0, 2], [1, 1], "block 1: 2 accepted of 1 drafted"),
        (np.zeros((2, 2)), [0, 0], [1, 3], "block 1: 0 accepted of 3 drafted, with logits for 2"),
        (np.full((2, 2), np.nan), [0, 0], [0, 1], "block 1: a drafted token's confidence is NaN"),
        (np.zeros((2, 2)), [0, 0], [0, 0], "no drafted block"),
        (np.zeros((0, 2)), [], [], "no drafted block"),
    ],
)
def test_bad_blocks_are_refused(
    logits: np.ndarray, accepted: list, drafted: list, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        SequentialTemperatureScaling().fit(logits, accepted, drafted)


def test_bad_options_are_refused() -> None:
    with pytest.raises(InputError, match="objective must be"):
        SequentialTemperatureScaling(objective="mse").fit(np.zeros((1, 1)), [0], [1])
    fitted = SequentialTemperatureScaling().fit(*draw_blocks(500, seed=0))
    with pytest.raises(InputError, match="temperatures are for 4 positions"):
        fitted.transform(np.zeros((2, 3)))
