"""The baseline decides exactly as vLLM's own AdaptiveVerificationManager does.

The manager is constructed for real, on stand-in request states; only its cost tables are
set directly, because profiling them needs an engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbench.policies import StepCosts, VerifyBatch, make_policy

pytest.importorskip("vllm", reason="compares with vLLM, which is not installed")

MAX_REQS, MAX_TOKENS, NUM_STEPS, NUM_BONUS = 24, 512, 7, 1
NUM_BATCHES = 500


@dataclass(frozen=True)
class Scenario:
    """One batch: per request its scheduled tokens, drafts, progress and confidences.

    Shapes: [num_reqs], confidences [num_reqs, NUM_STEPS] float32.
    """

    slots: np.ndarray
    non_draft_tokens: np.ndarray
    drafts: np.ndarray
    computed_tokens: np.ndarray
    prefill_tokens: np.ndarray
    confidences: np.ndarray
    max_total_logits: int
    draft_ms: np.ndarray  # [MAX_REQS + 1]
    verify_ms: np.ndarray  # [MAX_TOKENS + 1]


def make_scenario(rng: np.random.Generator) -> Scenario:
    num_reqs = int(rng.integers(1, MAX_REQS + 1))
    prefilling = rng.random(num_reqs) < 0.2
    computed = rng.integers(0, 100, num_reqs)
    chunk = np.where(prefilling, rng.integers(1, 8, num_reqs), 1)
    # A prefilling request samples only if its chunk reaches the end of the prompt.
    prefill = np.where(prefilling, computed + chunk + rng.integers(0, 2, num_reqs), computed)
    drafts = np.where(prefilling, 0, rng.integers(0, NUM_STEPS + 1, num_reqs))
    # From nearly free to dearer than a token is worth, smooth or in stairs.
    jumps = rng.exponential(rng.uniform(0.05, 4.0), MAX_TOKENS)
    jumps *= rng.random(MAX_TOKENS) < rng.uniform(0.05, 1.0)
    tight = rng.random() < 0.3
    return Scenario(
        slots=rng.permutation(MAX_REQS)[:num_reqs],
        non_draft_tokens=chunk,
        drafts=drafts,
        computed_tokens=computed,
        prefill_tokens=prefill,
        confidences=rng.beta(rng.uniform(0.05, 4), 1.0, (num_reqs, NUM_STEPS)).astype(np.float32),
        max_total_logits=int(rng.integers(num_reqs, 3 * num_reqs)) if tight else 10_000,
        draft_ms=np.concatenate([[0.0], rng.uniform(0, 2, MAX_REQS).cumsum()]),
        verify_ms=rng.uniform(2, 30) + np.concatenate([[0.0], jumps.cumsum()]),
    )


def vllm_decision(scenario: Scenario) -> tuple[int, list[int]]:
    """Budget and admitted drafts per request, by vLLM's code."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  (stands in for CUDA streams; must come first)
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as stock

    req_ids = [f"request-{slot}" for slot in scenario.slots]
    states = SimpleNamespace(
        num_speculative_steps=NUM_STEPS,
        device=torch.device("cpu"),
        max_num_reqs=MAX_REQS,
        max_num_batched_tokens=MAX_TOKENS,
        req_id_to_index=dict(zip(req_ids, scenario.slots.tolist(), strict=True)),
        num_computed_tokens_np=scattered(scenario.computed_tokens, scenario.slots),
        prefill_len=SimpleNamespace(np=scattered(scenario.prefill_tokens, scenario.slots)),
    )
    manager = stock.AdaptiveVerificationManager(
        states,
        torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        NUM_BONUS,
        max_total_logits=scenario.max_total_logits,
    )
    manager.cost_tables = (scenario.draft_ms, scenario.verify_ms)
    manager._stale_confidences[manager._stale_idx].np[scenario.slots] = scenario.confidences
    manager._confidence_probs[scenario.slots] = torch.from_numpy(scenario.confidences)

    scheduled = scenario.non_draft_tokens + scenario.drafts
    num_tokens = manager.get_num_tokens(
        dict(zip(req_ids, scheduled.tolist(), strict=True)),
        {req_id: [0] * int(n) for req_id, n in zip(req_ids, scenario.drafts, strict=True)},
    )
    budget = num_tokens - int(scenario.non_draft_tokens.sum())
    capacities = torch.from_numpy(scenario.drafts.astype(np.int32))
    if budget == 0:  # the manager itself admits nothing without ranking
        capacities.zero_()
    elif budget < int(scenario.drafts.sum()):
        stock._assign_draft_token_budget(
            manager._confidence_probs,
            torch.from_numpy(scenario.slots),
            capacities,
            budget,
            NUM_STEPS,
        )
    return budget, capacities.tolist()


def scattered(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
    by_slot = np.zeros(MAX_REQS, dtype=np.int32)
    by_slot[slots] = values
    return by_slot


def specbench_decision(scenario: Scenario) -> tuple[int, list[int]]:
    """The same by the policy, which prices drafting by tokens instead of by requests."""
    num_reqs = len(scenario.slots)
    draft_ms = torch.full((MAX_REQS * NUM_STEPS + 1,), torch.nan, dtype=torch.float64)
    draft_ms[::NUM_STEPS] = torch.from_numpy(scenario.draft_ms)
    confidences = torch.from_numpy(scenario.confidences)
    sampling = scenario.computed_tokens + scenario.non_draft_tokens >= scenario.prefill_tokens
    capacity = torch.from_numpy(scenario.drafts.astype(np.int32))
    policy = make_policy("dspark")
    budget = policy.verify_budget(
        VerifyBatch(
            survival=confidences.double().cumprod(dim=1),
            capacity=capacity,
            num_base_tokens=int(scenario.non_draft_tokens.sum()),
            num_sampling=int(np.count_nonzero(sampling)),
            num_drafted=num_reqs * NUM_STEPS,
            max_budget=max(0, scenario.max_total_logits - num_reqs * NUM_BONUS),
        ),
        StepCosts(draft_ms=draft_ms, verify_ms=torch.from_numpy(scenario.verify_ms)),
    )
    return budget, policy.verify_lengths(confidences.cumprod(dim=1), capacity, budget).tolist()


def test_budget_and_admission_equal_vllms_on_random_batches() -> None:
    rng = np.random.default_rng(20260)
    kinds = {"none": 0, "some": 0, "all": 0}
    for number in range(NUM_BATCHES):
        scenario = make_scenario(rng)
        theirs, ours = vllm_decision(scenario), specbench_decision(scenario)
        assert ours == theirs, f"batch {number}: {scenario}"
        total = int(scenario.drafts.sum())
        kinds["none" if ours[0] == 0 else "all" if ours[0] == total else "some"] += 1
    # The batches must exercise every branch, or equality says little.
    assert min(kinds.values()) >= NUM_BATCHES // 20, kinds
