"""Synthetic chains whose acceptance is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from specbench.estimators.ngram_chains import NgramChains

MIN_N, MAX_N, NUM_POSITIONS = 2, 8, 5


def true_conditional(match_length: np.ndarray, agreement: np.ndarray) -> np.ndarray:
    """[n, NUM_POSITIONS]: rises with match length, falls with disagreement, rises with position."""
    positions = np.arange(NUM_POSITIONS)
    logit = -1.0 + 0.4 * match_length - 1.2 * (agreement == 2) + 0.5 * (agreement == 1)
    return 1.0 / (1.0 + np.exp(-(logit[:, None] + 0.3 * positions)))


def draw_chains(num_chains: int, seed: int, num_groups: int = 40) -> NgramChains:
    """Chains accepted exactly with ``true_conditional``; lengths end independently."""
    rng = np.random.default_rng(seed)
    match_length = rng.integers(MIN_N, MAX_N + 1, num_chains)
    agreement = rng.integers(0, 3, num_chains)
    num_occurrences = np.where(agreement == 0, 1, rng.integers(2, 6, num_chains))
    num_agreeing = np.where(agreement == 2, 1, num_occurrences)
    chain_length = rng.integers(1, NUM_POSITIONS + 1, num_chains)
    held = rng.random((num_chains, NUM_POSITIONS)) < true_conditional(match_length, agreement)
    num_accepted = np.minimum(held.cumprod(axis=1).sum(axis=1), chain_length)
    return NgramChains(
        match_length=match_length,
        num_accepted=num_accepted,
        chain_length=chain_length,
        num_occurrences=num_occurrences,
        num_agreeing=num_agreeing,
        group=np.array([f"prompt-{i}" for i in rng.integers(0, num_groups, num_chains)]),
    )


@pytest.fixture
def draw() -> Callable[..., NgramChains]:
    return draw_chains
