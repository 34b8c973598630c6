"""How many tokens to draft: known answers, invariants, and the exact optimum without options."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.policies import POLICIES, PreDraftBatch, StepCosts, VerifyBatch, make_policy
from specbench.policies.draft_schedule import (
    MAX_CANDIDATES,
    Schedule,
    expected_accepted,
    schedule_drafts,
)

F64 = torch.float64
# Milliseconds: a pass of the drafter, a drafted token; a pass of the target, a token of it.
PASS_MS, DRAFT_MS, STEP_MS, VERIFY_MS = 2.0, 0.1, 10.0, 0.5


def curve(first: float, slope: float, size: int, at_zero: float | None = None) -> torch.Tensor:
    ms = first + slope * torch.arange(size + 1, dtype=F64)
    if at_zero is not None:
        ms[0] = at_zero
    return ms


def schedule(
    survival: torch.Tensor,
    *,
    capacity: torch.Tensor | None = None,
    resolution: float = 0.0,
    pass_ms: float = PASS_MS,
    draft_ms: float = DRAFT_MS,
    verify_ms: float = VERIFY_MS,
) -> Schedule:
    num_reqs, num_steps = survival.shape
    if capacity is None:
        capacity = torch.full((num_reqs,), num_steps)
    return schedule_drafts(
        survival,
        capacity,
        num_sampling=num_reqs,
        draft_ms=curve(pass_ms, draft_ms, survival.numel(), at_zero=0.0),
        verify_ms=curve(STEP_MS + num_reqs * verify_ms, verify_ms, survival.numel()),
        resolution=resolution,
    )


@st.composite
def survivals(draw, max_reqs: int = 6, max_steps: int = 7) -> torch.Tensor:
    num_reqs, num_steps = draw(st.integers(1, max_reqs)), draw(st.integers(1, max_steps))
    rows = [[draw(st.floats(0, 1)) for _ in range(num_steps)] for _ in range(num_reqs)]
    return torch.tensor(rows, dtype=F64).cumprod(dim=1)


def test_hopeless_slots_are_not_drafted_and_the_drafter_is_skipped() -> None:
    # Alone, 10.5 ms for one token; with the block another 2.1 + 0.5 ms for 0.01 tokens.
    assert schedule(torch.full((1, 4), 0.01, dtype=F64)) == Schedule(
        0, 0, pytest.approx(1 / 10.5), 0.0
    )


def test_certain_slots_are_all_drafted_and_verified() -> None:
    found = schedule(torch.ones(3, 5, dtype=F64))
    assert found[:2] == (15, 15)
    assert found.goodput == pytest.approx(18 / (2 + 1.5 + 10 + 9))
    # 18 tokens without drafting: six steps of 11.5 ms.
    assert found.gain_ms == pytest.approx(6 * 11.5 - 22.5)


def test_the_fixed_cost_of_a_pass_is_weighed_too() -> None:
    # Half a token more, for 0.6 ms and the pass, against 1 token in 10.5 ms.
    likely = torch.tensor([[0.5]], dtype=F64)
    assert schedule(likely, pass_ms=4.6).num_drafted == 1
    assert schedule(likely, pass_ms=4.7).num_drafted == 0


def test_slots_are_drafted_beyond_the_verified_ones_only_if_drafting_shows_something() -> None:
    # Verifying a token costs five drafted ones: worth looking before verifying.
    survival = torch.full((8, 7), 0.6, dtype=F64).cumprod(dim=1)
    blind = schedule(survival, verify_ms=1.0)
    seeing = schedule(survival, verify_ms=1.0, resolution=0.5)
    assert blind.num_drafted == blind.num_verified
    assert seeing.num_drafted > seeing.num_verified
    assert seeing.num_drafted > blind.num_drafted
    assert seeing.goodput > blind.goodput


def test_what_cannot_be_drafted_is_not_planned() -> None:
    survival = torch.ones(3, 4, dtype=F64)
    found = schedule(survival, capacity=torch.tensor([4, 0, 1]))
    assert found.num_drafted == 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_impossible_predictions_count_as_hopeless(bad: float) -> None:
    survival = torch.ones(2, 3, dtype=F64)
    survival[1] = bad
    assert schedule(survival).num_drafted == 3


def test_no_request_and_no_slot() -> None:
    assert schedule(torch.empty(0, 7, dtype=F64)).num_drafted == 0
    assert schedule(torch.empty(3, 0, dtype=F64)).num_drafted == 0


@settings(deadline=None)  # machine load must not fail a test
@given(survivals(max_reqs=3, max_steps=3), st.floats(0, 3), st.floats(0, 1), st.floats(0, 5))
def test_without_options_the_schedule_is_the_exact_optimum(
    survival: torch.Tensor, pass_ms: float, draft_ms: float, verify_ms: float
) -> None:
    # Every draft length of every request, each verified in full, without sorting anything.
    num_reqs, num_steps = survival.shape
    best = 0.0
    for lengths in itertools.product(range(num_steps + 1), repeat=num_reqs):
        drafted = sum(lengths)
        accepted = sum(float(row[:n].sum()) for row, n in zip(survival, lengths, strict=True))
        drafting = pass_ms + draft_ms * drafted if drafted else 0.0
        verifying = STEP_MS + verify_ms * (num_reqs + drafted)
        best = max(best, (num_reqs + accepted) / (drafting + verifying))
    found = schedule(survival, pass_ms=pass_ms, draft_ms=draft_ms, verify_ms=verify_ms)
    assert found.goodput == pytest.approx(best, rel=1e-9)
    assert found.num_verified <= found.num_drafted


@settings(deadline=None)
@given(survivals(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_seeing_more_is_never_worth_less(
    survival: torch.Tensor, less: float, more: float, verify_ms: float
) -> None:
    less, more = sorted((less, more))
    # Up to MAX_CANDIDATES slots every number of tokens is tried; above, the grid is coarse.
    survival = survival[: MAX_CANDIDATES // survival.shape[1]]
    worth = [schedule(survival, resolution=r, verify_ms=verify_ms).goodput for r in (less, more)]
    assert worth[1] >= worth[0] * (1 - 1e-12)


@pytest.mark.parametrize("num_reqs", [16, 256])
@pytest.mark.parametrize("resolution", [0.0, 0.3])
def test_the_coarse_grid_of_large_batches_loses_next_to_nothing(
    num_reqs: int, resolution: float
) -> None:
    generator = torch.Generator().manual_seed(num_reqs)
    for verify_ms in (0.01, 0.1, 1.0):
        level = torch.rand(num_reqs, 1, generator=generator, dtype=F64)
        survival = level.expand(num_reqs, 7).cumprod(dim=1)
        size = survival.numel()
        costs = (
            curve(PASS_MS, DRAFT_MS, size, at_zero=0.0)[:, None]
            + curve(STEP_MS + num_reqs * verify_ms, verify_ms, size)[None, :]
        )
        slots = survival.flatten().sort(descending=True).values
        accepted = expected_accepted(slots, torch.arange(size + 1), size, resolution)
        exact = float(((accepted + num_reqs) / costs).max())
        found = schedule(survival, resolution=resolution, verify_ms=verify_ms).goodput
        assert found == pytest.approx(exact, rel=2e-3)
        assert found <= exact * (1 + 1e-12)


# What is expected of the best B slots.


def test_without_resolution_the_best_slots_are_those_predicted() -> None:
    slots = torch.tensor([0.9, 0.5, 0.25], dtype=F64)
    found = expected_accepted(slots, torch.tensor([0, 2, 3]), 4, 0.0)
    assert found[0].tolist() == [0, 0, 0, 0, 0]
    assert found[1].tolist() == pytest.approx([0, 0.9, 1.4, 1.4, 1.4])
    assert found[2].tolist() == pytest.approx([0, 0.9, 1.4, 1.65, 1.65])


def test_with_full_resolution_every_verified_token_is_accepted() -> None:
    slots = torch.tensor([0.9, 0.5, 0.25, 0.25], dtype=F64)
    found = expected_accepted(slots, torch.tensor([4]), 4, 1.0)
    assert found[0].tolist() == pytest.approx([0, 1, 1.9, 1.9, 1.9])


@settings(deadline=None)
@given(survivals(), st.floats(0, 1), st.floats(0, 1))
def test_the_best_slots_agree_with_the_option_on_each(
    survival: torch.Tensor, resolution: float, price: float
) -> None:
    # Lagrange: max over B of accepted(B) - price * B is the sum of every slot's option.
    slots = survival.flatten().sort(descending=True).values
    size = slots.shape[0]
    accepted = expected_accepted(slots, torch.tensor([size]), size, resolution)[0]
    surplus = float((accepted - price * torch.arange(size + 1, dtype=F64)).max())
    option = resolution * slots * (1 - price) + (1 - resolution) * (slots - price).clamp(min=0)
    # Whole budgets only: the best one misses less than a slot.
    assert float(option.sum()) - 1.0 <= surplus <= float(option.sum()) + 1e-9


# The policy.


def pre_draft(survival: torch.Tensor, *, max_budget: int = 60) -> PreDraftBatch:
    num_reqs, num_steps = survival.shape
    return PreDraftBatch(
        survival=survival,
        capacity=torch.full((num_reqs,), num_steps, dtype=torch.int32),
        resolution=0.0,
        num_base_tokens=num_reqs,
        num_sampling=num_reqs,
        max_budget=max_budget,
    )


def test_the_policy_prices_a_token_at_the_batch_it_joins() -> None:
    # Flat up to 8 tokens of the target's pass, steep above: 6 of the 14 likely slots fit.
    tokens = torch.arange(65, dtype=F64)
    costs = StepCosts(
        draft_ms=0.01 * tokens, verify_ms=torch.where(tokens <= 8, 10.0, 10.0 + 20 * (tokens - 8))
    )
    batch = pre_draft(torch.full((2, 7), 0.95, dtype=F64).cumprod(dim=1))
    assert make_policy("forespark").draft_budget(batch, costs).num_tokens == 6


def test_the_policy_plans_no_more_verification_than_the_engine_can_do() -> None:
    costs = StepCosts(curve(0.0, 0.1, 64), curve(10.0, 0.0, 64))
    batch = pre_draft(torch.ones(4, 7, dtype=F64), max_budget=5)
    assert make_policy("forespark").draft_budget(batch, costs).num_tokens == 5


def test_a_fixed_length_drafts_and_verifies_the_same_for_everyone() -> None:
    policy = make_policy("forespark:2")
    batch = pre_draft(torch.tensor([[0.9, 0.8, 0.7], [0.1, 0.0, 0.0]], dtype=F64))
    assert policy.draft_budget(batch, None) == (4, float("inf"))
    assert policy.draft_lengths(batch.survival, batch.capacity, 4).tolist() == [2, 2]
    drafted = torch.tensor([2, 2], dtype=torch.int32)
    verified = VerifyBatch(batch.survival, drafted, 2, 2, num_drafted=4, max_budget=60)
    assert policy.verify_budget(verified, None) == 4
    assert policy.verify_lengths(batch.survival, drafted, 4).tolist() == [2, 2]
    assert not policy.needs_costs
    assert not policy.needs_calibration


def test_forespark_is_registered_and_says_that_it_sizes_drafts() -> None:
    assert [name for name in POLICIES.names() if make_policy(name).sizes_drafts] == ["forespark"]
