"""Chains from responses, against a walk written out one token at a time."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbench.calibration import collect
from specbench.calibration.collect import collect_chains, conversations
from specbench.errors import InputError
from specbench.estimators.ngram_features import RECENT_WEIGHT, update_recent
from specbench.training.responses import SCHEMA

MIN_N, MAX_N, NUM_POSITIONS = 2, 4, 5


def test_the_engine_that_writes_the_text_starts_without_numba() -> None:
    program = "import sys, specbench.calibration.calibrate; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def frame(*rows: tuple[list[int], list[int]], **columns: list[Any]) -> pl.DataFrame:
    """Responses with the given (prompt, response) tokens."""
    values: dict[str, list[Any]] = {
        "prompt_id": [f"p{i}" for i in range(len(rows))],
        "source": ["chat-topic"] * len(rows),
        "split": ["train"] * len(rows),
        "temperature": [0.0] * len(rows),
        "prompt_token_ids": [prompt for prompt, _ in rows],
        "response_token_ids": [response for _, response in rows],
    }
    return pl.DataFrame(values | columns, schema=SCHEMA)


def walk(prompt: list[int], response: list[int]) -> list[dict[str, Any]]:
    """Every step of one decode, by definition; a row for each step with a match."""
    text, rows = prompt + response, []
    known, recent = len(prompt) + 1, math.nan
    while known < len(text):
        row: dict[str, Any] | None = lookup(text[:known])
        accepted = 0
        if row is not None:
            start = row.pop("start")
            chain = text[:known][start : start + NUM_POSITIONS][: len(text) - known]
            while accepted < len(chain) and chain[accepted] == text[known + accepted]:
                accepted += 1
            row |= {
                "in_prompt": start < len(prompt),
                "chain_length": len(chain),
                "num_accepted": accepted,
                "recent_acceptance": recent,
            }
            rows.append(row)
            hit = float(accepted > 0)
            recent = hit if math.isnan(recent) else recent + RECENT_WEIGHT * (hit - recent)
        known += accepted + 1
    return rows


def lookup(text: list[int]) -> dict[str, int] | None:
    for n in range(MAX_N, MIN_N - 1, -1):
        suffix = text[len(text) - n :]
        starts = [i + n for i in range(len(text) - n) if text[i : i + n] == suffix]
        if len(suffix) == n and starts:
            agreeing = [start for start in starts if text[start] == text[starts[-1]]]
            return {
                "start": starts[-1],
                "match_length": n,
                "num_occurrences": len(starts),
                "num_agreeing": len(agreeing),
            }
    return None


# Three tokens: matches, disagreements and whole copies are all common.
TOKENS = st.lists(st.integers(0, 2), max_size=30)


@given(st.lists(st.tuples(TOKENS, TOKENS.filter(lambda t: len(t) >= 2)), min_size=1, max_size=4))
def test_every_step_is_what_the_definition_says(texts: list[tuple[list[int], list[int]]]) -> None:
    collected = collect_chains(frame(*texts), min_n=MIN_N, max_n=MAX_N, num_positions=NUM_POSITIONS)
    expected = [(i, row) for i, text in enumerate(texts) for row in walk(*text)]
    chains = collected.chains
    assert chains.group is not None
    assert chains.group.tolist() == [number for number, _ in expected]
    for name in ("match_length", "num_accepted", "chain_length", "in_prompt"):
        assert getattr(chains, name).tolist() == [row[name] for _, row in expected]
    for name in ("num_occurrences", "num_agreeing"):
        assert getattr(chains, name).tolist() == [row[name] for _, row in expected]
    assert chains.recent_acceptance is not None
    np.testing.assert_allclose(
        chains.recent_acceptance, [row["recent_acceptance"] for _, row in expected], atol=1e-6
    )


def test_a_copied_prompt_by_hand() -> None:
    collected = collect_chains(
        frame(([1, 2, 3, 4, 5, 6], [9, 2, 3, 4, 5, 7, 8])), min_n=2, max_n=4, num_positions=3
    )
    # Steps: after 9 nothing matches (2 is the bonus); after 9 2 nothing (3); after 2 3 the
    # chain 4 5 6 has two right, and 7 is the bonus; after 5 7 nothing matches (8).
    chains = collected.chains
    assert chains.match_length.tolist() == [2]
    assert chains.chain_length.tolist() == [3]
    assert chains.num_accepted.tolist() == [2]
    assert chains.in_prompt is not None
    assert chains.in_prompt.tolist() == [True]
    assert chains.recent_acceptance is not None
    assert np.isnan(chains.recent_acceptance).all()
    assert collected.num_steps == 4
    assert collected.num_response_tokens == 7


def test_a_chain_is_cut_where_the_response_ends() -> None:
    collected = collect_chains(frame(([1, 2, 3, 4, 5, 6], [1, 2, 3, 4])), min_n=2, max_n=4)
    assert collected.chains.chain_length.tolist() == [2]
    assert collected.chains.num_accepted.tolist() == [2]


def test_batches_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    texts = [
        (rng.integers(0, 3, 10).tolist(), rng.integers(0, 3, n).tolist()) for n in range(2, 40)
    ]
    whole = collect_chains(frame(*texts))
    monkeypatch.setattr(collect, "RESPONSES_PER_BATCH", 3)
    parts = collect_chains(frame(*texts))
    assert len(whole.chains) > 100
    for name in ("match_length", "num_accepted", "recent_acceptance", "group"):
        np.testing.assert_array_equal(getattr(whole.chains, name), getattr(parts.chains, name))


def test_follow_up_turns_belong_to_their_first_turn() -> None:
    responses = frame(([1], [2, 3]), ([1], [2, 3]), prompt_id=["chat/0/1", "chat/0/1++"])
    assert conversations(responses).tolist() == ["chat/0/1", "chat/0/1"]


def test_sampled_text_is_accepted_with_the_targets_probability() -> None:
    """The coupling the module relies on: hits have the mean of p(proposed token)."""
    rng = np.random.default_rng(1)
    transitions = np.array([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])
    texts = []
    for _ in range(300):
        tokens = [0]
        for _ in range(60):
            tokens.append(int(rng.choice(3, p=transitions[tokens[-1]])))
        texts.append((tokens[:20], tokens[20:]))
    collected = collect_chains(frame(*texts, temperature=[1.0] * 300), min_n=2, max_n=2)
    chains = collected.chains
    # The chance of the proposed token is known from the text itself: walk once more.
    chances = []
    for prompt, response in texts:
        text, known = prompt + response, len(prompt) + 1
        while known < len(text):
            found = lookup_pair(text[:known])
            accepted = 0
            if found is not None:
                chances.append(transitions[text[known - 1], text[found]])
                while (
                    accepted < 16
                    and known + accepted < len(text)
                    and found + accepted < known
                    and text[found + accepted] == text[known + accepted]
                ):
                    accepted += 1
            known += accepted + 1
    assert len(chances) == len(chains)
    error = (chains.num_accepted > 0).mean() - np.mean(chances)
    # Four standard errors of a rate; the seed is fixed.
    assert abs(error) < 4 * 0.5 / np.sqrt(len(chains))


def lookup_pair(text: list[int]) -> int | None:
    for end in range(len(text) - 2, 0, -1):
        if text[end - 1 : end + 1] == text[-2:]:
            return end + 1
    return None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"response_token_ids": [[1, None, 2]]}, "missing"),
        ({"response_token_ids": [[1, -4]]}, "out of range"),
        ({"temperature": [math.nan]}, "temperature"),
        ({"temperature": [-1.0]}, "temperature"),
        ({"prompt_id": [None]}, "missing"),
        ({"response_token_ids": [[1]]}, "none of 1 responses has 2 tokens"),
        ({"response_token_ids": [[]]}, "none of 1 responses has 2 tokens"),
    ],
)
def test_what_no_engine_can_have_written_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        collect_chains(frame(([1], [2, 3]), **change))


STEPS = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20)


@given(STEPS)
def test_recent_acceptance_counts_steps_with_a_match_only(steps: list[tuple[bool, bool]]) -> None:
    recent, expected = torch.tensor([math.nan]), math.nan
    for matched, hit in steps:
        recent = update_recent(recent, torch.tensor([matched]), torch.tensor([hit]))
        if matched:
            outcome = float(hit)
            if math.isnan(expected):
                expected = outcome
            else:
                expected = (1 - RECENT_WEIGHT) * expected + RECENT_WEIGHT * outcome
    assert recent.item() == pytest.approx(expected, nan_ok=True, abs=1e-6)


def test_recent_acceptance_treats_requests_apart() -> None:
    updated = update_recent(
        torch.tensor([math.nan, math.nan, 0.5, 0.5]),
        torch.tensor([False, True, True, False]),
        torch.tensor([True, True, False, True]),
    )
    assert math.isnan(updated[0].item())
    assert updated[1:].tolist() == pytest.approx([1.0, 0.35, 0.5])
