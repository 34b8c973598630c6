"""What a request's record says about its next block: known posteriors, and fits that find them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.exceptions import NotFittedError

from specbench.errors import InputError
from specbench.estimators.acceptance_prior import AcceptancePrior, validate_prior
from specbench.estimators.acceptance_tracker import AcceptanceTracker
from specbench.estimators.recent_acceptance import (
    DECAYS,
    WEIGHTS,
    RecentAcceptance,
    resolution,
)

PRIOR = AcceptancePrior((0.6, 0.5, 0.8), weight=4.0, decay=0.5, resolution=0.3)
CPU = torch.device("cpu")


def fitted(prior: AcceptancePrior) -> RecentAcceptance:
    model = RecentAcceptance()
    model.conditional_ = np.asarray(prior.conditional)
    model.weight_, model.decay_ = prior.weight, prior.decay
    return model


def tracker(max_num_reqs: int = 3) -> AcceptanceTracker:
    return AcceptanceTracker(PRIOR, 3, max_num_reqs, CPU)


def observe(tracked: AcceptanceTracker, *verdicts: tuple[int, int, int]) -> None:
    """Each (slot, tokens emitted, tokens rejected)."""
    slots, sampled, rejected = torch.tensor(verdicts, dtype=torch.int32).T
    tracked.observe(slots, sampled, rejected)


def survival(tracked: AcceptanceTracker, slot: int = 0) -> list[float]:
    found: list[float] = tracked.survival()[slot].tolist()
    return found


# Decided by hand.


def test_a_request_without_a_record_is_worth_the_prior() -> None:
    assert survival(tracker()) == pytest.approx([0.6, 0.3, 0.24])


def test_what_was_decided_counts_and_what_lies_behind_a_rejection_does_not() -> None:
    tracked = tracker()
    observe(tracked, (0, 2, 1))  # the first accepted, the second of two or more rejected
    first = (4 * 0.6 + 0.5) / 4.5
    second = (4 * 0.5 + 0.0) / 4.5
    assert survival(tracked) == pytest.approx([first, first * second, first * second * 0.8])


def test_a_block_accepted_whole_has_no_rejection() -> None:
    tracked = tracker()
    observe(tracked, (0, 3, 0))  # two verified, both accepted
    first, second = (4 * 0.6 + 0.5) / 4.5, (4 * 0.5 + 0.5) / 4.5
    assert survival(tracked) == pytest.approx([first, first * second, first * second * 0.8])


def test_steps_without_verification_forget_and_prompt_chunks_do_not() -> None:
    tracked = tracker()
    observe(tracked, (0, 2, 1))
    observe(tracked, (0, 0, 0))
    observe(tracked, (0, 1, 0))
    assert survival(tracked)[0] == pytest.approx((4 * 0.6 + 0.25) / 4.25)


def test_a_new_request_in_a_slot_starts_afresh_and_leaves_the_others_alone() -> None:
    tracked = tracker()
    observe(tracked, (0, 2, 1), (2, 4, 0))
    tracked.forget(2)
    assert survival(tracked, 2) == pytest.approx([0.6, 0.3, 0.24])
    assert survival(tracked, 0)[0] > 0.6
    assert survival(tracked, 1) == pytest.approx([0.6, 0.3, 0.24])


def test_a_prior_may_cover_more_positions_than_are_drafted() -> None:
    tracked = AcceptanceTracker(PRIOR, 2, 1, CPU)
    observe(tracked, (0, 3, 0))
    assert len(survival(tracked)) == 2


def test_nothing_is_read_back_to_the_host() -> None:
    tracked = AcceptanceTracker(PRIOR, 3, 4, torch.device("meta"))
    slots, counts = (torch.empty(4, dtype=torch.int32, device="meta") for _ in range(2))
    tracked.observe(slots, counts, counts)
    tracked.forget(1)
    assert tracked.survival().shape == (4, 3)


# The engine's counts against the fit's.


@settings(deadline=None)  # machine load must not fail a test
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_the_engine_predicts_what_was_fitted(blocks: list[tuple[int, int, int]]) -> None:
    group = np.array([g for g, _, _ in blocks], dtype=np.int64)
    graded = np.array([n for _, n, _ in blocks], dtype=np.int64)
    accepted = np.array([min(a, n) for _, n, a in blocks], dtype=np.int64)
    expected = fitted(PRIOR).predict(accepted, graded, group)
    tracked = tracker()
    for i, slot in enumerate(group.tolist()):
        found = survival(tracked, slot)
        assert found == pytest.approx(expected[i].tolist(), abs=1e-5)
        assert all(0 <= later <= earlier <= 1 for earlier, later in pairwise(found))
        a, n = int(accepted[i]), int(graded[i])
        observe(tracked, (slot, a + 1, n - a))


# Fits.


def simulated(level: np.ndarray, num_blocks: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Blocks of three of every group, accepted with the group's own chance at each position."""
    rng = np.random.default_rng(seed)
    group = np.repeat(np.arange(len(level)), num_blocks)
    held = rng.random((len(group), 3)) < level[group][:, None]
    accepted = held.cumprod(axis=1).sum(axis=1)
    return accepted, np.full(len(group), 3), group


