"""Twins of the acceptance estimator's kernels against the Triton kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import OraclePair, assert_same

HERE = "test_estimator_fit"
MAX_REQS, STEPS = 7, 3
STATE = ("slope", "intercepts", "features", "predictions", "info", "grad", "counts")


def served(
    num_rounds: int, seed: int, per_token: bool, dtype: torch.dtype, vocab_size: int
) -> dict[str, torch.Tensor]:
    """Serve random steps: predict from draft logits, grade, refit after every round of six."""
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    rng = np.random.default_rng(seed)
    estimator = OnlineAcceptanceEstimator(MAX_REQS, STEPS, torch.device("cpu"))
    estimator.REFIT_INTERVAL = 6
    confidence = torch.full((MAX_REQS, STEPS), -7.0)
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.0, 1.0])
    for _ in range(6 * num_rounds):
        idx = torch.from_numpy(rng.permutation(MAX_REQS)[:5])
        rows = idx.repeat_interleave(STEPS) if per_token else idx
        scale = rng.choice([0.5, 3.0, 6.0], (rows.shape[0], 1))
        values = rng.normal(0, 1, (rows.shape[0], vocab_size)) * scale
        logits = torch.tensor(values, dtype=dtype)
        padded = torch.cat([rows, torch.tensor([-1])])  # a padded row follows
        logits = torch.cat([logits, logits[:1]])
        if per_token:
            steps = torch.arange(STEPS, dtype=torch.int32).repeat(6)
            estimator.predict(logits, padded, steps, confidence, temperature)
        else:
            for step in range(STEPS):
                shared = torch.tensor(step, dtype=torch.int64)
                estimator.predict(logits + step, padded, shared, confidence, temperature)
        num_rejected = torch.from_numpy(rng.integers(0, STEPS, 5).astype(np.int32))
        num_sampled = torch.from_numpy(rng.integers(0, STEPS + 1, 5).astype(np.int32))
        num_sampled = torch.minimum(num_sampled, STEPS + 1 - num_rejected)
        estimator.step(idx, num_sampled, num_rejected)
    return {name: getattr(estimator, name) for name in STATE} | {"confidence": confidence}


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(
    ("dtype", "vocab_size", "num_rounds"),
    [(torch.float32, 50, 2), (torch.bfloat16, 50, 2), (torch.float32, 4100, 1)],
)
def test_predictions_and_fits(
    pair: OraclePair, per_token: bool, dtype: torch.dtype, vocab_size: int, num_rounds: int
) -> None:
    reference, twin = pair.call(f"{HERE}:served", num_rounds, 0, per_token, dtype, vocab_size)
    # Sums of float32 terms in another order; the fit divides by differences of them.
    assert_same(reference.value, twin.value, rtol=2e-3, atol=2e-4)
    assert (twin.value["intercepts"] != -0.2).all()  # a fit moved every position
    assert (twin.value["counts"] == 0).all()


def test_statistics_between_fits(pair: OraclePair) -> None:
    """One round less a step: nothing fitted yet, so the sums themselves compare."""
    kernel = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator._accumulate_kernel"
    rng = np.random.default_rng(1)
    features = torch.from_numpy(rng.normal(0, 3, (MAX_REQS, STEPS)).astype(np.float32))
    predictions = torch.from_numpy(rng.random((MAX_REQS, STEPS)).astype(np.float32))
    reference, twin = pair.launch(
        kernel,
        (STEPS,),
        torch.ones(STEPS, 3),
        torch.ones(STEPS, 2),
        torch.tensor([6, 0, 3, 1, 2]),
        torch.tensor([0, 1, 4, 2, 1], dtype=torch.int32),
        torch.tensor([0, 3, 0, 1, 2], dtype=torch.int32),
        features,
        STEPS,
        predictions,
        STEPS,
        torch.zeros(STEPS),
        5,
        BLOCK_R=256,
        num_warps=1,
    )
    assert_same(reference.args, twin.args, rtol=1e-5, atol=1e-6)
    # First drafts seen: accepted twice, rejected twice; the first request drafted nothing.
    assert twin.args[9].tolist() == [4.0, 2.0, 1.0]


def test_a_certain_drafter_gets_the_greatest_log_odds(pair: OraclePair) -> None:
    """A row with all its mass on one token, and a uniform one of two tokens (log-odds 0)."""
    reference, twin = pair.call(f"{HERE}:extreme_features")
    assert_same(reference.value, twin.value, rtol=1e-6, atol=1e-6)
    assert twin.value[:2, 0].tolist() == [40.0, 0.0]


def extreme_features() -> torch.Tensor:
    from vllm.v1.worker.gpu.spec_decode.acceptance_estimator import OnlineAcceptanceEstimator

    estimator = OnlineAcceptanceEstimator(MAX_REQS, STEPS, torch.device("cpu"))
    logits = torch.tensor([[200.0, 0.0, -torch.inf], [3.0, 3.0, -torch.inf]])
    idx, step = torch.tensor([0, 1]), torch.tensor(0)
    estimator.predict(logits, idx, step, torch.zeros(2, STEPS), torch.ones(MAX_REQS))
    return estimator.features
