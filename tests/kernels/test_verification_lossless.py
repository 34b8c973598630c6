"""Verified and resampled tokens follow the target's distribution, whatever the drafter proposes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from specbench.kernels.cpu import batch, resampling, verification
from specbench.kernels.cpu.verification import BlockTerms, DraftRows, Requests, TargetRows

# Three output tokens over four words: 64 joint outcomes, each expected at least 20 times.
VOCAB, STEPS, NUM_REQS = 4, 2, 40_000
# One chance in a million per case that a correct sampler fails, and seeds are fixed.
P_VALUE_MIN = 1e-6


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def verify(
    target_logits: np.ndarray,
    draft_logits: np.ndarray | None,
    drafts: np.ndarray,
    temperature: float,
    whole_block: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Verify the same step NUM_REQS times with different seeds; (tokens, number of tokens)."""
    rows = np.tile(target_logits.astype(np.float32), (NUM_REQS, 1)).ravel()
    target = TargetRows(rows, VOCAB, VOCAB)
    draft = DraftRows(rows[:0], 0, 0, False)
    if draft_logits is not None:
        draft = DraftRows(draft_logits.astype(np.float32).ravel(), 0, VOCAB, True)
    sampled_drafts = np.zeros((NUM_REQS, STEPS + 1), np.int32)
    sampled_drafts[:, 1:] = drafts
    num_rows = NUM_REQS * (STEPS + 1)
    requests = Requests(
        sampled_drafts.ravel(),
        np.arange(0, num_rows + 1, STEPS + 1, dtype=np.int32),
        np.arange(NUM_REQS),
        np.full(NUM_REQS, temperature, np.float32),
    )
    row_request = np.repeat(np.arange(NUM_REQS), STEPS + 1)
    row_step = np.tile(np.arange(STEPS + 1, dtype=np.int32), NUM_REQS)
    terms = BlockTerms(*(np.zeros(num_rows, np.float32) for _ in range(4)))
    if whole_block:
        verification.fill_log_sum_exps(terms.target_lse, terms.draft_lse, target, draft, requests)
        verification.fill_joint_log_p(terms, target, draft, requests)
        if draft.known:
            wanted = np.flatnonzero((row_step > 0) & (row_step < STEPS))
            resampling.residual_masses(
                terms.residual_mass, terms, target, draft, wanted, row_request, row_step,
                requests.temperature,
            )  # fmt: skip
    tokens = np.full((NUM_REQS, STEPS + 1), -1, np.int64)
    counts = np.zeros(NUM_REQS, np.int32)
    target_lse, draft_lse = np.zeros((2, NUM_REQS), np.float32)
    seeds = np.arange(NUM_REQS, dtype=np.int64) * 7919 + 13
    pos = np.tile(np.arange(100, 101 + STEPS), NUM_REQS)
    no_rates = np.empty(0, np.float32)
    verification.reject(
        tokens, counts, target_lse, draft_lse, target, draft, requests, seeds, pos, no_rates,
        terms, False, whole_block,
    )  # fmt: skip
    drawn, values = np.zeros(NUM_REQS, np.int64), np.zeros(NUM_REQS, np.float32)
    resampling.resample(
        drawn, values, target, draft, requests, row_request, counts, target_lse, draft_lse,
        terms.joint_log_p, seeds, pos, False, whole_block,
    )  # fmt: skip
    batch.insert_resampled(
        tokens, counts, drawn, requests.cu_num_logits, row_request, requests.temperature
    )
    return tokens, counts


@pytest.mark.parametrize("whole_block", [False, True])
@pytest.mark.parametrize("proposal", ["probabilistic", "one_hot", "hot_and_wrong"])
def test_joint_distribution_is_the_targets(whole_block: bool, proposal: str) -> None:
    rng = np.random.default_rng(5)
    target_logits = rng.normal(0, 0.8, (STEPS + 1, VOCAB))
    temperature = 0.7 if proposal == "probabilistic" else 1.0
    spread = 2.0 if proposal == "hot_and_wrong" else 0.8
    draft_logits = rng.normal(0, spread, (STEPS, VOCAB))
    q = softmax(draft_logits / temperature)
    drafts = np.stack([rng.choice(VOCAB, NUM_REQS, p=q[step]) for step in range(STEPS)], axis=1)
    known = None if proposal == "one_hot" else draft_logits
    if known is None:
        drafts[:] = [1, 2]
    tokens, counts = verify(target_logits, known, drafts, temperature, whole_block)
    assert set(np.unique(counts)) == {1, 2, 3}

    # What a later step would emit: the target's own samples at the positions still open.
    p = softmax(target_logits)
    for step in range(STEPS + 1):
        still_open = counts <= step
        tokens[still_open, step] = rng.choice(VOCAB, int(still_open.sum()), p=p[step])
    observed = np.zeros((VOCAB,) * (STEPS + 1))
    np.add.at(observed, tuple(tokens.T), 1)
    expected = NUM_REQS * np.einsum("i,j,k->ijk", *p)
    assert expected.min() > 20
    assert chisquare(observed.ravel(), expected.ravel()).pvalue > P_VALUE_MIN
    for step in range(STEPS + 1):
        marginal = np.bincount(tokens[:, step], minlength=VOCAB)
        assert chisquare(marginal, NUM_REQS * p[step]).pvalue > P_VALUE_MIN


def test_more_is_accepted_by_the_block_than_token_by_token() -> None:
    rng = np.random.default_rng(8)
    target_logits = rng.normal(0, 1.5, (STEPS + 1, VOCAB))
    draft_logits = rng.normal(0, 1.5, (STEPS, VOCAB))
    q = softmax(draft_logits)
    drafts = np.stack([rng.choice(VOCAB, NUM_REQS, p=q[step]) for step in range(STEPS)], axis=1)
    _, block = verify(target_logits, draft_logits, drafts, 1.0, True)
    _, token = verify(target_logits, draft_logits, drafts, 1.0, False)
    # Three standard errors of the difference of two means.
    slack = 3 * np.hypot(block.std(), token.std()) / np.sqrt(NUM_REQS)
    assert block.mean() > token.mean() - slack


def test_acceptance_rate_is_the_overlap_of_the_distributions() -> None:
    """P(first draft accepted) = sum over x of min(p(x), q(x))."""
    rng = np.random.default_rng(9)
    target_logits = rng.normal(0, 1.0, (STEPS + 1, VOCAB))
    draft_logits = rng.normal(0, 1.0, (STEPS, VOCAB))
    p, q = softmax(target_logits), softmax(draft_logits)
    drafts = np.stack([rng.choice(VOCAB, NUM_REQS, p=q[step]) for step in range(STEPS)], axis=1)
    _, counts = verify(target_logits, draft_logits, drafts, 1.0, False)
    expected = np.minimum(p[0], q[0]).sum()
    rate = (counts > 1).mean()
    assert abs(rate - expected) < 4 * np.sqrt(expected * (1 - expected) / NUM_REQS)