def test_requests_that_differ_are_told_apart_by_their_record() -> None:
    rng = np.random.default_rng(1)
    train = simulated(rng.beta(2.0, 2.0, 300), 60, seed=2)
    test = simulated(rng.beta(2.0, 2.0, 100), 60, seed=3)
    model = RecentAcceptance().fit(*train)
    # The true prior is Beta(2, 2), that is 4 observations, and forgetting is no help.
    assert model.conditional_[0] == pytest.approx(0.5, abs=0.05)
    assert model.decay_ >= 0.99
    assert 2.0 <= model.weight_ <= 8.0
    with_record, alone = model.log_losses(*test)
    assert with_record < alone - 0.05


def test_equal_requests_keep_the_prior() -> None:
    model = RecentAcceptance().fit(*simulated(np.full(200, 0.6), 40))
    assert model.conditional_ == pytest.approx([0.6, 0.6, 0.6], abs=0.03)
    assert model.weight_ == max(WEIGHTS) or model.decay_ < max(DECAYS)
    with_record, alone = model.log_losses(*simulated(np.full(50, 0.6), 40, seed=5))
    assert with_record == pytest.approx(alone, abs=0.005)


def test_the_order_in_which_requests_interleave_does_not_matter() -> None:
    accepted, graded, group = simulated(np.linspace(0.1, 0.9, 20), 10)
    mixed = np.argsort(np.tile(np.arange(10), 20), kind="stable")
    straight = fitted(PRIOR).predict(accepted, graded, group)
    shuffled = fitted(PRIOR).predict(accepted[mixed], graded[mixed], group[mixed])
    np.testing.assert_allclose(shuffled, straight[mixed])


def test_a_prior_carries_what_was_fitted() -> None:
    model = RecentAcceptance().fit(*simulated(np.full(20, 0.5), 10))
    prior = model.prior(0.25)
    validate_prior(prior, "test")
    assert prior.conditional == tuple(model.conditional_.tolist())
    assert (prior.weight, prior.decay, prior.resolution) == (model.weight_, model.decay_, 0.25)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (([1, 2], [2], [0, 0]), "different numbers"),
        (([3], [2], [0]), "3 accepted of 2"),
        (([-1], [2], [0]), "-1 accepted"),
        (([], [], []), "no drafted block"),
        (([0], [0], [0]), "no drafted block"),
    ],
)
def test_blocks_that_make_no_sense_are_refused(blocks: tuple[list[int], ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecentAcceptance().fit(*(np.asarray(column, dtype=np.int64) for column in blocks))


def test_an_unfitted_model_says_so() -> None:
    with pytest.raises(NotFittedError):
        RecentAcceptance().predict([0], [1], [0])
    with pytest.raises(NotFittedError):
        RecentAcceptance().prior(0.5)


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        (AcceptancePrior((), 1.0, 1.0, 0.0), "no acceptance"),
        (AcceptancePrior((0.5, 1.2), 1.0, 1.0, 0.0), r"conditional\[1\]"),
        (AcceptancePrior((0.5,), 0.0, 1.0, 0.0), "weight"),
        (AcceptancePrior((0.5,), float("inf"), 1.0, 0.0), "weight"),
        (AcceptancePrior((0.5,), 1.0, float("nan"), 0.0), "decay"),
        (AcceptancePrior((0.5,), 1.0, 1.0, -0.1), "resolution"),
    ],
)
def test_impossible_priors_are_refused(prior: AcceptancePrior, message: str) -> None:
    with pytest.raises(InputError, match=message):
        validate_prior(prior, "here")


def test_resolution_is_the_share_of_the_variance_that_is_explained() -> None:
    # Confidences scatter around 0.5 with variance v; acceptance follows them.
    rng = np.random.default_rng(0)
    shown = rng.beta(1.0, 1.0, (40_000, 1))
    accepted = rng.random(shown.shape) < shown
    predicted, graded = np.full(shown.shape, 0.5), np.ones(shown.shape, dtype=bool)
    # Var(uniform) / (0.5 * 0.5) = (1 / 12) / (1 / 4).
    assert resolution(predicted, shown, accepted, graded) == pytest.approx(1 / 3, abs=0.02)
    assert resolution(shown, predicted, accepted, graded) == 0.0
    assert resolution(predicted, accepted.astype(float), accepted, graded) == 1.0
