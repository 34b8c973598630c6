from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from specbench.errors import InputError
from specbench.estimators.acceptance_evaluation import (
    cross_validate,
    evaluate,
    group_folds,
    select_features,
)
from specbench.estimators.ngram_acceptance import NgramAcceptance
from specbench.estimators.ngram_chains import NgramChains

MAX_ECE = 0.03  # what calibrated acceptance is held to on held-out prompts


def make_estimator() -> NgramAcceptance:
    return NgramAcceptance(min_n=2, max_n=8, num_positions=5)


def test_held_out_predictions_are_calibrated_and_the_baseline_is_not(
    draw: Callable[..., NgramChains],
) -> None:
    chains = draw(40_000, seed=0)
    report = evaluate(make_estimator(), chains)["all"]
    assert (report.num_chains, report.num_groups, report.num_splits) == (40_000, 40, 5)
    for kind in (report.conditional, report.survival):
        assert [position.position for position in kind] == [1, 2, 3, 4, 5]
        for position in kind:
            assert position.after.ece < MAX_ECE < position.before.ece
            assert position.after.brier < position.before.brier
            assert position.after.auc > 0.6


def test_positions_count_the_chains_that_tell_about_them() -> None:
    chains = NgramChains(
        match_length=np.full(8, 4),
        num_accepted=np.array([0, 1, 2, 2, 0, 1, 2, 2]),
        chain_length=np.array([2, 2, 2, 3, 1, 1, 2, 2]),
        group=np.arange(8) % 4,
    )
    weights = np.array([1, 1, 1, 1, 1, 1, 1, 3.0])
    estimator = NgramAcceptance(min_n=2, max_n=8, num_positions=4)
    report = evaluate(estimator, chains, sample_weight=weights, num_splits=2)["all"]
    assert [p.weight for p in report.conditional] == [10, 7, 1, 0]
    assert [p.weight for p in report.survival] == [10, 8, 1, 0]
    assert [p.observed_rate for p in report.conditional] == [0.8, 6 / 7, 0.0, None]
    assert report.survival[1].observed_rate == pytest.approx(6 / 8)
    last = report.survival[3].after
    assert (last.ece, last.brier, last.auc) == (None, None, None)


def test_every_label_gets_its_own_report(draw: Callable[..., NgramChains]) -> None:
    chains = draw(3_000, seed=1)
    labels = ["chat" if i < 1_000 else "code-edit" for i in range(3_000)]
    reports = evaluate(make_estimator(), chains, labels=labels)
    assert {name: report.num_chains for name, report in reports.items()} == {
        "all": 3_000,
        "chat": 1_000,
        "code-edit": 2_000,
    }
    parsed = json.loads(json.dumps(asdict(reports["chat"]), allow_nan=False))
    assert len(parsed["survival"][0]["after"]["curve"]["observed"]) >= 2
    with pytest.raises(InputError, match="3000 chains but 1 labels"):
        evaluate(make_estimator(), chains, labels=["chat"])


def test_no_prompt_is_on_both_sides_of_a_split(draw: Callable[..., NgramChains]) -> None:
    groups = draw(2_000, seed=2).group
    assert groups is not None
    folds = group_folds(groups, 5, seed=0)
    for train, test in folds:
        assert not set(groups[train]) & set(groups[test])
    assert sorted(np.concatenate([test for _, test in folds])) == list(range(2_000))
    same = group_folds(groups, 5, seed=0)
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(folds, same, strict=True))
    other = group_folds(groups, 5, seed=1)
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(folds, other, strict=True))


def test_a_prompt_seen_in_training_would_flatter_the_fit() -> None:
    """Prompts with their own acceptance, tied to their match length: leakage must not show."""
    rng = np.random.default_rng(3)
    prompt = np.repeat(np.arange(7), 300)
    rate = np.array([0.1, 0.9, 0.1, 0.9, 0.1, 0.9, 0.5])[prompt]
    accepted = (rng.random(prompt.size) < rate).astype(int)
    chains = NgramChains(prompt + 2, accepted, np.ones(prompt.size, int), group=prompt)
    estimator = NgramAcceptance(min_n=2, max_n=8, num_positions=1)
    held_out, num_folds = cross_validate(estimator, chains, num_splits=7)
    assert num_folds == 7
    seen = estimator.fit(chains).predict_conditional(chains)
    loss_held_out = ((held_out[:, 0] - accepted) ** 2).mean()
    assert loss_held_out > ((seen[:, 0] - accepted) ** 2).mean() + 0.02


def test_useful_features_are_kept_and_noise_is_not(draw: Callable[..., NgramChains]) -> None:
    chains = draw(20_000, seed=4)
    noise = np.random.default_rng(5)
    chains = replace(
        chains,
        in_prompt=noise.random(20_000) < 0.5,
        recent_acceptance=noise.random(20_000),
    )
    assert select_features(make_estimator(), chains) == ("agreement",)


def test_without_prompts_nothing_can_be_held_out(draw: Callable[..., NgramChains]) -> None:
    chains = draw(100, seed=0)
    with pytest.raises(InputError, match="no group"):
        evaluate(make_estimator(), replace(chains, group=None))
    with pytest.raises(InputError, match=r"1 prompt\(s\); holding some out takes at least 2"):
        evaluate(make_estimator(), replace(chains, group=np.zeros(100)))
    with pytest.raises(InputError, match="num_splits must be at least 2"):
        evaluate(make_estimator(), chains, num_splits=1)
