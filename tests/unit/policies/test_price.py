"""Allocation and budget against exhaustive search on small batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.policies.price import allocate_by_survival, goodput_optimal_budget

NAN, INF = float("nan"), float("inf")


@st.composite
def batches(draw, max_reqs: int = 3, max_steps: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Survivals and capacities; confidences of exactly 0, 0.5 and 1 make ties common."""
    num_reqs, num_steps = draw(st.integers(0, max_reqs)), draw(st.integers(1, max_steps))
    confidence = st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 1.0)
    rows = [[draw(confidence) for _ in range(num_steps)] for _ in range(num_reqs)]
    capacity = [draw(st.integers(0, num_steps)) for _ in range(num_reqs)]
    survival = torch.tensor(rows, dtype=torch.float64).reshape(num_reqs, num_steps).cumprod(dim=1)
    return survival, torch.tensor(capacity, dtype=torch.int32)


def every_allocation(capacity: torch.Tensor) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(limit + 1) for limit in capacity.tolist()))


def expected_accepted(survival: torch.Tensor, lengths: tuple[int, ...]) -> float:
    return sum(sum(row[:n]) for row, n in zip(survival.tolist(), lengths, strict=True))


@settings(deadline=None)  # machine load must not fail a test
@given(batches(), st.data())
def test_allocation_meets_the_budget_and_no_other_accepts_more(batch, data) -> None:
    survival, capacity = batch
    budget = data.draw(st.integers(0, int(capacity.sum())))
    lengths = allocate_by_survival(survival, capacity, budget)
    assert lengths.dtype == capacity.dtype
    assert ((lengths >= 0) & (lengths <= capacity)).all()
    assert int(lengths.sum()) == budget
    best = max(
        expected_accepted(survival, other)
        for other in every_allocation(capacity)
        if sum(other) == budget
    )
    assert expected_accepted(survival, tuple(lengths.tolist())) == pytest.approx(best)


@settings(deadline=None)  # machine load must not fail a test
@given(batches(max_reqs=5, max_steps=6), st.data())
def test_a_larger_budget_never_takes_a_token_away(batch, data) -> None:
    survival, capacity = batch
    total = int(capacity.sum())
    budget = data.draw(st.integers(0, max(total - 1, 0)))
    smaller = allocate_by_survival(survival, capacity, budget)
    larger = allocate_by_survival(survival, capacity, min(budget + 1, total))
    assert (larger >= smaller).all()


@settings(deadline=None)  # machine load must not fail a test
@given(batches(max_reqs=5, max_steps=6), st.data())
def test_admitted_survivals_are_at_least_the_refused_ones(batch, data) -> None:
    survival, capacity = batch
    budget = data.draw(st.integers(0, int(capacity.sum())))
    lengths = allocate_by_survival(survival, capacity, budget).tolist()
    rows = survival.tolist()
    admitted = [p for row, n in zip(rows, lengths, strict=True) for p in row[:n]]
    refused = [
        p
        for row, n, limit in zip(rows, lengths, capacity.tolist(), strict=True)
        for p in row[n:limit]
    ]
    assert min(admitted, default=1.0) >= max(refused, default=0.0)


def test_ties_are_broken_by_request_then_position() -> None:
    survival = torch.full((3, 2), 0.5, dtype=torch.float64)
    capacity = torch.tensor([2, 2, 2])
    assert allocate_by_survival(survival, capacity, 3).tolist() == [2, 1, 0]


def test_large_ties_still_give_prefixes() -> None:
    # Large enough for a sort that is not stable to scramble equal elements.
    survival = torch.ones(64, 16, dtype=torch.float64)
    capacity = torch.full((64,), 16)
    lengths = allocate_by_survival(survival, capacity, 500)
    assert lengths.tolist() == [16] * 31 + [4] + [0] * 32


def test_no_request_and_no_capacity_get_nothing() -> None:
    empty = allocate_by_survival(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), 0)
    assert empty.tolist() == []
    none = allocate_by_survival(torch.rand(3, 4), torch.zeros(3, dtype=torch.int32), 0)
    assert none.tolist() == [0, 0, 0]
    no_steps = allocate_by_survival(torch.empty(2, 0), torch.zeros(2, dtype=torch.int32), 0)
    assert no_steps.tolist() == [0, 0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_impossible_survivals_do_not_crash(bad: float) -> None:
    survival = torch.tensor([[0.9, bad, bad], [0.8, 0.4, 0.1]], dtype=torch.float64)
    capacity = torch.tensor([3, 2])
    for budget in range(6):
        lengths = allocate_by_survival(survival, capacity, budget)
        assert ((lengths >= 0) & (lengths <= capacity)).all()
        assert int(lengths.sum()) <= budget
    cost_ms = torch.linspace(10.0, 20.0, 6, dtype=torch.float64)
    assert 0 <= goodput_optimal_budget(survival, capacity, 2, cost_ms) <= 5


def test_values_outside_the_capacity_are_never_looked_at() -> None:
    survival = torch.tensor([[0.5, NAN], [0.4, INF]], dtype=torch.float64)
    capacity = torch.tensor([1, 1])
    assert allocate_by_survival(survival, capacity, 1).tolist() == [1, 0]
    cost_ms = torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64)
    assert goodput_optimal_budget(survival, capacity, 2, cost_ms) == 2


@settings(deadline=None)  # machine load must not fail a test
@given(batches(), st.integers(0, 3), st.data())
def test_budget_reaches_the_goodput_of_exhaustive_search(batch, num_sampling, data) -> None:
    survival, capacity = batch
    max_budget = data.draw(st.integers(0, int(capacity.sum())))
    steps = data.draw(st.lists(st.floats(0.0, 5.0), min_size=max_budget, max_size=max_budget))
    cost_ms = torch.tensor([2.0, *steps], dtype=torch.float64).cumsum(0)

    def goodput(lengths: tuple[int, ...]) -> float:
        return (num_sampling + expected_accepted(survival, lengths)) / float(cost_ms[sum(lengths)])

    budget = goodput_optimal_budget(survival, capacity, num_sampling, cost_ms)
    assert 0 <= budget <= max_budget
    ours = goodput(tuple(allocate_by_survival(survival, capacity, budget).tolist()))
    best = max(goodput(other) for other in every_allocation(capacity) if sum(other) <= max_budget)
    assert ours == pytest.approx(best)


def test_the_smallest_maximiser_is_taken() -> None:
    survival = torch.zeros(2, 3, dtype=torch.float64)
    flat = torch.ones(7, dtype=torch.float64)
    assert goodput_optimal_budget(survival, torch.tensor([3, 3]), 2, flat) == 0


def test_the_maximum_is_global_not_the_first_peak() -> None:
    # Padding to graphs: 1 to 3 drafts cost one stair, of which the first alone loses.
    survival = torch.tensor([[0.95, 0.9, 0.85]], dtype=torch.float64)
    stairs = torch.tensor([10.0, 21.0, 21.0, 21.0], dtype=torch.float64)
    assert goodput_optimal_budget(survival, torch.tensor([3]), 1, stairs) == 3


def test_nothing_to_verify_is_budget_zero() -> None:
    one = torch.ones(1, dtype=torch.float64)
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert goodput_optimal_budget(empty, torch.empty(0, dtype=torch.int32), 0, one) == 0
    survival = torch.rand(2, 3, dtype=torch.float64)
    assert goodput_optimal_budget(survival, torch.zeros(2, dtype=torch.int32), 2, one) == 0
