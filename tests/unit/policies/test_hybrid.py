from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specbench.errors import UsageError
from specbench.policies import DraftBatch, Drafter, StepCosts, VerifyBatch, make_policy

NUM_STEPS = 16


def costs(slope_ms: float = 0.5, num_tokens: int = 200) -> StepCosts:
    sizes = torch.arange(num_tokens, dtype=torch.float64)
    return StepCosts(draft_ms=0.1 * sizes, verify_ms=10.0 + slope_ms * sizes)


def drafts(max_budget: int = 100, num_base_tokens: int = 2) -> DraftBatch:
    """A request with a good block and a bad copy, and one the other way round."""
    model = torch.tensor([[0.9, 0.8, 0.7], [0.3, 0.1, 0.0]])
    ngram = torch.zeros(2, NUM_STEPS)
    ngram[0, :2] = torch.tensor([0.5, 0.2])
    ngram[1] = 0.95 ** torch.arange(1, NUM_STEPS + 1)
    return DraftBatch(
        model_survival=model,
        ngram_survival=ngram,
        num_sampling=2,
        num_base_tokens=num_base_tokens,
        num_drafted=6,
        max_budget=max_budget,
    )


def test_which_drafters_run() -> None:
    assert make_policy("hybrid").drafter is Drafter.BOTH
    uses = {drafter: (drafter.uses_model, drafter.uses_ngram) for drafter in Drafter}
    assert uses == {
        Drafter.NONE: (False, False),
        Drafter.NGRAM: (False, True),
        Drafter.MODEL: (True, False),
        Drafter.BOTH: (True, True),
    }


def test_hybrid_takes_no_argument() -> None:
    with pytest.raises(UsageError, match="'hybrid' takes no argument"):
        make_policy("hybrid:3")


@pytest.mark.parametrize("num_sampling", [2, torch.tensor(2)], ids=["int", "tensor"])
def test_each_request_takes_its_better_chain(num_sampling: int | torch.Tensor) -> None:
    batch = replace(drafts(), num_sampling=num_sampling)
    choice = make_policy("hybrid").choose_chains(batch, costs())
    assert choice.use_ngram.tolist() == [False, True]
    assert choice.survival.shape == (2, NUM_STEPS)
    assert torch.equal(choice.survival[0, :3], batch.model_survival[0])
    assert torch.equal(choice.survival[1], batch.ngram_survival[1])


def test_budget_and_shares_follow_from_the_chosen_chains_as_in_dspark() -> None:
    hybrid, table = make_policy("hybrid"), costs()
    choice = hybrid.choose_chains(drafts(), table)
    lengths = torch.tensor([3, NUM_STEPS], dtype=torch.int32)
    batch = VerifyBatch(choice.survival.double(), lengths, 2, 2, 6, 100)
    budget = hybrid.verify_budget(batch, table)
    assert budget == int(choice.budget)
    assert budget == make_policy("dspark").verify_budget(batch, table)
    shares = hybrid.verify_lengths(choice.survival, lengths, budget)
    assert shares.tolist() == [3, budget - 3]
    assert budget - 3 > 7  # longer than a model's block


def test_the_choice_keeps_to_what_the_engine_can_verify() -> None:
    choice = make_policy("hybrid").choose_chains(drafts(max_budget=4), costs(slope_ms=0.001))
    assert int(choice.budget) == 4


def test_the_choice_reads_costs_at_the_batchs_own_size() -> None:
    # A wall at 7 tokens: 2 base tokens leave 5 drafts before it, 6 leave one.
    sizes = torch.arange(200)
    wall = torch.where(sizes <= 7, 10.0, 1000.0).to(torch.float64)
    table = StepCosts(draft_ms=torch.zeros(200, dtype=torch.float64), verify_ms=wall)
    hybrid = make_policy("hybrid")
    assert int(hybrid.choose_chains(drafts(num_base_tokens=2), table).budget) == 5
    assert int(hybrid.choose_chains(drafts(num_base_tokens=6), table).budget) == 1


def test_time_spent_drafting_makes_verifying_more_worthwhile() -> None:
    # The dearer the fixed part of a step, the more of its drafts should be verified.
    sizes = torch.arange(200, dtype=torch.float64)
    verify_ms = 2.0 + sizes
    budgets = [
        int(
            make_policy("hybrid")
            .choose_chains(drafts(), StepCosts(slope_ms * sizes, verify_ms))
            .budget
        )
        for slope_ms in (0.0, 5.0)
    ]
    assert budgets[0] < budgets[1]


def test_without_costs_it_says_how_to_get_them() -> None:
    hybrid = make_policy("hybrid")
    batch = VerifyBatch(torch.ones(1, 1), torch.ones(1, dtype=torch.int32), 1, 1, 7, 8)
    with pytest.raises(UsageError, match=r"'hybrid' needs step costs.*specbench costs profile"):
        hybrid.verify_budget(batch, None)
    with pytest.raises(UsageError, match=r"'hybrid' needs step costs.*specbench costs profile"):
        hybrid.choose_chains(drafts(), None)


@pytest.mark.parametrize("spec", ["ar", "ngram", "dspark"])
def test_policies_with_one_drafter_have_nothing_to_choose(spec: str) -> None:
    with pytest.raises(NotImplementedError, match="no two chains"):
        make_policy(spec).choose_chains(drafts(), costs())
