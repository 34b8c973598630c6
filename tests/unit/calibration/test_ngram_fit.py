"""The n-gram fit on text whose copies hold with a known probability."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from specbench.calibration.ngram_fit import LookupSpec, fit_ngram, parse_features
from specbench.errors import InputError, UsageError
from specbench.training.responses import SCHEMA

LOOKUP = LookupSpec(min_n=2, max_n=4, num_positions=3)
HOLDS = {"chat-topic": 0.3, "code-edit": 0.9}
VOCAB = 1000


def copying(num_prompts: int, split: str, seed: int) -> pl.DataFrame:
    """Responses that copy their prompt; before each token they leave it with a known chance.

    A response that leaves draws fresh tokens and comes back at a random place.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_prompts):
        source = list(HOLDS)[i % 2]
        prompt = rng.choice(VOCAB, 400, replace=False).tolist()
        response: list[int] = []
        place = int(rng.integers(300))
        while len(response) < 60:
            if place < 400 and (len(response) < 2 or rng.random() < HOLDS[source]):
                response.append(prompt[place])
                place += 1
            else:
                response += rng.integers(VOCAB, 2 * VOCAB, 1).tolist()
                place = int(rng.integers(300))
                response += prompt[place : place + 2]
                place += 2
        rows.append((f"{split}{i}", source, split, 0.0, prompt, response))
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def test_known_rates_are_found_and_held_out_prompts_agree() -> None:
    responses = pl.concat([copying(200, "train", 0), copying(60, "test", 1)])
    fit = fit_ngram(responses, LOOKUP, features=(), seed=0)
    held_out, crossed = fit.reports
    assert (held_out.held_out, crossed.held_out) == ("test prompts", "5 folds by prompt")
    assert list(held_out.sources) == ["all", "chat", "code-edit"]
    for source, rate in (("chat", 0.3), ("code-edit", 0.9)):
        first = crossed.sources[source].survival[0]
        assert first.observed_rate == pytest.approx(rate, abs=0.05)
    first = held_out.sources["all"].survival[0]
    assert first.after.ece is not None
    assert first.before.ece is not None
    assert first.after.ece < 0.05 < first.before.ece
    assert fit.num_prompts == 200
    assert held_out.sources["all"].num_prompts == 60
    assert fit.table.survival.shape == (1, 5, 3)


def test_the_choice_finds_what_tells_the_texts_apart() -> None:
    fit = fit_ngram(copying(200, "train", 0), LOOKUP, features=None, seed=0)
    assert fit.features_were_chosen
    assert "recent_acceptance" in fit.features
    plain = fit_ngram(copying(200, "train", 0), LOOKUP, features=(), seed=0)
    better, worse = (f.reports[0].sources["all"].survival[0].after.brier for f in (fit, plain))
    assert better is not None
    assert worse is not None
    assert better < worse


def test_without_a_train_split_everything_is_fitted_and_cross_validated() -> None:
    fit = fit_ngram(copying(20, "test", 0), LOOKUP, features=(), seed=0)
    assert [report.held_out for report in fit.reports] == ["5 folds by prompt"]
    assert fit.num_prompts == 20


def test_one_prompt_is_too_few() -> None:
    with pytest.raises(InputError, match="1 prompt"):
        fit_ngram(copying(1, "train", 0), LOOKUP, features=(), seed=0)


def test_text_that_repeats_nothing_is_refused() -> None:
    rows = [(f"p{i}", "chat-topic", "train", 0.0, [1, 2], [3, 4, 5]) for i in range(3)]
    with pytest.raises(InputError, match="generate more"):
        fit_ngram(pl.DataFrame(rows, schema=SCHEMA, orient="row"), LOOKUP, features=(), seed=0)


def test_the_report_as_json_has_no_curves() -> None:
    report = fit_ngram(copying(20, "train", 0), LOOKUP, features=(), seed=0).reports[0].to_json()
    survival = report["sources"]["all"]["survival"]
    assert set(survival) == {"num_graded", "accepted", "before", "after"}
    assert set(survival["after"]) == {"ece", "ece_noise", "brier", "auc"}
    assert {len(column) for column in survival["after"].values()} == {LOOKUP.num_positions}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("none", ()),
        ("in_prompt, agreement", ("agreement", "in_prompt")),
    ],
)
def test_features_are_read(text: str | None, expected: tuple[str, ...] | None) -> None:
    assert parse_features(text) == expected


@pytest.mark.parametrize("text", ["length", "agreement,agreement", "", "none,agreement"])
def test_unknown_features_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--features"):
        parse_features(text)


@pytest.mark.parametrize("sizes", [(0, 4, 3), (5, 4, 3), (2, 4, 0)])
def test_impossible_lookups_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError):
        LookupSpec(*sizes)
