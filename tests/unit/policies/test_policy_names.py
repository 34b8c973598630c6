from __future__ import annotations

import pytest
import torch

from specbench.errors import UsageError
from specbench.policies import POLICIES, Drafter, StepCosts, VerifyBatch, make_policy


def batch(num_base_tokens: int = 3, max_budget: int = 100) -> VerifyBatch:
    return VerifyBatch(
        survival=torch.tensor([[0.9, 0.5, 0.1]] * 3, dtype=torch.float64),
        capacity=torch.tensor([3, 2, 0]),
        num_base_tokens=num_base_tokens,
        num_sampling=3,
        num_drafted=9,
        max_budget=max_budget,
    )


def costs(verify_slope_ms: float) -> StepCosts:
    sizes = torch.arange(64, dtype=torch.float64)
    return StepCosts(draft_ms=0.1 * sizes, verify_ms=10.0 + verify_slope_ms * sizes)


def test_the_built_in_policies_are_registered() -> None:
    assert {"ar", "dspark", "ngram"} <= set(POLICIES.names())
    assert make_policy("ar").drafter is Drafter.NONE
    assert make_policy("ngram").drafter is Drafter.NGRAM
    assert make_policy("dspark").drafter is Drafter.MODEL


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dsprak", "unknown policy 'dsprak'.*did you mean 'dspark'"),
        ("", "unknown policy"),
        ("ar:1", "'ar' takes no argument"),
        ("ar:", "'ar' takes no argument"),
        ("ngram:0", "must be a whole number, 1"),
        ("ngram:x", "must be a whole number, 1"),
        ("dspark:", "must be a whole number"),
        ("dspark:-1", "must be a whole number"),
        ("dspark:three", "must be a whole number"),
        ("forespark:x", "'forespark:x': the length must be a whole number"),
    ],
)
def test_unusable_names_are_refused(spec: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_policy(spec)


def test_ar_verifies_nothing_and_ngram_all_that_fits() -> None:
    assert make_policy("ar").verify_budget(batch(), None) == 0
    assert make_policy("ngram").verify_budget(batch(), None) == 5
    assert make_policy("ngram").verify_budget(batch(max_budget=4), None) == 4


def test_a_fixed_length_is_the_same_for_everyone_within_capacity() -> None:
    policy = make_policy("dspark:2")
    budget = policy.verify_budget(batch(), None)
    assert budget == 4
    lengths = policy.verify_lengths(batch().survival, batch().capacity, budget)
    assert lengths.tolist() == [2, 2, 0]


def test_dspark_verifies_less_where_tokens_cost_more() -> None:
    # At 2 ms a token the goodput of 0 to 5 verified tokens is 3/16.9, 3.9/18.9, 4.8/20.9,
    # 5.3/22.9, 5.8/24.9 and 5.9/26.9: highest at 4.
    policy = make_policy("dspark")
    budgets = [policy.verify_budget(batch(), costs(slope)) for slope in (0.001, 2.0, 50.0)]
    assert budgets == [5, 4, 0]


def test_dspark_reads_costs_at_the_batchs_own_size() -> None:
    # A jump at 8 tokens is out of reach for 3 base tokens plus 5, but cuts 5 base tokens at 2.
    sizes = torch.arange(64)
    stairs = torch.where(sizes <= 7, 10.0, 100.0).to(torch.float64)
    table = StepCosts(draft_ms=torch.zeros(64, dtype=torch.float64), verify_ms=stairs)
    assert make_policy("dspark").verify_budget(batch(num_base_tokens=2), table) == 5
    assert make_policy("dspark").verify_budget(batch(num_base_tokens=5), table) == 2


def test_adaptive_dspark_without_costs_says_how_to_get_them() -> None:
    with pytest.raises(UsageError, match="specbench costs profile"):
        make_policy("dspark").verify_budget(batch(), None)
